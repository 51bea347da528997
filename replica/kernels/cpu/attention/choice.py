"""Chooses which rows' attention torch computes, and which our compiled loops do.

Which is faster depends on the processor's matrix instructions and on torch's kernels for them, so both are measured
(see `measurements`). torch's results are checked at each start. If they are about equally fast, or torch's cannot be
used, our loops compute all rows: their results do not depend on how a prompt is split into chunks.
"""

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ....models.base import AttentionRule
from ...base import PagedRows, TorchCpuKernels
from ..runtime.measurements import Comparison, measurements
from . import decode, fused, prefill

log = logging.getLogger(__name__)

#: Queries and tokens of the two rows that are measured. Both dtypes together take 0.14 s on an AVX2 EPYC.
SHORT, LONG = (64, 64), (128, 1024)
#: Tokens of the row whose decode is measured.
DECODED = 1024
#: The fewest queries of a row that torch may compute.
FEWEST = 16
#: Largest error of torch's results, relative to their norm. Rounding to bfloat16 makes 0.2 %.
MAX_ERROR = 0.02
PAGE = 16

Attend = Callable[[torch.Tensor, PagedRows, torch.Tensor, AttentionRule, torch.Tensor], object]


@dataclass(slots=True, frozen=True)
class PromptChoice:
    """Torch computes rows with at least so many queries and tokens; None: no rows."""

    least: tuple[int, int] | None
    reason: str

    def __str__(self) -> str:
        if self.least is None:
            return f"own loops ({self.reason})"
        return "torch for rows of at least {} queries and {} tokens ({})".format(*self.least, self.reason)

    def takes(self, queries: int, tokens: int) -> bool:
        return self.least is not None and queries >= self.least[0] and tokens >= self.least[1]


@dataclass(slots=True, frozen=True)
class DecodeChoice:
    by_torch: bool
    reason: str

    def __str__(self) -> str:
        return f"{'torch' if self.by_torch else 'own loops'} ({self.reason})"


def decide(short: Comparison, long: Comparison) -> PromptChoice:
    """The choice, from how many times as fast torch is for SHORT and for LONG rows."""
    reason = (
        f"torch is {long.speed:.2f} times as fast for prompts of {LONG[1]} tokens, "
        f"{short.speed:.2f} times for {SHORT[1]}"
    )
    if not long.library:
        return PromptChoice(None, reason)
    # Between the two: with 64 queries, both were equally fast at about 128 tokens on an AVX2 EPYC.
    return PromptChoice((FEWEST, 1) if short.library else (SHORT[0], LONG[1] // 4), reason)


@functools.cache
def prompt_choice(dtype: torch.dtype, heads: int, kv_heads: int, dim: int) -> PromptChoice:
    """The choice for layers of this shape on this processor."""
    group, name = heads // kv_heads, str(dtype).removeprefix("torch.")
    try:
        found = [
            _compare(f"prompt attention of {queries} of {tokens} tokens", dtype, group, dim, queries, tokens)
            for queries, tokens in (SHORT, LONG)
        ]
        choice = decide(*found)
    except (RuntimeError, AttributeError, TypeError, ArithmeticError) as error:  # another torch, another operator
        choice = PromptChoice(None, f"torch's attention cannot be used: {' '.join(str(error).split())[:200]}")
    log.info("prompt_attention_chosen dtype=%s choice='%s'", name, choice)
    return choice


@functools.cache
def decode_choice(dtype: torch.dtype, heads: int, kv_heads: int, dim: int) -> DecodeChoice:
    """Like `prompt_choice`, for rows that compute one token."""
    try:
        found = _compare(f"decode attention of {DECODED} tokens", dtype, heads // kv_heads, dim, 1, DECODED)
    except (RuntimeError, ArithmeticError) as error:
        return DecodeChoice(by_torch=False, reason=f"torch cannot be used: {' '.join(str(error).split())[:200]}")
    return DecodeChoice(found.library, f"torch is {found.speed:.2f} times as fast for a row of {DECODED} tokens")


def _compare(name: str, dtype: torch.dtype, group: int, dim: int, queries: int, tokens: int) -> Comparison:
    """Compare our loops with torch for one row, and one KV head with `group` query heads.

    Raises ArithmeticError if torch's results are wrong.
    """
    generator = torch.Generator().manual_seed(0)
    pages = -(-tokens // PAGE)
    keys, values = torch.randn(2, pages, PAGE, 1, dim, generator=generator).to(dtype)
    q = torch.randn(queries, group, dim, generator=generator).to(dtype)
    table = torch.arange(pages, dtype=torch.int32)[None]
    rows = PagedRows(keys, values, table, torch.tensor([tokens], dtype=torch.int32))
    firsts, rule = torch.tensor([0, queries], dtype=torch.int32), AttentionRule(dim**-0.5)
    own, other = torch.empty_like(q), torch.empty_like(q)
    run_own, run_other = (
        (lambda: decode.decode(q, rows, rule, own), lambda: TorchCpuKernels().decode(q, rows, None, rule, other))
        if queries == 1
        else (lambda: prefill.prefill(q, rows, firsts, rule, own), lambda: fused.prefill(q, rows, firsts, rule, other))
    )
    run_own()
    run_other()
    error = float((own.float() - other.float()).norm() / own.float().norm())
    if not error < MAX_ERROR:
        raise ArithmeticError(f"its results differ by {error:.1%}")
    return measurements().compare(f"{name}, {dtype}, {group} heads of {dim}", run_own, run_other)
