"""The prefix index against a naive oracle."""

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from homing.router.index import PrefixIndex

REPLICAS = ("r0", "r1", "r2", "r3")
blocks = st.lists(st.integers(0, 12), max_size=8)


class IndexMachine(RuleBasedStateMachine):
    """Random changes on the index and on plain sets must give the same matches."""

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex()
        self.oracle: dict[str, set[int]] = {}

    @rule(replica=st.sampled_from(REPLICAS))
    def join_or_leave(self, replica):
        if replica in self.oracle:
            self.index.leave(replica)
            del self.oracle[replica]
        else:
            self.index.join(replica, capacity=100)
            self.oracle[replica] = set()

    @precondition(lambda self: self.oracle)
    @rule(data=st.data(), hashes=blocks, change=st.sampled_from(["add", "remove", "reset", "clear"]))
    def change(self, data, hashes, change):
        replica = data.draw(st.sampled_from(sorted(self.oracle)))
        held = self.oracle[replica]
        if change == "clear":
            self.index.clear(replica)
            held.clear()
            return
        getattr(self.index, change)(replica, hashes)
        if change == "reset":
            held.clear()
        if change == "remove":
            held.difference_update(hashes)
        else:
            held.update(hashes)

    @rule(prompt=st.lists(st.integers(0, 12), max_size=10, unique=True))
    def match(self, prompt):
        assert self.index.match(prompt) == {replica: prefix(held, prompt) for replica, held in self.oracle.items()}

    @invariant()
    def consistent(self):
        self.index.check()
        assert len(self.index) == len(set().union(*self.oracle.values()))


def prefix(held: set[int], prompt: list[int]) -> int:
    return next((position for position, block in enumerate(prompt) if block not in held), len(prompt))


TestIndex = IndexMachine.TestCase
TestIndex.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


@given(st.lists(st.integers(0, 2**64 - 1), unique=True, min_size=1, max_size=50))
def test_a_hole_ends_the_prefix_even_if_later_blocks_are_held(hashes: list[int]) -> None:
    """KV behind a missing block is of no use: counting it would send requests to the wrong replica."""
    index = PrefixIndex()
    index.join("r0", 100)
    hole = len(hashes) // 2

    index.add("r0", hashes[:hole] + hashes[hole + 1 :])

    assert index.match(hashes) == {"r0": hole}


def test_memory_is_bounded_by_what_a_replica_says_it_has() -> None:
    """A publisher gone wrong must not fill the router's memory."""
    index = PrefixIndex()
    index.join("r0", 10)

    index.add("r0", range(100))

    assert index.count("r0") == len(index) == 10
    assert index.dropped == 90
    index.check()


def test_a_replica_that_left_leaves_nothing_behind() -> None:
    """Its bit goes to the next replica, which must not inherit its blocks."""
    index = PrefixIndex()
    index.join("old", 10)
    index.add("old", [1, 2])

    index.leave("old")
    index.join("new", 10)

    assert index.match([1, 2]) == {"new": 0}
    assert len(index) == 0
