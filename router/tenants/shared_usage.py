"""Tenants' usage shared between router processes, in one file that all of them map into memory.

`rate_limits.py` explains the numbers. The processes share a port, so they run on one machine and have the same
monotonic clock. A record is a tenant's digest followed by doubles, initially 0: the used part of both rates, each with
its time, and the number of running requests per router. A record is locked for each change, so the limits hold exactly,
no matter how unevenly the kernel distributes connections or which router dies. The kernel releases the locks of a
process that dies.
"""

import fcntl
import mmap
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from struct import calcsize

from .api_keys import DIGEST_BYTES
from .rate_limits import UsageRecord

_DOUBLE = calcsize("d")
#: Doubles for the two rates, which precede the per-router numbers.
_RATES = 4


class SharedUsage:
    """The shared file as used by router number `seat` of `seats`."""

    def __init__(self, path: Path, *, seat: int, seats: int) -> None:
        """Open the file; create it if it does not exist. Raises OSError."""
        assert 0 <= seat < seats, f"router {seat} of {seats}"
        self._path = path
        self._record_bytes = DIGEST_BYTES + (_RATES + seats) * _DOUBLE
        self._seat = seat
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)

    def records(self, tenants: Sequence[bytes]) -> dict[bytes, UsageRecord]:
        """Records by tenant digest, added where missing. Resets running requests of this seat's previous process."""
        with _Lock(self._file, 0, 0):
            content = os.pread(self._file, os.fstat(self._file).st_size, 0)
            places = {content[at : at + DIGEST_BYTES]: at for at in range(0, len(content), self._record_bytes)}
            missing = [tenant for tenant in tenants if tenant not in places]
            new = b"".join([tenant.ljust(self._record_bytes, b"\0") for tenant in missing])
            os.pwrite(self._file, new, len(content))
        places |= {tenant: len(content) + self._record_bytes * number for number, tenant in enumerate(missing)}
        if not places:
            return {}
        shared = memoryview(mmap.mmap(self._file, 0))
        return {tenant: self._record(shared, places[tenant]) for tenant in tenants}

    def close(self) -> None:
        """Delete the file. Other processes that have it open can still use it; after a crash the file remains."""
        os.close(self._file)
        self._path.unlink(missing_ok=True)

    def _record(self, shared: memoryview, place: int) -> UsageRecord:
        numbers = shared[place + DIGEST_BYTES : place + self._record_bytes].cast("d")
        lock = _Lock(self._file, place, self._record_bytes)
        with lock:
            numbers[_RATES + self._seat] = 0.0
        return UsageRecord(numbers[:2], numbers[2:_RATES], numbers[_RATES:], self._seat, lock)


class _Lock(AbstractContextManager[None]):
    """An exclusive lock between processes on a part of the file; length 0 extends to the end of the file."""

    __slots__ = ("_file", "_length", "_start")

    def __init__(self, file: int, start: int, length: int) -> None:
        self._file = file
        self._start = start
        self._length = length

    def __enter__(self) -> None:
        fcntl.lockf(self._file, fcntl.LOCK_EX, self._length, self._start)

    def __exit__(self, *_: object) -> None:
        fcntl.lockf(self._file, fcntl.LOCK_UN, self._length, self._start)
