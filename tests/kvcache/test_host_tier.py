"""Slots of the host tier: each is free or holds one block, and a listener knows which, whatever comes and goes when."""

from collections.abc import Sequence

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from homing.kvcache.hashing import BlockHash, token_bytes
from homing.kvcache.host_tier import HOST, HostBlock, HostTier
from homing.kvcache.pool import Block, BlockId

SLOTS = 4
ROOT = BlockHash(b"r" * 16)


def named(name: int) -> BlockHash:
    return BlockHash(name.to_bytes(16, "big"))


def cached(name: int) -> Block:
    """A block of a tree: block 1 is first, and each block follows the one with half its number."""
    block = Block(BlockId(name))
    block.block_hash, block.tokens = named(name), token_bytes([name])
    block.content = b"of the prefix"
    block.first, block.salt = name == 1, "s" if name == 1 else "of an earlier use"
    block.parent = ROOT if name == 1 else named(name // 2)
    return block


class Resident:
    """What a subscriber believes to be in host memory."""

    def __init__(self) -> None:
        self.hashes: set[bytes] = set()
        self.runs: list[tuple[bytes | None, tuple[bytes, ...], str]] = []

    def stored(self, parent, hashes, tokens, salt, medium="GPU"):
        assert medium == HOST
        assert not self.hashes & set(hashes)
        assert len(tokens) == 4 * len(hashes)
        assert (parent is None) == (salt == "s")
        self.hashes |= set(hashes)
        self.runs.append((parent, tuple(hashes), salt))

    def removed(self, hashes, medium="GPU"):
        assert medium == HOST
        assert self.hashes >= set(hashes)
        self.hashes -= set(hashes)

    def cleared(self):
        self.hashes.clear()


def run_of(tier: HostTier, path: Sequence[int], start: int = 0) -> list[HostBlock]:
    return tier.run([named(name) for name in path[start:]])


class AnyOrder(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.resident = Resident()
        self.tier = HostTier(SLOTS, self.resident)
        #: The naive model: the names held, the one that gives way first in front.
        self.order: list[int] = []
        self.generations: set[int] = set()

    @rule(names=st.lists(st.integers(1, 15), unique=True, max_size=6))
    def evict(self, names: list[int]) -> None:
        missing = self.tier.missing([cached(name) for name in names])
        touched = [name for name in names if name in self.order]
        self.order = [name for name in self.order if name not in touched] + touched
        new = [name for name in names if name not in touched][-SLOTS:]

        placed = self.tier.add(missing)

        self.order = (self.order + new)[-SLOTS:]
        assert [block.block_hash for block in placed] == [named(name) for name in new]
        made = {block.generation for block in placed}
        assert len(made) == len(placed)
        assert not made & self.generations
        self.generations |= made

    @rule(leaf=st.integers(1, 15), start=st.integers(0, 3), loads=st.booleans())
    def use(self, leaf: int, start: int, loads: bool) -> None:
        path = [leaf >> shift for shift in reversed(range(leaf.bit_length()))]
        expected = []
        for name in path[start:]:
            if name not in self.order:
                break
            expected.append(name)

        run = run_of(self.tier, path, start)

        assert [block.block_hash for block in run] == [named(name) for name in expected]
        rest = [name for name in self.order if name not in expected]
        if loads:
            self.tier.loaded(run)
            self.order = expected[::-1] + rest
        else:
            self.tier.keep(run)
            self.order = rest + expected[::-1]

    @rule(place=st.integers(0, SLOTS))
    def drop(self, place: int) -> None:
        if place < len(self.order):
            (block,) = [held for held in self.tier._held.values() if held.block_hash == named(self.order[place])]
            self.tier.drop(block)
            self.tier.drop(block)
            del self.order[place]

    @rule()
    def clear(self) -> None:
        self.tier.clear()
        self.resident.cleared()
        self.order.clear()

    @invariant()
    def agrees(self) -> None:
        self.tier.check()
        assert self.resident.hashes == {named(name) for name in self.order}
        assert len(self.tier) == len(self.order)


def test_any_order_of_operations_keeps_slots_order_and_events_right() -> None:
    run_state_machine_as_test(AnyOrder, settings=settings(max_examples=60, stateful_step_count=30, deadline=None))


def test_blocks_evicted_together_are_announced_as_runs_from_their_heads() -> None:
    """The pool evicts the last block of a chain first; an event lists a chain from its first."""
    resident = Resident()
    tier = HostTier(8, resident)

    tier.add([cached(name) for name in (4, 2, 1, 7, 3)])

    assert resident.runs == [
        (named(1), (named(3), named(7)), ""),
        (None, (named(1), named(2), named(4)), "s"),
    ]
