"""Turns the token deltas of one answer into text that is safe to show, together with the tokens behind that text.

Pure state: incremental decoding, stop strings, and alignment of logprobs with text. Independent of streams and HTTP.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Literal

import msgspec

from ...replica.messages import PositionLogprobs
from ..backend import TokenDelta
from .detokenizer import Detokenizer
from .parsers.deltas import Content, Delta, Reasoning, ToolCallArguments, ToolCallStart
from .parsers.loose_json import is_object
from .parsers.parser import AnswerParser

Ending = Literal["stop", "length", "tool_calls"]


@dataclass(slots=True, frozen=True)
class TokenAt:
    """A token and where its text begins, in characters from the start of the answer (or of the echoed prompt)."""

    token_id: int
    offset: int
    logprobs: PositionLogprobs | None  #: None for the first token of a prompt, or if none were requested


class TextDelta(msgspec.Struct, frozen=True, gc=False):
    """The next part of an answer that can be shown."""

    text: str  #: content of the answer, without reasoning and calls
    ending: Ending | None = None
    #: New tokens whose text begins within the text shown so far; empty if no logprobs were requested.
    tokens: Sequence[TokenAt] = ()
    #: All parts in order, including `text`, if a parser found reasoning or calls; empty if there is only `text`.
    deltas: Sequence[Delta] = ()


class AnswerText:
    """Turns the deltas of one token stream into text.

    The token that ended the answer (`stop_token_id`) gets no text and no logprobs; the same holds for everything from
    the start of a stop string.
    """

    __slots__ = ("_decoded", "_detokenizer", "_min_tokens", "_pending", "_show_stop", "_shown", "_stops")

    def __init__(
        self, detokenizer: Detokenizer, stops: Sequence[str] = (), *, min_tokens: int = 0, show_stop: bool = False
    ) -> None:
        """`min_tokens`: stop strings that end within the text of so many tokens do not count. `show_stop`: whether the
        text includes the stop string or stop token."""
        self._detokenizer = detokenizer
        self._stops = StopFinder(stops, show_stop=show_stop) if stops else None
        self._min_tokens = min_tokens if stops else 0  #: tokens left until stop strings count
        self._show_stop = show_stop
        self._decoded = 0  #: number of characters that the detokenizer has returned
        self._shown = 0  #: number of characters shown
        self._pending: list[TokenAt] | None = None  #: tokens whose text is held back; None: there were none so far

    @property
    def stopped_by(self) -> str | None:
        """The stop string that ended the answer; None if none did."""
        return self._stops.stopped_by if self._stops is not None else None

    def push(self, delta: TokenDelta) -> TextDelta:
        """The text that `delta` completes. Must not be called after an ending."""
        ids = delta.token_ids if delta.stop_token_id is None else delta.token_ids[:-1]
        exempt = 0  # characters at the start of the text in which no stop string may end
        if delta.text is not None:
            text = delta.text
            if self._min_tokens:
                exempt = len(text) if delta.text_tokens <= self._min_tokens else 0
                self._min_tokens = max(0, self._min_tokens - delta.text_tokens)
        elif self._min_tokens:
            first = min(self._min_tokens, len(ids))
            self._min_tokens -= first
            text = self._decode(ids[:first], delta.logprobs)
            exempt = len(text)
            text += self._decode(ids[first:], delta.logprobs and delta.logprobs[first:])
        else:
            text = self._decode(ids, delta.logprobs)
        ending: Ending | None = None
        if delta.finish_reason is not None:
            if self._show_stop and delta.stop_token_id is not None:
                text += self._detokenizer.push([delta.stop_token_id])
            text += self._detokenizer.flush()
            ending = "length" if delta.finish_reason == "length" else "stop"
        stops, stopped = self._stops, False
        if stops is not None:
            text = stops.push(text, exempt)
            if stops.stopped_by is not None:
                ending, stopped = "stop", True
            elif ending:
                text += stops.flush()
        self._shown += len(text)
        return TextDelta(text, ending, self._release(everything=bool(ending) and not stopped) if self._pending else ())

    def _decode(self, ids: Sequence[int], logprobs: Sequence[PositionLogprobs | None] | None) -> str:
        """The text of tokens. With logprobs, each token is released together with the start of its text."""
        if logprobs is None:
            return self._detokenizer.push(ids)
        parts: list[str] = []
        pending = self._pending = self._pending or []
        for token_id, position in zip(ids, logprobs, strict=False):
            pending.append(TokenAt(token_id, self._decoded, position))
            parts.append(self._detokenizer.push([token_id]))
            self._decoded += len(parts[-1])
        return "".join(parts)

    def _release(self, *, everything: bool) -> list[TokenAt]:
        pending = self._pending or []
        ready = [token for token in pending if everything or token.offset < self._shown]
        self._pending = pending[len(ready) :]
        return ready


class TokenAnswerText(AnswerText):
    """Like `AnswerText`, but tokens accompany the text even without logprobs, and so does the one that ended it."""

    __slots__ = ()

    def push(self, delta: TokenDelta) -> TextDelta:
        if delta.logprobs is None:
            delta = msgspec.structs.replace(delta, logprobs=[None] * len(delta.token_ids))
        shown = super().push(delta)
        if delta.stop_token_id is None or self.stopped_by is not None:
            return shown
        scores = delta.logprobs or ()
        score = scores[len(delta.token_ids) - 1] if len(scores) >= len(delta.token_ids) else None
        return msgspec.structs.replace(
            shown, tokens=[*shown.tokens, TokenAt(delta.stop_token_id, self._decoded, score)]
        )


class AnswerBlock(msgspec.Struct):
    """A part of an answer: only text, only reasoning, or one tool call, whose text is its arguments."""

    kind: Literal["text", "reasoning", "tool_call"]
    parts: list[str]
    id: str = ""
    name: str = ""
    tokens: list[TokenAt] = []  #: the tokens of a text, if its logprobs were requested

    @property
    def text(self) -> str:
        return "".join(self.parts)

    @property
    def is_cut_call(self) -> bool:
        """Whether this is a call whose arguments are not complete."""
        return self.kind == "tool_call" and not is_object(self.text or "{}")


def append_delta(blocks: list[AnswerBlock], shown: TextDelta) -> None:
    """Append a delta to the blocks of an answer."""
    tokens = shown.tokens
    for delta in shown.deltas or (Content(shown.text),):
        match delta:
            case ToolCallStart(_, call_id, name):
                blocks.append(AnswerBlock("tool_call", [], call_id, name))
            case ToolCallArguments(_, text):
                blocks[-1].parts.append(text)
            case Content(text) | Reasoning(text):
                kind: Literal["text", "reasoning"] = "text" if type(delta) is Content else "reasoning"
                if not blocks or blocks[-1].kind != kind:
                    if not text:
                        continue
                    blocks.append(AnswerBlock(kind, []))
                blocks[-1].parts.append(text)
                if kind == "text":
                    blocks[-1].tokens += tokens
                    tokens = ()


def parse_deltas(parser: AnswerParser | None, shown: TextDelta) -> list[Delta]:
    """The deltas that the parser finds in newly shown text; without a parser, all text is content."""
    if parser is None:
        return [Content(shown.text)]
    return (parser.feed(shown.text) if shown.text else []) + (parser.finish() if shown.ending else [])


class LastCall:
    """Whether the last call of an answer is complete, if an engine has parsed the answer."""

    __slots__ = ("_arguments", "_started")

    def __init__(self) -> None:
        self._started = False
        self._arguments: list[str] = []

    def add(self, found: Sequence[Delta]) -> None:
        for each in found:
            match each:
                case ToolCallStart():
                    self._started, self._arguments = True, []
                case ToolCallArguments(_, text):
                    self._arguments.append(text)

    @property
    def complete(self) -> bool:
        """Whether there was a call, and the last one's arguments are an object; some engines send none for none."""
        return self._started and is_object("".join(self._arguments) or "{}")


