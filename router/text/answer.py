"""One answer as it grows: token deltas in, safe text and the tokens behind it out.

Pure state that joins detokenizer, stop strings and logprobs. Knows no streams and no shapes of HTTP.
"""

from collections.abc import Sequence
from typing import Literal

import msgspec

from ...replica.messages import PositionLogprobs
from ..backend import TokenDelta
from .detokenizer import Detokenizer
from .logprobs import TokenAt
from .stops import StopFinder

Ending = Literal["stop", "length"]


class TextDelta(msgspec.Struct, frozen=True, gc=False):
    """What became showable."""

    text: str
    ending: Ending | None = None
    #: the tokens whose text begins in what has been shown by now; empty where no logprobs were asked for
    tokens: Sequence[TokenAt] = ()


class AnswerText:
    """Turns the deltas of one token stream into text.

    The token that ended the answer (`stop_token_id`) gives no text and no logprobs; neither does what comes from the
    start of a stop string on.
    """

    __slots__ = ("_decoded", "_detokenizer", "_pending", "_shown", "_stops")

    def __init__(self, detokenizer: Detokenizer, stops: Sequence[str] = ()) -> None:
        self._detokenizer = detokenizer
        self._stops = StopFinder(stops) if stops else None
        self._decoded = 0  #: characters that came out of the detokenizer
        self._shown = 0  #: characters given out
        self._pending: list[TokenAt] = []  #: tokens whose text is held back

    def push(self, delta: TokenDelta) -> TextDelta:
        """The text that `delta` completes. After an ending nothing more may be pushed."""
        ids = delta.token_ids if delta.stop_token_id is None else delta.token_ids[:-1]
        if delta.text is not None:
            text = delta.text
        elif delta.logprobs is None:
            text = self._detokenizer.push(ids)
        else:
            text = self._scored(ids, delta.logprobs)
        ending: Ending | None = None
        if delta.finish_reason is not None:
            text += self._detokenizer.flush()
            ending = "length" if delta.finish_reason == "length" else "stop"
        if self._stops is None:
            self._shown += len(text)
            return TextDelta(text, ending, self._release(everything=ending is not None) if self._pending else ())
        return self._until_stop(self._stops, text, ending)

    def _until_stop(self, stops: StopFinder, text: str, ending: Ending | None) -> TextDelta:
        """What may be shown of `text` as far as stop strings are concerned."""
        text = stops.push(text)
        if stops.stopped_by is not None:
            ending = "stop"
        elif ending:
            text += stops.flush()
        self._shown += len(text)
        return TextDelta(text, ending, self._release(everything=ending is not None and not stops.stopped_by))

    def _scored(self, ids: Sequence[int], logprobs: Sequence[PositionLogprobs]) -> str:
        """The text of tokens that come with their logprobs, which are shown when their text is."""
        parts: list[str] = []
        for token_id, position in zip(ids, logprobs, strict=False):
            self._pending.append(TokenAt(token_id, self._decoded, position))
            parts.append(self._detokenizer.push([token_id]))
            self._decoded += len(parts[-1])
        return "".join(parts)

    def _release(self, *, everything: bool) -> list[TokenAt]:
        ready = [token for token in self._pending if everything or token.offset < self._shown]
        self._pending = self._pending[len(ready) :]
        return ready
