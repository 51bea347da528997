"""Accounts of tenants that several router processes keep together: one file, mapped by all of them.

Shell under meter.py, which says what the numbers mean. The processes are on one machine, as they share a port, and so
they share its monotonic clock, too. A record is a tenant's digest and its numbers, each a double, at first 0: the spent
part of both rates with its time, and for each router how many requests it runs. Whoever changes a record locks it, so
that limits hold exactly, however unevenly the kernel deals out connections and whichever router is lost. The lock of a
process that dies is open again.
"""

import fcntl
import mmap
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from struct import calcsize

from .api_keys import DIGEST_BYTES
from .rate_limits import Book

_DOUBLE = calcsize("d")
#: Numbers of the two rates, before those of the routers.
_RATES = 4


class SharedAccounts:
    """The accounts as one of `seats` routers sees them; its own numbers are those of `seat`."""

    def __init__(self, path: Path, *, seat: int, seats: int) -> None:
        """Makes the file where it is not there. Raises OSError."""
        assert 0 <= seat < seats, f"router {seat} of {seats}"
        self._path = path
        self._record = DIGEST_BYTES + (_RATES + seats) * _DOUBLE
        self._seat = seat
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)

    def books(self, tenants: Sequence[bytes]) -> dict[bytes, Book]:
        """The accounts of the tenants with these digests. What an earlier process of this seat ran is over."""
        places = self._enrol(tenants)
        if not places:
            return {}
        content = memoryview(mmap.mmap(self._file, 0))
        return {tenant: self._book(content, places[tenant]) for tenant in tenants}

    def close(self) -> None:
        """With the cluster: the file goes, and who has it open yet still has it. A router that dies leaves it."""
        os.close(self._file)
        self._path.unlink(missing_ok=True)

    def _enrol(self, tenants: Sequence[bytes]) -> dict[bytes, int]:
        """Where each tenant's record begins; a tenant without one gets it at the end."""
        with _Lock(self._file, 0, 0):
            content = os.pread(self._file, os.fstat(self._file).st_size, 0)
            places = {content[at : at + DIGEST_BYTES]: at for at in range(0, len(content), self._record)}
            missing = [tenant for tenant in tenants if tenant not in places]
            os.pwrite(self._file, b"".join([tenant.ljust(self._record, b"\0") for tenant in missing]), len(content))
        return places | {tenant: len(content) + self._record * number for number, tenant in enumerate(missing)}

    def _book(self, content: memoryview, place: int) -> Book:
        numbers = content[place + DIGEST_BYTES : place + self._record].cast("d")
        lock = _Lock(self._file, place, self._record)
        with lock:
            numbers[_RATES + self._seat] = 0.0
        return Book(numbers[:2], numbers[2:_RATES], numbers[_RATES:], self._seat, lock)


class _Lock(AbstractContextManager[None]):
    """A part of the file, held by one process at a time; a length of 0 is all that there is and will be."""

    __slots__ = ("_file", "_length", "_start")

    def __init__(self, file: int, start: int, length: int) -> None:
        self._file = file
        self._start = start
        self._length = length

    def __enter__(self) -> None:
        fcntl.lockf(self._file, fcntl.LOCK_EX, self._length, self._start)

    def __exit__(self, *_: object) -> None:
        fcntl.lockf(self._file, fcntl.LOCK_UN, self._length, self._start)
