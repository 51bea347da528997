"""Notices a process of this machine that is stopped (SIGSTOP): it neither ends nor answers, and keeps its memory.

Its state in /proc says so, where a missing answer would not: a long step, an import or a busy machine look the same to
whoever waits. Depends on files in /proc only, not on Ray.
"""

import asyncio
import contextlib
import re
from pathlib import Path

import psutil

from ..registry import ProcessMark

POLL_S = 0.25
#: A process is stopped if it was found so this many times in a row, and never ran in between.
POLLS = 4
_FIELDS = re.compile(r"^(State|voluntary_ctxt_switches|nonvoluntary_ctxt_switches):\s+(\S+)", re.MULTILINE)


def switches_when_stopped(status: str) -> int | None:
    """How often the process was scheduled, if it is stopped; else None. `status`: its /proc/PID/status.

    State `t`, of a process that a debugger has stopped, does not count.
    """
    fields = dict(_FIELDS.findall(status))
    if fields.get("State") != "T":
        return None
    return int(fields["voluntary_ctxt_switches"]) + int(fields["nonvoluntary_ctxt_switches"])


class StopDetector:
    """Judges one process by readings at regular intervals.

    Counts readings instead of seconds, so that it is right even if this process was stopped as well.
    """

    def __init__(self) -> None:
        self._switches: int | None = None
        self._times = 0

    def observe(self, switches: int | None) -> bool:
        """Whether the process is stopped for good, given `switches_when_stopped` now."""
        if switches is None:
            self._times = 0
        else:
            self._times = self._times + 1 if switches == self._switches else 1
        self._switches = switches
        return self._times >= POLLS


async def until_stopped(mark: ProcessMark) -> psutil.Process:
    """Wait until the process is stopped, and return it. Waits forever for one that ends, or is on another machine."""
    detector = StopDetector()
    if mark.process() is not None:
        with contextlib.suppress(OSError):  # it has ended
            while True:
                # Whether its id belongs to another process by now is checked last, as that takes five times as long.
                if detector.observe(switches_when_stopped(_status(mark.pid))) and (process := mark.process()):
                    return process
                await asyncio.sleep(POLL_S)
    await asyncio.Event().wait()
    raise AssertionError("unreachable")


def _status(pid: int) -> str:
    return Path(f"/proc/{pid}/status").read_text()
