"""How many threads a rank computes with on a CPU: as many as the cores that other processes leave idle.

Two threads that share one core turn a matrix product of 0.5 ms into 5 ms, because each waits for the other at every
operation; a core that stays idle costs less than half of the speed. So a core that other processes use is given up at
once, and a free core is taken when two looks in a row found it free.

One thread must load, measure and serve. OpenMP gives each computing thread a team of its own, which lives as long as
the thread. If all teams together have more threads than cores, their threads sleep between operations instead of
spinning: on two cores a decode step took 22 ms instead of 16 while a thread that had loaded the model kept a team
beside the one that served. Pure except `read_cpu_times` and `usable_cores`; no torch.
"""

import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from ..config import ReplicaSettings

#: Time between two looks; one costs 40 µs.
INTERVAL_S = 1.0
#: Use of a core by others that is ignored. A router and Ray's own processes use less. Not tuned.
TOLERATED = 0.35

_STAT = Path("/proc/stat")
_QUOTA = Path("/sys/fs/cgroup/cpu.max")
#: Of a line of /proc/stat: user, nice, system, -, -, interrupts, soft interrupts, stolen by the hypervisor.
_BUSY_COLUMNS = (0, 1, 2, 5, 6, 7)


@dataclass(slots=True, frozen=True)
class CpuTimes:
    at_s: float
    busy_s: float  #: on all cores that this process may use, by any process
    own_s: float  #: by this process


@dataclass(slots=True)
class ThreadChoice:
    cores: int
    most: int
    threads: int = 1
    fixed: bool = False
    _last: CpuTimes | None = None
    _offered: int = field(init=False)  #: threads by the last look alone

    def __post_init__(self) -> None:
        self._offered = self.most  # the first look counts for two

    def observe(self, times: CpuTimes) -> int:
        """The number of threads from now on."""
        last, self._last = self._last, times
        if self.fixed or last is None or times.at_s <= last.at_s:
            return self.threads
        taken = (times.busy_s - last.busy_s - (times.own_s - last.own_s)) / (times.at_s - last.at_s)
        offered = min(max(1, math.floor(self.cores - taken + TOLERATED)), self.most)
        self.threads = min(offered, max(self._offered, self.threads))
        self._offered = offered
        return self.threads


def thread_choice(settings: ReplicaSettings, cores: int | None = None) -> ThreadChoice:
    """The first choice for one rank: as set, or up to its share of the cores."""
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
    """From /proc/stat on Linux; None elsewhere."""
    try:
        lines = _STAT.read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    names = {f"cpu{core}" for core in os.sched_getaffinity(0)}
    columns = [line.split() for line in lines]
    ticks = sum(int(line[1 + column]) for line in columns if line[0] in names for column in _BUSY_COLUMNS)
    return CpuTimes(time.monotonic(), ticks / os.sysconf("SC_CLK_TCK"), time.process_time())


class ThreadTuner:
    """Applies a choice and revises it from time to time. Owned by the thread that computes."""

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
        """Between two steps: revise the choice if INTERVAL_S has passed."""
        now = self._clock()
        if self._choice.fixed or now < self._next_s:
            return
        self._next_s = now + INTERVAL_S
        before, times = self._choice.threads, self._read()
        if times is not None and self._choice.observe(times) != before:
            self._set_threads(self._choice.threads)
