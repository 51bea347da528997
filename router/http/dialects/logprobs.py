"""Logprobs as the answers of OpenAI's API and of vLLM's show them. Pure."""

from collections.abc import Callable, Sequence

import msgspec

from ....replica.messages import PositionLogprobs, TokenLogprob
from ...text.answer import TokenAt

#: JSON has no infinity. Tokens that cannot be sampled get this logprob, as in vLLM.
LOWEST_LOGPROB = -9999.0


def finite(logprob: float) -> float:
    """`logprob`, but at least `LOWEST_LOGPROB`."""
    return max(logprob, LOWEST_LOGPROB)


class NamedLogprob(msgspec.Struct, frozen=True):
    """One token of `prompt_logprobs`, as in vLLM; the rank is 1 for the most likely token, and null if unknown."""

    logprob: float
    rank: int | None
    decoded_token: str


#: Logprobs by token id for each position; null for the first token.
PromptLogprobs = list[dict[int, NamedLogprob] | None]


def prompt_logprobs(positions: Sequence[PositionLogprobs | None], name: Callable[[int], str]) -> PromptLogprobs:
    """The response field of this name. `name`: returns the text of a token."""
    found: PromptLogprobs = []
    for position in positions:
        if position is None:
            found.append(None)
            continue
        entries = {
            each.token_id: NamedLogprob(finite(each.logprob), rank, name(each.token_id))
            for rank, each in enumerate(position.top, 1)
        }
        chosen = position.chosen
        entries.setdefault(chosen.token_id, NamedLogprob(finite(chosen.logprob), None, name(chosen.token_id)))
        found.append(entries)
    return found


class TopLogprob(msgspec.Struct, frozen=True):
    """One alternative at a position."""

    token: str
    bytes: list[int]
    logprob: float


class TokenEntry(TopLogprob, frozen=True):
    """The token at one position, with its most likely alternatives."""

    top_logprobs: list[TopLogprob]


def token_entries(
    tokens: Sequence[TokenAt], top: int, piece: Callable[[int], bytes], *, by_id: bool
) -> list[TokenEntry]:
    """The entries of those tokens that have logprobs, with up to `top` alternatives each.

    `piece`: returns the bytes of a token. `by_id`: whether tokens are named by their ids.
    """

    def scored(each: TokenLogprob) -> tuple[str, list[int], float]:
        written = piece(each.token_id)
        name = f"token_id:{each.token_id}" if by_id else written.decode(errors="replace")
        return name, list(written), finite(each.logprob)

    return [
        TokenEntry(*scored(at.chosen), [TopLogprob(*scored(each)) for each in at.top[:top]])
        for token in tokens
        if (at := token.logprobs) is not None
    ]
