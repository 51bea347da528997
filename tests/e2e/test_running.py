"""Processes that tests start must not outlive them, no matter how the test run stops."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from homing.cluster.registry import wait_gone

from .running import until

ROOT = Path(__file__).resolve().parents[2]

CUT = """
import subprocess, sys, time
from pathlib import Path
from tests.e2e.parent_death import end_with_us

def test_that_is_cut():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], preexec_fn=end_with_us)
    fresh = Path(__file__).with_name("fresh")
    fresh.write_text(str(child.pid))
    fresh.rename(fresh.with_name("child"))
    try:
        time.sleep(600)
    finally:
        fresh.with_name("down").touch()
"""


@pytest.mark.parametrize("workers", [(), ("-n", "1", "--dist", "loadfile")], ids=["one process", "a worker"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_test_run_that_is_cut_takes_its_clusters_along(number: int, workers: tuple[str, ...], tmp_path: Path) -> None:
    """`timeout` sends SIGTERM, and a stuck run gets SIGKILL: in both cases no Ray process may remain."""
    path = tmp_path / "test_cut.py"
    path.write_text(CUT)
    options = ["-q", "-s", "-p", "no:cacheprovider", "-p", "xdist", f"--rootdir={ROOT}", f"--confcutdir={ROOT}"]
    command = [sys.executable, "-m", "pytest", *options, "-p", "tests.conftest", *workers, str(path)]
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": _paths(), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        stdout=subprocess.DEVNULL,
    ) as run:
        until(lambda: path.with_name("child").exists() or None, "the test has started")
        child = psutil.Process(int(path.with_name("child").read_text()))
        run.send_signal(number)
        left = wait_gone([child], 60)

    assert left == []
    if number == signal.SIGTERM:
        assert path.with_name("down").exists()


def _paths() -> str:
    return os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
