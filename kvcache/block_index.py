"""The resident blocks by hash: verified look-ups, copies of one hash, and blocks that must stay private.

Does not know which blocks are idle or pinned: the cache says which blocks were evicted or released, and learns which
ones a commit made redundant. Waiting requests that await a block hold it as soon as it is resident.

A cached block's parent hash identifies its true prefix even though hashes may collide, so verifying a hit takes one
comparison per block: its parent's hash and its own tokens. `commit` maintains this: if a block's hash already belongs
to another prefix, that block and all later ones of the request stay private.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from struct import Struct
from typing import Protocol

from .hashing import TOKEN_BYTES, BlockHash, content_digest
from .holds import Holds
from .partial_match import PartialHit, PartialMatcher
from .pool import Block, BlockId, BlockState


class LowerTier(Protocol):
    """Takes what leaves the pool. Called synchronously, in the cache's thread. Must not block or call the cache."""

    def evicted(self, blocks: Sequence[Block]) -> None:
        """These blocks, whose `content` is known, are about to lose their hashes, the last block of a chain first.

        Their KV stays as it is until the next step, or until the caller of the cache writes to them.
        """

    def cleared(self) -> None:
        """The cache was emptied."""


class CacheListener(Protocol):
    """Receives changes to the resident set synchronously, in the caller's thread. Must not block or call the cache."""

    def stored(
        self, parent: BlockHash | None, hashes: Sequence[BlockHash], tokens: bytes, salt: str, medium: str = "GPU"
    ) -> None:
        """Consecutive blocks of one chain became resident in a medium: GPU is the pool, CPU and DISK are the tiers.

        `parent` is the block before them, whatever its medium; None if they start the chain, which `salt` then
        distinguishes from other tenants' chains of the same tokens (otherwise it is empty).
        """

    def removed(self, hashes: Sequence[BlockHash], medium: str = "GPU") -> None:
        """The last copies of these blocks in a medium were evicted."""

    def cleared(self) -> None:
        """The cache was emptied, tiers included."""


@dataclass(slots=True, frozen=True)
class CachedBlock:
    block_hash: BlockHash
    parent: BlockHash | None  #: None for the first block of a chain
    tokens: bytes


@dataclass(slots=True)
class CacheStats:
    """Totals since the start."""

    query_tokens: int = 0  #: prompt tokens of acquired matches
    hit_tokens: int = 0  #: the part of `query_tokens` found in the cache
    partial_hit_tokens: int = 0  #: the part of `hit_tokens` copied from partially matching blocks
    host_hit_tokens: int = 0  #: the part of `hit_tokens` loaded from the host tier
    evicted_tokens: int = 0
    collisions: int = 0  #: look-ups and commits that met a hash belonging to another prefix


