"""Gives up what is least likely to be hit soon, as learned from the traffic itself.

Idle blocks stand in a few *lanes* by how often they were hit before, in each lane by age. The policy compares the
oldest block of each lane by the density of hits that `AgeTable` learned, and falls back to the oldest of all where
the difference is small. So prompts that come once give way to prefixes that came back, for as long as that pays in this
traffic; where it does not, the order is that of LRU.

Closed under prefixes, because a parent never stands before its child by any of the things compared: its hits, hence its
lane, are at least the child's; it fell idle no earlier; and density falls neither from lane to lane nor rises with age.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby, repeat
from operator import attrgetter, itemgetter

from ..hashing import BlockHash
from ..pool import Block, BlockList
from .age_table import AGES, EPOCHS_PER_TURNOVER, AgeTable
from .lru_guard import LruGuard

#: Blocks hit never, once, twice, three times, more often. Three or eight lanes did as well on the traces.
LANES = 5
_MOST = LANES - 1
#: The oldest block goes unless another's density is below this share of its own. Without it, agents whose working set
#: just fits lost 0.3 to 0.9 points of hit rate against LRU; with it, at most 0.2, and other traffic gains nearly as
#: much as before.
DECISIVE = 0.8
#: So that a tiny cache has no epochs of single blocks.
FEWEST_EPOCH_BLOCKS = 16

#: A moment is an epoch and, in so many lower bits, a number within it.
EPOCH_SHIFT = 32

#: The lane that a block was given up from, and the epoch since which it had been idle.
Ghost = tuple[int, int]

_hash_of = attrgetter("block_hash")
_hits_of = attrgetter("hits")
_cohort_of = attrgetter("hits", "idle_since")
_since_of = itemgetter(1)


class HitDensity:
    """Least hits to expect per block and time goes first."""

    def __init__(self, new_guard: Callable[[], LruGuard] = LruGuard) -> None:
        self._new_guard = new_guard
        self._lanes = tuple(BlockList() for _ in range(LANES))
        self._size = 0
        #: Lane and epoch of blocks that were given up and did not come back yet, to recognize them when they do.
        self._ghosts: dict[BlockHash | None, Ghost] = {}
        #: Blocks that were given up together, oldest first, whether they came back or not: the order of forgetting. A
        #: dictionary alone knows the order, too, but finds its first entry only behind the holes of deleted ones.
        self._gone: deque[tuple[Ghost, list[BlockHash | None]]] = deque()
        #: Blocks in `_gone`: given up and not forgotten yet; at most `memory_limit`.
        self.remembered = 0
        self.begin(0)

    def begin(self, capacity: int) -> None:
        self._epoch_blocks = max(FEWEST_EPOCH_BLOCKS, capacity // EPOCHS_PER_TURNOVER)
        self.memory_limit = self._epoch_blocks * AGES
        self._table = AgeTable(LANES, self._epoch_blocks)
        self._guard = self._new_guard()
        self._ghosts.clear()
        self._gone.clear()
        self.remembered = self._stored = 0
        #: A moment: the epoch, and in its lower bits what fell idle together.
        self._now = 0

    def store(self, blocks: Sequence[Block], parent: Block | None) -> None:
        if not self._ghosts.keys().isdisjoint(map(_hash_of, blocks)):
            self._recognize(blocks, parent)
        self._stored += len(blocks)
        while self._stored >= self._epoch_blocks:
            self._stored -= self._epoch_blocks
            self._table.advance()
            self._now = self._table.epoch << EPOCH_SHIFT
            if self._table.epoch % EPOCHS_PER_TURNOVER == 0:
                self._guard.turnover(self._epoch_blocks * EPOCHS_PER_TURNOVER, self._table.age_of(self._size))

    def _recognize(self, blocks: Sequence[Block], parent: Block | None) -> None:
        """Blocks that were resident before get the hits they had."""
        forget = self._ghosts.pop
        found = [forget(block.block_hash, None) for block in blocks]
        start = 0
        for ghost, group in groupby(found):
            end = start + len(list(group))
            if ghost is not None:
                lane, since = ghost
                before = blocks[start - 1] if start else parent
                # A ghost may be of another prefix, as hashes may collide.
                hits = lane + 1 if before is None else min(lane + 1, before.hits)
                for block in blocks[start:end]:
                    block.hits = hits
                self._count(lane, since, end - start, resident=False)
            start = end

    def add(self, blocks: Sequence[Block]) -> None:
        if not blocks:
            return
        self._now += 1
        now, hits, alike = self._now, blocks[0].hits, True
        for block in blocks:
            block.idle_since = now
            if block.hits != hits:
                alike = False
        self._size += len(blocks)
        if alike:
            self._enter(min(hits, _MOST), blocks)
            return
        for hits, group in groupby(blocks, _hits_of):
            self._enter(min(hits, _MOST), list(group))

    def _enter(self, lane: int, run: Sequence[Block]) -> None:
        self._lanes[lane].extend(run)
        self._table.idle(lane, len(run))

    def reuse(self, blocks: Sequence[Block]) -> None:
        self._size -= len(blocks)
        hits, since = blocks[0].hits, blocks[0].idle_since
        if len({block.hits for block in blocks}) == 1 == len({block.idle_since for block in blocks}):
            self._leave(min(hits, _MOST), since >> EPOCH_SHIFT, blocks)
            return
        for (hits, since), group in groupby(blocks, _cohort_of):
            self._leave(min(hits, _MOST), since >> EPOCH_SHIFT, list(group))

    def _leave(self, lane: int, since: int, run: Sequence[Block]) -> None:
        self._lanes[lane].remove(run)
        self._count(lane, since, len(run), resident=True)

    def _count(self, lane: int, since: int, blocks: int, *, resident: bool) -> None:
        self._table.hit(lane, since, blocks)
        self._guard.hit(self._table.epoch - since, blocks, resident=resident)

    def discard(self, block: Block) -> None:
        self._size -= 1
        # Another request computed it again: it would have been hit.
        self._leave(min(block.hits, _MOST), block.idle_since >> EPOCH_SHIFT, (block,))

    def take(self, count: int) -> list[Block]:
        assert count <= self._size, f"{count} blocks asked of {self._size} idle ones"
        self._size -= count
        taken: list[Block] = []
        while len(taken) < count:
            heads = [blocks.oldest for blocks in self._lanes]
            lane = self._next_lane(heads)
            run = self._lanes[lane].take_older(count - len(taken), self._turn_ends(lane, heads))
            self._remember(run, lane)
            taken += run
        return taken

    def _next_lane(self, heads: Sequence[Block | None]) -> int:
        """The lane that gives up its oldest block; of equals the one with fewer hits, as it may hold the children."""
        if not self._guard.learned:
            return min((head.idle_since, lane) for lane, head in enumerate(heads) if head is not None)[1]
        density = self._table.density
        ranked = [
            (density(lane, head.idle_since >> EPOCH_SHIFT), head.idle_since >> EPOCH_SHIFT, lane)
            for lane, head in enumerate(heads)
            if head is not None
        ]
        best, oldest = min(ranked), min(ranked, key=_since_of)
        return best[2] if best[0] < DECISIVE * oldest[0] else oldest[2]

    def _turn_ends(self, lane: int, heads: Sequence[Block | None]) -> int:
        """Until which moment blocks of this lane go before another lane is asked: its cohort's, at most."""
        head = heads[lane]
        assert head is not None, f"lane {lane} is empty"
        end = ((head.idle_since >> EPOCH_SHIFT) + 1) << EPOCH_SHIFT
        if self._guard.learned:
            return end
        # Of one moment, fewer hits first.
        others = [other.idle_since + (lane < place) for place, other in enumerate(heads) if other and place != lane]
        return min([end, *others])

    def _remember(self, run: Sequence[Block], lane: int) -> None:
        ghost, hashes = (lane, run[0].idle_since >> EPOCH_SHIFT), [block.block_hash for block in run]
        self._ghosts.update(zip(hashes, repeat(ghost)))
        self._gone.append((ghost, hashes))
        self.remembered += len(hashes)
        ghosts = self._ghosts
        while self.remembered > self.memory_limit:
            ghost, hashes = self._gone.popleft()
            self.remembered -= len(hashes)
            for block_hash in hashes:
                # Another one: it came back since and was given up again.
                if ghosts.get(block_hash) is ghost:
                    del ghosts[block_hash]

    def check(self) -> None:
        self._table.check()
        self._guard.check()
        for blocks in self._lanes:
            blocks.check()
            since = [block.idle_since for block in blocks]
            assert since == sorted(since), "a lane is not ordered by age"
        assert self._size == sum(map(len, self._lanes)), f"{self._size} idle blocks, not so many in the lanes"
        remembered = sum(len(hashes) for _, hashes in self._gone)
        assert remembered == self.remembered, f"{remembered} blocks are remembered, {self.remembered} were counted"
        assert remembered <= self.memory_limit, f"{remembered} blocks are remembered, at most {self.memory_limit}"
        known = {block_hash for _, hashes in self._gone for block_hash in hashes}
        assert self._ghosts.keys() <= known, "a ghost would never be forgotten"
        idle = {block.block_hash for block in self}
        assert idle.isdisjoint(self._ghosts), "an idle block is remembered as gone"

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Block]:
        waiting = [iter(blocks) for blocks in self._lanes]
        heads = [next(blocks, None) for blocks in waiting]
        while any(heads):
            lane = self._next_lane(heads)
            head = heads[lane]
            assert head is not None, f"lane {lane} is empty"
            yield head
            heads[lane] = next(waiting[lane], None)
