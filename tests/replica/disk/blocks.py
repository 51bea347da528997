"""Blocks with recognisable KV, and transfers that fail on demand."""

import errno
import os
from collections.abc import Callable
from random import Random

from homing.kvcache.hashing import BlockHash
from homing.replica.disk.disk_file import Transfers
from homing.replica.disk.file_format import DiskEntry, Identity

BLOCK_SIZE, BLOCK_BYTES, SLOTS = 4, 10_000, 16
IDENTITY = Identity(
    model="toy", root="ab" * 16, seed="cd" * 8, layout="float32", block_size=BLOCK_SIZE, block_bytes=BLOCK_BYTES
)


def kv_of(block_hash: bytes) -> bytes:
    """The right KV of a block."""
    return Random(block_hash).randbytes(BLOCK_BYTES)


def entry(name: int, slot: int, generation: int) -> DiskEntry:
    digest = name.to_bytes(16, "little")
    tokens = (name % 2**32).to_bytes(4, "little") * BLOCK_SIZE
    first = name % 3 == 0
    return DiskEntry(slot, generation, BlockHash(digest), BlockHash(bytes(16)), first, tokens, "salt" if first else "")


class FaultyTransfers(Transfers):
    """Calls these instead of reading and writing; None: nothing is wrong with it."""

    def __init__(self) -> None:
        self.read_fault: Callable[[int, memoryview, int], int] | None = None
        self.write_fault: Callable[[int, memoryview, int], int] | None = None
        self.sync_fault: Callable[[int, memoryview, int], int] | None = None
        self.synced = 0  #: number of calls

    def read(self, file: int, into: memoryview, offset: int) -> int:
        if self.read_fault:
            return self.read_fault(file, into, offset)
        return super().read(file, into, offset)

    def write(self, file: int, data: memoryview, offset: int) -> int:
        if self.write_fault:
            return self.write_fault(file, data, offset)
        return super().write(file, data, offset)

    def sync(self, file: int) -> None:
        self.synced += 1
        if self.sync_fault:
            self.sync_fault(file, memoryview(b""), 0)


def failing(number: int) -> Callable[[int, memoryview, int], int]:
    def fail(file: int, data: memoryview, offset: int) -> int:
        raise OSError(number, os.strerror(number))

    return fail


def flipped(file: int, into: memoryview, offset: int) -> int:
    count = os.preadv(file, [into], offset)
    into[count // 3] ^= 4
    return count


def shortened(file: int, into: memoryview, offset: int) -> int:
    """A device whose data ends in the middle of each slot."""
    return os.preadv(file, [into[:4096]], offset) if len(into) > 8192 else 0


#: Faults of reading, with the kind by which they are counted.
READ_FAULTS = {
    "a read that fails": (failing(errno.EIO), "disk_io"),
    "a read that ends early": (shortened, "disk_short_read"),
    "a flipped bit": (flipped, "disk_checksum"),
}