def with_deltas(shown: TextDelta, found: Sequence[Delta], *, called: bool) -> TextDelta:
    """`shown` with reasoning and calls separated from the content. `called`: there was a call; the last is complete.

    An answer that ends inside a call, as a stop string may make it, does not end with "tool_calls": an agent would run
    what is there of it.
    """
    ending: Ending | None = "tool_calls" if shown.ending == "stop" and called else shown.ending
    text = "".join([each.text for each in found if type(each) is Content])
    plain = all(type(each) is Content for each in found)
    return TextDelta(text, ending, shown.tokens, () if plain else found)


class ContentTokens:
    """Leaves each delta the tokens of its content, without those of reasoning, calls and markers.

    A parser shows some text later than it gets the tokens, and markers never, so what it shows is looked for in that.
    """

    __slots__ = ("_received", "_start", "_tokens")

    def __init__(self) -> None:
        self._received = ""  #: what the parser got and has not shown
        self._start = 0  #: the offset of that in the answer
        self._tokens: list[TokenAt] = []

    def push(self, received: str, shown: TextDelta) -> TextDelta:
        """The delta with the tokens whose content it shows. `received`: the text before the parser."""
        self._received += received
        self._tokens += shown.tokens
        found: list[TokenAt] = []
        for delta in shown.deltas or (Content(shown.text),):
            match delta:
                case Content(text):
                    found += self._taken(text)
                case Reasoning(text):
                    self._taken(text)
                case _:
                    self._drop(len(self._received))
        return msgspec.structs.replace(shown, tokens=found)

    def _taken(self, text: str) -> list[TokenAt]:
        """Remove the tokens up to the end of `text`, and return those of its own."""
        at = self._received.find(text)
        if at < 0:
            at, text = 0, self._received
        before = self._drop(at)
        own = self._drop(len(text))
        overlaps = before and text and (not own or own[0].offset > self._start - len(text))
        return before[-1:] + own if overlaps else own

    def _drop(self, characters: int) -> list[TokenAt]:
        self._received = self._received[characters:]
        self._start += characters
        count = bisect_left(self._tokens, self._start, key=attrgetter("offset"))
        dropped, self._tokens = self._tokens[:count], self._tokens[count:]
        return dropped


