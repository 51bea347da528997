"""Blocks that requests in flight are expected to leave on one replica, from dispatch until the request ends there.

Pure state. Without it, a burst of requests with a common prefix would scatter, because the prefix is announced only
after it is computed. Independent of load and of held blocks (prefix_index.py): a held block may also be expected, and
is not evicted while its request runs.

Each block is entered once, by the first request that expects it. Every other request that expects the block is a
follower of that request, and takes over the block if that request ends first.
"""

from collections.abc import Iterable, Sequence
from itertools import repeat
from operator import itemgetter

import msgspec


class Expectation(msgspec.Struct, eq=False, kw_only=True):
    """The blocks that one request will leave."""

    chain: Sequence[int]  #: hashes of the prompt's full blocks
    start: int  #: index in `chain` of the first block that was not held at dispatch
    followers: "dict[Expectation, None]" = {}  #: expectations that share blocks with this one, each once
    withdrawn: bool = False


class ExpectedBlocks:
    """The expected blocks of one replica."""

    def __init__(self) -> None:
        self.owners: dict[int, Expectation] = {}  #: by block; read by the placement, which has many replicas

    def __len__(self) -> int:
        return len(self.owners)

    def expect(self, wanted: Expectation) -> None:
        self._expect(wanted, wanted.start, len(wanted.chain))

    def _expect(self, wanted: Expectation, start: int, end: int) -> None:
        """Enter these blocks of its chain."""
        # One C call for all blocks: a prompt may have thousands.
        owners = set(map(self.owners.setdefault, wanted.chain[start:end], repeat(wanted)))
        owners.discard(wanted)
        for owner in owners:
            owner.followers[wanted] = None

    def withdraw(self, gone: Expectation) -> None:
        """Drop the blocks that nothing else will leave. Idempotent."""
        if gone.withdrawn:
            return
        gone.withdrawn = True
        for block in gone.chain[gone.start :]:
            if self.owners.get(block) is gone:
                del self.owners[block]
        followers, gone.followers = gone.followers, {}  # followers may refer to each other: leave no reference cycle
        self._inherit(gone, [each for each in followers if not each.withdrawn])

    def _inherit(self, gone: Expectation, followers: Sequence[Expectation]) -> None:
        """Hand the blocks of `gone` to its followers.

        One of them takes what it shares with `gone`; the others follow it and look up only what it does not cover. So
        the end of each of many requests with one prompt costs that prompt's length once, not once per request.
        """
        shared = []
        for follower in followers:
            start = max(follower.start, gone.start)
            shared.append((common_prefix(gone.chain, follower.chain, start), -start, follower))
        if not shared:
            return
        end, negative, heir = max(shared, key=itemgetter(0, 1))
        start = -negative
        self._expect(heir, start, end)
        for its_end, negative, follower in shared:
            its_start = -negative
            if follower is heir:
                continue
            if its_end > start:
                heir.followers[follower] = None
            self._expect(follower, its_start, min(its_end, start))

    def extended(self, hashes: Sequence[int], held: int) -> int:
        """Length of the prefix of `hashes` that is held or expected; the first `held` blocks are held."""
        end = held
        while end < len(hashes) and (owner := self.owners.get(hashes[end])) is not None:
            end = common_prefix(owner.chain, hashes, end)
        return end

    def check(self, expectations: Iterable[Expectation]) -> None:
        """Assert that the blocks are exactly those of these expectations."""
        wanted = set[int]()
        for each in expectations:
            assert not each.withdrawn, "an expectation is withdrawn and counted"
            wanted.update(each.chain[each.start :])
        assert self.owners.keys() == wanted, f"{len(self.owners)} blocks are expected, {len(wanted)} should be"
        assert not any(owner.withdrawn for owner in self.owners.values()), "a block belongs to no request"


def common_prefix(one: Sequence[int], other: Sequence[int], same: int) -> int:
    """Length of the common prefix of two chains that agree at index `same`, and hence at all before it."""
    low, high = same, min(len(one), len(other))
    while high - low > 1:
        middle = (low + high) // 2
        if one[middle] == other[middle]:
            low = middle
        else:
            high = middle
    return low + 1
