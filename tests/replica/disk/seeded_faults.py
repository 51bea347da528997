"""Lives of a cache over a file on a disk that fails, lies and dawdles, drawn from a seed.

Each life begins with what the one before left in the file, sometimes damaged in between, and ends in order or in the
middle of everything. No block may ever have other KV than its own, or come back after the cache was cleared.
"""

import errno
import os
import threading
import time
from collections import Counter
from pathlib import Path
from random import Random

from homing.kvcache.hashing import BlockHash
from homing.kvcache.pool import Block
from homing.replica.disk.disk_file import Transfers
from homing.replica.disk.file_format import PAGE_BYTES, Layout

from .blocks import BLOCK_BYTES, BLOCK_SIZE
from .kept_cache import KeptCache

SLOTS = 16
LAYOUT = Layout(BLOCK_SIZE, BLOCK_BYTES, SLOTS)
#: Faults of one read or write, with the kind by which they are counted, if they can be noticed.
FAULTS: dict[str, str | None] = {
    "read error": "disk_io",
    "read ends early": "disk_short_read",
    "read in pieces": None,
    "read of another slot": "disk_checksum",
    "bit flipped in a read": "disk_checksum",
    "write error": "disk_io",
    "no space": "disk_full",
    "write of nothing": "disk_io",
    "write in pieces": None,
    "write torn by an error": "disk_io",
    "bit flipped in a write": "disk_checksum",
    "write lost": "disk_checksum",
    "write to another slot": "disk_checksum",
    "delay": None,
    "a second": None,
}


