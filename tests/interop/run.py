"""Feed other projects' indexers with our event stream: `make interop`. Run as `python -m tests.interop.run`.

Each indexer gets a virtual environment on top of ours. The exit code is 1 if an indexer promises something else than
the cache holds, and 3 if it cannot be installed.
"""

import argparse
import contextlib
import os
import subprocess
import sys
from pathlib import Path

from ..clients.environments import Environment, NotInstallableError

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
NOT_INSTALLED = 3
#: A comparison takes 4 s. It was once found to hang, probably in the indexer's native code: then it prints where every
#: thread is, and is tried once more.
HANGS_S, TRIES = 100, 2
#: The exit code of `timeout` when it has ended a command.
HUNG = 124


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--environments", type=Path, default=Path(".venv-clients"))
    parser.add_argument("--pip-flags", default="")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    environment = Environment("dynamo", given.environments.resolve() / "dynamo", requirements=HERE / "requirements")
    try:
        environment.make(given.pip_flags)
    except NotInstallableError as error:
        print(f"dynamo: not installed: {error}")
        return NOT_INSTALLED
    command = [str(environment.bin / "python"), "-m", "tests.interop.dynamo", "--seed", str(given.seed)]
    quiet = os.environ | {"DYN_LOG": "error", "PYTHONFAULTHANDLER": "1"}
    for _ in range(TRIES):
        with contextlib.suppress(subprocess.TimeoutExpired):
            # SIGABRT makes Python print its threads, if it still can; `run` kills what does not end by it.
            limited = ["timeout", "--signal=ABRT", str(HANGS_S), *command]
            code = subprocess.run(limited, cwd=ROOT, env=quiet, check=False, timeout=2 * HANGS_S).returncode
            if code != HUNG:
                return 1 if code else 0
        print("dynamo: hung", flush=True)
    return 1


if __name__ == "__main__":
    sys.exit(main())
