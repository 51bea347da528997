"""Predicted evictions by the requests ahead, compared with an engine that evicts like vLLM's block pool."""

from collections import OrderedDict

from hypothesis import given
from hypothesis import strategies as st

from homing.router.routing.eviction_order import EvictionOrder

ROOM = 12


class Pool:
    """An engine's memory: free blocks, cached or empty, in the order in which they are reused."""

    def __init__(self) -> None:
        self.free: OrderedDict[object, None] = OrderedDict((f"empty {place}", None) for place in range(ROOM))
        self.users: dict[int, int] = {}

    def start(self, chain: list[int]) -> tuple[int, list[int], list[int]] | None:
        """Return (blocks of the prompt found, blocks evicted, blocks stored), or None if it does not fit."""
        found = next((place for place, block in enumerate(chain) if not self.has(block)), len(chain))
        idle = [block for block in chain[:found] if block in self.free]
        if len(self.free) - len(idle) < len(chain) - found + 1:
            return None
        for block in idle:
            del self.free[block]
        for block in chain:
            self.users[block] = self.users.get(block, 0) + 1
        taken = [self.free.popitem(last=False)[0] for _ in range(len(chain) - found + 1)]
        return found, [block for block in taken if isinstance(block, int)], chain[found:]

    def has(self, block: int) -> bool:
        return block in self.users or block in self.free

    def end(self, number: int, chain: list[int]) -> None:
        self.free[f"rest {number}"] = None
        self.free.move_to_end(f"rest {number}", last=False)
        for block in reversed(chain):
            self.users[block] -= 1
            if not self.users[block]:
                del self.users[block]
                self.free[block] = None


def chain_of(prompt: int, length: int) -> list[int]:
    return [100 * prompt + place for place in range(length)]


@given(st.lists(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 5)), min_size=1, max_size=4), max_size=12))
def test_what_is_kept_is_what_the_engine_finds(bursts: list[list[tuple[int, int]]]) -> None:
    """All requests of a burst have different prompts, are sent before the first one starts, and end when all run."""
    order, pool, number = EvictionOrder(ROOM + 1), Pool(), 0
    for burst in bursts:
        asked: dict[int, tuple[list[int], int]] = {}
        for prompt, length in dict(burst).items():
            chain = chain_of(prompt, length)
            held = next((place for place, block in enumerate(chain) if not pool.has(block)), length)
            number += 1
            kept = order.remaining_hit(chain, held)
            order.sent(number, chain, kept)
            order.check()
            asked[number] = (chain, kept)
        for chain, kept in asked.values():
            if (start := pool.start(chain)) is None:
                return  # it waits until another request ends; which of its blocks are then left is not predicted
            found, gone, new = start
            assert found == kept
            order.removed(gone)
            order.stored(new)
        for request, (chain, _) in asked.items():
            pool.end(request, chain)
            order.ended(request)
            order.ended(request)
            order.check()


def test_what_was_used_least_recently_is_forgotten_first() -> None:
    """The start of a prompt is kept longer than its end, and blocks in use by a request are kept."""
    order = EvictionOrder(5)
    for number, chain in enumerate(([1, 2, 3], [1, 9, 8])):
        order.sent(number, chain, 0)
        order.stored([block for block in chain if block not in order])
        order.removed(order.surplus())
        order.ended(number)
    assert [block for block in range(10) if block in order] == [1, 2, 8, 9]

    order.sent(2, [2], 1)
    order.stored([7])

    assert order.surplus() == [8]
