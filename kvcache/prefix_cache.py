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
* A cached block's parent hash identifies its true prefix even though hashes may collide, so verifying a hit takes one
  comparison per block: its parent's hash and its own tokens. `commit` maintains this: if a block's hash already
  belongs to another prefix, that block and all later ones of the request stay private.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from struct import Struct
from typing import Protocol

import msgspec

from .errors import StaleMatch
from .hashing import TOKEN_BYTES, BlockHash
from .partial_match import PartialHit, PartialMatcher
from .pins import PinBook, PinLimits
from .pool import Block, BlockId, BlockList, BlockPool, BlockState

#: Up to this share of all blocks, what is held for waiting requests is taken by no other prompt. More would leave the
#: prompts before them no memory. Simulated with agents whose conversations exceed the caches, mean TTFT: 73 s with 0,
#: 75 s with 1/16, 77 s with 1/8, 84 s with 1/4, 132 s with 1.
HELD_SHARE = 1 / 8


class CacheListener(Protocol):
    """Receives changes to the resident set synchronously, in the caller's thread. Must not block or call the cache."""

    def stored(self, parent: BlockHash | None, hashes: Sequence[BlockHash], tokens: bytes, salt: str) -> None:
        """Consecutive blocks of one chain became resident. `parent` is None if they start the chain, which `salt` then
        distinguishes from other tenants' chains of the same tokens (otherwise it is empty).
        """

    def removed(self, hashes: Sequence[BlockHash]) -> None:
        """The last copies of these blocks were evicted."""

    def cleared(self) -> None:
        """The cache was emptied."""


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


@dataclass(slots=True, frozen=True)
class CachedBlock:
    block_hash: BlockHash
    parent: BlockHash | None  #: None for the first block of a chain
    tokens: bytes


#: Where a waiting request stands now; the one with the highest value starts last.
Turn = Callable[[], tuple[float, ...]]


@dataclass(slots=True)
class _Hold:
    """The blocks held for a waiting request, and its place in the queue."""

    blocks: list[Block]
    turn: Turn
    hashes: Sequence[BlockHash]  #: of the blocks that it holds and will hold; empty: it holds no more


