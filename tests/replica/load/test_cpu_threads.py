"""The thread count follows the cores that are free: down at once, up after a core was free twice in a row."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from homing.replica.config import ReplicaSettings
from homing.replica.load.cpu_threads import (
    INTERVAL_S,
    CpuTimes,
    ThreadChoice,
    ThreadTuner,
    read_cpu_times,
    thread_choice,
    usable_cores,
)

from ..fakes import FakeClock


class Machine:
    """A machine with preset core usage."""

    def __init__(self) -> None:
        self.at_s = self.busy_s = self.own_s = 0.0

    def pass_by(self, others: float, own: float) -> CpuTimes:
        """Counters after one more second in which others used `others` cores and this process used `own`."""
        self.at_s += 1.0
        self.busy_s += others + own
        self.own_s += own
        return CpuTimes(self.at_s, self.busy_s, self.own_s)


def chosen(choice: ThreadChoice, others: list[float]) -> list[int]:
    """The thread count after each second; the first observation only sets the baseline."""
    machine = Machine()
    choice.observe(machine.pass_by(0.0, 0.0))
    return [choice.observe(machine.pass_by(used, float(choice.threads))) for used in others]


def test_a_free_core_is_taken_the_second_time_and_given_up_at_once() -> None:
    """Two threads on one core are ten times as slow; leaving a core idle is less than twice as slow."""
    assert chosen(ThreadChoice(cores=2, max_threads=2), [0.1, 0.2, 1.0, 0.1, 0.1]) == [2, 2, 1, 1, 2]


def test_a_little_work_of_others_takes_no_core() -> None:
    """The router next to the replica and Ray's own processes always use some CPU."""
    assert chosen(ThreadChoice(cores=4, max_threads=4), [0.3, 0.3, 0.3]) == [4, 4, 4]


@given(st.integers(1, 64), st.integers(1, 8), st.lists(st.floats(0, 64), max_size=20))
def test_there_is_always_a_thread_and_never_more_than_allowed(cores: int, ranks: int, others: list[float]) -> None:
    """Holds for any readings of the kernel's counters."""
    most = max(1, cores // ranks)

    assert all(1 <= threads <= most for threads in chosen(ThreadChoice(cores, most), others))


def test_a_tuner_looks_once_in_a_while_and_applies_changes_alone() -> None:
    """Reading the counters between all steps would cost more than it gains."""
    clock, machine = FakeClock(), Machine()
    applied: list[int] = []
    looks: list[float] = []

    def read() -> CpuTimes:
        looks.append(clock.now)
        return machine.pass_by(0.0, 1.0)

    tuner = ThreadTuner(ThreadChoice(cores=2, max_threads=2), applied.append, read, clock)
    tuner.apply()
    for _ in range(40):
        tuner.update()
        clock.now += INTERVAL_S / 8

    assert len(looks) == 5
    assert applied == [1, 2]


def test_a_system_that_does_not_tell_keeps_its_threads() -> None:
    """Not every system has Linux's counters."""
    applied: list[int] = []
    tuner = ThreadTuner(ThreadChoice(cores=2, max_threads=2, threads=2), applied.append, lambda: None)

    tuner.apply()
    tuner.update()

    assert applied == [2]


def test_this_machine_tells_its_cores_and_times() -> None:
    """The readers work on the machine that runs the tests, and time advances."""
    assert usable_cores() >= 1
    first, second = read_cpu_times(), read_cpu_times()
    if first is not None and second is not None:
        assert second.at_s >= first.at_s
        assert second.own_s >= first.own_s


@pytest.mark.parametrize(
    ("settings", "most"), [({}, 8), ({"tensor_parallel_size": 2}, 4), ({"tensor_parallel_size": 16}, 1)]
)
def test_threads_are_at_most_a_rank_s_share_of_the_cores(settings, most):
    """Ranks of one replica compute at the same time, so each is limited to its share."""
    assert thread_choice(ReplicaSettings(**settings), 8).max_threads == most


def test_threads_that_were_set_stay():
    """An operator who sets the thread count knows what else runs on the machine."""
    choice = thread_choice(ReplicaSettings(cpu_threads=3), 8)

    assert chosen(choice, [8.0, 0.0, 8.0]) == [3, 3, 3]
