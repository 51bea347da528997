"""Expected blocks: from dispatch until stored, or until nobody is left who would store them."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from homing.router.index import PrefixIndex
from homing.router.reservations import Reservations

CHAIN = [10, 11, 12, 13]


def index_of(**held: list[int]) -> PrefixIndex:
    index = PrefixIndex()
    for replica, hashes in held.items():
        index.join(replica, 100)
        index.add(replica, hashes)
    return index


def test_expected_blocks_prolong_what_is_held() -> None:
    """A sibling that comes before the events must see where the prefix is going to be."""
    index, reservations = index_of(r0=[10], r1=[]), Reservations(30)
    reservations.reserve(1, "r0", CHAIN[1:], now=0)

    found = reservations.extend(index.match(CHAIN), CHAIN, index)

    assert found == {"r0": 4, "r1": 0}


def test_a_block_stays_expected_while_any_request_will_store_it() -> None:
    """The first sibling's abort must not take the second one's expectation away."""
    index, reservations = index_of(r0=[]), Reservations(30)
    reservations.reserve(1, "r0", CHAIN, now=0)
    reservations.reserve(2, "r0", CHAIN, now=0)

    reservations.release(1)

    assert reservations.extend({"r0": 0}, CHAIN, index) == {"r0": 4}
    reservations.release(2)
    assert reservations.count("r0") == 0


def test_an_old_request_does_not_release_a_newer_expectation() -> None:
    """Stored, evicted and expected anew: the block belongs to the newer request then."""
    reservations = Reservations(30)
    reservations.reserve(1, "r0", [10], now=0)
    reservations.stored("r0", [10])
    reservations.reserve(2, "r0", [10], now=1)

    reservations.release(1)

    assert reservations.count("r0") == 1


def test_expectations_end_after_their_time() -> None:
    """A replica that never stores them (caching is off there) must not look warm for ever."""
    reservations = Reservations(30)
    reservations.reserve(1, "r0", CHAIN, now=0)
    reservations.reserve(2, "r0", [99], now=20)

    assert reservations.expire(now=30) == 1
    assert reservations.count("r0") == 1


class ReservationMachine(RuleBasedStateMachine):
    """Against sets of (replica, block) per request."""

    def __init__(self) -> None:
        super().__init__()
        self.reservations = Reservations(10)
        self.open: dict[int, tuple[str, set[int], int]] = {}
        self.next = 0
        self.now = 0

    @rule(replica=st.sampled_from(["a", "b"]), hashes=st.sets(st.integers(0, 6)))
    def reserve(self, replica, hashes):
        self.next += 1
        self.reservations.reserve(self.next, replica, hashes, self.now)
        self.open[self.next] = (replica, set(hashes), self.now + 10)

    @rule(data=st.data())
    def release(self, data):
        request = data.draw(st.integers(0, self.next))
        self.reservations.release(request)
        self.open.pop(request, None)

    @rule(replica=st.sampled_from(["a", "b"]), hashes=st.sets(st.integers(0, 6)))
    def stored(self, replica, hashes):
        self.reservations.stored(replica, hashes)
        for owner, expected, _ in self.open.values():
            if owner == replica:
                expected -= hashes

    @rule(seconds=st.integers(1, 8))
    def pass_time(self, seconds):
        self.now += seconds
        self.reservations.expire(self.now)
        self.open = {request: entry for request, entry in self.open.items() if entry[2] > self.now}

    @rule(replica=st.sampled_from(["a", "b"]))
    def leave(self, replica):
        self.reservations.leave(replica)
        self.open = {request: entry for request, entry in self.open.items() if entry[0] != replica}

    @invariant()
    def agrees(self):
        self.reservations.check()
        for replica in ("a", "b"):
            expected = set().union(*(hashes for owner, hashes, _ in self.open.values() if owner == replica))
            assert self.reservations.count(replica) == len(expected)


TestReservations = ReservationMachine.TestCase
TestReservations.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
