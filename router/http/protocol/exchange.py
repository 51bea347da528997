"""One request and its response, as endpoints see them. Sockets and framing are in `connection.py`.

An exchange ends once: with a whole response, at the end of a stream, or because the client left. Anything sent after
that is dropped, so endpoints need not check whether the client is still connected.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from ...backend import Forecast
from ...errors import RouterError

if TYPE_CHECKING:
    from ...activity import ChoiceRecord
    from .connection import HttpConnection

JSON = "application/json"
EVENTS = "text/event-stream; charset=utf-8"
#: Status in metrics and log of a request whose client left (nginx's number); it is never sent.
CLIENT_GONE = 499

Headers = Iterable[tuple[str, object]]


class ClientGoneError(Exception):
    """The client disconnected before its request was dispatched, so there is nobody to respond to."""


class Request(msgspec.Struct, frozen=True, gc=False):
    """A request as the client sent it."""

    method: str
    path: str  #: decoded, without the query
    headers: Mapping[str, str]  #: names in lower case; the values of a repeated name are joined by commas
    body: bytes
    keep_alive: bool
    http_1_0: bool = False
    receive_s: float = 0.0  #: seconds from its first byte to its last


class GenerationSummary(msgspec.Struct):
    """The figures of one generation, for usage, access log and spans."""

    tenant: str
    replicas: str
    prompt_tokens: int
    predicted_tokens: int  #: cached tokens that the routing decision expected
    cached_tokens: int
    output_tokens: int
    ttft_s: float | None
    reasoning_tokens: int = 0  #: included in `output_tokens`
    pinned_tokens: int = 0  #: prompt tokens that are now pinned
    #: from the request's last byte until the first choice was sent to a replica, tokenizing included; None: it was not
    queue_s: float | None = None
    session: str | None = None  #: the conversation, as the client named it
    agent: str | None = None  #: the agent within the session
    parent: str | None = None  #: the agent that started that agent
    forecast: Forecast | None = None  #: what the decision for the first choice expected, and why it was taken
    moves: int = 0  #: how often choices continued on another replica
    model: str = ""  #: the name that requests use
    waited_s: float | None = None  #: from the arrival at the first choice's replica to its first step; None: unknown
    loaded_tokens: dict[str, int] = {}  #: the part of `cached_tokens` loaded from tiers, by medium
    choices: "Sequence[ChoiceRecord]" = ()  #: what became of the first of them
    hidden: int = 0  #: number of further choices

    def phases(self, total_s: float) -> dict[str, float]:
        """The seconds of each phase that has begun, by name. `total_s`: from the request's last byte to its end."""
        if self.ttft_s is None:
            if self.queue_s is None:
                return {}
            return {"queue_s": self.queue_s, "prefill_s": max(0.0, total_s - self.queue_s)}
        # A first token that came before another choice was sent counts all its time as prefill.
        queue_s = min(self.queue_s or 0.0, self.ttft_s)
        spent, prefill_s = {"queue_s": queue_s}, self.ttft_s - queue_s
        if self.waited_s is not None:
            spent["wait_s"] = min(self.waited_s, prefill_s)
            prefill_s -= spent["wait_s"]
        return spent | {"prefill_s": prefill_s, "decode_s": max(0.0, total_s - self.ttft_s)}


class Exchange(msgspec.Struct, eq=False):
    """A request in progress. Used on the event loop's thread only."""

    request: Request
    wire: "HttpConnection"
    id: str
    started_at: float  #: monotonic seconds at which the request was complete
    on_end: Callable[["Exchange"], None]
    status: int | None = None  #: None: no head was sent
    over: bool = False
    gone: bool = False  #: the client left before the end
    on_gone: Callable[[], object] | None = None  #: called once, when the client leaves
    summary: GenerationSummary | None = None
    extra_headers: Headers = ()  #: sent with every response, errors included
    #: Encodes the body of an error response; None: OpenAI's format.
    error_body: Callable[[RouterError], bytes] | None = None
    call_endpoint: Callable[["Exchange"], None] | None = None  #: calls the endpoint again
    tenant: str = ""  #: the caller's name for logs; empty: the endpoint asks for no key
    model: str = ""  #: the model that the request named; empty: not read, or none
    error: RouterError | None = None  #: the error that ended it
    blocked_s: float = 0.0  #: seconds in which the client did not read; set at the end
    departure: tuple[int, str | None] | None = None  #: see `RequestRecord.departure`
    generation: Any = None  #: the running choices (`Generation`), if it generates
    span: Any = None  #: OpenTelemetry's span, if requests are traced
    names: Sequence[str] = ()  #: by which it can be aborted, besides its id
    traceparent: str = ""  #: W3C trace context that is passed on with the request

    def respond(self, body: bytes, *, status: int = 200, content_type: str = JSON, headers: Headers = ()) -> None:
        self.respond_in([body], status=status, content_type=content_type, headers=headers)

    def respond_in(
        self, pieces: Sequence[bytes], *, status: int = 200, content_type: str = JSON, headers: Headers = ()
    ) -> None:
        """Respond with a body in pieces. However long it is, nothing waits for its being sent."""
        if self.over:
            return
        assert self.status is None, f"second response: {self.status}, then {status}"
        self.status = status
        length = sum(map(len, pieces))
        self.wire.send_head(self, [("content-type", content_type), *headers, *self.extra_headers], length)
        self.wire.send_body(pieces, length)
        self._finish()

    def begin_stream(self, headers: Headers) -> None:
        if self.over:
            return
        self.status = 200
        # nginx and others like it would collect the events of a second before they pass them on.
        fixed = [("content-type", EVENTS), ("cache-control", "no-cache"), ("x-accel-buffering", "no")]
        self.wire.send_head(self, [*fixed, *headers, *self.extra_headers], None)

    def send(self, data: bytes) -> None:
        """Send a non-empty part of the stream."""
        if not self.over:
            self.wire.send_chunk(data)

    def end(self, data: bytes = b"") -> None:
        """End the stream, with its last part."""
        if not self.over:
            self.wire.end_stream(data)
            self._finish()

    def end_in(self, pieces: Sequence[bytes]) -> None:
        """End the stream with a last part in pieces. However long it is, nothing waits for its being sent."""
        if not self.over:
            self.wire.end_stream_in(pieces)
            self._finish()

    def restart(self) -> None:
        """Process the request as if it had just arrived, because its model was replaced. Does nothing after the end."""
        if self.over:
            return
        assert self.status is None, f"restart after a response with status {self.status}"
        assert self.call_endpoint is not None, "an exchange without an endpoint"
        self.on_gone = None
        self.call_endpoint(self)

    def client_left(self) -> None:
        """End the exchange because the client closed the connection. Does nothing after the end."""
        if self.over:
            return
        self.over = self.gone = True
        self.status = CLIENT_GONE
        self.blocked_s = self.wire.blocked_s
        if self.on_gone is not None:
            self.on_gone()
        self.on_end(self)

    def _finish(self) -> None:
        self.over = True
        self.on_gone = None
        self.blocked_s = self.wire.blocked_s
        self.on_end(self)
        self.wire.exchange_over()
