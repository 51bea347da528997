"""Keeps the pool's blocks on disk while the replica runs, and puts them back into the pool when it starts again.

Blocks are written when they are cached, not when they are evicted: a replica that is killed has no time to write. The
copy out of the pool happens in the engine's thread, a few blocks per step and more while it is idle; the rest in the
disk's thread. A block that is evicted before its turn is not kept.
"""

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice

from ...kvcache.block_index import CacheListener
from ...kvcache.disk_tier import DiskBlock, DiskTier, newest_chains
from ...kvcache.hashing import BlockHash
from ...kvcache.pool import BlockId
from ...kvcache.prefix_cache import PrefixCache
from .disk_file import DiskFile
from .disk_worker import DiskWorker, Read, Write
from .file_format import MAX_SALT_BYTES, DiskEntry

log = logging.getLogger(__name__)

#: Blocks copied out of the pool after a step, and in a round of an idle engine. One takes about 1 % of computing it.
BUSY_BLOCKS, IDLE_BLOCKS = 2, 16
#: Blocks read ahead of the one that is copied into the pool at the start. Not tuned.
AHEAD = 4
#: A start waits no longer for one block, and may read for so long whatever computing would take.
PATIENCE_S = 5.0


class DiskKeeper:
    """Stands between the cache and its listener, in the engine's thread."""

    def __init__(
        self,
        file: DiskFile,
        listener: CacheListener,
        copy_out: Callable[[BlockId, memoryview], None],
        failures: Counter[str],
    ) -> None:
        """`copy_out`: copies a block's KV out of the pool. `failures`: counts by kind the blocks that could not be kept
        or put back, and clears that failed.
        """
        self.failures = failures
        failures.update(file.failures)
        self.tier = DiskTier(file.slots)
        self._file = file
        self._listener = listener
        self._copy_out = copy_out
        self._cache: PrefixCache | None = None
        self._worker: DiskWorker | None = None
        #: Cached blocks that are still to be written, with the salt of those that start a chain.
        self._pending: dict[BlockHash, str] = {}
        #: What to do when the worker has ended what it was told, by number.
        self._started: dict[int, Callable[..., None]] = {}

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
            self._started[self._worker.clear()] = _cleared

    def restore(
        self,
        cache: PrefixCache,
        copy_in: Callable[[BlockId, memoryview], None],
        *,
        compute_s: float = 0.0,
        patience_s: float = PATIENCE_S,
    ) -> int:
        """Fill the empty cache with the newest blocks of the file, and return their number. Then start writing.

        `copy_in`: copies a block's KV into the pool. Blocks that fail are dropped, with all that follow them.
        `compute_s`: seconds to compute a block. Ends when computing the blocks would have been sooner, or when the disk
        takes longer than `patience_s` over one block; the others stay on disk.
        """
        began = time.monotonic()
        self._cache, self._worker = cache, DiskWorker(self._file)
        found = [_block_of(entry) for entry in self._file.entries]
        self.tier.restore(found)  # older copies of a block stay unused until others take their slots
        runs = newest_chains(self.tier, cache.total_blocks)
        wanted = sum(map(len, runs))
        patience = _Patience(patience_s, began + max(patience_s, wanted * compute_s))
        used, count = [], 0
        for run in runs:
            if not run[0].first and cache.block_of(run[0].parent) is None:
                continue
            blocks = cache.allocate(len(run))
            assert blocks is not None, f"{len(run)} blocks are more than the pool has left"
            good = self._read(run, [block.block_id for block in blocks], copy_in, patience)
            hashes = [block.block_hash for block in run[:good]]
            tokens = b"".join(block.tokens for block in run[:good])
            # A chain's first block is number 0; of others, only that they are not matters.
            cache.commit(blocks[:good], int(not run[0].first), run[0].parent, hashes, tokens, run[0].salt)
            used.append(blocks)
            count += good
            if patience.over:
                self.failures["disk_slow"] += wanted - count
                log.warning("disk_kv_failed kind=disk_slow error=%d of %d blocks were read in time", count, wanted)
                break
        # Followers before their parents and old chains before new ones: the order of eviction.
        for blocks in reversed(used):
            cache.release(blocks)
        log.info("disk_kv_restored blocks=%d of=%d seconds=%.3f", count, len(found), time.monotonic() - began)
        return count

    def _read(
        self,
        run: Sequence[DiskBlock],
        targets: Sequence[BlockId],
        copy_in: Callable[[BlockId, memoryview], None],
        patience: "_Patience",
    ) -> int:
        """Read a run's blocks into the pool; returns how many came before the first that failed or came too late."""
        ahead, rest = deque[_Reading](), iter(run)
        for place, target in enumerate(targets):
            ahead.extend([self._start_read(block) for block in islice(rest, AHEAD - len(ahead))])
            reading = ahead.popleft()
            self._await(reading, patience)
            if not reading.done:
                return place
            copy_in(target, reading.into)
        return len(run)

    def _start_read(self, block: DiskBlock) -> "_Reading":
        assert self._worker is not None, "restore comes first"
        reading = _Reading(memoryview(bytearray(self._file.layout.block_bytes)))
        number = self._worker.start(Read(block.slot, block.generation, block.block_hash, reading.into))
        if number is not None:
            reading.started = True
            self.tier.begin_read(block.block_hash)
            self._started[number] = partial(self._end_read, block, reading)
        return reading

    def _end_read(self, block: DiskBlock, reading: "_Reading", *, done: bool) -> None:
        reading.done = done
        self.tier.end_read(block, done=done)

    def _await(self, reading: "_Reading", patience: "_Patience") -> None:
        """Wait for a read's end, or until the patience is over."""
        assert self._worker is not None, "restore comes first"
        end = min(patience.deadline, time.monotonic() + patience.per_block_s)
        while reading.done is None:
            if not reading.started or not self._worker.wait_for_end(end - time.monotonic()):
                patience.over = True
                return
            self._collect(self._worker)

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
            if ended.failure:
                self.failures[ended.failure] += 1
            self._started.pop(ended.number)(done=ended.failure is None)

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
            self._started[number] = partial(self.tier.end_write, place)

    def check(self) -> None:
        """Assert that the tier's bookkeeping agrees with itself, and with the file unless that is being changed."""
        self.tier.check()
        if self._worker is None or not self._worker.wait(0):
            return
        self._collect(self._worker)
        for block in self.tier:
            assert self._file.holds(block.slot, block.generation), f"{block} is not in its slot"
        assert not self._started, f"{len(self._started)} transfers never ended"

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


@dataclass(slots=True)
class _Reading:
    """A block on its way into the pool."""

    into: memoryview
    started: bool = False  #: False: the disk takes too long over another one
    done: bool | None = None  #: None: it has not ended


@dataclass(slots=True)
class _Patience:
    """How long a start waits for the disk."""

    per_block_s: float
    deadline: float
    over: bool = False


def _cleared(*, done: bool) -> None:
    """A clear has ended. If it failed, the file makes up for it before it takes blocks."""


def _block_of(entry: DiskEntry) -> DiskBlock:
    return DiskBlock(
        entry.block_hash, entry.parent, entry.first, entry.tokens, entry.salt, entry.slot, entry.generation
    )


def _entry_of(block: DiskBlock) -> DiskEntry:
    return DiskEntry(
        block.slot, block.generation, block.block_hash, block.parent, block.first, block.tokens, block.salt
    )
