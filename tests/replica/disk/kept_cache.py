"""A prefix cache over a pool of recognisable KV, with a file below it: a replica without a model."""

from collections import Counter
from itertools import pairwise
from pathlib import Path

from homing.kvcache.hashing import BlockHash, BlockHasher, token_bytes
from homing.kvcache.prefix_cache import PrefixCache
from homing.replica.disk.disk_file import Transfers, open_file
from homing.replica.disk.keeper import DiskKeeper

from .blocks import BLOCK_SIZE, IDENTITY, kv_of

ROOT = BlockHash(b"r" * 16)
HASHER = BlockHasher(BLOCK_SIZE, 1)
SLOTS = 32
#: What each block that was ever computed follows, and its tokens.
KNOWN: dict[BlockHash, tuple[BlockHash, bytes]] = {}


class Events:
    """What subscribers believe to be in the pool."""

    def __init__(self) -> None:
        self.hashes: set[bytes] = set()

    def stored(self, parent, hashes, tokens, salt, medium="GPU"):
        assert parent is None or parent in self.hashes
        self.hashes |= set(hashes)

    def removed(self, hashes, medium="GPU"):
        self.hashes -= set(hashes)

    def cleared(self):
        self.hashes.clear()


class KeptCache:
    """A cache over a pool of recognisable KV, with a file below it."""

    def __init__(
        self,
        path: Path,
        blocks: int = 17,
        transfers: Transfers | None = None,
        slots: int = SLOTS,
        patience_s: float = 60.0,
    ) -> None:
        file = open_file(path, IDENTITY, 0, slots, transfers)
        assert file is not None
        self.pool: dict[int, bytes] = {}
        self.events = Events()
        self.keeper = DiskKeeper(file, self.events, self.copy_out, Counter())
        self.cache = PrefixCache(blocks, BLOCK_SIZE, listener=self.keeper)
        self.restored = self.keeper.restore(self.cache, self.copy_in, patience_s=patience_s)
        self.check()

    def copy_in(self, block: int, data: memoryview) -> None:
        self.pool[block] = bytes(data)

    def copy_out(self, block: int, data: memoryview) -> None:
        data[:] = self.pool[block]

    def run(self, *tokens: int) -> int:
        """Compute a prompt of whole blocks, one block per token. Returns how many blocks it found."""
        ids = token_bytes([token for token in tokens for _ in range(BLOCK_SIZE)])
        hashes = HASHER.chain(ROOT, ids)
        for place, (parent, block_hash) in enumerate(pairwise([ROOT, *hashes])):
            KNOWN[block_hash] = parent, ids[place * 4 * BLOCK_SIZE : (place + 1) * 4 * BLOCK_SIZE]
        match = self.cache.match(ROOT, hashes, ids, len(ids) // 4 + 1)
        found = len(match.blocks)
        blocks = self.cache.acquire(match, len(hashes) - found)
        assert blocks is not None
        for block, block_hash in zip(blocks[found:], hashes[found:], strict=True):
            self.pool[block.block_id] = kv_of(block_hash)
        if hashes[found:]:
            parent = hashes[found - 1] if found else ROOT
            content = ids[found * 4 * BLOCK_SIZE :]
            self.cache.commit(blocks[found:], found, parent, hashes[found:], content, "tenant")
        self.cache.release(blocks)
        return found

    def settle(self) -> None:
        """Until all is written."""
        while self.keeper.work(3) or self.keeper.pending:
            pass
        assert self.keeper._worker is not None
        assert self.keeper._worker.wait(60)
        self.keeper.work(0)
        self.check()

    def check(self) -> None:
        """All cached blocks have the right KV, also at subscribers."""
        self.cache.check()
        self.keeper.check()
        residents = [block.block_hash for block in self.cache.residents()]
        assert self.events.hashes == set(residents)
        for block_hash in residents:
            block = self.cache.block_of(block_hash)
            assert block is not None
            assert self.pool[block.block_id] == kv_of(block_hash)
            assert (block.parent, block.tokens) == KNOWN[block_hash]

    def end(self) -> None:
        self.keeper.close(60)
