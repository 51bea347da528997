"""`homing stop` stops a cluster in bounded time, whatever its processes do."""

import io
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from homing.cluster.cli.main import run
from homing.cluster.errors import NotRunning, SettingsError
from homing.cluster.registry import ClusterRegistry, ProcessMark, RegistryEntry, is_alive

#: Starts a child; both exit only on SIGKILL.
STUBBORN = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if sys.argv[1] == "parent":
    subprocess.Popen([sys.executable, "-c", sys.argv[2], "child"])
print("ready", flush=True)
time.sleep(600)
"""


@pytest.fixture
def stubborn() -> Iterator[psutil.Process]:
    """A process with a child, both of which ignore SIGTERM."""
    command = [sys.executable, "-c", STUBBORN, "parent", STUBBORN]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.readline()
        yield psutil.Process(process.pid)
        process.kill()


def entry_of(process: psutil.Process, run_dir: Path, ray: tuple[ProcessMark, ...] = ()) -> RegistryEntry:
    run_dir.mkdir()
    mark = ProcessMark.of(process)
    return RegistryEntry(
        name="default", pid=mark.pid, started=mark.started, boot=mark.boot, phase="ready", run_dir=str(run_dir), ray=ray
    )


@pytest.mark.parametrize("flags", [[], ["--force"]])
def test_what_does_not_end_by_itself_is_killed(stubborn: psutil.Process, tmp_path: Path, flags: list[str]) -> None:
    """A failed stop would leave ports and memory in use and require a second command."""
    registry = ClusterRegistry(tmp_path)
    registry.write(entry_of(stubborn, tmp_path / "homing-k_ill3d0"))
    (tmp_path / "settings.yaml").write_text("cluster: {stop_timeout_s: 0.2}")
    family = [stubborn, *stubborn.children()]
    out = io.StringIO()

    code = run(["stop", "--config", str(tmp_path / "settings.yaml"), "--state-dir", str(tmp_path), *flags], out)

    assert code == 0
    assert "killed 2 processes that had not exited" in out.getvalue()
    assert not any(map(is_alive, family))
    assert not (tmp_path / "homing-k_ill3d0").exists()


def test_ray_of_a_cluster_that_was_killed_is_removed_by_the_next_command(
    stubborn: psutil.Process, tmp_path: Path
) -> None:
    """The entry's pid and start time identify the process; a new process with the same pid is left alone."""
    registry = ClusterRegistry(tmp_path)
    (child,) = stubborn.children()
    mark = ProcessMark.of(child)
    other = ProcessMark(mark.pid, mark.started - 60, mark.boot)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as dead:
        marks = (ProcessMark.of(stubborn), other)
        registry.write(entry_of(psutil.Process(dead.pid), tmp_path / "homing-k_ill3d0", marks))
        dead.kill()

    with pytest.raises(NotRunning):
        registry.running("default")

    stubborn.wait(60)
    assert is_alive(child)
    child.kill()


@pytest.mark.parametrize("flag", ["--detach", "--detach=true"])
def test_the_process_in_the_background_starts_no_other_one(tmp_path: Path, flag: str) -> None:
    """It gets the user's words, and each process would otherwise start the next."""
    words = ["route", flag, "--background", "--state-dir", str(tmp_path)]

    with pytest.raises(SettingsError, match="no engine is listed"):
        run(words, io.StringIO())
