"""One request at an external engine: the events of its answer in, outputs as our own replicas send them out.

Pure; knows no connection. The answer's last output waits for the end of the stream, because only there engines report
how many prompt tokens they had cached.
"""

from collections.abc import Callable

import msgspec

from ....replica.messages import Generate, Refused, TokenOutput
from ...backend import TextOutput
from ...text.parsers.deltas import ToolCallStart
from .wire import EventStreamParser, EventTooLongError, Piece, error_message, read_piece

#: Enough of an error answer for its message.
_MAX_ERROR_BYTES = 64 * 1024
#: Statuses with which an engine answers a request that no engine would accept.
_CLIENT_ERRORS = frozenset({400, 413, 422})


class ExternalRequest:
    """An `AnswerSink` (http_client.py) for one `Generate`."""

    def __init__(
        self,
        generate: Generate,
        on_reply: Callable[["ExternalRequest", TokenOutput | TextOutput | Refused], None],
        *,
        eos_token_ids: frozenset[int],
        uncached_tokens: int,
        now: float,
    ) -> None:
        """`on_reply` gets the outputs; the last one has a finish reason or is a refusal."""
        self.generate = generate
        self.request_id = generate.request_id
        self.uncached_tokens = uncached_tokens  #: of the prompt, as expected when it was sent
        self.sent_at = self.heard_at = now
        self.generated = 0  #: by this engine
        self.cached_tokens: int | None = None
        self.closed = False
        self._on_reply = on_reply
        self._stops = frozenset(generate.sampling.stop_token_ids) | (
            frozenset() if generate.sampling.ignore_eos else eos_token_ids
        )
        self._before = len(generate.token_ids) // 4 - generate.prompt_tokens
        self._status = 0
        self._calls = 0  #: tool calls of a chat
        self._error = b""
        self._parser = EventStreamParser()
        self._last: TokenOutput | TextOutput | None = None

    @property
    def context_tokens(self) -> int:
        return len(self.generate.token_ids) // 4 + self.generated

    # From the connection

    def head(self, status: int) -> None:
        self._status = status

    def body(self, data: bytes) -> None:
        if self._status != 200:
            self._error = (self._error + data)[:_MAX_ERROR_BYTES]
            return
        try:
            for event in self._parser.feed(data):
                self._take(read_piece(event, self._calls))
        except (msgspec.DecodeError, UnicodeDecodeError, EventTooLongError) as error:
            self._refuse(f"its answer cannot be read: {error}")

    def end(self, broken: str | None) -> None:
        if self.closed:
            return
        if broken is None and self._status != 200:
            message = error_message(self._error)
            if self._status in _CLIENT_ERRORS:
                self._close(Refused(request_id=self.request_id, reason="invalid", message=message))
            else:
                self._refuse(f"it answers {self._status}: {message}")
        elif self._last is not None:
            self.closed = True
            self._on_reply(self, msgspec.structs.replace(self._last, cached_tokens=self.cached_tokens))
        else:
            self._refuse(broken or "its answer ends without a finish reason")

    # The answer

    def _take(self, piece: Piece) -> None:
        if self.closed:
            return
        if piece.cached_tokens is not None:
            self.cached_tokens = piece.cached_tokens
        if piece.error is not None:
            self._refuse(piece.error)
        elif piece.finish_reason == "abort":
            self._refuse("it aborted the answer")
        elif piece.done:
            self.end(None)
        elif piece.token_ids or piece.text or piece.deltas or piece.finish_reason:
            output = self._text(piece) if piece.token_ids is None else self._tokens(piece, piece.token_ids)
            if piece.finish_reason is not None:
                self._last = output
                return
            self._on_reply(self, output)

    def _tokens(self, piece: Piece, token_ids: list[int]) -> TokenOutput:
        index = self._before + self.generated
        first = not self.generated
        self.generated += len(token_ids)
        # A token that ended the answer has no text.
        stopped = piece.finish_reason == "stop" and token_ids and token_ids[-1] in self._stops
        return TokenOutput(
            self.request_id,
            index,
            token_ids,
            finish_reason=piece.finish_reason,
            logprobs=piece.logprobs,
            stop_token_id=token_ids[-1] if stopped else None,
            pinned_tokens=0 if first and self.generate.pins else None,
        )

    def _text(self, piece: Piece) -> TextOutput:
        """Token counts of text come from the usage beside it; without usage a piece of text counts as one token."""
        if piece.deltas:
            self._calls += sum([isinstance(each, ToolCallStart) for each in piece.deltas])
        counted = piece.completion_tokens
        generated = self.generated + bool(piece.text or piece.deltas) if counted is None else counted
        fresh, self.generated = max(0, generated - self.generated), max(generated, self.generated)
        return TextOutput(self.request_id, piece.text, fresh, piece.finish_reason, deltas=piece.deltas)

    def _refuse(self, reason: str) -> None:
        self._close(Refused(request_id=self.request_id, reason="internal", message=reason, retry=True))

    def _close(self, refusal: Refused) -> None:
        if not self.closed:
            self.closed = True
            self._on_reply(self, refusal)
