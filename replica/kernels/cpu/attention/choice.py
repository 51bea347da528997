"""Chooses which rows of a prompt step torch's fused attention computes, and which our compiled loops do.

Which is faster depends on the processor's matrix instructions and on torch's kernels for them, so both are measured
once per process and shape, before the replica is ready. If they are about equally fast, or torch's cannot be used, our
loops compute all rows: their results do not depend on how a prompt is split into chunks.
"""

import functools
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ....models.base import AttentionRule
from ...base import PagedRows
from . import fused, prefill

log = logging.getLogger(__name__)

#: Queries and tokens of the two rows that are measured. Both dtypes together take 0.14 s on an AVX2 EPYC.
SHORT, LONG = (64, 64), (128, 1024)
#: The fewest queries of a row that torch may compute.
FEWEST = 16
#: How much faster torch must be to be chosen.
MARGIN = 1.25
REPEATS = 3
#: Largest error of torch's results, relative to their norm. Rounding to bfloat16 makes 0.2 %.
MAX_ERROR = 0.02
PAGE = 16


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


def decide(short: float, long: float) -> PromptChoice:
    """The choice, from how many times as fast torch is for SHORT and for LONG rows."""
    reason = f"torch is {long:.2f} times as fast for prompts of {LONG[1]} tokens, {short:.2f} times for {SHORT[1]}"
    if long < MARGIN:
        return PromptChoice(None, reason)
    # Between the two: with 64 queries, both were equally fast at about 128 tokens on an AVX2 EPYC.
    return PromptChoice((FEWEST, 1) if short >= MARGIN else (SHORT[0], LONG[1] // 4), reason)


@functools.cache
def prompt_choice(dtype: torch.dtype, heads: int, kv_heads: int, dim: int) -> PromptChoice:
    """The choice for layers of this shape on this processor; measured at the first call."""
    started, threads = time.perf_counter(), torch.get_num_threads()
    torch.set_num_threads(1)  # with several, a busy machine decides
    try:
        short, long = (_speed(dtype, heads // kv_heads, dim, *each) for each in (SHORT, LONG))
        choice = decide(short, long)
    except (RuntimeError, AttributeError, TypeError, ArithmeticError) as error:  # another torch, another operator
        choice = PromptChoice(None, f"torch's attention cannot be used: {' '.join(str(error).split())[:200]}")
    finally:
        torch.set_num_threads(threads)
    name, took = str(dtype).removeprefix("torch."), time.perf_counter() - started
    log.info("prompt_attention_chosen dtype=%s measured_s=%.2f choice='%s'", name, took, choice)
    return choice


def _speed(dtype: torch.dtype, heads: int, dim: int, queries: int, tokens: int) -> float:
    """How many times as fast as our loops torch is for one row, and one KV head with `heads` query heads.

    Raises ArithmeticError if torch's results are wrong.
    """
    generator = torch.Generator().manual_seed(0)
    pages = -(-tokens // PAGE)
    keys, values = torch.randn(2, pages, PAGE, 1, dim, generator=generator).to(dtype)
    q = torch.randn(queries, heads, dim, generator=generator).to(dtype)
    table = torch.arange(pages, dtype=torch.int32)[None]
    rows = PagedRows(keys, values, table, torch.tensor([tokens], dtype=torch.int32))
    firsts, rule = torch.tensor([0, queries], dtype=torch.int32), AttentionRule(dim**-0.5)
    own, other = torch.empty_like(q), torch.empty_like(q)
    own_s, other_s = _seconds(
        lambda: prefill.prefill(q, rows, firsts, rule, own), lambda: fused.prefill(q, rows, firsts, rule, other)
    )
    error = float((own.float() - other.float()).norm() / own.float().norm())
    if not error < MAX_ERROR:
        raise ArithmeticError(f"its results differ by {error:.1%}")
    return own_s / other_s


def _seconds(*runs: Callable[[], object]) -> list[float]:
    """Each run's least time of a few in turn, after one that loads and compiles what it needs."""
    times: list[list[float]] = [[] for _ in runs]
    for _ in range(1 + REPEATS):
        for run, own in zip(runs, times, strict=True):
            started = time.perf_counter()
            run()
            own.append(time.perf_counter() - started)
    return [min(each[1:]) for each in times]
