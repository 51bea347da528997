"""One answer as it grows: token deltas in; text that is safe to show, and the tokens behind it, out.

Pure state: incremental decoding, stop strings, and alignment of logprobs with text. Independent of streams and HTTP.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from ...replica.messages import PositionLogprobs
from ..backend import TokenDelta
from .detokenizer import Detokenizer
from .parsers.deltas import Content, Delta, Reasoning, ToolCallArguments, ToolCallStart
from .parsers.parser import AnswerParser

Ending = Literal["stop", "length", "tool_calls"]


@dataclass(slots=True, frozen=True)
class TokenAt:
    """A token and where its text begins, in characters from the start of the answer (or of the echoed prompt)."""

    token_id: int
    offset: int
    logprobs: PositionLogprobs | None  #: None: the first token of a prompt, or none were requested


class TextDelta(msgspec.Struct, frozen=True, gc=False):
    """What can be shown next."""

    text: str  #: of the answer itself
    ending: Ending | None = None
    #: The tokens whose text begins in what has been shown so far; empty if no logprobs were requested.
    tokens: Sequence[TokenAt] = ()
    #: Everything in order, `text` included, if a parser found reasoning or calls; empty: there is nothing but `text`.
    deltas: Sequence[Delta] = ()


class AnswerText:
    """Turns the deltas of one token stream into text.

    The token that ended the answer (`stop_token_id`) has no text and no logprobs; nor has anything from the start of a
    stop string on.
    """

    __slots__ = ("_decoded", "_detokenizer", "_pending", "_show_stop", "_shown", "_stops")

    def __init__(self, detokenizer: Detokenizer, stops: Sequence[str] = (), *, show_stop: bool = False) -> None:
        """`show_stop`: the text includes what ended it."""
        self._detokenizer = detokenizer
        self._stops = StopFinder(stops, show_stop=show_stop) if stops else None
        self._show_stop = show_stop
        self._decoded = 0  #: characters that the detokenizer returned
        self._shown = 0  #: characters shown
        self._pending: list[TokenAt] = []  #: tokens whose text is held back

    @property
    def stopped_by(self) -> str | None:
        """The stop string that ended the answer."""
        return self._stops.stopped_by if self._stops is not None else None

    def push(self, delta: TokenDelta) -> TextDelta:
        """The text that `delta` completes. Not to be called after an ending."""
        ids = delta.token_ids if delta.stop_token_id is None else delta.token_ids[:-1]
        if delta.text is not None:
            text = delta.text
        elif delta.logprobs is None:
            text = self._detokenizer.push(ids)
        else:
            text = self._push_scored(ids, delta.logprobs)
        ending: Ending | None = None
        if delta.finish_reason is not None:
            if self._show_stop and delta.stop_token_id is not None:
                text += self._detokenizer.push([delta.stop_token_id])
            text += self._detokenizer.flush()
            ending = "length" if delta.finish_reason == "length" else "stop"
        stops, stopped = self._stops, False
        if stops is not None:
            text = stops.push(text)
            if stops.stopped_by is not None:
                ending, stopped = "stop", True
            elif ending:
                text += stops.flush()
        self._shown += len(text)
        return TextDelta(text, ending, self._release(everything=bool(ending) and not stopped) if self._pending else ())

    def _push_scored(self, ids: Sequence[int], logprobs: Sequence[PositionLogprobs | None]) -> str:
        """The text of tokens with logprobs. A token is shown together with the start of its text."""
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


class TokenAnswerText(AnswerText):
    """The same, and tokens come with the text although there are no logprobs of them."""

    __slots__ = ()

    def push(self, delta: TokenDelta) -> TextDelta:
        if delta.logprobs is None:
            delta = msgspec.structs.replace(delta, logprobs=[None] * len(delta.token_ids))
        return super().push(delta)


class Block(msgspec.Struct):
    """A part of an answer that is all text, all reasoning, or one tool call, whose text is its arguments."""

    kind: Literal["text", "reasoning", "tool_call"]
    parts: list[str]
    id: str = ""
    name: str = ""

    @property
    def text(self) -> str:
        return "".join(self.parts)


def extend(blocks: list[Block], shown: TextDelta) -> None:
    """Add what is shown next to the blocks of an answer."""
    for delta in shown.deltas or (Content(shown.text),):
        match delta:
            case ToolCallStart(_, call_id, name):
                blocks.append(Block("tool_call", [], call_id, name))
            case ToolCallArguments(_, text):
                blocks[-1].parts.append(text)
            case Content(text) | Reasoning(text):
                kind: Literal["text", "reasoning"] = "text" if type(delta) is Content else "reasoning"
                if not blocks or blocks[-1].kind != kind:
                    if not text:
                        continue
                    blocks.append(Block(kind, []))
                blocks[-1].parts.append(text)


def found_by(parser: AnswerParser | None, shown: TextDelta) -> list[Delta]:
    """What the parser finds in the text that is shown next; without one it is all content."""
    if parser is None:
        return [Content(shown.text)]
    return (parser.feed(shown.text) if shown.text else []) + (parser.finish() if shown.ending else [])


def told_apart(shown: TextDelta, found: Sequence[Delta], *, calls: bool) -> TextDelta:
    """The same with reasoning and calls told from the answer's text. `calls`: there were calls before."""
    ending = shown.ending
    if ending == "stop" and (calls or any(type(each) is ToolCallStart for each in found)):
        ending = "tool_calls"
    text = "".join([each.text for each in found if type(each) is Content])
    plain = all(type(each) is Content for each in found)
    return TextDelta(text, ending, shown.tokens, () if plain else found)


class StopFinder:
    """Finds stop strings in text that arrives in pieces.

    A stop string takes effect as soon as the text contains one, however the text is divided; the text is cut before it.
    Text is held back only while it may be the beginning of a stop string.
    """

    __slots__ = ("_held", "_show_stop", "_stops", "stopped_by")

    def __init__(self, stops: Sequence[str], *, show_stop: bool = False) -> None:
        """`stops` are not empty strings. `show_stop`: the text is cut behind the one that is found."""
        self._stops = stops
        self._show_stop = show_stop
        self._held = ""
        self.stopped_by: str | None = None  #: once set, no more text comes

    def push(self, text: str) -> str:
        """The text that can be shown now."""
        if self.stopped_by is not None or not text:
            return ""
        # A match ends in the new text: otherwise it would have been found before.
        text = self._held + text
        # The stop string that is complete first wins; of those that end together, the longest.
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            end, start, self.stopped_by = min(found)
            self._held = ""
            return text[: end if self._show_stop else start]
        # Hold the longest end of the text that begins a stop string.
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
        """At the end of the answer: the held text, which did not become a stop string."""
        held, self._held = self._held, ""
        return held
