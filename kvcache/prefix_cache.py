"""The prefix cache: tracks which block holds which prefix and who uses it, and evicts unused blocks.

Pure synchronous state: no clock, no sockets, no tensors. The caller reports which blocks it has computed and receives
blocks to fill; the cache never reads KV. Only one thread may call it (the engine's).

A request calls `match` (look up the prompt), `acquire` (share the blocks found, allocate the others), `commit` (the KV
of these blocks is computed), `allocate` (more blocks while decoding) and `release`. A request that waits calls `hold`
first and `unhold` later: its prefix is not evicted while other blocks can be, and grows as its blocks become resident.

Invariants, asserted by `check`:

* All copies of a hash are live, or there is exactly one copy and no request uses it.
* Residency is prefix-closed: if a block is cached, so are its parent and all earlier blocks of its chain.
  A request holds a copy of each ancestor of its blocks when it commits or hits them, `release` frees the tail first,
  eviction takes blocks in the order in which they fell idle, and a copy is dropped only while another is live. It would
  break if a table's head were released before its tail, as sliding-window attention does.
* A pinned block is resident. While no request uses it, it is withheld from eviction and does not count as free.
* A block found by its hash holds the prefix that was asked for, as block_index.py explains.
"""

from collections.abc import Hashable, Iterator, Sequence
from itertools import islice

import msgspec

from .block_index import BlockIndex, CachedBlock, CacheListener, CacheStats, LowerTier
from .errors import StaleMatch
from .hashing import BlockHash
from .holds import Holds, Turn
from .idle_blocks import IdleBlocks
from .partial_match import PartialHit
from .pins import PinBook, PinLimits
from .pool import Block, BlockPool

#: Up to this share of all blocks, what is held for waiting requests is taken by no other prompt. More would leave the
#: prompts before them no memory. Simulated with agents whose conversations exceed the caches, mean TTFT: 73 s with 0,
#: 75 s with 1/16, 77 s with 1/8, 84 s with 1/4, 132 s with 1.
HELD_SHARE = 1 / 8


class PrefixMatch(msgspec.Struct, frozen=True):
    """The result of a look-up. Acquire it before calling any other method of the cache.

    `PrefixMatch((), 0)` uses nothing from the cache. A match whose `query_tokens` is 0 is left out of the statistics.
    """

    blocks: tuple[Block, ...]
    tokens: int  #: number of tokens in `blocks` and `partial` together
    query_tokens: int = 0  #: length of the prompt that was looked up
    collisions: int = 0  #: 1 if the match ended at a hash that belongs to another prefix, else 0
    version: int = 0  #: the cache's version at the time of the look-up
    partial: PartialHit | None = None


