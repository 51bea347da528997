"""Install agent frameworks and programs next to our environment and test them: `make frameworks`, `make clients`.

Run as `python -m tests.agents.run [NAME...]`. Each framework gets its own virtual environment, the programs one npm
folder. The exit code is 1 if a test fails, and 3 if nothing failed but something could not be installed.
"""

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

from ..clients.environments import Environment, NotInstallableError

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
#: By environment: its test file, and the selection (-k) of tests there.
FRAMEWORKS = {
    "openai-agents": ("test_frameworks.py", "openai_agents or pydantic_ai"),
    "instructor": ("test_frameworks.py", "instructor"),
    "llama-index": ("test_frameworks.py", "llama_index"),
    "litellm": ("test_litellm.py", ""),
}
PROGRAMS = "npm"
NOT_INSTALLED = 3


def tested(python: Path, arguments: list[str], **environment: str) -> bool:
    """Whether these tests pass, in an environment that names no other server."""
    leaks = ["-W", "ignore::ResourceWarning", "-W", "ignore::pytest.PytestUnraisableExceptionWarning"]  # theirs
    command = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", *leaks, *arguments]
    environ = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/"), **environment}
    return subprocess.run(command, cwd=ROOT, env=environ, check=False).returncode == 0


def framework(name: str, folder: Path, pip_flags: str) -> bool:
    environment = Environment(name, folder / name, requirements=HERE / "requirements")
    environment.make(pip_flags)
    file, selected = FRAMEWORKS[name]
    return tested(environment.bin / "python", [f"tests/agents/{file}", "-k", selected])


def programs(folder: Path) -> bool:
    at = folder / PROGRAMS
    at.mkdir(parents=True, exist_ok=True)
    shutil.copy(HERE / "npm" / "package.json", at / "package.json")
    print(f"installing Claude Code, Codex, OpenCode, Qwen Code and the AI SDK into {at} (1.2 GB)", flush=True)
    npm = ["npm", "install", "--no-audit", "--no-fund", "--ignore-scripts", "--silent"]
    if shutil.which("npm") is None or subprocess.run(npm, cwd=at, check=False).returncode:
        raise NotInstallableError("npm cannot install them")
    # Their own scripts select the binary for this machine; npm may be configured to run no scripts.
    for package, script in (("opencode-ai", "postinstall.mjs"), ("@anthropic-ai/claude-code", "install.cjs")):
        subprocess.run(["node", script], cwd=at / "node_modules" / package, check=True)
    return tested(Path(sys.executable), ["tests/agents/test_programs.py"], NPM_CLIENTS=str(at))


def main() -> int:
    """Install, test and print a summary."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", choices=[[], *FRAMEWORKS, PROGRAMS], help="only these environments")
    parser.add_argument("--environments", type=Path, default=Path(".venv-clients"))
    parser.add_argument("--pip-flags", default="")
    given = parser.parse_args()
    folder, verdicts = given.environments.resolve(), {}
    for name in given.names or [*FRAMEWORKS, PROGRAMS]:
        try:
            passed = programs(folder) if name == PROGRAMS else framework(name, folder, given.pip_flags)
            verdicts[name] = "passed" if passed else "failed"
        except NotInstallableError as error:
            verdicts[name] = f"not installed: {error}"
    print("\n".join(f"{name}: {verdict}" for name, verdict in verdicts.items()))
    if "failed" in verdicts.values():
        return 1
    return 0 if set(verdicts.values()) == {"passed"} else NOT_INSTALLED


if __name__ == "__main__":
    sys.exit(main())
