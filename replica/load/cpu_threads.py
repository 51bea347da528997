"""How many threads a rank computes with on a CPU: as many as the cores that other processes leave it.

Two threads that take turns on one core cost a product of 0.5 ms 5 ms, for each waits for the other at every operation,
while a core that stands idle costs less than a half. So a core that others take is given up at once, and one that is
free is taken when it was free twice.

All of them belong to one thread, which loads, measures and serves. OpenMP gives each thread that computes a team of its
own, which stays while the thread does; when the teams together are more threads than the cores, their members sleep
between operations instead of spinning. On two cores a decoding step took 22 ms instead of 16 while a thread that had
loaded the model kept a team beside the one that served. Pure but for `read_cpu_times` and `usable_cores`; no torch.
"""

import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

#: Time between two looks; one costs 40 µs.
INTERVAL_S = 1.0
#: Of a core that others may use before it counts as taken. A router and Ray's own processes take less. Not tuned.
TOLERATED = 0.35

_STAT = Path("/proc/stat")
_QUOTA = Path("/sys/fs/cgroup/cpu.max")
#: Of a line of /proc/stat: user, nice, system, -, -, interrupts, soft interrupts, stolen by the hypervisor.
_BUSY_COLUMNS = (0, 1, 2, 5, 6, 7)


@dataclass(slots=True, frozen=True)
class CpuTimes:
    """Seconds of CPU time up to a moment."""

    at_s: float
    busy_s: float  #: of all cores that this process may use, by whomever
    own_s: float  #: of this process


@dataclass(slots=True)
class ThreadChoice:
    """The number of threads, revised from one look to the next."""

    cores: int
    most: int
    threads: int = 1
    _last: CpuTimes | None = None
    _offered: int = field(init=False)  #: threads that the last look alone would have given

    def __post_init__(self) -> None:
        self._offered = self.most  # the first look counts for two

    def observe(self, times: CpuTimes) -> int:
        """What to compute with from here on."""
        last, self._last = self._last, times
        if last is None or times.at_s <= last.at_s:
            return self.threads
        taken = (times.busy_s - last.busy_s - (times.own_s - last.own_s)) / (times.at_s - last.at_s)
        offered = min(max(1, math.floor(self.cores - taken + TOLERATED)), self.most)
        self.threads = min(offered, max(self._offered, self.threads))
        self._offered = offered
        return self.threads


class ThreadKeeper:
    """Applies a choice, once in a while. Owned by the thread that computes."""

    def __init__(
        self,
        choice: ThreadChoice,
        apply: Callable[[int], None],
        read: Callable[[], CpuTimes | None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._choice = choice
        self._apply = apply
        self._read = read
        self._clock = clock
        self._next_s = -math.inf

    def begin(self) -> None:
        """In the thread that computes, before it does: thread counts belong to the calling thread."""
        self._apply(self._choice.threads)

    def look(self) -> None:
        """Between two steps."""
        now = self._clock()
        if now < self._next_s:
            return
        self._next_s = now + INTERVAL_S
        before, times = self._choice.threads, self._read()
        if times is not None and self._choice.observe(times) != before:
            self._apply(self._choice.threads)


def usable_cores() -> int:
    """Cores that this process may use: its affinity and, in a container, the quota."""
    cores = len(_affinity())
    try:
        quota, period = _QUOTA.read_text(encoding="utf-8").split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))


def read_cpu_times() -> CpuTimes | None:
    """Where Linux tells it; None elsewhere."""
    try:
        lines = _STAT.read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    return CpuTimes(time.monotonic(), _busy_seconds(lines, _affinity()), time.process_time())


def _busy_seconds(lines: list[str], cores: set[int]) -> float:
    wanted = {f"cpu{core}" for core in cores}
    columns = [line.split() for line in lines]
    ticks = sum(int(line[1 + column]) for line in columns if line[0] in wanted for column in _BUSY_COLUMNS)
    return ticks / os.sysconf("SC_CLK_TCK")


def _affinity() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))
