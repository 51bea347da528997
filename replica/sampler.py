"""From logits to tokens, for a whole batch. A row's token depends on its own logits, parameters and (seed, position)."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .messages import PositionLogprobs, SamplingParams


@dataclass(slots=True, frozen=True)
class SamplingRow:
    """One row of logits and how its token is drawn."""

    params: SamplingParams
    position: int  #: tokens generated so far, counted over all replicas that worked on the request
    prompt_ids: Sequence[int]  #: read for the repetition penalty only
    generated_ids: Sequence[int]  #: read for penalties only
    banned_ids: Sequence[int] = ()  #: never drawn now, such as the stop ids before `min_tokens`


@dataclass(slots=True, frozen=True)
class Sampled:
    """The token drawn for one row."""

    token_id: int
    logprobs: PositionLogprobs | None  #: where `params.logprobs` asks for them


def sample(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[Sampled]:
    """Draw one token per row of `logits` [len(rows), vocab], float32; `logits` is left as it is."""
    raise NotImplementedError


def prompt_logprobs(logits: torch.Tensor, next_ids: Sequence[int], top: int) -> list[PositionLogprobs]:
    """Logprobs of `next_ids[i]` and the `top` likeliest ids under row i of `logits` [len(next_ids), vocab]."""
    raise NotImplementedError


def banned_before(params: SamplingParams, position: int, eos_token_ids: Sequence[int]) -> tuple[int, ...]:
    """Ids that `min_tokens` forbids at this position: the end-of-sequence and stop ids, or none."""
    raise NotImplementedError
