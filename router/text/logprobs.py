"""Logprobs in OpenAI's two shapes: one for chat (`content` entries with bytes), one for completions (parallel lists).

Pure: takes positions as replicas report them and the bytes of each token. Knows no streams.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from ...replica.messages import PositionLogprobs, TokenLogprob
from .detokenizer import Detokenizer

#: JSON has no infinity; what a token that cannot be drawn is given instead (vLLM's figure).
LOWEST_LOGPROB = -9999.0

PieceOf = Callable[[int], bytes]


@dataclass(slots=True, frozen=True)
class TokenAt:
    """A token and where its text begins, in characters from the start of the answer (or of the echoed prompt)."""

    token_id: int
    offset: int
    logprobs: PositionLogprobs | None  #: None: the first token of a prompt


class TopLogprob(msgspec.Struct, frozen=True):
    """One alternative at a position of a chat answer."""

    token: str
    bytes: list[int]
    logprob: float


class TokenEntry(msgspec.Struct, frozen=True):
    """One position of a chat answer."""

    token: str
    bytes: list[int]
    logprob: float
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    """`choices[].logprobs` of chat answers."""

    content: list[TokenEntry]
    refusal: None = None


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """`choices[].logprobs` of completions: one element per token in each list."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


def finite(logprob: float) -> float:
    """`logprob`, raised to the lowest number that is sent."""
    return max(logprob, LOWEST_LOGPROB)


def unique_name(piece: bytes) -> str:
    """A token as text; parts of characters as `bytes:\\xe2\\x80`, so that different tokens keep different names."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


def _alternative(each: TokenLogprob, piece_of: PieceOf) -> TopLogprob:
    piece = piece_of(each.token_id)
    return TopLogprob(piece.decode(errors="replace"), list(piece), finite(each.logprob))


def _entry(position: PositionLogprobs, top: int, piece_of: PieceOf) -> TokenEntry:
    chosen = _alternative(position.chosen, piece_of)
    alternatives = [_alternative(each, piece_of) for each in position.top[:top]]
    return TokenEntry(chosen.token, chosen.bytes, chosen.logprob, alternatives)


def chat_logprobs(tokens: Sequence[TokenAt], top: int, piece_of: PieceOf) -> ChatLogprobs:
    """One entry for each token of the answer, with its `top` likeliest alternatives."""
    return ChatLogprobs([_entry(token.logprobs, top, piece_of) for token in tokens if token.logprobs])


def _top_names(position: PositionLogprobs | None, top: int, piece_of: PieceOf) -> dict[str, float] | None:
    """The likeliest tokens and the one that stands there, which may be one more than asked for."""
    if position is None:
        return None
    shown = [*position.top[:top], position.chosen]
    names: dict[str, float] = {}
    for each in shown:
        names.setdefault(unique_name(piece_of(each.token_id)), finite(each.logprob))
    return names


def completion_logprobs(tokens: Sequence[TokenAt], top: int, piece_of: PieceOf) -> CompletionLogprobs:
    """Parallel lists over the tokens; `top` alternatives beside the token itself."""
    return CompletionLogprobs(
        text_offset=[token.offset for token in tokens],
        token_logprobs=[finite(token.logprobs.chosen.logprob) if token.logprobs else None for token in tokens],
        tokens=[unique_name(piece_of(token.token_id)) for token in tokens],
        top_logprobs=[_top_names(token.logprobs, top, piece_of) for token in tokens],
    )


def prompt_tokens(
    token_ids: Sequence[int], logprobs: Sequence[PositionLogprobs | None], detokenizer: Detokenizer
) -> list[TokenAt]:
    """The tokens of an echoed prompt with the offsets of their text."""
    offset = 0
    tokens: list[TokenAt] = []
    for token_id, position in zip(token_ids, logprobs, strict=True):
        tokens.append(TokenAt(token_id, offset, position))
        offset += len(detokenizer.push([token_id]))
    return tokens