@dataclass(slots=True)
class CacheStats:
    """Totals since the start."""

    query_tokens: int = 0  #: prompt tokens of acquired matches
    hit_tokens: int = 0  #: the part of `query_tokens` found in the cache
    partial_hit_tokens: int = 0  #: the part of `hit_tokens` copied from partially matching blocks
    evicted_tokens: int = 0
    collisions: int = 0  #: look-ups and commits that met a hash belonging to another prefix


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
    ) -> None:
        self.block_size = block_size
        self.enabled = enabled
        self.partial_block_reuse = partial_block_reuse
        self.counters = CacheStats()
        self._pool = BlockPool(num_blocks)
        #: Number of blocks available to requests: all but the null block.
        self.total_blocks = num_blocks - 1
        #: Cached blocks that no request uses, in the order of eviction: the least recently used first, as in vLLM.
        self.idle = BlockList()
        self._listener = listener
        self._stride = block_size * TOKEN_BYTES
        self._split = Struct(f"{self._stride}s").iter_unpack
        #: One copy of each resident hash, in the order in which they became resident: parents before children.
        self._index: dict[BlockHash, Block] = {}
        #: The resident blocks by their parent, for partial matches.
        self._partial_matcher = PartialMatcher(self._index)
        #: Further copies of a hash, by block id. If a hash has an entry, all its copies are live.
        self._copies: dict[BlockHash, dict[BlockId, Block]] = {}
        #: Live blocks that are never shared, because their hash or an ancestor's belongs to another prefix.
        self._private: dict[BlockId, BlockHash] = {}
        self._most_held = held_share * self.total_blocks
        limits = pin_limits or PinLimits()
        self.pins = PinBook(int(limits.tenant_share * self.total_blocks), int(limits.total_share * self.total_blocks))
        #: Unused pinned blocks, withheld from eviction.
        self._withheld: dict[BlockHash, Block] = {}
        #: The prefix held for each waiting request; empty if it waits for its first block.
        self._holds: dict[Hashable, _Hold] = {}
        #: The requests whose held prefix ends before this block.
        self._awaited: dict[BlockHash, list[Hashable]] = {}
        #: By block id, for how many waiting requests a block is held; they count in its `ref_count`. Never zero.
        self._held: dict[BlockId, int] = {}
        #: Number of blocks that only waiting requests use and that are not pinned.
        self._only_held = 0
        #: Increases whenever blocks lose their hash, which makes earlier matches stale.
        self._version = 0

    @property
    def blocks(self) -> Sequence[Block]:
        return self._pool.blocks

    @property
    def free_blocks(self) -> int:
        """Number of blocks that can be allocated now: free ones, and cached ones that are neither pinned nor in use."""
        return len(self._pool.free) + len(self.idle) + self._only_held

    @property
    def unheld_free_blocks(self) -> int:
        """Number of blocks in `free_blocks` that are held for no waiting request."""
        return len(self._pool.free) + len(self.idle)

    @property
    def blocks_for_prompts(self) -> int:
        """Number of blocks in `free_blocks` that a prompt should take while others run."""
        return self.free_blocks if self._only_held > self._most_held else self.unheld_free_blocks

    @property
    def cached_free_blocks(self) -> int:
        """Number of blocks in `free_blocks` that still hold cached KV."""
        return len(self.idle) + self._only_held

    def next_evictions(self, count: int) -> list[BlockHash]:
        """Hashes of at most `count` blocks, in the order in which they would be evicted once no block is free.

        Held ones, which come after all others, are left out.
        """
        hashes = (block.block_hash for block in islice(self.idle, count))
        return [block_hash for block_hash in hashes if block_hash is not None]

    @property
    def pinned_idle_blocks(self) -> int:
        """Number of pinned blocks that no running request uses; they are not free. O(pins): for tests and diagnosis."""
        pinned = map(self._index.__getitem__, self.pins)
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
        found: list[Block] = []
        append = found.append
        for block in map(self._index.get, hashes[:limit]):
            if block is None:
                break
            append(block)
        blocks = tuple(found[: self._verified(root, hashes, tokens, found)])
        partial = self._partial_match(root, blocks, tokens, num_tokens) if self.partial_block_reuse else None
        return PrefixMatch(
            blocks,
            len(blocks) * self.block_size + (partial.tokens if partial else 0),
            num_tokens,
            int(len(blocks) < len(found)),
            self._version,
            partial,
        )

    def can_acquire(self, match: PrefixMatch) -> bool:
        """Whether the blocks of a match are still cached. There may be a longer match if blocks were stored since."""
        return match.version == self._version

    def _partial_match(
        self, root: BlockHash, blocks: Sequence[Block], tokens: bytes, num_tokens: int
    ) -> PartialHit | None:
        start = len(blocks) * self.block_size
        # The last token must be computed, and a whole block would have matched by its hash.
        end = min(num_tokens, start + self.block_size) - 1
        wanted = tokens[start * TOKEN_BYTES : end * TOKEN_BYTES]
        return self._partial_matcher.match(blocks[-1] if blocks else root, wanted) if end > start else None

    def _verified(self, root: BlockHash, hashes: Sequence[BlockHash], tokens: bytes, found: list[Block]) -> int:
        """Count the leading blocks found by hash whose content is really this prefix."""
        count = len(found)
        if not count or not found[0].first:
            return 0
        # Compare everything at once first: two comparisons in C instead of two in Python per block. A first block at a
        # later position (its root equals the preceding hash) leaves `parents` one short, so the comparison fails.
        parents = [block.parent for block in found if not block.first]
        held = b"".join([block.tokens for block in found])
        if found[0].parent == root and parents == hashes[: count - 1] and tokens.startswith(held):
            return count
        for position, (block, parent) in enumerate(zip(found, [root, *hashes[: count - 1]], strict=True)):
            start = position * self._stride
            content = tokens[start : start + self._stride]
            if (block.parent, block.first, block.tokens) != (parent, position == 0, content):
                return position
        return count

    def acquire(self, match: PrefixMatch, new_blocks: int, leave: int | None = None) -> list[Block] | None:
        """Return a request's block table: the matched blocks, then `new_blocks` more. None, with no effect, if too few.

        `leave`: it must leave so many of `blocks_for_prompts`. None: it may take all that is free.

        With `match.partial`, the caller must copy the KV of its tokens into the first new block before it writes to any
        block handed out since the look-up: the source block is not held and may even be among the new blocks.
        Raises StaleMatch when any block lost its hash since the look-up.
        """
        if (match.blocks or match.partial) and match.version != self._version:
            raise StaleMatch("the cache changed between match and acquire: match again right before acquire")
        assert new_blocks or not match.partial, "a partial hit needs a block to be copied into"
        pinned, idle = self._idle_of(match.blocks)
        held = self._count_only_held(match.blocks)
        room = self.free_blocks - held
        if leave is not None:
            room = min(room, self.blocks_for_prompts) - leave
        if new_blocks > room - len(idle):
            return None
        self._only_held -= held
        # Take the matched blocks out of the order before evicting, so that a request never evicts its own prefix.
        self._use(pinned, idle)
        for block in match.blocks:
            block.ref_count += 1
        if match.query_tokens:
            counters = self.counters
            counters.query_tokens += match.query_tokens
            counters.hit_tokens += match.tokens
            counters.partial_hit_tokens += match.partial.tokens if match.partial else 0
            counters.collisions += match.collisions
        return [*match.blocks, *self._take(new_blocks)]

    def _idle_of(self, blocks: Sequence[Block]) -> tuple[list[Block], list[Block]]:
        """The idle ones of a prefix: first those that are withheld because they are pinned, then the others."""
        idle = [block for block in blocks if not block.ref_count]
        if not self._withheld:
            return [], idle
        # Pins are prefix-closed, so the withheld blocks come first.
        evictable = (place for place, block in enumerate(idle) if block.block_hash not in self._withheld)
        kept = next(evictable, len(idle))
        return idle[:kept], idle[kept:]

    def _use(self, pinned: Sequence[Block], idle: Sequence[Block]) -> None:
        for block in pinned:
            assert block.block_hash is not None, f"{block} is withheld but has no hash"
            del self._withheld[block.block_hash]
        if idle:
            self.idle.remove(idle)

    def hold(self, request: Hashable, match: PrefixMatch, turn: Turn = tuple, hashes: Sequence[BlockHash] = ()) -> None:
        """Hold the whole blocks of a match for a request that waits, until `unhold`: others are evicted first.

        `hashes`: those of the blocks that it may use. It also holds each of them that becomes resident after these.

        Held blocks count as free. When they are needed, the request with the highest `turn`, which starts last, loses
        the last blocks of its prefix; among equals, the one held last.
        """
        assert request not in self._holds, f"a prefix is held for {request} already"
        if not match.blocks and not hashes:
            return
        assert not match.blocks or match.version == self._version, "the cache changed between match and hold"
        pinned, idle = self._idle_of(match.blocks)
        self._use(pinned, idle)
        self._only_held += len(idle)
        for block in match.blocks:
            block.ref_count += 1
            self._held[block.block_id] = self._held.get(block.block_id, 0) + 1
        self._holds[request] = hold = _Hold(list(match.blocks), turn, hashes)
        self._await_next(request, hold)

    def _await_next(self, request: Hashable, hold: _Hold) -> None:
        if len(hold.blocks) < len(hold.hashes):
            self._awaited.setdefault(hold.hashes[len(hold.blocks)], []).append(request)

    def _await_no_more(self, request: Hashable, hold: _Hold) -> None:
        if len(hold.blocks) < len(hold.hashes):
            wanted = hold.hashes[len(hold.blocks)]
            self._awaited[wanted].remove(request)
            if not self._awaited[wanted]:
                del self._awaited[wanted]
        hold.hashes = ()

    def _extend_holds(self, block: Block, block_hash: BlockHash) -> None:
        """Hold a block that has just become resident for the requests that wait for it."""
        for request in self._awaited.pop(block_hash):
            hold = self._holds[request]
            if hold.blocks and block.parent != hold.blocks[-1].block_hash:  # the hash of another prefix
                hold.hashes = ()
                continue
            hold.blocks.append(block)
            block.ref_count += 1
            self._held[block.block_id] = self._held.get(block.block_id, 0) + 1
            self._await_next(request, hold)

    def holds(self, block: Block) -> int:
        """For how many waiting requests the block is held."""
        return self._held.get(block.block_id, 0)

    def unhold(self, request: Hashable) -> None:
        """The request no longer waits. If it starts, call this after `acquire`."""
        if (hold := self._holds.pop(request, None)) is not None:
            self._await_no_more(request, hold)
            self._end_hold(hold.blocks)

    def _end_hold(self, blocks: Sequence[Block]) -> None:
        self._only_held -= self._count_only_held(blocks)
        for block in blocks:
            if (holds := self._held.pop(block.block_id)) > 1:
                self._held[block.block_id] = holds - 1
        self.release(blocks)

    def _shorten_holds(self, count: int) -> None:
        """Make `count` blocks free or idle that only waiting requests use."""
        skips = True
        while count > len(self._pool) + len(self.idle):
            shortened = False
            for request, hold in sorted(self._holds.items(), key=lambda item: item[1].turn())[::-1]:
                missing = count - len(self._pool) - len(self.idle)
                if missing <= 0:
                    return
                # Whoever uses a prefix's last block uses all of it, except for copies: then no block would become free.
                if not hold.blocks or (skips and not self._is_only_held(hold.blocks[-1])):
                    continue
                self._await_no_more(request, hold)
                hold.blocks, ended, shortened = hold.blocks[:-missing], hold.blocks[-missing:], True
                if not hold.blocks:
                    del self._holds[request]
                self._end_hold(ended)
            skips = shortened

    def _count_only_held(self, blocks: Sequence[Block]) -> int:
        held, pins = self._held, self.pins
        if not held:
            return 0
        found = [block for block in blocks if held.get(block.block_id) == block.ref_count]
        return len(found) if not len(pins) else sum(map(self._is_only_held, found))

    def _is_only_held(self, block: Block) -> bool:
        if not 0 < self.holds(block) == block.ref_count:
            return False
        return block.block_hash is None or block.block_hash not in self.pins

    def allocate(self, count: int) -> list[Block] | None:
        """Return `count` more blocks for a running request, or None, with no effect, if fewer are available."""
        if count > self.free_blocks:
            return None
        return self._take(count)

    def _take(self, count: int) -> list[Block]:
        if self._only_held:
            self._shorten_holds(count)
        from_pool = min(count, len(self._pool.free))
        taken = self._pool.take(from_pool)
        if from_pool < count:
            taken += self._evict(count - from_pool)
        for block in taken:
            block.ref_count = 1
        return taken

    def _evict(self, count: int) -> list[Block]:
        evicted = self.idle.take_oldest(count)
        gone: list[BlockHash] = []
        index, append = self._index, gone.append
        for block in evicted:
            block_hash = block.block_hash
            assert block_hash is not None, f"{block} was evicted but has no hash"
            if block.siblings is not None:
                self._partial_matcher.leave(block)
            del index[block_hash]
            append(block_hash)
            block.block_hash = None
            block.first = False
        self._version += 1
        self.counters.evicted_tokens += count * self.block_size
        if self._listener is not None:
            self._listener.removed(gone)
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
        count = len(blocks)
        assert len(hashes) == count, f"{count} blocks with {len(hashes)} hashes"
        assert len(tokens) == count * self._stride, f"{count} blocks with {len(tokens)} bytes of tokens"
        if self._private:
            # If `parent` is the hash of a private block, two prefixes have that hash: share no block that follows it.
            ends = start and parent in self._private.values()
            private = (place for place, block in enumerate(blocks) if block.block_id in self._private)
            public = 0 if ends else next(private, len(blocks))
            self._keep_private(blocks[public:], hashes[public:])
            if not public:
                return
            blocks, hashes, tokens = blocks[:public], hashes[:public], tokens[: public * self._stride]
        assert not start or parent in self._index, f"block {start} of a chain committed before block {start - 1}"
        shared, copies = self._register(blocks, start, parent, hashes, tokens)
        self._announce(blocks[:shared], copies, start, parent, hashes, tokens, salt)

    def _register(
        self, blocks: Sequence[Block], start: int, parent: BlockHash, hashes: Sequence[BlockHash], tokens: bytes
    ) -> tuple[int, list[int]]:
        """Enter blocks into the index. Return the number now shared, and the positions that already had a copy."""
        setdefault = self._index.setdefault
        copies: list[int] = []
        previous = parent
        if start == 0:
            blocks[0].first = True
        rows = zip(blocks, hashes, [*hashes[1:], None], self._split(tokens), strict=True)
        for place, (block, block_hash, follower, (content,)) in enumerate(rows):
            if setdefault(block_hash, block) is block and block.block_hash is None:
                block.block_hash = block_hash
                block.parent = previous
                block.tokens = content
                block.children = follower
                if block_hash in self._awaited:
                    self._extend_holds(block, block_hash)
            elif self._register_copy(block, block_hash, previous, content):
                copies.append(place)
            else:
                self._keep_private(blocks[place:], hashes[place:])
                return place, copies
            previous = block_hash
        return len(blocks), copies

    def _register_copy(self, block: Block, block_hash: BlockHash, parent: BlockHash, content: bytes) -> bool:
        """Enter a block whose hash is already resident. Return False if the hash belongs to another prefix."""
        if block.block_hash is not None:
            assert block.block_hash == block_hash, f"{block} committed again as {block_hash.hex()}"
            return True
        holder = self._index[block_hash]
        if (holder.parent, holder.tokens, holder.first) != (parent, content, block.first):
            self.counters.collisions += 1
            return False
        if holder.ref_count:
            self._copies.setdefault(block_hash, {})[block.block_id] = block
        else:
            if self._withheld.pop(block_hash, None) is None:
                self.idle.remove((holder,))
            self._partial_matcher.replace(holder, block)
            self._forget(holder)
            self._pool.give((holder,))
            self._index[block_hash] = block
        block.block_hash = block_hash
        block.parent = parent
        block.tokens = content
        return True

    def _keep_private(self, blocks: Sequence[Block], hashes: Sequence[BlockHash]) -> None:
        for block, block_hash in zip(blocks, hashes, strict=True):
            if block.block_hash is None:
                block.first = False
                self._private[block.block_id] = block_hash

    def _forget(self, block: Block) -> None:
        block.block_hash = None
        block.first = False
        block.siblings = None
        self._version += 1

    def _announce(
        self,
        blocks: Sequence[Block],
        copies: list[int],
        start: int,
        parent: BlockHash,
        hashes: Sequence[BlockHash],
        tokens: bytes,
        salt: str,
    ) -> None:
        """Report each run of newly resident blocks. Positions in `copies` were reported when their first copy came."""
        begin = 0
        for end in chain(copies, (len(blocks),)):
            if begin < end:
                before = hashes[begin - 1] if begin else (parent if start else None)
                if before is None:
                    self._partial_matcher.add_first(parent, blocks[0])
                else:
                    self._partial_matcher.add(self._index[before], blocks[begin])
                if self._listener is not None:
                    content = tokens[begin * self._stride : end * self._stride]
                    self._listener.stored(before, hashes[begin:end], content, "" if before else salt)
            begin = end + 1

    def release(self, blocks: Sequence[Block]) -> None:
        """Release a request's block table (given in order). The tail becomes idle first, so that roots live longest."""
        idle: list[Block] = []
        spare: list[Block] = []
        held = self._held
        for block in reversed(blocks):
            users = block.ref_count - 1
            block.ref_count = users
            if users:
                assert users > 0, f"{block} was released more often than it was acquired"
                if held and held.get(block.block_id) == users:
                    self._only_held += self._is_only_held(block)
            elif block.block_hash is None:
                spare.append(block)
            else:
                idle.append(block)
        if self._copies:
            idle = self._without_copies(idle, spare)
        if self._private:
            for block in spare:
                self._private.pop(block.block_id, None)
        if len(self.pins):
            idle = self._without_pinned(idle)
        self.idle.extend(idle)
        self._pool.give(spare)

    def _without_copies(self, idle: list[Block], spare: list[Block]) -> list[Block]:
        """Return the blocks of `idle` that are their hash's last copy; add the redundant others to `spare`."""
        kept: list[Block] = []
        for block in idle:
            block_hash = block.block_hash
            assert block_hash is not None, f"{block} is idle but has no hash"
            others = self._copies.get(block_hash)
            if others is None:
                kept.append(block)
                continue
            if self._index[block_hash] is block:
                successor = self._index[block_hash] = others.popitem()[1]
                self._partial_matcher.replace(block, successor)
            else:
                del others[block.block_id]
            if not others:
                del self._copies[block_hash]
            self._forget(block)
            spare.append(block)
        return kept

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
        shared = [self._index[block_hash] for block_hash in chain]
        self._only_held -= self._count_only_held(shared)
        done = self.pins.pin(tenant, chain, expires_at)
        self._only_held += self._count_only_held(shared)
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
        freed = [self._withheld.pop(block_hash, None) for block_hash in hashes]
        self.idle.extend([block for block in freed if block is not None])
        if self._held:
            self._only_held += self._count_only_held([self._index[block_hash] for block_hash in hashes])

    def _without_pinned(self, idle: list[Block]) -> list[Block]:
        """Return the blocks of `idle` that are not pinned; withhold the others from eviction."""
        others: list[Block] = []
        for block in idle:
            block_hash = block.block_hash
            if block_hash is not None and block_hash in self.pins:
                self._withheld[block_hash] = block
            else:
                others.append(block)
        return others

    def reset(self) -> bool:
        """Clear the cache, with pins and holds. Return False, with no effect, while a running request uses a block."""
        if self.free_blocks + self.pinned_idle_blocks != self.total_blocks:
            return False
        for request in list(self._holds):
            self.unhold(request)
        self.pins.clear()
        idle = [*self.idle.take_oldest(len(self.idle)), *self._withheld.values()]
        self._withheld.clear()
        for block in idle:
            self._forget(block)
        self._pool.give(idle)
        self._index.clear()
        self._partial_matcher.clear()
        if self.enabled and self._listener is not None:
            self._listener.cleared()
        return True

    def residents(self) -> Iterator[CachedBlock]:
        """Iterate over a copy of the distinct cached blocks, parents before their children."""
        return iter(
            [
                CachedBlock(block_hash, None if block.first else block.parent, block.tokens)
                for block_hash, block in self._index.items()
            ]
        )

    def check(self) -> None:
        """Assert every invariant. O(blocks); for tests and diagnosis."""
        self._pool.check()
        self.idle.check()
        self.pins.check()
        self._partial_matcher.check()
        self._check_copies()
        self._check_prefixes()
        idle = list(self.idle)
        assert len({block.block_id for block in idle}) == len(idle), "a block is idle twice"
        for block in idle:
            assert block.state is BlockState.CACHED_FREE, f"{block} is offered for eviction but not idle"
        assert all(self.holds(block) <= block.ref_count for block in self._pool.blocks), "wrong reference counts"
        held = Counter(block.block_id for hold in self._holds.values() for block in hold.blocks)
        assert held == self._held, "wrong holds"
        growing = [(each, hold) for each, hold in self._holds.items() if len(hold.blocks) < len(hold.hashes)]
        awaited = {each for requests in self._awaited.values() for each in requests}
        assert awaited == {each for each, _ in growing}, "a hold that grows awaits nothing, or another awaits something"
        for each, hold in growing:
            assert each in self._awaited[hold.hashes[len(hold.blocks)]], f"{each} awaits another block than its next"
        only_held = sum(map(self._is_only_held, self._pool.blocks))
        assert only_held == self._only_held, f"{self._only_held} of {only_held} blocks counted as only held"
        live = [block for block in self._pool.blocks if block.ref_count and not self._is_only_held(block)]
        accounted = len(live) + self.free_blocks + len(self._withheld)
        assert accounted == self.total_blocks, f"{accounted} blocks accounted for, of {self.total_blocks}"
        for block in self._pool.blocks:
            assert block.block_hash is not None or not block.first, f"{block} starts a chain but has no hash"
        for block_hash, block in self._index.items():
            pinned_and_idle = block_hash in self.pins and not block.ref_count
            assert pinned_and_idle == (self._withheld.get(block_hash) is block), f"{block}: pinned, but not withheld"
        assert len(self._withheld) <= len(self.pins), f"{len(self._withheld)} blocks withheld, {len(self.pins)} pinned"
        resident = sum(block_hash in self._index for block_hash in self.pins)
        assert resident == len(self.pins), f"{len(self.pins)} blocks pinned, {resident} of them resident"

    def _check_copies(self) -> None:
        for block_hash, block in self._index.items():
            assert block.block_hash == block_hash, f"{block} is found under {block_hash.hex()}"
        for block_hash, others in self._copies.items():
            copies = [self._index[block_hash], *others.values()]
            assert others, f"{block_hash.hex()} has an empty set of copies"
            assert len({copy.block_id for copy in copies}) == len(copies), f"a copy of {block_hash.hex()} occurs twice"
            for copy in copies:
                assert copy.state is BlockState.LIVE, f"{copy} is a copy that no request uses"
                assert copy.block_hash == block_hash, f"{copy} is a copy of {block_hash.hex()}"
        cached = sum(block.block_hash is not None for block in self._pool.blocks)
        indexed = len(self._index) + sum(map(len, self._copies.values()))
        assert cached == indexed, f"{cached} blocks have a hash, {indexed} can be found"
        for block_id in self._private:
            block = self._pool.blocks[block_id]
            assert block.ref_count, f"{block} is private but not in use"
            assert block.block_hash is None, f"{block} is private and shared"

    def _check_prefixes(self) -> None:
        seen: set[BlockHash | None] = set()
        for block_hash, block in self._index.items():
            assert block.first or block.parent in seen, f"{block} is resident before or without its parent"
            seen.add(block_hash)
        gone: set[BlockHash | None] = set()
        for block in self.idle:
            assert block.first or block.parent not in gone, f"{block} would be evicted after its parent"
            gone.add(block.block_hash)
