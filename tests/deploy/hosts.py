"""Two hosts made of namespaces (hosts.sh), each with an SSH server and a Python that has homing's dependencies.

They have their own addresses, homes, processes and shared memory, but share the file system below. Ending one process
ends the hosts and everything that runs on them.
"""

import contextlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

ADDRESSES = ("10.77.0.1", "10.77.0.2")
TOOLS = ("unshare", "nsenter", "ip", "ssh", "ssh-keygen", "rsync", "/usr/sbin/sshd", "pgrep")
SSHD_CONFIG = """\
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/key.pub
PidFile none
UsePAM no
StrictModes no
PasswordAuthentication no
"""
NAMESPACES = ["unshare", "--net", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child"]


@dataclass
class Hosts:
    """Running hosts, and the place from which an operator reaches them."""

    folder: Path
    process: "subprocess.Popen[str]"

    @property
    def key(self) -> Path:
        """The private key that allows logging in as user `homing`."""
        return self.folder / "key"

    def operator(self, *command: str, timeout_s: float = 240) -> "subprocess.CompletedProcess[str]":
        """Run a command in the switch's network, with the operator's own home."""
        (inside,) = psutil.Process(self.process.pid).children()
        enter = ["nsenter", f"--target={inside.pid}", "--net", "--mount", "--pid", "--wd=."]
        desk = str(self.folder / "operator")
        environment = os.environ | {"HOME": desk, "TMPDIR": desk}
        return subprocess.run(
            [*enter, *command],
            cwd=desk,
            env=environment,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            stdin=subprocess.DEVNULL,
        )

    def processes(self) -> list[str]:
        """Command lines of all processes on the hosts."""
        lines = []
        for process in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                lines.append(" ".join(process.cmdline()))
        return lines


def why_not() -> str | None:
    """The reason why hosts cannot run on this machine; None if they can."""
    if os.geteuid() != 0:
        return "namespaces and an SSH server need root"
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        return f"not installed: {', '.join(missing)} (Debian: openssh-server, openssh-client, rsync, iproute2, procps)"
    tried = subprocess.run([*NAMESPACES, "true"], capture_output=True, text=True, check=False)
    return f"cannot create namespaces: {tried.stderr.strip()}" if tried.returncode else None


@contextlib.contextmanager
def two_hosts() -> Iterator[Hosts]:
    """Run two hosts that accept SSH connections for the duration of the block."""
    with tempfile.TemporaryDirectory(prefix="hosts-", dir="/tmp") as name:
        folder = Path(name)
        _furnish(folder)
        command = [*NAMESPACES, "bash", str(Path(__file__).with_name("hosts.sh")), name]
        with (folder / "log").open("w") as log:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n", (folder / "log").read_text()
            yield Hosts(folder, process)
        finally:
            process.kill()
            process.communicate()


def _furnish(folder: Path) -> None:
    """Create the keys, the operator's folder, and homes that contain a Python."""
    for key in ("key", "host_key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / key], check=True)
    (folder / "sshd_config").write_text(SSHD_CONFIG.format(folder=folder))
    (folder / "operator").mkdir()
    for number in range(1, len(ADDRESSES) + 1):
        _install_python(folder / str(number) / "homing" / "env")
        # A missing package must be an error, not a download.
        (folder / str(number) / ".bashrc").write_text("export PIP_NO_INDEX=1\n")


def _install_python(env: Path) -> None:
    """An environment that has our dependencies through a .pth file but not homing, which the setup commands install."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", env], check=True)
    (target,) = env.glob("lib/python3*/site-packages")
    (target / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    ray = env / "bin" / "ray"
    ray.write_text(f"#!{env}/bin/python\nfrom ray.scripts.scripts import main\n\nmain()\n")
    ray.chmod(0o755)
