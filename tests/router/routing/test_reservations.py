"""Expected blocks: counted from dispatch until no request is left that would store them."""

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from homing.router.routing.reservations import Reservations

CHAIN = [10, 11, 12, 13]


def test_expected_blocks_prolong_what_is_held() -> None:
    """A sibling that comes before the events must see where the prefix will be."""
    reservations = Reservations(30)
    reservations.reserve(1, "r0", CHAIN, 1, now=0)

    assert reservations.expected_prefixes({"r0": 1, "r1": 0}, CHAIN) == {"r0": 4, "r1": 0}


def test_a_prompt_shares_only_what_agrees() -> None:
    """Two turns of one conversation share their first blocks, not their last."""
    reservations = Reservations(30)
    reservations.reserve(1, "r0", CHAIN, 0, now=0)

    assert reservations.expected_prefixes({"r0": 0}, [10, 11, 99]) == {"r0": 2}
    assert reservations.expected_prefixes({"r0": 0}, [98, 99]) == {"r0": 0}


def test_expectations_of_several_requests_add_up() -> None:
    """The longer prompt will use the shorter one's blocks and adds its own."""
    reservations = Reservations(30)
    reservations.reserve(1, "r0", CHAIN[:2], 0, now=0)
    reservations.reserve(2, "r0", CHAIN, 0, now=0)

    assert reservations.expected_prefixes({"r0": 0}, [*CHAIN, 14]) == {"r0": 4}
    assert reservations.count("r0") == 4


def test_a_block_stays_expected_while_any_request_will_store_it() -> None:
    """Aborting the first sibling must not remove the second one's expected blocks."""
    reservations = Reservations(30)
    reservations.reserve(1, "r0", CHAIN, 0, now=0)
    reservations.reserve(2, "r0", CHAIN, 0, now=0)

    reservations.release(1)

    assert reservations.expected_prefixes({"r0": 0}, CHAIN) == {"r0": 4}
    reservations.release(2)
    assert reservations.count("r0") == 0


class CountedChain(list[int]):
    """Counts how often it is read."""

    reads = 0

    def __getitem__(self, place: Any) -> Any:
        self.reads += 1
        return super().__getitem__(place)


def test_the_cost_of_a_release_does_not_grow_with_those_before_it() -> None:
    """A long prompt that shares blocks with many shorter ones takes over each block once."""
    reservations, prompts = Reservations(30), 16
    for number in range(1, prompts):
        reservations.reserve(number, "r0", range(number), 0, now=0)
    long = CountedChain(range(prompts))
    reservations.reserve(prompts, "r0", long, 0, now=0)

    for number in range(1, prompts):
        reservations.release(number)

    assert long.reads <= 2 * prompts
    assert reservations.count("r0") == prompts


def test_expectations_end_after_their_time() -> None:
    """A replica that never stores them (because caching is off) must not look warm forever."""
    reservations = Reservations(30)
    reservations.reserve(1, "r0", CHAIN, 0, now=0)
    reservations.reserve(2, "r0", [99], 0, now=20)

    reservations.expire(now=30)
    assert reservations.count("r0") == 1


#: Prompts as block hashes: a hash covers its word and all before it, so equal hashes are at equal positions.
prompts = st.lists(st.integers(0, 2), max_size=6).map(
    lambda words: [hash(tuple(words[:n])) for n in range(1, 1 + len(words))]
)


class ReservationMachine(RuleBasedStateMachine):
    """Compared with the set of blocks that each request will store."""

    def __init__(self) -> None:
        super().__init__()
        self.reservations = Reservations(10)
        self.open: dict[int, tuple[str, set[int], int]] = {}
        self.next = 0
        self.now = 0

    def expected(self, replica: str) -> set[int]:
        return set().union(*(blocks for owner, blocks, _ in self.open.values() if owner == replica))

    @rule(replica=st.sampled_from(["a", "b"]), prompt=prompts, held=st.integers(0, 6))
    def reserve(self, replica, prompt, held):
        self.next += 1
        self.reservations.reserve(self.next, replica, prompt, held, self.now)
        self.open[self.next] = (replica, set(prompt[held:]), self.now + 10)

    @rule(prompt=prompts, held=st.integers(0, 6))
    def expected_prefixes(self, prompt, held):
        held = min(held, len(prompt))
        for replica, end in self.reservations.expected_prefixes({"a": held, "b": held}, prompt).items():
            expected = self.expected(replica)
            assert end == next((at for at in range(held, len(prompt)) if prompt[at] not in expected), len(prompt))

    @rule(data=st.data())
    def release(self, data):
        request = data.draw(st.integers(0, self.next))
        self.reservations.release(request)
        self.open.pop(request, None)

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
            assert self.reservations.count(replica) == len(self.expected(replica))


TestReservations = ReservationMachine.TestCase
TestReservations.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
