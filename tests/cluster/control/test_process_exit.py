"""The end of another process is news, whenever it comes."""

import subprocess
import sys
import threading

import pytest

from homing.cluster.control.process_exit import when_ended

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such news")

PATIENCE_S = 30


def test_a_killed_process_is_told_of() -> None:
    """A raylet that dies takes its replicas along only when Ray comes to look; they must not wait for that."""
    told = threading.Event()
    with subprocess.Popen(["sleep", "600"]) as process:
        when_ended(process.pid, told.set)
        too_early = told.is_set()

        process.kill()

        assert told.wait(PATIENCE_S)
    assert not too_early


def test_a_process_that_is_gone_already_is_told_of_at_once() -> None:
    """It may die between a look at its number and the watch."""
    told = threading.Event()
    with subprocess.Popen(["true"]) as process:
        process.wait(PATIENCE_S)

    when_ended(process.pid, told.set)

    assert told.is_set()
