"""Log probabilities of drawn and prompt tokens under the model's own logits, for a whole batch.

`score` makes a few launches on the logits' device; `read` turns its result into the messages' values.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from ..messages import PositionLogprobs, SamplingParams, TokenLogprob
from .logit_edits import Move, mover

#: Placeholder for a token id: the token that is drawn from these logits.
DRAWN = -1


@dataclass(slots=True, frozen=True)
class ScoredRow:
    place: int  #: index of its logits among the step's
    token_id: int  #: the token to score; DRAWN for the one drawn at `place`
    top: int  #: how many of the likeliest tokens to return as well
    listed: Sequence[int] = ()  #: tokens to return instead of the likeliest; `read` sorts them, best first


def scored_rows(params: Sequence[SamplingParams]) -> list[ScoredRow]:
    """The rows of a batch that request logprobs."""
    return [
        ScoredRow(place, DRAWN, each.logprobs, each.logprob_token_ids)
        for place, each in enumerate(params)
        if each.logprobs is not None
    ]


class Scores(NamedTuple):
    """The scores of R rows, on the device; later steps must not overwrite them."""

    token_ids: torch.Tensor  #: [R] int64
    logprobs: torch.Tensor  #: [R] float32
    top_ids: torch.Tensor  #: [R, top]
    top_logprobs: torch.Tensor  #: [R, top]
    listed: torch.Tensor  #: [R, longest list]


def score(logits: torch.Tensor, rows: Sequence[ScoredRow], tokens: torch.Tensor, move: Move) -> Scores:
    """Score each row by its own logits in [len(rows), vocab]; `tokens[place]` is the token drawn at that place."""
    logprobs = logits.float().log_softmax(-1)
    token_ids = move(np.array([row.token_id for row in rows], dtype=np.int64))
    drawn = [index for index, row in enumerate(rows) if row.token_id == DRAWN]
    if drawn:
        places = move(np.array([rows[index].place for index in drawn], dtype=np.int64))
        # Where no token could be drawn (below 0), the score is never reported.
        token_ids.index_copy_(0, move(np.array(drawn, dtype=np.int64)), tokens[places].clamp(min=0))
    top_logprobs, top_ids = logprobs.topk(min(max(row.top for row in rows), logits.shape[1]), dim=-1)
    width = max(len(row.listed) for row in rows)
    listed = np.array([[*row.listed, *[0] * (width - len(row.listed))] for row in rows], dtype=np.int64)
    chosen = logprobs.gather(1, token_ids[:, None])[:, 0]
    return Scores(token_ids, chosen, top_ids, top_logprobs, logprobs.gather(1, move(listed.reshape(len(rows), width))))


def read(rows: Sequence[ScoredRow], scores: Scores) -> list[PositionLogprobs]:
    """Convert scores to one PositionLogprobs per row, with the alternatives that the row asked for."""
    return [
        PositionLogprobs(
            chosen=TokenLogprob(token_id, logprob),
            top=sorted(map(TokenLogprob, row.listed, listed), key=lambda each: -each.logprob)
            if row.listed
            else [TokenLogprob(*pair) for pair in zip(top_ids[: row.top], top, strict=False)],
        )
        for row, token_id, logprob, top_ids, top, listed in zip(rows, *(x.tolist() for x in scores), strict=True)
    ]


def prompt_logprobs(logits: torch.Tensor, next_ids: Sequence[int], top: int) -> list[PositionLogprobs]:
    """Logprobs of `next_ids[i]` and the `top` likeliest ids under row i of `logits` [len(next_ids), vocab]."""
    assert logits.shape[0] == len(next_ids), (logits.shape, len(next_ids))
    rows = [ScoredRow(place, token_id, top) for place, token_id in enumerate(next_ids)]
    return read(rows, score(logits, rows, logits.new_empty(0), mover(logits.device))) if rows else []
