"""Edits of single logits before tokens are drawn: penalties, biases, allowed and banned ids.

`edits_of` computes which logits of a batch change and how, from the rows' parameters and tokens, in pure numpy.
`LogitEdits.apply` changes them on any device with a few launches per batch, without reading anything back.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ..messages import SamplingParams
from .step_plan import Int64s

Float32s = npt.NDArray[np.float32]
#: Copies an array to the device of the logits.
Move = Callable[[npt.NDArray[Any]], torch.Tensor]


def mover(device: torch.device) -> Move:
    """Return a copy function that may block on the device; `attention.paged.to_device` does not."""
    return lambda array: torch.from_numpy(array).to(device)


#: Edited logits are clamped to +/- this: one request's parameters must not look like a failing model.
GREATEST = float(np.finfo(np.float32).max)
_TINY = float(np.finfo(np.float32).tiny)


@dataclass(slots=True, frozen=True)
class SamplingRow:
    params: SamplingParams
    position: int  #: tokens generated so far, on all replicas that worked on the request
    prompt_ids: Sequence[int]  #: read for the repetition penalty only
    generated_ids: Sequence[int]  #: read for penalties and bad words only
    banned_ids: Sequence[int] = ()  #: such as the stop ids before `min_tokens`


class _Kind(IntEnum):
    """Kinds of edits, in the order in which they are made; one logit may have one of each."""

    REPEATED = 0  #: divided by the operand if positive, else multiplied
    PENALISED = 1  #: the operand is subtracted
    BIASED = 2  #: the operand is added
    ALLOWED = 3  #: kept; all others of its row become -GREATEST
    BANNED = 4  #: becomes -GREATEST


@dataclass(slots=True, frozen=True)
class LogitEdits:
    places: Int64s  #: [2, N] rows and tokens, ordered by kind
    numbers: Float32s  #: [N] the edits' operands
    ends: tuple[int, ...]  #: where each kind ends in `places`
    limited: Int64s  #: rows that may draw only their allowed tokens

    def apply(self, logits: torch.Tensor, move: Move) -> None:
        """Edit `logits` [rows, vocab] float32 in place. Finite ones stay so; only ALLOWED and BANNED alter others."""
        places, numbers = move(self.places), move(self.numbers)
        parts = [((places[0, a:b], places[1, a:b]), numbers[a:b]) for a, b in pairwise((0, *self.ends))]
        _change(logits, *parts[_Kind.REPEATED], lambda old, by: torch.where(old > 0, old / by, old * by))
        _change(logits, *parts[_Kind.PENALISED], torch.sub)
        _change(logits, *parts[_Kind.BIASED], torch.add)
        if len(self.limited):
            kept, _ = parts[_Kind.ALLOWED]
            values = logits[kept]
            logits.index_fill_(0, move(self.limited), -GREATEST)
            logits.index_put_(kept, values)
        _change(logits, *parts[_Kind.BANNED], lambda _, by: by)


def _change(
    logits: torch.Tensor,
    at: tuple[torch.Tensor, torch.Tensor],
    by: torch.Tensor,
    changed: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> None:
    if not len(by):
        return
    old = logits[at]
    new = changed(old, by)
    logits.index_put_(at, torch.where(old.isfinite(), new.clamp(-GREATEST, GREATEST), new))


def has_edits(params: SamplingParams) -> bool:
    """Whether these parameters edit logits at every position; `banned_before` gives the bans of some positions."""
    return bool(_penalised(params) or params.logit_bias or params.allowed_token_ids or params.bad_words)


def edits_of(rows: Sequence[SamplingRow]) -> LogitEdits | None:
    """The edits of a batch; None if no logit changes."""
    found: list[list[tuple[int, Int64s, npt.NDArray[np.float64]]]] = [[] for _ in _Kind]
    for index, row in enumerate(rows):
        if has_edits(row.params) or len(row.banned_ids):
            for kind, tokens, each in _edits_of_row(row):
                found[kind].append((index, tokens, each))
    parts = [part for kind in found for part in kind]
    if not parts:
        return None
    counts = [sum(len(tokens) for _, tokens, _ in kind) for kind in found]
    places = np.empty((2, sum(counts)), dtype=np.int64)
    places[0] = np.repeat([index for index, _, _ in parts], [len(tokens) for _, tokens, _ in parts])
    places[1] = np.concatenate([tokens for _, tokens, _ in parts])
    exact = np.concatenate([each for _, _, each in parts])
    numbers: Float32s = np.clip(exact, -GREATEST, GREATEST).astype(np.float32)
    limited = np.array([index for index, _, _ in found[_Kind.ALLOWED]], dtype=np.int64)
    return LogitEdits(places, numbers, tuple(np.cumsum(counts).tolist()), limited)


def _edits_of_row(row: SamplingRow) -> Iterator[tuple[_Kind, Int64s, npt.NDArray[np.float64]]]:
    params, generated_ids = row.params, np.asarray(row.generated_ids, dtype=np.int64)
    if params.repetition_penalty != 1.0:
        seen = np.union1d(np.asarray(row.prompt_ids, dtype=np.int64), generated_ids)
        yield _Kind.REPEATED, seen, np.full(len(seen), max(params.repetition_penalty, _TINY))
    if params.presence_penalty or params.frequency_penalty:
        generated, counts = np.unique(generated_ids, return_counts=True)
        yield _Kind.PENALISED, generated, params.presence_penalty + params.frequency_penalty * counts.astype(np.float64)
    if params.logit_bias:
        yield _Kind.BIASED, _ids(params.logit_bias), np.array(list(params.logit_bias.values()), dtype=np.float64)
    if params.allowed_token_ids:
        allowed = _ids(params.allowed_token_ids)
        yield _Kind.ALLOWED, allowed, np.zeros(len(allowed))
    banned = _ids([*row.banned_ids, *_word_ends(params.bad_words, row.generated_ids)])
    if len(banned):
        yield _Kind.BANNED, banned, np.full(len(banned), -GREATEST)


def _ids(ids: Any) -> Int64s:
    return np.fromiter(ids, dtype=np.int64)


def _penalised(params: SamplingParams) -> bool:
    return bool(params.repetition_penalty != 1.0 or params.presence_penalty or params.frequency_penalty)


def sampling_row(
    params: SamplingParams, tokens: Sequence[int], prompt_tokens: int, eos_token_ids: Sequence[int]
) -> SamplingRow:
    """The row that draws the token after `tokens`, of which the first `prompt_tokens` are the prompt."""
    position, penalised = len(tokens) - prompt_tokens, _penalised(params)
    return SamplingRow(
        params=params,
        position=position,
        prompt_ids=tokens[:prompt_tokens] if penalised else (),
        generated_ids=tokens[prompt_tokens:] if penalised or params.bad_words else (),
        banned_ids=banned_before(params, position, eos_token_ids),
    )


def banned_before(params: SamplingParams, position: int, eos_token_ids: Sequence[int]) -> tuple[int, ...]:
    """Ids that `min_tokens` forbids at this position: the end-of-sequence and stop ids, or none."""
    if position >= params.min_tokens:
        return ()
    return (*eos_token_ids, *params.stop_token_ids)


def _word_ends(words: Sequence[Sequence[int]], generated_ids: Sequence[int]) -> list[int]:
    """The last token of each word whose other tokens are the latest generated ones."""
    longest = max(map(len, words), default=1) - 1
    latest = tuple(generated_ids[-longest:]) if longest else ()
    return [word[-1] for word in words if latest[len(latest) - len(word) + 1 :] == tuple(word[:-1])]


def mask_logits(logits: torch.Tensor, rows: torch.Tensor, bits: torch.Tensor) -> None:
    """Set all tokens that `bits` does not allow in `rows` of `logits` [N, vocab] float32 to -inf, in place.

    rows [R] int64; bits [R, ceil(vocab / 32)] int32: bit i % 32 of word i // 32 allows token i.
    """
    places = torch.arange(32, dtype=torch.int32, device=logits.device)
    allowed = ((bits[:, :, None] >> places) & 1).flatten(1)[:, : logits.shape[1]]
    logits.index_copy_(0, rows, logits[rows].masked_fill_(allowed == 0, -math.inf))