class FailingDisk(Transfers):
    """A disk that fails at a given rate. It never lies about the header: then nobody could know of a clear."""

    def __init__(self, random: Random, injected: Counter[str], rate: float, *, stalls: bool) -> None:
        self.random, self.injected, self.rate, self.stalls = random, injected, rate, stalls
        self.dead = False  #: whether the process is gone: nothing reaches the file any more

    def read(self, file: int, into: memoryview, offset: int) -> int:
        fault = self._draw(
            ["read error", "read ends early", "read in pieces", "bit flipped in a read", "read of another slot"]
        )
        kv = offset >= LAYOUT.data_offset
        match fault:
            case "read error":
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            case "read ends early":
                return 0
            case "read in pieces":
                return super().read(file, into[:PAGE_BYTES], offset)
            case "read of another slot" if kv:
                offset = LAYOUT.data_at(self.random.randrange(SLOTS))
        count = super().read(file, into, offset)
        if fault == "bit flipped in a read" and count:
            into[self.random.randrange(count)] ^= 1 << self.random.randrange(8)
        return count

    def write(self, file: int, data: memoryview, offset: int) -> int:
        faults = ["write error", "no space", "write of nothing", "write in pieces", "write torn by an error"]
        kv = offset >= LAYOUT.data_offset
        if offset:
            faults += ["bit flipped in a write", "write lost", "write to another slot"]
        fault = self._draw(faults)
        part = data[: len(data) // 2 // PAGE_BYTES * PAGE_BYTES or 1] if not kv or len(data) > PAGE_BYTES else data
        if self.dead or fault == "write lost":
            return len(data)
        match fault:
            case "write error":
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            case "no space":
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            case "write of nothing":
                return 0
            case "write in pieces":
                return super().write(file, part, offset)
            case "write torn by an error":
                super().write(file, part, offset)
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            case "bit flipped in a write":
                data = memoryview(bytearray(data)) if not kv else data
                place, bit = self.random.randrange(len(data)), 1 << self.random.randrange(8)
                data[place] ^= bit
            case "write to another slot":
                slot = self.random.randrange(SLOTS)
                offset = LAYOUT.data_at(slot) if kv else LAYOUT.record_at(slot)
                super().write(file, data[: BLOCK_BYTES // PAGE_BYTES * PAGE_BYTES] if kv else data, offset)
                return len(data)
        return super().write(file, data, offset)

    def sync(self, file: int) -> None:
        if self._draw(["write error"]):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    def _draw(self, faults: list[str]) -> str | None:
        if self.dead or self.random.random() >= self.rate:
            return None
        fault = self.random.choice([*faults, "delay"])
        if fault == "delay" and self.stalls:
            self.stalls, fault = False, "a second"
        self.injected[fault] += 1
        if fault in ("delay", "a second"):
            time.sleep(1.0 if fault == "a second" else self.random.random() / 500)
            return None
        return fault


def damage(path: Path, random: Random) -> None:
    """What may happen to a file that nobody uses."""
    size = path.stat().st_size
    with path.open("r+b") as raw:
        kind = random.randrange(5)
        if kind == 0:
            for _ in range(random.randrange(1, 20)):
                raw.seek(random.randrange(size))
                byte = raw.read(1)[0]
                raw.seek(-1, os.SEEK_CUR)
                raw.write(bytes([byte ^ 1 << random.randrange(8)]))
        elif kind == 1:
            raw.truncate(random.randrange(size))
        elif kind == 2:
            raw.seek(random.randrange(0, size, 64))
            raw.write(bytes(random.randrange(1, 20_000)))
            raw.truncate(size)
        else:  # a slot's KV, or all of it, in another slot
            source, target = random.randrange(SLOTS), random.randrange(SLOTS)
            for at in (LAYOUT.data_at, LAYOUT.record_at)[: kind - 2]:
                raw.seek(at(source))
                held = raw.read(LAYOUT.slot_bytes if at == LAYOUT.data_at else LAYOUT.record_bytes)
                raw.seek(at(target))
                raw.write(held)


class Life:
    """One life of a cache. `cleared`: what must not come back, kept up to date."""

    def __init__(self, path: Path, random: Random, disk: FailingDisk, cleared: set[BlockHash]) -> None:
        self.random, self.disk, self.cleared = random, disk, cleared
        self.cache = KeptCache(path, random.randrange(4, 20), disk, SLOTS, patience_s=60.0)
        self.running: list[list[Block]] = []
        found = self.hashes()
        assert not found & cleared, "blocks came back that were cleared"

    def hashes(self) -> set[BlockHash]:
        return {block.block_hash for block in self.cache.cache.residents()}

    def live(self, turns: int) -> None:
        for _ in range(turns):
            act = self.random.choice([self.prompt] * 6 + [self.keep] * 6 + [self.begin, self.abort, self.drain])
            act()
            if self.random.random() < 0.04:
                self.clear()
            self.cache.check()

    def prompt(self) -> None:
        length = self.random.randrange(1, 4)
        if self.cache.cache.free_blocks >= length:
            self.cache.run(*(self.random.randrange(4) for _ in range(length)))
        self.cleared -= self.hashes()

    def begin(self) -> None:
        """A request takes blocks and is not done with them."""
        if blocks := self.cache.cache.allocate(self.random.randrange(1, 3)):
            self.running.append(list(blocks))

    def abort(self) -> None:
        if self.running:
            self.cache.cache.release(self.running.pop(self.random.randrange(len(self.running))))

    def keep(self) -> None:
        self.cache.keeper.work(self.random.randrange(4))

    def drain(self) -> None:
        while self.running:
            self.abort()
        self.cache.settle()

    def clear(self) -> None:
        held = {block.block_hash for block in self.cache.keeper.tier} | self.hashes()
        if self.cache.cache.reset():
            self.cleared |= held

    def end(self) -> None:
        """In order, with or without time to write what is left."""
        self.cache.keeper.close(self.random.choice([0.0, 60.0]))

    def die(self) -> None:
        """Nothing that is not in the file gets there; a clear may be among that."""
        worker, file = self.cache.keeper._worker, self.cache.keeper._file
        assert worker is not None
        if not worker.wait(0) or file._uncleared:
            self.cleared.clear()
        self.disk.dead = True
        self.cache.end()


def run(seed: int, folder: Path, injected: Counter[str], failures: Counter[str]) -> None:
    """The lives of one seed. Counts the faults, and what the cache noticed of them. Raises what went wrong."""
    random, path, cleared = Random(seed), folder / f"{seed}.kv", set[BlockHash]()
    rate = random.choice([0.0, 0.01, 0.05, 0.3])
    before = len(os.listdir("/proc/self/fd")), threading.active_count()
    for _ in range(random.randrange(2, 5)):
        disk = FailingDisk(Random(random.random()), injected, rate, stalls=seed % 50 == 7)
        try:
            life = Life(path, random, disk, cleared)
        except FileExistsError:  # damaged so that it could be anything; whoever owns it is told to remove it
            path.unlink()
            continue
        except OSError:  # the file cannot be opened, so the replica starts without
            continue
        life.live(random.randrange(10, 60))
        while life.running:
            life.abort()
        if random.random() < 0.3:
            life.clear()
        life.die() if random.random() < 0.3 else life.end()
        failures.update(life.cache.keeper.failures)
        if random.random() < 0.3 and path.exists():
            damage(path, random)
            injected["damage"] += 1
    after = len(os.listdir("/proc/self/fd")), threading.active_count()
    assert after == before, f"descriptors and threads: {before} before, {after} after"
    path.unlink(missing_ok=True)
