"""One request and its answer, as endpoints see them. Knows HTTP's words; sockets and framing are connection.py's.

An exchange ends once: with a whole response, at the end of a stream, or because the client left. What is sent after
that goes nowhere, so that whoever writes an answer need not watch the client.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

import msgspec

JSON = "application/json"
EVENTS = "text/event-stream; charset=utf-8"
#: Status in metrics and log of a request whose client left (nginx' number); nobody receives it.
CLIENT_GONE = 499

Headers = Iterable[tuple[str, object]]


class Request(msgspec.Struct, frozen=True, gc=False):
    """What the client sent."""

    method: str
    path: str  #: decoded, without the query
    headers: Mapping[str, str]  #: names in lower case; of a name given twice, the values joined by commas
    body: bytes
    keep_alive: bool
    http_1_0: bool = False


class Account(msgspec.Struct):
    """What the access log tells of a generation."""

    tenant: str
    replicas: str
    prompt_tokens: int
    predicted_tokens: int  #: cached ones that the decision expected
    cached_tokens: int
    output_tokens: int
    ttft_s: float | None


class Wire(Protocol):
    """The connection of an exchange."""

    def send_head(self, exchange: "Exchange", headers: Headers, length: int | None) -> None:
        """The status line and the headers; without a `length` a stream of chunks follows."""

    def send_body(self, data: bytes) -> None:
        """A whole body, behind its head."""

    def send_chunk(self, data: bytes) -> None:
        """A piece of a stream; never empty."""

    def end_stream(self) -> None:
        """No piece follows."""

    def exchange_over(self) -> None:
        """The next request may be answered."""


class Exchange(msgspec.Struct, eq=False):
    """A request under way. Used in the loop's thread."""

    request: Request
    wire: Wire
    id: str
    started_at: float  #: monotonic seconds: its head was there
    when_over: Callable[["Exchange"], None]
    status: int | None = None  #: None: no head was sent
    over: bool = False
    gone: bool = False  #: the client left before the end
    on_gone: Callable[[], None] | None = None  #: called once, when it leaves
    account: Account | None = None
    notes: Headers = ()  #: headers that the answer carries, whatever it is
    again: Callable[["Exchange"], None] | None = None  #: has its endpoint called once more

    def respond(self, body: bytes, *, status: int = 200, content_type: str = JSON, headers: Headers = ()) -> None:
        """The whole answer."""
        if self.over:
            return
        assert self.status is None, f"answered twice: {self.status}, then {status}"
        self.status = status
        self.wire.send_head(self, [("content-type", content_type), *headers, *self.notes], len(body))
        self.wire.send_body(body)
        self._finish()

    def begin_stream(self, headers: Headers) -> None:
        """The head of a stream of events."""
        if self.over:
            return
        self.status = 200
        self.wire.send_head(
            self, [("content-type", EVENTS), ("cache-control", "no-cache"), *headers, *self.notes], None
        )

    def send(self, data: bytes) -> None:
        """A piece of the stream; never empty."""
        if not self.over:
            self.wire.send_chunk(data)

    def end(self) -> None:
        """The end of the stream."""
        if not self.over:
            self.wire.end_stream()
            self._finish()

    def begin_anew(self) -> None:
        """As if the request came just now: what it was asked of is gone. Harmless when the client is, too."""
        if self.over:
            return
        assert self.status is None, f"to begin anew, answered {self.status}"
        assert self.again is not None, "nobody calls the endpoint again"
        self.on_gone = None
        self.again(self)

    def lose(self) -> None:
        """The client left. Harmless when the exchange is over."""
        if self.over:
            return
        self.over = self.gone = True
        self.status = CLIENT_GONE
        if self.on_gone is not None:
            self.on_gone()
        self.when_over(self)

    def _finish(self) -> None:
        self.over = True
        self.on_gone = None
        self.when_over(self)
        self.wire.exchange_over()
