"""Feed other projects' indexers with our event stream: `make interop`. Run as `python -m tests.interop.run`.

Each indexer gets a virtual environment on top of ours. The exit code is 1 if an indexer promises something else than
the cache holds, and 3 if it cannot be installed.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

from ..clients.environments import Environment, NotInstallableError

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
NOT_INSTALLED = 3


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
    quiet = os.environ | {"DYN_LOG": "error"}
    return 1 if subprocess.run(command, cwd=ROOT, env=quiet, check=False, timeout=500).returncode else 0


if __name__ == "__main__":
    sys.exit(main())
