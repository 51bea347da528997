"""Chooses how many threads a rank computes with on a CPU: one per core that other processes leave idle.

Two threads on one core turn a matrix product of 0.5 ms into 5 ms, because each waits for the other at every operation;
leaving a core idle costs less than half the speed. So a core that other processes use is given up at once, and a free
core is taken only after two observations in a row found it free.

One thread must load, measure and serve. OpenMP gives each computing thread a thread team of its own, which lives as
long as that thread. If all teams together have more threads than there are cores, they sleep between operations instead
of spinning: on two cores a decode step took 22 ms instead of 16 while the thread that had loaded the model still kept a
team besides the serving thread's. Pure except `read_cpu_times` and `usable_cores`; no torch.
"""

import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from ..config import ReplicaSettings

#: Time between two observations; each costs 40 µs.
INTERVAL_S = 1.0
#: Cores' worth of use by other processes that is ignored. A router and Ray's processes use less. Not tuned.
TOLERATED = 0.35

_STAT = Path("/proc/stat")
_QUOTA = Path("/sys/fs/cgroup/cpu.max")
#: Columns of a line in /proc/stat: user, nice, system, interrupts, soft interrupts, stolen by the hypervisor.
_BUSY_COLUMNS = (0, 1, 2, 5, 6, 7)


@dataclass(slots=True, frozen=True)
class CpuTimes:
    at_s: float
    busy_s: float  #: CPU time of all processes on the cores that this process may use
    own_s: float  #: CPU time of this process


@dataclass(slots=True)
class ThreadChoice:
    cores: int
    max_threads: int
    threads: int = 1
    fixed: bool = False
    _last: CpuTimes | None = None
    _available: int = field(init=False)  #: number of threads according to the last observation alone

    def __post_init__(self) -> None:
        self._available = self.max_threads  # the first observation counts as two

    def observe(self, times: CpuTimes) -> int:
        """Take CPU times into account; returns the number of threads to use from now on."""
        last, self._last = self._last, times
        if self.fixed or last is None or times.at_s <= last.at_s:
            return self.threads
        others = (times.busy_s - last.busy_s - (times.own_s - last.own_s)) / (times.at_s - last.at_s)
        available = min(max(1, math.floor(self.cores - others + TOLERATED)), self.max_threads)
        self.threads = min(available, max(self._available, self.threads))
        self._available = available
        return self.threads


def thread_choice(settings: ReplicaSettings, cores: int | None = None) -> ThreadChoice:
    """The initial choice for one rank: the configured number, or up to its share of the cores."""
    cores = cores or usable_cores()
    if settings.cpu_threads:
        return ThreadChoice(cores, settings.cpu_threads, settings.cpu_threads, fixed=True)
    return ThreadChoice(cores, max(1, cores // settings.tensor_parallel_size))


def usable_cores() -> int:
    """Cores that this process may use: its affinity and, in a container, its quota."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = _QUOTA.read_text(encoding="utf-8").split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))


def read_cpu_times() -> CpuTimes | None:
    """CPU times from /proc/stat on Linux; None elsewhere."""
    try:
        lines = _STAT.read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    names = {f"cpu{core}" for core in os.sched_getaffinity(0)}
    columns = [line.split() for line in lines]
    ticks = sum(int(line[1 + column]) for line in columns if line[0] in names for column in _BUSY_COLUMNS)
    return CpuTimes(time.monotonic(), ticks / os.sysconf("SC_CLK_TCK"), time.process_time())


class ThreadTuner:
    """Applies a thread choice and revises it regularly. Owned by the thread that computes."""

    def __init__(
        self,
        choice: ThreadChoice,
        set_threads: Callable[[int], None],
        read: Callable[[], CpuTimes | None] = read_cpu_times,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._choice = choice
        self._set_threads = set_threads
        self._read = read
        self._clock = clock
        self._next_s = -math.inf

    def apply(self) -> None:
        self._set_threads(self._choice.threads)

    def update(self) -> None:
        """Revise the choice if INTERVAL_S has passed. Call between two steps."""
        now = self._clock()
        if self._choice.fixed or now < self._next_s:
            return
        self._next_s = now + INTERVAL_S
        before, times = self._choice.threads, self._read()
        if times is not None and self._choice.observe(times) != before:
            self._set_threads(self._choice.threads)
