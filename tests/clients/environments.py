"""The tools' virtual environments: one per tool, on top of ours, because some tools exclude each other's packages.

A .pth file makes the running environment's packages importable, so that no tool installs its own torch. Packages that a
tool needs in another version are installed in its environment, never in ours. Independent of clusters and reports.
"""

import os
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

REQUIREMENTS = Path(__file__).resolve().parent / "requirements"
SHARED = REQUIREMENTS.parent.parent / "events" / "compat" / "requirements.txt"


class NotInstallableError(Exception):
    """A tool cannot be installed; the message is pip's last line."""


@dataclass(frozen=True, slots=True)
class Environment:
    """One tool's virtual environment."""

    name: str
    folder: Path
    with_dependencies: bool = True  #: False: the requirements list every package that it needs
    requirements: Path = REQUIREMENTS  #: the folder with NAME.txt

    @property
    def bin(self) -> Path:
        """The folder of its programs."""
        return self.folder / "bin"

    def make(self, pip_flags: str = "") -> None:
        """Install the requirements unless they are installed. Raises NotInstallableError."""
        wanted = self._wanted()
        stamp = self.folder / ".ready"
        if stamp.exists() and stamp.read_text() == wanted:
            return
        print(f"installing {self.name} into {self.folder}", flush=True)
        _run([sys.executable, "-m", "venv", str(self.folder)])
        self._lay_below()
        flags = [*pip_flags.split(), *([] if self.with_dependencies else ["--no-deps"])]
        pip = [str(self.bin / "pip"), "install", "--disable-pip-version-check", "--quiet", *flags]
        _run([*pip, "--requirement", str(self.requirements / f"{self.name}.txt")])
        stamp.write_text(wanted)

    def version(self, package: str) -> str:
        """The version of an installed package."""
        ask = f"import importlib.metadata as m; print(m.version({package!r}))"
        return _run([str(self.bin / "python"), "-c", ask]).strip()

    def _wanted(self) -> str:
        own = (self.requirements / f"{self.name}.txt").read_text()
        return own if self.with_dependencies else own + SHARED.read_text()

    def _lay_below(self) -> None:
        """Make this environment's packages importable there, after its own."""
        ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
        theirs = Path(_run([str(self.bin / "python"), "-c", ask]).strip())
        line = f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"
        (theirs / "below.pth").write_text(line)


def _run(command: list[str]) -> str:
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environ)
    if done.returncode:
        last = (done.stderr or done.stdout).strip().splitlines()[-1:]
        raise NotInstallableError(" ".join(last) or f"{command[0]} exited with {done.returncode}")
    return done.stdout
