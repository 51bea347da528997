"""Usage of tenants that several router processes share: one file, mapped by all of them.

`rate_limits.py` says what the numbers mean. The processes share a port, so they run on one machine and have the same
monotonic clock. A record is a tenant's digest followed by doubles, initially 0: the used part of both rates, each with
its time, and the number of running requests of each router. A record is locked for each change, so the limits hold
exactly, however unevenly the kernel distributes connections and whichever router dies. The kernel releases the locks of
a process that dies.
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
#: Numbers of the two rates, which precede those of the routers.
_RATES = 4


class SharedUsage:
    """The records as router `seat` of `seats` sees them."""

    def __init__(self, path: Path, *, seat: int, seats: int) -> None:
        """Creates the file if it does not exist. Raises OSError."""
        assert 0 <= seat < seats, f"router {seat} of {seats}"
        self._path = path
        self._record_bytes = DIGEST_BYTES + (_RATES + seats) * _DOUBLE
        self._seat = seat
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)

    def records(self, tenants: Sequence[bytes]) -> dict[bytes, UsageRecord]:
        """The records of the tenants with these digests. Clears what an earlier process of this seat was running."""
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
        """Remove the file at the end of the cluster; processes that have it open keep it. A crash leaves it behind."""
        os.close(self._file)
        self._path.unlink(missing_ok=True)

    def _record(self, shared: memoryview, place: int) -> UsageRecord:
        numbers = shared[place + DIGEST_BYTES : place + self._record_bytes].cast("d")
        lock = _Lock(self._file, place, self._record_bytes)
        with lock:
            numbers[_RATES + self._seat] = 0.0
        return UsageRecord(numbers[:2], numbers[2:_RATES], numbers[_RATES:], self._seat, lock)


class _Lock(AbstractContextManager[None]):
    """A part of the file, locked by one process at a time; a length of 0 means everything from there on."""

    __slots__ = ("_file", "_length", "_start")

    def __init__(self, file: int, start: int, length: int) -> None:
        self._file = file
        self._start = start
        self._length = length

    def __enter__(self) -> None:
        fcntl.lockf(self._file, fcntl.LOCK_EX, self._length, self._start)

    def __exit__(self, *_: object) -> None:
        fcntl.lockf(self._file, fcntl.LOCK_UN, self._length, self._start)