class StopFinder:
    """Finds stop strings in text that arrives in pieces.

    A stop string takes effect as soon as the text contains it, however the text is divided; the text is cut before it.
    Text is held back only while it may be the beginning of a stop string.
    """

    __slots__ = ("_held", "_show_stop", "_stops", "stopped_by")

    def __init__(self, stops: Sequence[str], *, show_stop: bool = False) -> None:
        """`stops`: non-empty strings. `show_stop`: whether the text is cut after a stop string instead of before it."""
        self._stops = stops
        self._show_stop = show_stop
        self._held = ""
        self.stopped_by: str | None = None  #: the stop string found; once set, no more text is returned

    def push(self, text: str, exempt: int = 0) -> str:
        """The text that can be shown now. `exempt`: characters at the start of `text` in which no stop string ends."""
        if self.stopped_by is not None or not text:
            return ""
        earliest = len(self._held) + exempt + 1  # a match ends here or later
        text = self._held + text
        # The stop string that ends first wins; among those that end at the same place, the longest.
        found = [
            (at + len(stop), at, stop)
            for stop in self._stops
            if (at := text.find(stop, max(0, earliest - len(stop)))) >= 0
        ]
        if found:
            end, start, self.stopped_by = min(found)
            self._held = ""
            return text[: end if self._show_stop else start]
        # Hold back the longest suffix of the text that is the beginning of a stop string.
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:length]):
                    longest = length
                    break
        cut = len(text) - longest
        self._held = text[cut:]
        return text[:cut]

    def flush(self) -> str:
        """The held text at the end of the answer, as it did not become a stop string."""
        held, self._held = self._held, ""
        return held
