"""Records of the KV blocks, their states, and the pool of free blocks.

Pure bookkeeping that does not depend on the meaning of hashes, on requests or on the KV itself. All records are created
at the start; no operation creates one later.

The cache makes these transitions and no others; tests read this table.

| from | event | to | when |
|---|---|---|---|
| free | allocate | live | a request takes it |
| live | commit | live | its KV is computed: it gets its hash and can be hit |
| live | share | live | another request's prompt hits it |
| live | release | live | one of several users releases it |
| live | release | cached and free | the last user releases a block with a hash |
| live | release | free | the last user releases it; no hash, or another copy is live |
| cached and free | touch | live | a prompt hits it |
| cached and free | evict | live | a request takes it because no free block is left |
| cached and free | supersede | free | a request commits another copy of it |
| cached and free | reset | free | the cache is emptied |

Block 0 is padding: no request gets it, and `total_blocks` does not count it.
"""

from collections.abc import Iterator, Sequence
from enum import Enum
from typing import NewType

from .errors import PoolTooSmall
from .hashing import BlockHash

BlockId = NewType("BlockId", int)

#: Hashes of the blocks that directly follow one prefix, as keys, in the order in which they became resident.
Siblings = dict[BlockHash, None]


class BlockState(Enum):
    """State of a block; the transitions are above."""

    FREE = "free"  #: holds no reusable KV; allocated first
    LIVE = "live"  #: in at least one request's block table, or held for a waiting request
    CACHED_FREE = "cached and free"  #: unused, but its KV can be hit; evicted when space is needed


class Block:
    """One block of KV memory."""

    __slots__ = (
        "block_hash",
        "block_id",
        "children",
        "content",
        "first",
        "newer",
        "older",
        "parent",
        "ref_count",
        "salt",
        "siblings",
        "tokens",
    )

    def __init__(self, block_id: BlockId) -> None:
        self.block_id = block_id
        self.ref_count = 0
        #: Set exactly while the block is cached; `parent` and `tokens` are valid only then.
        self.block_hash: BlockHash | None = None
        #: Hash of the block before this one, or the root for the first block of a chain.
        self.parent: BlockHash | None = None
        #: Token ids of this block, uint32 little-endian.
        self.tokens = b""
        #: True only while cached, and only for the first block of a chain.
        self.first = False
        #: Names the first block of a chain to listeners; valid only while `first`.
        self.salt = ""
        #: `content_digest` of the prefix that ends with it; None until it is asked for.
        self.content: bytes | None = None
        #: The blocks that follow this one, maintained by `PartialMatcher`; valid only while this copy is in the index.
        self.children: BlockHash | Siblings | None = None
        #: The dictionary that contains this block's hash, if any.
        self.siblings: Siblings | None = None
        #: Neighbours in the `BlockList` that holds this block; meaningless otherwise.
        self.older = self
        self.newer = self

    @property
    def state(self) -> BlockState:
        if self.ref_count:
            return BlockState.LIVE
        return BlockState.FREE if self.block_hash is None else BlockState.CACHED_FREE

    def __repr__(self) -> str:
        name = self.block_hash.hex() if self.block_hash is not None else None
        return f"Block({self.block_id}, {self.state.value}, ref_count={self.ref_count}, hash={name})"


class BlockList:
    """Intrusive doubly linked list of blocks, oldest first: O(1) at both ends and in the middle.

    A ring around one sentinel, so that every block has two neighbours. The caller ensures that a block is in at most
    one list.
    """

    __slots__ = ("_sentinel", "_size")

    def __init__(self) -> None:
        self._sentinel = Block(BlockId(0))
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Block]:
        block = self._sentinel.newer
        while block is not self._sentinel:
            yield block
            block = block.newer

    def extend(self, blocks: Sequence[Block]) -> None:
        """Append blocks at the newest end; the last of them becomes the newest."""
        last = self._sentinel.older
        for block in blocks:
            block.older = last
            last.newer = block
            last = block
        last.newer = self._sentinel
        self._sentinel.older = last
        self._size += len(blocks)

    def remove(self, blocks: Sequence[Block]) -> None:
        """Remove blocks from any position."""
        for block in blocks:
            older, newer = block.older, block.newer
            older.newer = newer
            newer.older = older
        self._size -= len(blocks)

    def take_oldest(self, count: int) -> list[Block]:
        """Remove and return the `count` oldest blocks, oldest first. The list must hold that many."""
        assert count <= self._size, f"{count} blocks requested from a list of {self._size}"
        taken: list[Block] = []
        append = taken.append
        block = self._sentinel
        for _ in range(count):
            block = block.newer
            append(block)
        rest = block.newer
        rest.older = self._sentinel
        self._sentinel.newer = rest
        self._size -= count
        return taken

    def check(self) -> None:
        """Assert that both directions agree with each other and with the size."""
        previous, seen = self._sentinel, 0
        for block in self:
            assert block.older is previous, f"{block} does not point back to {previous}"
            previous, seen = block, seen + 1
        assert self._sentinel.older is previous, "the newest block is not the last one"
        assert seen == self._size, f"{seen} blocks in a list of size {self._size}"


class BlockPool:
    """All block records, and the stack of free blocks."""

    __slots__ = ("blocks", "free")

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise PoolTooSmall(f"{num_blocks} KV blocks: at least 2 are needed, because block 0 is reserved")
        #: Block 0 is the null block: the padding of block tables points to it, and it is never allocated.
        self.blocks = tuple(Block(BlockId(block_id)) for block_id in range(num_blocks))
        #: The stack of free blocks; changed only by `take` and `give`. A list suffices: no block is taken from the
        #: middle, and slices move many at once. Lowest ids on top.
        self.free = list(self.blocks[:0:-1])

    def __len__(self) -> int:
        return len(self.free)

    def take(self, count: int) -> list[Block]:
        rest = len(self.free) - count
        assert rest >= 0, f"{count} blocks requested, {len(self.free)} are free"
        taken = self.free[rest:]
        del self.free[rest:]
        taken.reverse()
        return taken

    def give(self, blocks: Sequence[Block]) -> None:
        self.free.extend(blocks)

    def check(self) -> None:
        """Assert that the stack holds only free blocks, each once, and that the null block is unused."""
        for block in self.free:
            assert block.state is BlockState.FREE, f"{block} is on the stack of free blocks"
        distinct = len({block.block_id for block in self.free})
        assert distinct == len(self.free), f"{len(self.free)} free blocks, only {distinct} distinct"
        null = self.blocks[0]
        assert null.state is BlockState.FREE, f"the null block is in use: {null}"
        assert null not in self.free, "the null block can be allocated"
