"""Which blocks lie in host memory, in which slots. Pure bookkeeping: the caller moves the KV.

A block enters when the pool evicts it, and counts as there at once: the caller saves it before it loads anything. A
slot has a generation, which only grows, so that what a slot holds now is told from what it held before. The block
evicted longest ago gives way. What was loaded into the pool is there twice, so it gives way first, until the pool
evicts it again.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from .block_index import CacheListener
from .hashing import BlockHash
from .pool import Block

HOST = "CPU"


@dataclass(slots=True, frozen=True)
class HostBlock:
    """A block and its place in host memory."""

    block_hash: BlockHash
    parent: BlockHash  #: hash of the block before, or the root
    first: bool  #: whether it starts a chain
    tokens: bytes  #: uint32 little-endian
    content: bytes  #: digest of all tokens up to its end (`content_digest`)
    salt: str  #: of a chain's first block, else empty
    slot: int
    generation: int


class HostTier:
    """The blocks in host memory, by hash."""

    def __init__(self, slots: int, listener: CacheListener | None = None) -> None:
        assert slots > 0, f"a tier of {slots} blocks"
        self.slots = slots
        self.evicted = 0  #: blocks that gave way to others
        self._listener = listener
        #: The block that gives way first in front.
        self._held: OrderedDict[BlockHash, HostBlock] = OrderedDict()
        self._free = list(range(slots - 1, -1, -1))
        self._generation = 0

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, block_hash: BlockHash) -> bool:
        return block_hash in self._held

    def holds(self, block: HostBlock) -> bool:
        """Whether the block is still in its slot."""
        return self._held.get(block.block_hash) is block

    def missing(self, blocks: Sequence[Block]) -> list[Block]:
        """Those of these cached blocks that are not here. The others count as used."""
        missing = []
        for block in blocks:
            assert block.block_hash is not None, f"{block} has no hash"
            if block.block_hash in self._held:
                self._held.move_to_end(block.block_hash)
            else:
                missing.append(block)
        return missing

    def add(self, blocks: Sequence[Block]) -> list[HostBlock]:
        """Places for cached blocks that are not here, in the order in which they are to give way, and that order's last
        ones if not all fit. Others give way to them.
        """
        blocks = blocks[-self.slots :]
        self._evict(len(blocks) - len(self._free))
        placed: list[HostBlock] = []
        for block in blocks:
            assert block.block_hash is not None, f"{block} has no hash"
            assert block.parent is not None, f"{block} has a hash, but no parent"
            assert block.content is not None, f"{block} has a hash, but its content is not known"
            assert block.block_hash not in self._held, f"{block} is in the tier"
            self._generation += 1
            place = HostBlock(
                block.block_hash,
                block.parent,
                block.first,
                block.tokens,
                block.content,
                block.salt if block.first else "",
                self._free.pop(),
                self._generation,
            )
            self._held[block.block_hash] = place
            placed.append(place)
        self._announce(placed)
        return placed

    def run(self, hashes: Sequence[BlockHash]) -> list[HostBlock]:
        """The blocks with these hashes, up to the first that is not here.

        Hashes may collide: the caller must compare `content`, as the blocks before them need not be here.
        """
        found: list[HostBlock] = []
        for block in map(self._held.get, hashes):
            if block is None:
                break
            found.append(block)
        return found

    def keep(self, run: Sequence[HostBlock]) -> None:
        """A prompt will use this run: it gives way last, its first block after the others."""
        for block in reversed(run):
            self._held.move_to_end(block.block_hash)

    def loaded(self, run: Sequence[HostBlock]) -> None:
        """The pool holds this run, too: it gives way first, its last block before the others."""
        for block in run:
            self._held.move_to_end(block.block_hash, last=False)

    def drop(self, block: HostBlock) -> None:
        """A block could not be saved or loaded. It may be gone already."""
        if self.holds(block):
            self._forget([block])

    def clear(self) -> None:
        """Forget all blocks. The listener is told by the cache that is cleared."""
        self._held.clear()
        self._free = list(range(self.slots - 1, -1, -1))

    def check(self) -> None:
        """Assert that each slot is free or holds one block."""
        slots = sorted([*self._free, *(block.slot for block in self._held.values())])
        assert slots == list(range(self.slots)), f"{len(slots)} slots accounted for, of {self.slots}"
        assert all(block.block_hash == held for held, block in self._held.items()), "a block under another hash"

    def _evict(self, count: int) -> None:
        if count > 0:
            victims = [block for block, _ in zip(self._held.values(), range(count), strict=False)]
            self.evicted += len(victims)
            self._forget(victims)

    def _forget(self, blocks: Sequence[HostBlock]) -> None:
        for block in blocks:
            del self._held[block.block_hash]
            self._free.append(block.slot)
        if self._listener is not None:
            self._listener.removed([block.block_hash for block in blocks], HOST)

    def _announce(self, placed: Sequence[HostBlock]) -> None:
        """Tell the listener, in runs: the pool evicts the last block of a chain first."""
        if self._listener is None:
            return
        run: list[HostBlock] = []
        for block in (*reversed(placed), None):
            if run and (block is None or block.first or block.parent != run[-1].block_hash):
                head = run[0]
                parent, tokens = None if head.first else head.parent, b"".join([each.tokens for each in run])
                self._listener.stored(parent, [each.block_hash for each in run], tokens, head.salt, HOST)
                run = []
            if block is not None:
                run.append(block)
