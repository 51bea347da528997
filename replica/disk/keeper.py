"""Keeps the pool's blocks on disk while the replica runs, and puts them back into the pool when it starts again.

Blocks are written when they are cached, not when they are evicted: a replica that is killed has no time to write. The
copy out of the pool happens in the engine's thread, a few blocks per step and more while it is idle; the rest in the
disk's thread. A block that is evicted before its turn is not kept.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence

from ...kvcache.block_index import CacheListener
from ...kvcache.disk_tier import DiskBlock, DiskTier, newest_chains
from ...kvcache.hashing import BlockHash
from ...kvcache.pool import BlockId
from ...kvcache.prefix_cache import PrefixCache
from .disk_file import DiskFailure, DiskFile
from .disk_worker import DiskWorker, Write
from .file_format import MAX_SALT_BYTES, DiskEntry

log = logging.getLogger(__name__)

#: Blocks copied out of the pool after a step, and in a round of an idle engine. One takes about 1 % of computing it.
BUSY_BLOCKS, IDLE_BLOCKS = 2, 16


class DiskKeeper:
    """Stands between the cache and its listener, in the engine's thread."""

    def __init__(
        self, file: DiskFile, listener: CacheListener, copy_out: Callable[[BlockId, memoryview], None]
    ) -> None:
        """`copy_out`: copies a block's KV out of the pool."""
        #: Blocks that could not be kept or put back, and clears that failed, by kind.
        self.failures: Counter[str] = Counter(file.failures)
        self.tier = DiskTier(file.slots)
        self._file = file
        self._listener = listener
        self._copy_out = copy_out
        self._cache: PrefixCache | None = None
        self._worker: DiskWorker | None = None
        #: Cached blocks that are still to be written, with the salt of those that start a chain.
        self._pending: dict[BlockHash, str] = {}
        #: What the worker was told to do, by number; None: to clear the file.
        self._started: dict[int, DiskBlock | None] = {}

    @property
    def pending(self) -> int:
        """Number of blocks to write."""
        return len(self._pending)

    def stored(
        self, parent: BlockHash | None, hashes: Sequence[BlockHash], tokens: bytes, salt: str, medium: str = "GPU"
    ) -> None:
        self._listener.stored(parent, hashes, tokens, salt, medium)
        if medium != "GPU":  # what leaves the pool for another tier cannot be copied out of the pool
            return
        for place, block_hash in enumerate(hashes):
            if block_hash not in self.tier:
                self._pending[block_hash] = "" if place else salt

    def removed(self, hashes: Sequence[BlockHash], medium: str = "GPU") -> None:
        self._listener.removed(hashes, medium)
        if medium != "GPU":
            return
        for block_hash in hashes:
            if self._pending.pop(block_hash, None) is not None:
                self.failures["disk_behind"] += 1
            self.tier.touch(block_hash)

    def cleared(self) -> None:
        self._listener.cleared()
        self._pending.clear()
        self._started.clear()
        self.tier.clear()
        if self._worker:
            self._started[self._worker.clear()] = None

    def restore(self, cache: PrefixCache, copy_in: Callable[[BlockId, memoryview], None]) -> int:
        """Fill the empty cache with the newest blocks of the file, and return their number. Then start writing.

        `copy_in`: copies a block's KV into the pool. Blocks that fail are dropped, with all that follow them.
        """
        began = time.monotonic()
        self._cache = cache
        found = [_block_of(entry) for entry in self._file.entries]
        self.tier.restore(found)  # older copies of a block stay unused until others take their slots
        used, count = [], 0
        for run in newest_chains(self.tier, cache.total_blocks):
            if not run[0].first and cache.block_of(run[0].parent) is None:
                continue
            blocks = cache.allocate(len(run))
            assert blocks is not None, f"{len(run)} blocks are more than the pool has left"
            good = self._read(run, [block.block_id for block in blocks], copy_in)
            hashes = [block.block_hash for block in run[:good]]
            tokens = b"".join(block.tokens for block in run[:good])
            # A chain's first block is number 0; of others, only that they are not matters.
            cache.commit(blocks[:good], int(not run[0].first), run[0].parent, hashes, tokens, run[0].salt)
            used.append(blocks)
            count += good
        # Followers before their parents and old chains before new ones: the order of eviction.
        for blocks in reversed(used):
            cache.release(blocks)
        self._worker = DiskWorker(self._file)
        log.info("disk_kv_restored blocks=%d of=%d seconds=%.3f", count, len(found), time.monotonic() - began)
        return count

    def _read(
        self, run: Sequence[DiskBlock], targets: Sequence[BlockId], copy_in: Callable[[BlockId, memoryview], None]
    ) -> int:
        """Read a run's blocks into the pool; returns how many came before the first that failed."""
        buffer = memoryview(bytearray(self._file.layout.block_bytes))
        for place, (block, target) in enumerate(zip(run, targets, strict=True)):
            try:
                self._file.get(block.slot, block.generation, block.block_hash, buffer)
            except DiskFailure as error:
                log.warning("disk_kv_failed kind=%s error=%s", error.kind, error)
                self.failures[error.kind] += 1
                self.tier.drop(block)
                return place
            copy_in(target, buffer)
        return len(run)

    def work(self, most: int) -> bool:
        """Copy at most so many blocks out of the pool, to be written. Whether more could be copied at once."""
        assert self._cache is not None, "restore comes first"
        assert self._worker is not None, "restore comes first"
        self._collect(self._worker)
        for _ in range(min(most, len(self._pending), self._worker.room)):
            self._write(self._cache, self._worker)
        return bool(self._pending) and self._worker.room > 0

    def _collect(self, worker: DiskWorker) -> None:
        for ended in worker.ended():
            if ended.number not in self._started:  # it was for the contents before a clear
                continue
            block = self._started.pop(ended.number)
            if ended.failure:
                self.failures[ended.failure] += 1
            if block is not None:
                self.tier.end_write(block, done=ended.failure is None)

    def _write(self, cache: PrefixCache, worker: DiskWorker) -> None:
        block_hash = next(iter(self._pending))
        salt = self._pending.pop(block_hash)
        block = cache.block_of(block_hash)
        assert block is not None, f"{block_hash.hex()} is to be written but not cached"
        assert block.parent is not None, f"{block} is cached but has no parent"
        if block_hash in self.tier or len(salt.encode()) > MAX_SALT_BYTES:
            return
        place = self.tier.begin_write(block_hash, block.parent, block.tokens, first=block.first, salt=salt)
        if place is None:
            self.failures["disk_behind"] += 1
            return
        data = memoryview(bytearray(self._file.layout.block_bytes))
        self._copy_out(block.block_id, data)
        number = worker.start(Write(_entry_of(place), data))
        if number is None:
            self.failures["disk_behind"] += 1
            self.tier.end_write(place, done=False)
        else:
            self._started[number] = place

    def check(self) -> None:
        self.tier.check()

    def close(self, timeout_s: float = 2.0) -> None:
        """Write what is left, as far as that takes no longer than `timeout_s`, and release the file."""
        if self._worker is None:
            self._file.close()
            return
        deadline = time.monotonic() + timeout_s
        while len(self._pending) and not self._worker.stalled and time.monotonic() < deadline:
            if not self.work(IDLE_BLOCKS):
                self._worker.wait(deadline - time.monotonic())
        self._worker.wait(deadline - time.monotonic())
        self._worker.close()
        self._collect(self._worker)


def _block_of(entry: DiskEntry) -> DiskBlock:
    return DiskBlock(
        entry.block_hash, entry.parent, entry.first, entry.tokens, entry.salt, entry.slot, entry.generation
    )


def _entry_of(block: DiskBlock) -> DiskEntry:
    return DiskEntry(
        block.slot, block.generation, block.block_hash, block.parent, block.first, block.tokens, block.salt
    )
