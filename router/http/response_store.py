"""Stores responses for later requests in an SQLite file that is bounded in count, bytes and age.

A response belongs to a tenant and is invisible to all others.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple

import msgspec

from ..errors import ConversationTooLong
from .sqlite_store import Bounds, Result, SqliteStore

log = logging.getLogger(__name__)

Item = dict[str, Any]

_SCHEMA = """
CREATE TABLE IF NOT EXISTS responses (
    id TEXT PRIMARY KEY, tenant BLOB NOT NULL, previous TEXT, created REAL NOT NULL, bytes INTEGER NOT NULL,
    input BLOB NOT NULL, body BLOB NOT NULL
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS by_age ON responses (created, bytes);
"""
#: Maximum number of responses in one conversation: all of them are read to continue it.
MAX_CONVERSATION = 1000
#: Pause before a missing response is looked up again: another router process may still be committing it.
RETRY_S = 0.1
#: Writes between two checks of the bounds.
WRITES_PER_SWEEP = 16


class StoreBounds(NamedTuple):
    """The limits of the store: number of responses, bytes and seconds. The oldest responses are deleted first."""

    responses: int
    bytes: int
    age_s: float
    conversation_bytes: int  #: maximum size of the items of a conversation that is continued


class StoredResponse(NamedTuple):
    """A stored response: the input items of its request, its JSON body, and the id of the previous response."""

    input: list[Item]
    body: bytes
    previous: str | None = None


class History(NamedTuple):
    """The items of a conversation, and how much JSON they were."""

    items: list[Item]
    bytes: int
    objects: int  #: upper bound


class _Made(msgspec.Struct):
    """The part of a response's body that continues the conversation."""

    output: msgspec.Raw


class ResponseStore(SqliteStore):
    """Opens `path` on first use. `wall`: seconds since 1970. Methods are called on the event loop."""

    def __init__(self, path: str, bounds: StoreBounds, wall: Callable[[], float] = time.time) -> None:
        super().__init__(path, "responses", _SCHEMA, wall)
        self._bounds = bounds
        self._writes = 0

    def put(self, tenant: bytes, response_id: str, response: StoredResponse) -> "Future[None]":
        """Store a response. Need not be awaited: later calls to this store run after the write."""
        done = self._pool.submit(self._put, tenant, response_id, response, self._wall())
        done.add_done_callback(_log_failure)
        return done

    async def get(self, tenant: bytes, response_id: str) -> StoredResponse | None:
        """A response of this tenant; None if there is none. Raises RouterError."""
        return await self._with_retry(lambda: self._get(tenant, response_id))

    async def history(self, tenant: bytes, response_id: str) -> History | None:
        """All items of the conversation that ends with this response; None if a part is gone.

        Raises ConversationTooLong and RouterError.
        """
        return await self._with_retry(lambda: self._history(tenant, response_id))

    async def delete(self, tenant: bytes, response_id: str) -> bool:
        """Delete a response. Returns whether it existed. Raises RouterError."""
        return await self._run(lambda: self._delete(tenant, response_id))

    async def _with_retry(self, work: Callable[[], Result | None]) -> Result | None:
        found = await self._run(work)
        if found is None:
            await asyncio.sleep(RETRY_S)
            found = await self._run(work)
        return found

    # In the thread

    def _put(self, tenant: bytes, response_id: str, response: StoredResponse, created: float) -> None:
        given = msgspec.json.encode(response.input)
        row = (response_id, tenant, response.previous, created, len(given) + len(response.body), given, response.body)
        self._open().execute("INSERT OR REPLACE INTO responses VALUES (?, ?, ?, ?, ?, ?, ?)", row)
        self._writes += 1
        if self._writes % WRITES_PER_SWEEP == 1:
            bounds = self._bounds
            self._sweep(Bounds(bounds.responses, bounds.bytes, bounds.age_s))

    def _row(self, tenant: bytes, response_id: str) -> tuple[bytes, bytes, str | None] | None:
        """The input, body and previous response of a response."""
        found: tuple[bytes, bytes, str | None] | None = (
            self._open()
            .execute(
                "SELECT input, body, previous FROM responses WHERE id = ? AND tenant = ? AND created >= ?",
                (response_id, tenant, self._wall() - self._bounds.age_s),
            )
            .fetchone()
        )
        return found

    def _get(self, tenant: bytes, response_id: str) -> StoredResponse | None:
        row = self._row(tenant, response_id)
        return None if row is None else StoredResponse(msgspec.json.decode(row[0]), *row[1:])

    def _history(self, tenant: bytes, response_id: str) -> History | None:
        lists: list[bytes] = []  # of items, as JSON, the last one first
        size, most = 0, self._bounds.conversation_bytes
        left: str | None = response_id
        while left is not None:
            row = self._row(tenant, left)
            if row is None:
                return None
            given, body, left = row
            made = bytes(msgspec.json.decode(body, type=_Made).output)
            lists += made, given
            size += len(made) + len(given)
            if len(lists) > 2 * MAX_CONVERSATION:
                raise ConversationTooLong(f"{MAX_CONVERSATION} stored responses")
            if size > most:
                raise ConversationTooLong(f"{most} bytes of stored items")
        items = [item for each in reversed(lists) for item in msgspec.json.decode(each)]
        return History(items, size, sum([each.count(b"{") for each in lists]))

    def _delete(self, tenant: bytes, response_id: str) -> bool:
        done = self._open().execute("DELETE FROM responses WHERE id = ? AND tenant = ?", (response_id, tenant))
        return done.rowcount > 0


def _log_failure(done: "Future[None]") -> None:
    if not done.cancelled() and (error := done.exception()) is not None:
        log.warning("response_not_stored reason=%r", f"{type(error).__name__}: {error}")
