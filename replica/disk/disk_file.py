"""One rank's KV file: blocks put into slots and read back, checked. Written by one thread; knows nothing of caches.

A block is written in three steps: its slot's record is erased, its KV is written, then its new record. So wherever
the process is killed, a slot holds the old block, or none, or the new one. Nothing waits for the disk to have it: a
power cut may lose the last blocks, and as these steps then reach the disk in any order, the checksum of the KV tells.
Only the header is synchronised, since a block that was cleared must never come back. KV passes by the page cache where
the file system allows, which otherwise would hold a second copy of what the host tier holds.
"""

import errno
import fcntl
import logging
import mmap
import os
import stat
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from random import SystemRandom
from typing import Literal

from ...kvcache.hashing import BlockHash
from .file_format import (
    PAGE_BYTES,
    DiskEntry,
    Header,
    Identity,
    Layout,
    data_check,
    decode_header,
    decode_record,
    encode_header,
    encode_record,
    is_ours,
)

log = logging.getLogger(__name__)

FailureKind = Literal["disk_checksum", "disk_stale", "disk_short_read", "disk_full", "disk_io", "disk_slow"]

#: Records are read in pieces of about so many bytes.
_SCAN_BYTES = 1 << 20


class DiskFailure(Exception):  # noqa: N818 - says what happened
    """A block or a file could not be used; the caller computes instead."""

    def __init__(self, kind: FailureKind, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class Transfers:
    """Reads from and writes to open files; tests inject faults here."""

    def read(self, file: int, into: memoryview, offset: int) -> int:
        return os.preadv(file, [into], offset)

    def write(self, file: int, data: memoryview, offset: int) -> int:
        return os.pwrite(file, data, offset)

    def sync(self, file: int) -> None:
        os.fdatasync(file)


class DiskFile:
    """A formatted, locked file. `entries` are the blocks found in it when it was opened."""

    def __init__(self, path: Path, file: int, header: Header, transfers: Transfers) -> None:
        """`file`: locked, and closed by `close`. Its records are read here. Raises OSError."""
        self.path = path
        self.header = header
        self.layout = _layout(header)
        self._file = file
        self._transfers = transfers
        #: Whether `clear` has not reached the file yet. Until it has, nothing is written or read.
        self._uncleared = False
        slots = self.layout.slots
        #: By slot: the generation of the block in it (0: none), and the checksum of its KV.
        self._generations, self._checks = array("Q", bytes(8 * slots)), array("Q", bytes(8 * slots))
        # Page-aligned, as O_DIRECT requires.
        self._page = memoryview(mmap.mmap(-1, self.layout.slot_bytes))
        self.failures: Counter[str] = Counter()  #: to read records, by kind
        self.entries = list(self._scan())
        self._data = _open_direct(path, file)

    @property
    def slots(self) -> int:
        return self.layout.slots

    @property
    def bypasses_page_cache(self) -> bool:
        return self._data is not None

    def put(self, entry: DiskEntry, data: memoryview, unchanged: Callable[[], bool] = lambda: True) -> None:
        """Write a block of `layout.block_bytes` over what the slot holds. Raises DiskFailure; the slot is then empty.

        `unchanged`: asked once `data` is copied, whether it was still the block's.
        """
        slot = entry.slot
        assert entry.generation > self._generations[slot], f"{entry} after generation {self._generations[slot]}"
        page = self._page[: len(data)]
        page[:] = data
        if not unchanged():
            raise DiskFailure("disk_stale", f"the block of slot {slot} was overwritten before it was copied")
        with self._naming_failures():
            self._finish_clear()
            check = data_check(page, self.header.drawn, entry.block_hash, entry.generation)
            self._erase(slot)
            self._write(self._data, self._page, self.layout.data_at(slot))
            record = encode_record(self.layout, self.header.drawn, entry, check)
            self._write(None, memoryview(record), self.layout.record_at(slot))
        self._generations[slot], self._checks[slot] = entry.generation, check
        self._forget_pages(slot)

    def get(self, slot: int, generation: int, block_hash: BlockHash, into: memoryview) -> None:
        """Read a block. Raises DiskFailure, and then leaves `into` as it was; the slot is then empty."""
        if self._generations[slot] != generation:
            raise DiskFailure("disk_stale", f"slot {slot} has generation {self._generations[slot]}, not {generation}")
        try:
            self._load(slot, generation, block_hash, into)
        except DiskFailure:
            with suppress(OSError):  # the slot counts as empty all the same
                self._erase(slot)
            raise
        self._forget_pages(slot)

    def _load(self, slot: int, generation: int, block_hash: BlockHash, into: memoryview) -> None:
        with self._naming_failures():
            count = self._read(self._data, self._page, self.layout.data_at(slot))
        if count < len(into):
            raise DiskFailure("disk_short_read", f"{self.path}: {count} of {len(into)} bytes of slot {slot}")
        data = self._page[: len(into)]
        if data_check(data, self.header.drawn, block_hash, generation) != self._checks[slot]:
            raise DiskFailure("disk_checksum", f"{self.path}: slot {slot} does not hold what was written")
        into[:] = data

    def holds(self, slot: int, generation: int) -> bool:
        """Whether a slot has the block of this generation."""
        return self._generations[slot] == generation

    def drop(self, slot: int) -> None:
        """Erase a slot's record. Raises DiskFailure; the slot counts as empty all the same."""
        with self._naming_failures():
            self._erase(slot)

    def clear(self) -> None:
        """Forget all blocks. Raises DiskFailure; `put` then fails until it or `close` has made up for it."""
        self._generations = array("Q", bytes(8 * self.slots))
        self.entries = []
        self._uncleared = True
        with self._naming_failures():
            self._finish_clear()

    def close(self) -> None:
        """Close the file, which releases the lock. If it should be cleared but cannot be, it is removed."""
        try:
            self._finish_clear()
        except OSError as error:
            log.warning("disk_kv_dropped file=%s reason=it cannot be cleared: %s", self.path, error)
            self._remove()
        if self._data is not None:
            os.close(self._data)
        os.close(self._file)

    def _finish_clear(self) -> None:
        if not self._uncleared:
            return
        header = _draw_header(self.header)
        self._write(None, memoryview(encode_header(header)), 0)
        self._transfers.sync(self._file)
        self.header = header
        self._uncleared = False

    def _remove(self) -> None:
        try:
            if os.path.samestat(os.lstat(self.path), os.fstat(self._file)):
                self.path.unlink()
        except OSError as error:
            log.error("disk_kv_not_cleared file=%s error=%s: delete the file", self.path, error)

    @contextmanager
    def _naming_failures(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            raise DiskFailure("disk_full" if full else "disk_io", f"{self.path}: {error}") from error

    def _erase(self, slot: int) -> None:
        # Also if the slot counts as empty: an erasure that failed has left its record.
        self._generations[slot] = 0
        self._write(None, memoryview(bytes(self.layout.record_bytes)), self.layout.record_at(slot))

    def _scan(self) -> Iterator[DiskEntry]:
        layout, drawn = self.layout, self.header.drawn
        size = layout.record_bytes
        at_once = max(1, _SCAN_BYTES // size)
        for begin in range(0, layout.slots, at_once):
            piece = self._records(begin, min(at_once, layout.slots - begin))
            if not piece.strip(b"\0"):
                continue
            for place in range(len(piece) // size):
                found = decode_record(layout, drawn, begin + place, piece[place * size : (place + 1) * size])
                if found:
                    entry, check = found
                    self._generations[entry.slot], self._checks[entry.slot] = entry.generation, check
                    yield entry

    def _records(self, begin: int, count: int) -> bytes:
        """The records of some slots, as many as can be read."""
        piece = bytearray(count * self.layout.record_bytes)
        try:
            done = self._read(None, memoryview(piece), self.layout.record_at(begin))
        except OSError as error:
            log.warning("disk_kv_failed kind=disk_io file=%s error=%s", self.path, error)
            self.failures["disk_io"] += 1
            return b""
        if done < len(piece):
            self.failures["disk_short_read"] += 1
        return bytes(piece[:done])

    def _write(self, file: int | None, data: memoryview, offset: int) -> None:
        _write_all(self._transfers, self._file if file is None else file, data, offset)

    def _read(self, file: int | None, into: memoryview, offset: int) -> int:
        return _read_all(self._transfers, self._file if file is None else file, into, offset)

    def _forget_pages(self, slot: int) -> None:
        if self._data is None:
            os.posix_fadvise(self._file, self.layout.data_at(slot), self.layout.slot_bytes, os.POSIX_FADV_DONTNEED)


def _write_all(transfers: Transfers, file: int, data: memoryview, offset: int) -> None:
    while data:
        count = transfers.write(file, data, offset)
        if count <= 0:
            raise OSError(errno.EIO, f"{count} bytes written")
        data, offset = data[count:], offset + count


def _read_all(transfers: Transfers, file: int, into: memoryview, offset: int) -> int:
    """Fill `into`; returns the bytes read, fewer only at the end of the file."""
    done = 0
    while done < len(into):
        count = transfers.read(file, into[done:], offset + done)
        if count <= 0:
            break
        done += count
    return done


def open_file(
    path: Path, identity: Identity, rank: int, slots: int, transfers: Transfers | None = None
) -> DiskFile | None:
    """Open and lock a rank's file, created and preallocated if it is new; None if another process has locked it.

    What it holds in another size or with a damaged header is dropped. Raises OSError, also if it is a link, another
    user's, not a KV file, or of another identity, version or rank; such a file is left as it is.
    """
    transfers = transfers or Transfers()
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    file = os.open(path, flags, 0o600)
    try:
        check_own(path, os.fstat(file))
        if not _lock(path, file):
            os.close(file)
            return None
        header = _formatted(path, file, Header(identity=identity, rank=rank, slots=slots, drawn=0), transfers)
        return DiskFile(path, file, header, transfers)
    except BaseException:
        os.close(file)
        raise


def check_own(path: Path, status: os.stat_result) -> None:
    """Raise OSError unless this is the status of a regular file of this user, under one name."""
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    if status.st_uid != os.geteuid():
        raise PermissionError(errno.EPERM, f"it belongs to user {status.st_uid}", str(path))
    if status.st_nlink > 1:
        raise OSError(errno.EMLINK, "it is also linked under another name", str(path))


def _lock(path: Path, file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    try:  # another process may have removed the file just before it was locked
        return os.stat(path, follow_symlinks=False).st_ino == os.fstat(file).st_ino
    except FileNotFoundError:
        return False


def _formatted(path: Path, file: int, wanted: Header, transfers: Transfers) -> Header:
    """The header of the file, which is formatted first if its own is not the wanted one."""
    first, layout = bytearray(PAGE_BYTES), _layout(wanted)
    size = os.fstat(file).st_size
    page = bytes(first[: _read_all(transfers, file, memoryview(first), 0)])
    if len(page) < min(size, PAGE_BYTES):  # what it is cannot be told, so nothing may be dropped
        raise OSError(errno.EIO, f"only {len(page)} bytes of {size} can be read", str(path))
    if not is_ours(page):
        raise OSError(errno.EEXIST, "it is not a KV file", str(path))
    held = decode_header(page)
    if held is not None and (other := _difference(held, wanted)):
        raise OSError(errno.EEXIST, f"it holds blocks of another {other}", str(path))
    if held is not None and held == _with_drawn(wanted, held.drawn) and size == layout.file_bytes:
        return held
    free = os.fstatvfs(file)
    if free.f_bavail * free.f_frsize + os.fstat(file).st_blocks * 512 < layout.file_bytes:
        raise OSError(errno.ENOSPC, f"{layout.file_bytes} bytes are needed", str(path))
    if size:
        reason = "another size" if held is not None else "damaged header"
        log.warning("disk_kv_dropped file=%s reason=%s wanted=%d blocks", path, reason, wanted.slots)
    header = _draw_header(wanted)
    # The old header goes first, so that a file is never taken for valid while it is formatted.
    os.ftruncate(file, 0)
    try:
        os.posix_fallocate(file, 0, layout.file_bytes)
    except OSError:
        os.ftruncate(file, 0)
        raise
    _write_all(transfers, file, memoryview(encode_header(header)), 0)
    transfers.sync(file)
    return header


def _difference(held: Header, wanted: Header) -> str:
    """The fields of the identity, of the version and the rank, in which two headers differ."""
    ours, theirs = wanted.identity, held.identity
    fields = [name for name in Identity.__struct_fields__ if getattr(ours, name) != getattr(theirs, name)]
    fields += [name for name in ("version", "rank") if getattr(wanted, name) != getattr(held, name)]
    return ", ".join(fields)


def _draw_header(header: Header) -> Header:
    return _with_drawn(header, SystemRandom().getrandbits(63))


def _with_drawn(header: Header, drawn: int) -> Header:
    return Header(identity=header.identity, rank=header.rank, slots=header.slots, drawn=drawn)


def _layout(header: Header) -> Layout:
    return Layout(header.identity.block_size, header.identity.block_bytes, header.slots)


def _open_direct(path: Path, file: int) -> int | None:
    """An open file, opened again to bypass the page cache; None where the file system cannot."""
    try:
        direct = os.open(path, os.O_RDWR | os.O_DIRECT | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        if os.path.samestat(os.fstat(direct), os.fstat(file)):  # nobody has put another file in its place
            os.preadv(direct, [mmap.mmap(-1, PAGE_BYTES)], 0)
            return direct
    except OSError:
        log.info("disk_kv_uses_page_cache file=%s", path)
    os.close(direct)
    return None
