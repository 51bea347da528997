"""Questions about requests between the router processes of one cluster, each of which knows only its own requests.

Every process has a Unix socket in a folder that only its user may enter. A connection carries one question and one
answer, each ended by the end of the stream. A process that does not run has no requests; one that does not answer in
time is named, because a request may be there.
"""

import asyncio
import logging
import os
import stat
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from ..activity import RequestRecord
from .history import RequestQuery

log = logging.getLogger(__name__)

#: A process answers between two iterations of its event loop. Longer than a garbage collection, shorter than a client's
#: patience.
ANSWER_TIMEOUT_S = 2.0
#: Time in which a question must have arrived, so that no connection stays open.
QUESTION_TIMEOUT_S = 10.0


class FindRequests(msgspec.Struct, frozen=True, tag=True):
    """Which requests fit?"""

    query: RequestQuery


class FindRequest(msgspec.Struct, frozen=True, tag=True):
    """What became of this request?"""

    request_id: str


class EndRequest(msgspec.Struct, frozen=True, tag=True):
    """End this request, for an admin; the answer is what had become of it, if it was in progress."""

    request_id: str
    by: str  #: the admin's tenant, for the log


class AbortRequests(msgspec.Struct, frozen=True, tag=True):
    """End a tenant's requests in progress, for the tenant; the answer is empty."""

    tenant: str
    names: list[str] | None  #: ids of requests or responses; None: all of the tenant's


Question = FindRequests | FindRequest | EndRequest | AbortRequests
#: Answers a question from the requests of this process.
Answerer = Callable[[Question], Awaitable[list[RequestRecord]]]

_encode = msgspec.msgpack.Encoder().encode
_question = msgspec.msgpack.Decoder(Question)
_answer = msgspec.msgpack.Decoder(list[RequestRecord])


@dataclass(slots=True)
class Answers:
    """What the other processes answered."""

    records: list[RequestRecord] = field(default_factory=list)
    silent: list[int] = field(default_factory=list)  #: seats of the processes that did not answer


class Siblings:
    """The router process in `seat` of `seats`, and the others."""

    def __init__(self, folder: Path, *, seat: int, seats: int, timeout_s: float = ANSWER_TIMEOUT_S) -> None:
        """Create the folder if necessary. Raises OSError, also if somebody else owns it or may enter it."""
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise PermissionError(f"{folder} is not a folder that only this user may enter")
        self._folder = folder
        self._seat = seat
        self._others = [other for other in range(seats) if other != seat]
        self._timeout_s = timeout_s
        self._server: asyncio.Server | None = None
        self._answering: set[asyncio.StreamWriter] = set()

    async def start(self, answer: Answerer) -> None:
        """Answer the others' questions. Replaces the socket that a killed process in this seat left behind."""
        path = self._path(self._seat)
        path.unlink(missing_ok=True)

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self._answering.add(writer)
            try:
                question = _question.decode(await asyncio.wait_for(reader.read(), QUESTION_TIMEOUT_S))
                writer.write(_encode(await answer(question)))
                await asyncio.wait_for(writer.drain(), QUESTION_TIMEOUT_S)
            except (OSError, TimeoutError, msgspec.MsgspecError) as error:
                log.warning("sibling_not_answered reason=%r", f"{type(error).__name__}: {error}")
            finally:
                self._answering.discard(writer)
                writer.close()

        self._server = await asyncio.start_unix_server(serve, path)
        path.chmod(0o600)

    async def ask(self, question: Question) -> Answers:
        """The answers of all other processes that run."""
        encoded, answers = _encode(question), Answers()
        found = await asyncio.gather(*(self._ask(other, encoded) for other in self._others))
        for seat, records in zip(self._others, found, strict=True):
            if records is None:
                answers.silent.append(seat)
            else:
                answers.records += records
        return answers

    async def _ask(self, seat: int, question: bytes) -> Sequence[RequestRecord] | None:
        """A process's answer; nothing if it does not run, None if it does not answer."""
        try:
            return await asyncio.wait_for(self._exchange(self._path(seat), question), self._timeout_s)
        except (FileNotFoundError, ConnectionRefusedError):
            return ()
        except (OSError, TimeoutError, msgspec.MsgspecError) as error:
            log.warning("sibling_silent router=%d reason=%r", seat, f"{type(error).__name__}: {error}")
            return None

    @staticmethod
    async def _exchange(path: Path, question: bytes) -> list[RequestRecord]:
        reader, writer = await asyncio.open_unix_connection(path)
        try:
            writer.write(question)
            writer.write_eof()
            return _answer.decode(await reader.read())
        finally:
            writer.close()

    async def close(self) -> None:
        """Answer no more. The last process removes the folder."""
        if self._server is None:
            return
        self._server.close()
        for writer in self._answering:
            writer.close()
        self._path(self._seat).unlink(missing_ok=True)
        with suppress(OSError):
            self._folder.rmdir()

    def _path(self, seat: int) -> Path:
        return self._folder / str(seat)