class PrefixCache:
    """Blocks by the prefix they hold. `num_blocks` includes the null block; `enabled=False` turns sharing off."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        listener: CacheListener | None = None,
        enabled: bool = True,
        partial_block_reuse: bool = True,
        pin_limits: PinLimits | None = None,
        held_share: float = HELD_SHARE,
        lower: LowerTier | None = None,
    ) -> None:
        self.block_size = block_size
        self.enabled = enabled
        self.partial_block_reuse = partial_block_reuse
        self.counters = CacheStats()
        #: Number of blocks available to requests: all but the null block.
        self.total_blocks = num_blocks - 1
        limits = pin_limits or PinLimits()
        self.pins = PinBook(int(limits.tenant_share * self.total_blocks), int(limits.total_share * self.total_blocks))
        self._pool = BlockPool(num_blocks)
        self._listener = listener
        self._lower = lower
        self._most_held = held_share * self.total_blocks
        self._holds = Holds(self.pins, self.release)
        self._index = BlockIndex(block_size, listener, self.counters, self._holds, self._displaced)
        self._unused = IdleBlocks(self.pins)
        #: Cached blocks that no request uses and no pin keeps, in the order of eviction.
        self.idle = self._unused.evictable

    @property
    def blocks(self) -> Sequence[Block]:
        return self._pool.blocks

    @property
    def free_blocks(self) -> int:
        """Number of blocks that can be allocated now: free ones, and cached ones that are neither pinned nor in use."""
        return len(self._pool.free) + len(self.idle) + self._holds.only_held

    @property
    def unheld_free_blocks(self) -> int:
        """Number of blocks in `free_blocks` that are held for no waiting request."""
        return len(self._pool.free) + len(self.idle)

    @property
    def blocks_for_prompts(self) -> int:
        """Number of blocks in `free_blocks` that a prompt should take while others run."""
        return self.free_blocks if self._holds.only_held > self._most_held else self.unheld_free_blocks

    @property
    def cached_free_blocks(self) -> int:
        """Number of blocks in `free_blocks` that still hold cached KV."""
        return len(self.idle) + self._holds.only_held

    def next_evictions(self, count: int) -> list[BlockHash]:
        """Hashes of at most `count` blocks, in the order in which they would be evicted once no block is free.

        Held ones, which come after all others, are left out.
        """
        hashes = (block.block_hash for block in islice(self.idle, count))
        return [block_hash for block_hash in hashes if block_hash is not None]

    @property
    def pinned_idle_blocks(self) -> int:
        """Number of pinned blocks that no running request uses; they are not free. O(pins): for tests and diagnosis."""
        pinned = map(self._index.blocks.__getitem__, self.pins)
        return sum([block.ref_count == self.holds(block) for block in pinned])

    @property
    def usage(self) -> float:
        """Fraction of the blocks that are live or pinned, 0 to 1."""
        return 1.0 - self.free_blocks / self.total_blocks

    def match(self, root: BlockHash, hashes: Sequence[BlockHash], tokens: bytes, num_tokens: int) -> PrefixMatch:
        """Find the longest cached prefix of a prompt. Has no effect; statistics are updated by `acquire`.

        `hashes` are those of the prompt's full blocks; `tokens` are its ids (uint32 LE). The match always excludes the
        last of the `num_tokens` tokens: it must be computed, as its logits produce the first token of the answer.
        """
        if not self.enabled:
            return PrefixMatch((), 0)
        limit = max(0, num_tokens - 1) // self.block_size
        blocks, collided = self._index.find(root, hashes[:limit], tokens)
        partial = self._index.find_partial(root, blocks, tokens, num_tokens) if self.partial_block_reuse else None
        return PrefixMatch(
            blocks,
            len(blocks) * self.block_size + (partial.tokens if partial else 0),
            num_tokens,
            int(collided),
            self._index.version,
            partial,
        )

    def can_acquire(self, match: PrefixMatch) -> bool:
        """Whether the blocks of a match are still cached. There may be a longer match if blocks were stored since."""
        return match.version == self._index.version

    def acquire(self, match: PrefixMatch, new_blocks: int, leave: int | None = None) -> list[Block] | None:
        """Return a request's block table: the matched blocks, then `new_blocks` more. None, with no effect, if too few.

        `leave`: it must leave so many of `blocks_for_prompts`. None: it may take all that is free.

        With `match.partial`, the caller must copy the KV of its tokens into the first new block before it writes to any
        block handed out since the look-up: the source block is not held and may even be among the new blocks.
        Raises StaleMatch when any block lost its hash since the look-up.
        """
        if (match.blocks or match.partial) and not self.can_acquire(match):
            raise StaleMatch("the cache changed between match and acquire: match again right before acquire")
        assert new_blocks or not match.partial, "a partial hit needs a block to be copied into"
        pinned, idle = self._unused.among(match.blocks)
        held = self._holds.count_only_held(match.blocks)
        room = self.free_blocks - held
        if leave is not None:
            room = min(room, self.blocks_for_prompts) - leave
        if new_blocks > room - len(idle):
            return None
        self._holds.only_held -= held
        # Take the matched blocks out of the order before evicting, so that a request never evicts its own prefix.
        self._unused.use(pinned, idle)
        for block in match.blocks:
            block.ref_count += 1
        if match.query_tokens:
            self._count(match)
        return [*match.blocks, *self._take(new_blocks)]

    def _count(self, match: PrefixMatch) -> None:
        counters = self.counters
        counters.query_tokens += match.query_tokens
        counters.hit_tokens += match.tokens
        counters.partial_hit_tokens += match.partial.tokens if match.partial else 0
        counters.collisions += match.collisions

    def hold(self, request: Hashable, match: PrefixMatch, turn: Turn = tuple, hashes: Sequence[BlockHash] = ()) -> None:
        """Hold the whole blocks of a match for a request that waits, until `unhold`: others are evicted first.

        `hashes`: those of the blocks that it may use. It also holds each of them that becomes resident after these.

        Held blocks count as free. When they are needed, the request with the highest `turn`, which starts last, loses
        the last blocks of its prefix; among equals, the one held last.
        """
        if not match.blocks and not hashes:
            return
        assert not match.blocks or self.can_acquire(match), "the cache changed between match and hold"
        pinned, idle = self._unused.among(match.blocks)
        self._unused.use(pinned, idle)
        self._holds.add(request, match.blocks, len(idle), turn, hashes)

    def holds(self, block: Block) -> int:
        """For how many waiting requests the block is held."""
        return self._holds.count(block)

    def unhold(self, request: Hashable) -> None:
        """The request no longer waits. If it starts, call this after `acquire`."""
        self._holds.end(request)

    def allocate(self, count: int) -> list[Block] | None:
        """Return `count` more blocks for a running request, or None, with no effect, if fewer are available."""
        if count > len(self._pool.free) and count > self.free_blocks:
            return None
        return self._take(count)

    def _take(self, count: int) -> list[Block]:
        if self._holds.only_held:
            self._holds.shorten(lambda: count - self.unheld_free_blocks)
        from_pool = min(count, len(self._pool.free))
        taken = self._pool.take(from_pool)
        if from_pool < count:
            taken += self._evict(count - from_pool)
        for block in taken:
            block.ref_count = 1
        return taken

    def _evict(self, count: int) -> list[Block]:
        evicted = self.idle.take_oldest(count)
        self.counters.evicted_tokens += count * self.block_size
        if self._lower is not None:
            self._index.know_content(evicted)
            self._lower.evicted(evicted)
        self._index.remove(evicted)
        return evicted

    def commit(
        self,
        blocks: Sequence[Block],
        start: int,
        parent: BlockHash,
        hashes: Sequence[BlockHash],
        tokens: bytes,
        salt: str = "",
    ) -> None:
        """Share these consecutive full blocks, whose KV is now computed, and notify the listener.

        `blocks[0]` is block number `start` of its chain; `parent` is the hash before it (the root when `start` is 0).
        `tokens` are the ids of these blocks only; `salt` is passed to the listener. A request must commit its blocks in
        order, without gaps; blocks that are already committed are skipped.
        """
        if not self.enabled or not blocks:
            return
        self._index.commit(blocks, start, parent, hashes, tokens, salt)

    def _displaced(self, block_hash: BlockHash, block: Block) -> None:
        self._unused.discard(block_hash, block)
        self._pool.give((block,))

    def release(self, blocks: Sequence[Block]) -> None:
        """Release a request's block table (given in order). The tail becomes idle first, so that roots live longest."""
        idle: list[Block] = []
        spare: list[Block] = []
        holds = self._holds
        held = holds.counts
        for block in reversed(blocks):
            users = block.ref_count - 1
            block.ref_count = users
            if users:
                assert users > 0, f"{block} was released more often than it was acquired"
                if held and held.get(block.block_id) == users:
                    holds.only_held += holds.is_only_held(block)
            elif block.block_hash is None:
                spare.append(block)
            else:
                idle.append(block)
        self._unused.add(self._index.released(idle, spare))
        self._pool.give(spare)

    def pin(self, tenant: bytes, blocks: Sequence[Block], expires_at: float) -> int | None:
        """Pin a prefix that is in use: its blocks are not evicted before `expires_at`, whatever space is needed.

        `blocks` are the leading blocks of a block table, in order. Returns the number pinned: those before the first
        unshared (uncommitted or private) block. Returns None, with no effect, if over the tenant's or total budget.
        """
        chain: list[BlockHash] = []
        for block in blocks:
            assert block.ref_count, f"{block} is pinned but not in use"
            if block.block_hash is None:
                break
            chain.append(block.block_hash)
        # `blocks` may be copies of blocks that are only held.
        shared = [self._index.blocks[block_hash] for block_hash in chain]
        self._holds.only_held -= self._holds.count_only_held(shared)
        done = self.pins.pin(tenant, chain, expires_at)
        self._holds.only_held += self._holds.count_only_held(shared)
        return len(chain) if done else None

    def expire_pins(self, now: float) -> None:
        """End the pins that are due. Their unused blocks can then be evicted, and count as used just now."""
        self._unpin(self.pins.expire(now))

    def break_pin(self) -> bool:
        """End the pin that would expire first, to make room for a request. Return False if there are no pins."""
        freed = self.pins.break_soonest()
        if freed is None:
            return False
        self._unpin(freed)
        return True

    def _unpin(self, hashes: Sequence[BlockHash]) -> None:
        self._unused.unpin(hashes)
        self._holds.only_held += self._holds.count_only_held([self._index.blocks[each] for each in hashes])

    def reset(self) -> bool:
        """Clear the cache, with pins and holds. Return False, with no effect, while a running request uses a block."""
        if self.free_blocks + self.pinned_idle_blocks != self.total_blocks:
            return False
        self._holds.end_all()
        self.pins.clear()
        self._pool.give(self._unused.take_all())
        self._index.clear()
        if self._lower is not None:
            self._lower.cleared()
        if self.enabled and self._listener is not None:
            self._listener.cleared()
        return True

    def block_of(self, block_hash: BlockHash) -> Block | None:
        """A copy of the block with this hash, if it is cached."""
        return self._index.blocks.get(block_hash)

    def residents(self) -> Iterator[CachedBlock]:
        """Iterate over a copy of the distinct cached blocks, parents before their children."""
        return self._index.residents()

    def check(self) -> None:
        """Assert every invariant. O(blocks); for tests and diagnosis."""
        blocks = self._pool.blocks
        for part in (self._pool, self.pins, self._unused):
            part.check()
        self._index.check(blocks)
        self._holds.check(blocks)
        withheld = self._unused.withheld
        live = [block for block in blocks if block.ref_count and not self._holds.is_only_held(block)]
        accounted = len(live) + self.free_blocks + len(withheld)
        assert accounted == self.total_blocks, f"{accounted} blocks accounted for, of {self.total_blocks}"
        for block in blocks:
            assert block.block_hash is not None or not block.first, f"{block} starts a chain but has no hash"
        for block_hash, block in self._index.blocks.items():
            pinned_and_idle = block_hash in self.pins and not block.ref_count
            assert pinned_and_idle == (withheld.get(block_hash) is block), f"{block}: pinned, but not withheld"
        resident = sum(block_hash in self._index.blocks for block_hash in self.pins)
        assert resident == len(self.pins), f"{len(self.pins)} blocks pinned, {resident} of them resident"