class BlockIndex:
    """Blocks by hash. Calls `displaced` for an idle block whose hash a block in use takes over, with that hash."""

    def __init__(
        self,
        block_size: int,
        listener: CacheListener | None,
        counters: CacheStats,
        holds: Holds,
        displaced: Callable[[BlockHash, Block], None],
    ) -> None:
        self._block_size = block_size
        self._listener = listener
        self._counters = counters
        self._holds = holds
        self._displaced = displaced
        self._block_bytes = block_size * TOKEN_BYTES
        self._split = Struct(f"{self._block_bytes}s").iter_unpack
        #: One copy of each resident hash, in the order in which they became resident: parents before children.
        self.blocks: dict[BlockHash, Block] = {}
        #: The resident blocks by their parent, for partial matches.
        self._matcher = PartialMatcher(self.blocks)
        #: Further copies of a hash, by block id. If a hash has an entry, all its copies are live.
        self.copies: dict[BlockHash, dict[BlockId, Block]] = {}
        #: Live blocks that are never shared, because their hash or an ancestor's belongs to another prefix.
        self.private: dict[BlockId, BlockHash] = {}
        #: Increases whenever blocks lose their hash, which makes earlier matches stale.
        self.version = 0

    def find(self, root: BlockHash, hashes: Sequence[BlockHash], tokens: bytes) -> tuple[tuple[Block, ...], bool]:
        """The longest resident prefix, and whether it ended at a hash that belongs to another prefix."""
        found: list[Block] = []
        append = found.append
        for block in map(self.blocks.get, hashes):
            if block is None:
                break
            append(block)
        if not found:
            return (), False
        verified = self._verified(root, hashes, tokens, found)
        return tuple(found[:verified]), verified < len(found)

    def find_partial(
        self, root: BlockHash, blocks: Sequence[Block], tokens: bytes, num_tokens: int
    ) -> PartialHit | None:
        """The block that shares the most leading tokens with the one after the matched `blocks`."""
        start = len(blocks) * self._block_size
        # The last token must be computed, and a whole block would have matched by its hash.
        end = min(num_tokens, start + self._block_size) - 1
        wanted = tokens[start * TOKEN_BYTES : end * TOKEN_BYTES]
        return self._matcher.match(blocks[-1] if blocks else root, wanted) if end > start else None

    def _verified(self, root: BlockHash, hashes: Sequence[BlockHash], tokens: bytes, found: list[Block]) -> int:
        """Count the leading blocks found by hash whose content is really this prefix."""
        count = len(found)
        if not found[0].first:
            return 0
        # Compare everything at once first: two comparisons in C instead of two in Python per block. A first block at a
        # later position (its root equals the preceding hash) leaves `parents` one short, so the comparison fails.
        parents = [block.parent for block in found if not block.first]
        held = b"".join([block.tokens for block in found])
        if found[0].parent == root and parents == hashes[: count - 1] and tokens.startswith(held):
            return count
        for position, (block, parent) in enumerate(zip(found, [root, *hashes[: count - 1]], strict=True)):
            start = position * self._block_bytes
            content = tokens[start : start + self._block_bytes]
            if (block.parent, block.first, block.tokens) != (parent, position == 0, content):
                return position
        return count

    def commit(
        self,
        blocks: Sequence[Block],
        start: int,
        parent: BlockHash,
        hashes: Sequence[BlockHash],
        tokens: bytes,
        salt: str,
    ) -> None:
        """Enter consecutive blocks of a chain, and tell the listener; see `PrefixCache.commit`."""
        count = len(blocks)
        assert len(hashes) == count, f"{count} blocks with {len(hashes)} hashes"
        assert len(tokens) == count * self._block_bytes, f"{count} blocks with {len(tokens)} bytes of tokens"
        if self.private:
            # If `parent` is the hash of a private block, two prefixes have that hash: share no block that follows it.
            ends = start and parent in self.private.values()
            private = (place for place, block in enumerate(blocks) if block.block_id in self.private)
            public = 0 if ends else next(private, len(blocks))
            self._keep_private(blocks[public:], hashes[public:])
            if not public:
                return
            blocks, hashes, tokens = blocks[:public], hashes[:public], tokens[: public * self._block_bytes]
        assert not start or parent in self.blocks, f"block {start} of a chain committed before block {start - 1}"
        if start == 0:
            blocks[0].first, blocks[0].salt = True, salt
        shared, copies = self._register(blocks, parent, hashes, tokens)
        self._announce(blocks[:shared], copies, start, parent, hashes, tokens, salt)

    def _register(
        self,
        blocks: Sequence[Block],
        parent: BlockHash,
        hashes: Sequence[BlockHash],
        tokens: bytes,
    ) -> tuple[int, list[int]]:
        """Enter blocks by hash. Return the number now shared, and the positions that already had a copy."""
        setdefault, awaited = self.blocks.setdefault, self._holds.awaited
        copies: list[int] = []
        previous = parent
        rows = zip(blocks, hashes, [*hashes[1:], None], self._split(tokens), strict=True)
        for place, (block, block_hash, follower, (content,)) in enumerate(rows):
            if setdefault(block_hash, block) is block and block.block_hash is None:
                block.block_hash = block_hash
                block.parent = previous
                block.tokens = content
                block.content = None
                block.children = follower
                if block_hash in awaited:
                    self._holds.extend(block, block_hash)
            elif self._register_copy(block, block_hash, previous, content):
                copies.append(place)
            else:
                self._keep_private(blocks[place:], hashes[place:])
                return place, copies
            previous = block_hash
        return len(blocks), copies

    def _register_copy(
        self,
        block: Block,
        block_hash: BlockHash,
        parent: BlockHash,
        content: bytes,
    ) -> bool:
        """Enter a block whose hash is already resident. Return False if the hash belongs to another prefix."""
        if block.block_hash is not None:
            assert block.block_hash == block_hash, f"{block} committed again as {block_hash.hex()}"
            return True
        holder = self.blocks[block_hash]
        if (holder.parent, holder.tokens, holder.first) != (parent, content, block.first):
            self._counters.collisions += 1
            return False
        if holder.ref_count:
            self.copies.setdefault(block_hash, {})[block.block_id] = block
        else:
            self._matcher.replace(holder, block)
            self._forget(holder)
            self._displaced(block_hash, holder)
            self.blocks[block_hash] = block
        block.block_hash = block_hash
        block.parent = parent
        block.tokens = content
        block.content = None
        return True

    def _keep_private(self, blocks: Sequence[Block], hashes: Sequence[BlockHash]) -> None:
        for block, block_hash in zip(blocks, hashes, strict=True):
            if block.block_hash is None:
                block.first = False
                self.private[block.block_id] = block_hash

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
                    self._matcher.add_first(parent, blocks[0])
                else:
                    self._matcher.add(self.blocks[before], blocks[begin])
                if self._listener is not None:
                    content = tokens[begin * self._block_bytes : end * self._block_bytes]
                    self._listener.stored(before, hashes[begin:end], content, "" if before else salt)
            begin = end + 1

    def know_content(self, blocks: Sequence[Block]) -> None:
        """Set the `content` of these cached blocks, and of those before them."""
        for last in blocks:
            path: list[Block] = []
            block, before = last, last.content
            while before is None:
                path.append(block)
                assert block.parent is not None, f"{block} is cached but has no parent"
                if block.first:
                    before = block.parent
                else:
                    block = self.blocks[block.parent]
                    before = block.content
            for block in reversed(path):
                before = block.content = content_digest(before, block.tokens)

    def remove(self, blocks: Sequence[Block]) -> None:
        """These blocks are evicted: they lose their hash."""
        gone: list[BlockHash] = []
        index, append = self.blocks, gone.append
        for block in blocks:
            block_hash = block.block_hash
            assert block_hash is not None, f"{block} was evicted but has no hash"
            if block.siblings is not None:
                self._matcher.leave(block)
            del index[block_hash]
            append(block_hash)
            block.block_hash = None
            block.first = False
        self.version += 1
        if self._listener is not None:
            self._listener.removed(gone)

    def released(self, shared: list[Block], spare: list[Block]) -> list[Block]:
        """Note that no request uses these blocks any more: some with a hash, and `spare` ones without.

        Returns the blocks that are their hash's last copy, and adds the redundant others to `spare`.
        """
        if self.copies:
            shared = self._without_copies(shared, spare)
        if self.private:
            for block in spare:
                self.private.pop(block.block_id, None)
        return shared

    def _without_copies(self, shared: list[Block], spare: list[Block]) -> list[Block]:
        kept: list[Block] = []
        for block in shared:
            block_hash = block.block_hash
            assert block_hash is not None, f"{block} is idle but has no hash"
            others = self.copies.get(block_hash)
            if others is None:
                kept.append(block)
                continue
            if self.blocks[block_hash] is block:
                successor = self.blocks[block_hash] = others.popitem()[1]
                self._matcher.replace(block, successor)
            else:
                del others[block.block_id]
            if not others:
                del self.copies[block_hash]
            self._forget(block)
            spare.append(block)
        return kept

    def _forget(self, block: Block) -> None:
        block.block_hash = None
        block.first = False
        block.siblings = None
        self.version += 1

    def clear(self) -> None:
        """Forget all blocks. None may be in use."""
        for block in self.blocks.values():
            self._forget(block)
        self.blocks.clear()
        self._matcher.clear()

    def residents(self) -> Iterator[CachedBlock]:
        """Iterate over a copy of the distinct cached blocks, parents before their children."""
        return iter(
            [
                CachedBlock(block_hash, None if block.first else block.parent, block.tokens)
                for block_hash, block in self.blocks.items()
            ]
        )

    def check(self, pool: Sequence[Block]) -> None:
        """Assert that each block of the pool with a hash is found, each copy is in use, and parents come first."""
        self._matcher.check()
        seen: set[BlockHash | None] = set()
        for block_hash, block in self.blocks.items():
            assert block.block_hash == block_hash, f"{block} is found under {block_hash.hex()}"
            assert block.first or block.parent in seen, f"{block} is resident before or without its parent"
            seen.add(block_hash)
        for block_hash, others in self.copies.items():
            copies = [self.blocks[block_hash], *others.values()]
            assert others, f"{block_hash.hex()} has an empty set of copies"
            assert len({copy.block_id for copy in copies}) == len(copies), f"a copy of {block_hash.hex()} occurs twice"
            for copy in copies:
                assert copy.state is BlockState.LIVE, f"{copy} is a copy that no request uses"
                assert copy.block_hash == block_hash, f"{copy} is a copy of {block_hash.hex()}"
        cached = sum(block.block_hash is not None for block in pool)
        indexed = len(self.blocks) + sum(map(len, self.copies.values()))
        assert cached == indexed, f"{cached} blocks have a hash, {indexed} can be found"
        for block_id in self.private:
            assert pool[block_id].ref_count, f"{pool[block_id]} is private but not in use"
            assert pool[block_id].block_hash is None, f"{pool[block_id]} is private and shared"
