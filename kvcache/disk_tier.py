"""Which blocks are on disk, in which slots. Pure bookkeeping: the caller moves the KV and reports how that went.

Slots are numbers; a generation, which only grows, tells what a slot holds now from what it held before. A block is
`writing` until the caller says that it is on disk, and is announced then. What is being read is kept until the read has
ended. Otherwise a new block replaces the last one of the chain that was used longest ago.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from .block_index import CacheListener
from .hashing import BlockHash

DISK = "DISK"


@dataclass(slots=True, frozen=True)
class DiskBlock:
    """A block and its place on disk."""

    block_hash: BlockHash
    parent: BlockHash  #: hash of the block before, or the root
    first: bool  #: whether it starts a chain
    tokens: bytes  #: uint32 little-endian
    salt: str  #: of a chain's first block, else empty
    slot: int = field(compare=False)
    generation: int = field(compare=False)


class DiskTier:
    """The blocks on disk, by hash."""

    def __init__(self, slots: int, listener: CacheListener | None = None) -> None:
        self.slots = slots
        self.evicted = 0  #: blocks that gave way to others
        self._listener = listener
        #: The blocks that can be read, the one used longest ago first.
        self._held: dict[BlockHash, DiskBlock] = {}
        self._writing: dict[BlockHash, DiskBlock] = {}
        #: How many reads of a block are under way, by its generation.
        self._reading: dict[int, int] = {}
        #: Slots of blocks whose read failed, while other reads of them are under way.
        self._failed: set[int] = set()
        #: Of the blocks that can be read, those that follow a hash, the one that came first in front.
        self._following: dict[BlockHash, dict[BlockHash, None]] = {}
        self._free = list(range(slots - 1, -1, -1))
        self._generation = 0

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, block_hash: BlockHash) -> bool:
        """Whether the block is on disk or is being written there."""
        return block_hash in self._held or block_hash in self._writing

    def __iter__(self) -> Iterator[DiskBlock]:
        return iter(self._held.values())

    def restore(self, blocks: Iterable[DiskBlock]) -> list[DiskBlock]:
        """Enter what was found on disk at the start. Returns what cannot be used: the older of two with one hash."""
        assert len(self._free) == self.slots, "blocks are restored into an empty tier"
        spare: list[DiskBlock] = []
        for block in sorted(blocks, key=lambda each: -each.generation):
            if block.block_hash in self._held:
                spare.append(block)
            else:
                self._held[block.block_hash] = block
        # The newest were entered first, so that they won.
        self._held = dict(reversed(self._held.items()))
        for block in self._held.values():
            self._following.setdefault(block.parent, {})[block.block_hash] = None
        self._generation = max((each.generation for each in (*self._held.values(), *spare)), default=0)
        used = {block.slot for block in self._held.values()}
        self._free = [slot for slot in range(self.slots - 1, -1, -1) if slot not in used]
        for run in _runs(self._held):
            self._stored(run)
        return spare

    def find(self, block_hash: BlockHash, parent: BlockHash, tokens: bytes, *, first: bool) -> DiskBlock | None:
        """The block if it is on disk and is really this one: hashes may collide."""
        block = self._held.get(block_hash)
        if block is None or (block.parent, block.tokens, block.first) != (parent, tokens, first):
            return None
        return block

    def begin_write(
        self, block_hash: BlockHash, parent: BlockHash, tokens: bytes, *, first: bool, salt: str = ""
    ) -> DiskBlock | None:
        """A place for a block that is not in the tier; call `end_write` later. None: all places are in use."""
        assert block_hash not in self, f"{block_hash.hex()} is on disk already"
        slot = self._free.pop() if self._free else self._evict()
        if slot is None:
            return None
        self._generation += 1
        block = DiskBlock(block_hash, parent, first, tokens, salt, slot, self._generation)
        self._writing[block_hash] = block
        return block

    def end_write(self, block: DiskBlock, *, done: bool) -> None:
        """The KV of a block is on disk, or could not be written."""
        if self._writing.get(block.block_hash) is not block:  # the tier was cleared in between
            return
        del self._writing[block.block_hash]
        if not done:
            self._free.append(block.slot)
            return
        self._held[block.block_hash] = block
        self._following.setdefault(block.parent, {})[block.block_hash] = None
        self._stored([block])

    def touch(self, block_hash: BlockHash) -> None:
        """A block was used: if it is there, it is now the last to give way."""
        if block := self._held.pop(block_hash, None):
            self._held[block_hash] = block

    def begin_read(self, block_hash: BlockHash) -> DiskBlock:
        """Read a block, which stays until `end_read`."""
        block = self._held[block_hash]
        self._reading[block.generation] = self._reading.get(block.generation, 0) + 1
        return block

    def end_read(self, block: DiskBlock, *, done: bool) -> None:
        """A read has ended; if it failed, the block is forgotten."""
        if block.generation not in self._reading:  # the tier was cleared in between
            return
        if not done and self._held.get(block.block_hash) is block:
            self._forget(block)
            self._failed.add(block.slot)
        self._reading[block.generation] -= 1
        if not self._reading[block.generation]:
            del self._reading[block.generation]
            if block.slot in self._failed:
                self._failed.discard(block.slot)
                self._free.append(block.slot)

    def clear(self) -> None:
        """Forget all blocks. The listener is told by the cache that is cleared."""
        for each in (self._held, self._writing, self._reading, self._failed, self._following):
            each.clear()
        self._free = list(range(self.slots - 1, -1, -1))

    def check(self) -> None:
        """Assert that each slot is free or holds one block, and that what is read is there."""
        taken = [block.slot for block in (*self._held.values(), *self._writing.values())]
        slots = sorted([*taken, *self._free, *self._failed])
        assert len(slots) == self.slots, f"{len(slots)} slots accounted for, of {self.slots}"
        assert len(set(slots)) == len(slots), f"a slot is used twice: {slots}"
        both = self._held.keys() & self._writing.keys()
        assert not both, f"{len(both)} blocks are on disk and being written"
        followers = {each for following in self._following.values() for each in following}
        assert followers == self._held.keys(), f"{len(followers)} blocks follow others, {len(self._held)} are held"

    def _evict(self) -> int | None:
        """Free the slot of the last block of the chain that was used longest ago, unless it is being read.

        A block before it would take those that follow with it: they can be used only together with it.
        """
        victim = next((block for block in self._held.values() if block.generation not in self._reading), None)
        if victim is None:
            return None
        # A block follows another one once at most, so this ends; hashes that form a ring have collided.
        for _ in range(len(self._held)):
            following = self._following.get(victim.block_hash)
            if not following:
                break
            after = self._held[next(iter(following))]
            if after.generation in self._reading:
                break
            victim = after
        self.evicted += 1
        self._forget(victim)
        return victim.slot

    def _forget(self, block: DiskBlock) -> None:
        del self._held[block.block_hash]
        following = self._following[block.parent]
        del following[block.block_hash]
        if not following:
            del self._following[block.parent]
        if self._listener is not None:
            self._listener.removed([block.block_hash], DISK)

    def _stored(self, run: Sequence[DiskBlock]) -> None:
        if self._listener is not None:
            head = run[0]
            tokens = b"".join([block.tokens for block in run])
            parent = None if head.first else head.parent
            self._listener.stored(parent, [block.block_hash for block in run], tokens, head.salt, DISK)


def _runs(held: dict[BlockHash, DiskBlock]) -> Iterator[list[DiskBlock]]:
    """The blocks as runs, each block the parent of the next; a block's parent comes before it if it is there."""
    followers: dict[BlockHash, list[DiskBlock]] = {}
    for block in held.values():
        followers.setdefault(block.parent, []).append(block)
    heads = [block for block in held.values() if block.first or block.parent not in held]
    while heads:
        run = [heads.pop()]
        while following := followers.get(run[-1].block_hash):
            run.append(following[0])
            heads.extend(following[1:])
        yield run


def newest_chains(held: Iterable[DiskBlock], most: int) -> list[list[DiskBlock]]:
    """At most so many blocks, with all blocks before them, as runs; the newest chains first, parents before followers.

    `held` in the order of use. Blocks without a block before them are left out.
    """
    by_hash = {block.block_hash: block for block in held}
    chosen: set[BlockHash] = set()
    unusable: set[BlockHash] = set()
    for block in reversed(by_hash.values()):
        path: list[BlockHash] = []
        step: DiskBlock | None = block
        while step is not None and step.block_hash not in chosen and step.block_hash not in unusable:
            path.append(step.block_hash)
            if step.first or len(path) > len(by_hash):
                break
            step = by_hash.get(step.parent)
        if step is None or step.block_hash in unusable or len(path) > len(by_hash):
            unusable.update(path)
        else:
            chosen.update(path[max(0, len(chosen) + len(path) - most) :])
        if len(chosen) >= most:
            break
    return list(_runs({block_hash: block for block_hash, block in by_hash.items() if block_hash in chosen}))
