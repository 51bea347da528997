"""A table in an SQLite file or in memory, bounded in rows, bytes and age: the oldest rows are deleted first.

Base class of the stores of responses and of requests. All work runs in sequence in one dedicated thread, off the event
loop. Several router processes on a machine may share a file.
"""

import asyncio
import contextlib
import os
import sqlite3
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeVar

from ..errors import RouterError

Result = TypeVar("Result")

BUSY_S = 5.0


class Bounds(NamedTuple):
    """The limits of a table."""

    rows: float
    bytes: float
    age_s: float


class SqliteStore:
    """A store in one table, which needs the columns `created` (seconds since 1970) and `bytes`."""

    def __init__(self, path: str, table: str, schema: str, wall: Callable[[], float] = time.time) -> None:
        """`path`: opened on first use; empty: in memory. `wall`: seconds since 1970."""
        self._path = path
        self._table = table
        self._schema = schema
        self._wall = wall
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=table)
        self._file: sqlite3.Connection | None = None

    def close(self) -> None:
        """Wait for all writes."""
        self._pool.submit(self._close)
        self._pool.shutdown(wait=True)

    async def _run(self, work: Callable[[], Result]) -> Result:
        """Call `work` in the thread. Raises RouterError."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, work)
        except sqlite3.Error as error:
            raise RouterError(f"the store of {self._table} failed: {error}") from error

    # In the thread

    def _open(self) -> sqlite3.Connection:
        if self._file is None:
            # Users' texts are private. SQLite gives the WAL files next to it the same permissions.
            with contextlib.suppress(OSError):
                if self._path:
                    os.close(os.open(self._path, os.O_CREAT | os.O_RDWR, 0o600))
            file = sqlite3.connect(self._path or ":memory:", timeout=BUSY_S, isolation_level=None)
            file.execute("PRAGMA journal_mode = WAL")
            file.execute("PRAGMA synchronous = NORMAL")
            file.executescript(self._schema)
            self._file = file
        return self._file

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _sweep(self, bounds: Bounds, where: str = "1") -> None:
        """Delete rows that are too old, then the oldest ones beyond the other bounds, among those `where` it holds."""
        file, table = self._open(), self._table
        file.execute(f"DELETE FROM {table} WHERE {where} AND created < ?", (self._wall() - bounds.age_s,))
        count = size = 0
        newest = f"SELECT created, bytes FROM {table} WHERE {where} ORDER BY created DESC"
        for created, length in file.execute(newest):
            count, size = count + 1, size + length
            if count > bounds.rows or size > bounds.bytes:
                file.execute(f"DELETE FROM {table} WHERE {where} AND created <= ?", (created,))
                break
