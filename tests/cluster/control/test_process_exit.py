"""The end of another process is reported."""

import subprocess
import sys
import threading

import pytest

from homing.cluster.control.process_exit import on_process_exit

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs pidfd_open")

PATIENCE_S = 30


def test_the_end_of_a_killed_process_is_reported() -> None:
    """A raylet that dies takes its replicas along only when Ray comes to look; they must not wait for that."""
    told = threading.Event()
    with subprocess.Popen(["sleep", "600"]) as process:
        on_process_exit(process.pid, told.set)
        too_early = told.is_set()

        process.kill()

        assert told.wait(PATIENCE_S)
    assert not too_early


def test_a_process_that_has_already_ended_is_reported_at_once() -> None:
    """It may die between a look at its number and the watch."""
    told = threading.Event()
    with subprocess.Popen(["true"]) as process:
        process.wait(PATIENCE_S)

    on_process_exit(process.pid, told.set)

    assert told.is_set()
