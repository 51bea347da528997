"""Telling a stopped process from one that is slow, waits or is being debugged."""

import asyncio
import subprocess
import sys
from collections.abc import Sequence

import psutil
import pytest

from homing.cluster.control.stopped_process import POLLS, StopDetector, switches_when_stopped, until_stopped
from homing.cluster.registry import ProcessMark

STATUS = """Name:\tray::ReplicaRank
Umask:\t0022
State:\t{state}
Tgid:\t4711
Threads:\t31
voluntary_ctxt_switches:\t150
nonvoluntary_ctxt_switches:\t7
"""


@pytest.mark.parametrize(
    ("state", "switches"),
    [
        ("T (stopped)", 157),
        ("t (tracing stop)", None),  # a debugger goes on
        ("R (running)", None),  # and may wait for a processor for long
        ("S (sleeping)", None),
        ("D (disk sleep)", None),
        ("Z (zombie)", None),
    ],
)
def test_only_a_stopped_process_counts(state: str, switches: int | None) -> None:
    """Killing a process that is merely slow would be worse than noticing a stopped one late."""
    assert switches_when_stopped(STATUS.format(state=state)) == switches


@pytest.mark.parametrize(
    ("readings", "stopped"),
    [
        ([5] * POLLS, True),
        ([5] * (POLLS - 1), False),
        ([5, 6, 7, 8, 9, 10], False),  # it runs between the readings: a slow process, stopped again and again
        ([5, 5, None, 5, 5, None, 5, 5], False),
        ([5, 5, 5, 6, *[6] * (POLLS - 1)], True),
    ],
)
def test_it_must_be_stopped_all_the_time(readings: Sequence[int | None], stopped: bool) -> None:
    """Its counter of switches says whether it ran between two readings that both found it stopped."""
    detector = StopDetector()

    assert any(detector.observe(each) for each in readings) is stopped


async def test_a_process_is_found_only_while_it_is_stopped() -> None:
    """The real state of a real process; one that has ended, or another with its id, is never found."""
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", "input()", stdin=subprocess.PIPE)
    process = psutil.Process(child.pid)
    mark = ProcessMark.of(process)
    waiting = asyncio.create_task(until_stopped(mark))
    other = asyncio.create_task(until_stopped(ProcessMark(mark.pid, mark.started + 9, mark.boot)))
    process.suspend()
    found = await waiting
    process.kill()
    await child.wait()
    ended = asyncio.create_task(until_stopped(mark))
    await asyncio.wait([ended, other], timeout=0)

    assert found == process
    assert not ended.done()
    assert not other.done()
    ended.cancel()
    other.cancel()
