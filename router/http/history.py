"""The history of requests: what became of each, and why it went where it did, for look-ups by id.

In memory or, to survive a restart, in an SQLite file. Bounded in bytes; refused requests have a share of their own, so
that a flood of them does not push the others out. Holds no text of prompts and answers, but ids that clients chose and
tenants' names, so only admins may read it.
"""

import asyncio
import logging
import time
import zlib
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from math import inf
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from ..activity import RequestRecord
from .sqlite_store import Bounds, SqliteStore

log = logging.getLogger(__name__)

#: Maximum age and number of records that are not written yet.
FLUSH_S = 0.25
FLUSH_RECORDS = 256
#: Records between two checks of the bounds.
RECORDS_PER_SWEEP = 512
#: Share of the bytes for refused requests.
REFUSED_SHARE = 0.25
#: Memory of a row besides its record.
ROW_BYTES = 150

_SCHEMA = """
CREATE TABLE IF NOT EXISTS requests (
    number INTEGER PRIMARY KEY, id TEXT NOT NULL, created REAL NOT NULL, state TEXT NOT NULL, refused INTEGER NOT NULL,
    tenant TEXT NOT NULL, model TEXT NOT NULL, hit_limit TEXT, first_token REAL, bytes INTEGER NOT NULL,
    record BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS requests_by_id ON requests (id);
CREATE INDEX IF NOT EXISTS requests_by_age ON requests (refused, created, bytes);
"""
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(RequestRecord).decode

State = Literal["running", "finished", "refused", "failed", "gone"]


_Named = Annotated[str, Meta(max_length=1024)]


class RequestQuery(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Which requests to list; null: any."""

    state: State | None = None
    tenant: _Named | None = None
    model: _Named | None = None
    limit: _Named | None = None  #: the limit that refused or ended them
    slowest: bool = False  #: those that waited longest for their first token first, instead of the newest
    most: Annotated[int, Meta(ge=1, le=1000)] = 100

    def fits(self, record: RequestRecord) -> bool:
        limit = record.error.limit if record.error is not None else None
        return (
            (self.state is None or self.state == record.state)
            and (self.tenant is None or self.tenant == record.tenant)
            and (self.model is None or self.model == record.model)
            and (self.limit is None or self.limit == limit)
        )

    def merge(self, records: Iterable[RequestRecord]) -> list[RequestRecord]:
        """The requests to list of what several routers found, each once, in the order of the query."""
        distinct = {(record.id, record.at): record for record in records}.values()
        return sorted(distinct, key=self._place)[: self.most]

    def _place(self, record: RequestRecord) -> float:
        if self.state == "running":
            return record.at
        return -(record.ttft_s or 0.0) if self.slowest else -record.at


class RequestHistory(SqliteStore):
    """The records of requests that are over. Methods are called on the event loop."""

    def __init__(self, path: str, most_bytes: int, wall: Callable[[], float] = time.time) -> None:
        """`path`: a file; empty: in memory."""
        super().__init__(path, "requests", _SCHEMA, wall)
        self._most_bytes = most_bytes
        self._unwritten: list[RequestRecord] = []
        self._timer: asyncio.TimerHandle | None = None
        self._written = 0
        self._lost = False

    def put(self, record: RequestRecord) -> None:
        self._unwritten.append(record)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(FLUSH_S, self._flush)
        elif len(self._unwritten) >= FLUSH_RECORDS:
            self._flush()

    async def find(self, request_id: str) -> RequestRecord | None:
        """The newest request with this id; None if there is none. Raises RouterError."""
        self._flush()
        return await self._run(lambda: self._find(request_id))

    async def search(self, query: RequestQuery) -> list[RequestRecord]:
        """The requests that fit, newest or slowest first. Raises RouterError."""
        self._flush()
        return await self._run(lambda: self._search(query))

    def close(self) -> None:
        self._flush()
        super().close()

    def _flush(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._unwritten:
            records, self._unwritten = self._unwritten, []
            self._pool.submit(self._write, records).add_done_callback(self._note_failure)

    def _note_failure(self, done: "Future[None]") -> None:
        if not done.cancelled() and (error := done.exception()) is not None and not self._lost:
            self._lost = True
            log.warning("request_history_lost file=%s reason=%r", self._path, f"{type(error).__name__}: {error}")

    # In the thread

    def _write(self, records: list[RequestRecord]) -> None:
        file = self._open()
        file.execute("BEGIN")
        try:
            file.executemany(
                "INSERT INTO requests "
                "(id, created, state, refused, tenant, model, hit_limit, first_token, bytes, record) "
                "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                map(_row, records),
            )
            file.execute("COMMIT")
        except BaseException:
            if file.in_transaction:  # else every later batch would fail, too
                file.execute("ROLLBACK")
            raise
        if self._written // RECORDS_PER_SWEEP < (self._written + len(records)) // RECORDS_PER_SWEEP:
            refused = self._most_bytes * REFUSED_SHARE
            self._sweep(Bounds(inf, self._most_bytes - refused, inf), "refused = 0")
            self._sweep(Bounds(inf, refused, inf), "refused = 1")
        self._written += len(records)

    def _find(self, request_id: str) -> RequestRecord | None:
        sql = "SELECT record FROM requests WHERE id = ? ORDER BY number DESC LIMIT 1"
        found = self._open().execute(sql, (request_id,)).fetchone()
        return None if found is None else _decode(zlib.decompress(found[0]))

    def _search(self, query: RequestQuery) -> list[RequestRecord]:
        columns = {"state": query.state, "tenant": query.tenant, "model": query.model, "hit_limit": query.limit}
        named = {name: value for name, value in columns.items() if value is not None}
        where = " AND ".join([f"{name} = ?" for name in named]) or "1"
        order = "first_token DESC" if query.slowest else "number DESC"
        sql = f"SELECT record FROM requests WHERE {where} ORDER BY {order} LIMIT ?"
        rows = self._open().execute(sql, (*named.values(), query.most))
        return [_decode(zlib.decompress(record)) for (record,) in rows]


def _row(record: RequestRecord) -> tuple[object, ...]:
    content = zlib.compress(_encode(record), 1)
    limit = record.error.limit if record.error is not None else None
    named = record.id, record.at, record.state, record.state == "refused", record.tenant, record.model, limit
    return *named, record.ttft_s, len(content) + ROW_BYTES, content
