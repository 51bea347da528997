"""A running request keeps its slot; whoever left or was preempted has none."""

import pytest

from homing.kvcache.hashing import BlockHasher
from homing.replica.engine.request import Phase
from homing.replica.execute.slots import SlotBook

from ..fakes import request_state

HASHER = BlockHasher(2, seed=3)


def running(number: int):
    state = request_state(number, [1, 2, 3], HASHER)
    state.arrival, state.phase = number, Phase.RUNNING
    return state


@pytest.fixture
def book():
    made = SlotBook(3)
    yield made
    made.check()


def test_slots_are_kept_and_start_once(book):
    """A second start would make the device forget what it holds."""
    first, second = running(1), running(2)

    slots, started = book.assign([first])
    again, more = book.assign([first, second])

    assert slots == [1]
    assert started == [first]
    assert again[0] == 1
    assert more == [second]
    assert 0 not in again


def test_slot_of_an_ended_request_is_given_on(book):
    """There are no more slots than requests that may run."""
    ended = [running(1), running(2), running(3)]
    book.assign(ended)
    for request in ended:
        request.phase = Phase.FINISHED

    slots, started = book.assign([running(4), running(5), running(6)])

    assert sorted(slots) == [1, 2, 3]
    assert len(started) == 3


def test_preempted_request_starts_anew(book):
    """Its blocks are others when it comes back, though it may do so within one call of the scheduler."""
    request = running(1)
    book.assign([request])
    request.preemptions += 1

    _, started = book.assign([request])

    assert started == [request]
