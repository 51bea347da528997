"""Helpers shared by the attention kernels: keys and values by block table, matrix products, scores, row search."""

import torch
import triton
import triton.language as tl

from ...models.base import AttentionRule
from .. import base

FP8_MAX = tl.constexpr(base.FP8_MAX)
LOG2E = tl.constexpr(1.4426950408889634)


def upcasts(x: torch.Tensor) -> bool:
    """Whether `dot` must widen its operands: Triton's CPU interpreter multiplies bfloat16 as if they were integers."""
    return x.device.type == "cpu" and x.dtype == torch.bfloat16


@triton.jit
def dot(a, b, UPCASTS: tl.constexpr) -> tl.tensor:
    """a @ b, accumulated in float32; float32 operands are not rounded to tf32."""
    if UPCASTS:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    return tl.dot(a, b, input_precision="ieee")


def score_terms(rule: AttentionRule) -> tuple[float, float]:
    """`scale` and `softcap` of `scored`, for scores in base 2."""
    if rule.softcap is None:
        return rule.scale * LOG2E.value, 0.0
    return rule.scale / rule.softcap * 2 * LOG2E.value, rule.softcap * LOG2E.value


@triton.jit
def scored(products, scale, softcap, CAPS: tl.constexpr) -> tl.tensor:
    """Scores in base 2 of products of queries and keys; `scale` and `softcap` as in `score_terms`."""
    scores = products * scale
    if CAPS:  # softcap * tanh(scores): scores are in base 2, times two
        decay = tl.exp2(-tl.abs(scores))
        capped = softcap * (1.0 - decay) / (1.0 + decay)
        scores = tl.where(scores < 0, -capped, capped)
    return scores


@triton.jit
def stored(x, pages) -> tl.tensor:
    """x as stored at `pages`, a pointer to KV; like `base.as_stored`."""
    kind = pages.dtype.element_ty
    if kind == tl.float8e4nv:
        wide = x.to(tl.float32)
        near = tl.minimum(tl.maximum(wide, -FP8_MAX), FP8_MAX)
        return tl.where(tl.abs(wide) < float("inf"), near, float("nan")).to(kind)
    return x.to(kind)


@triton.jit
def pages_of(table, token, there, PAGE: tl.constexpr) -> tl.tensor:
    """The page number of each token, the same for keys and values."""
    return tl.load(table + token // PAGE, mask=there, other=0).to(tl.int64)


@triton.jit
def key_tile(
    keys, page, token, there, page_stride, token_stride, DIM: tl.constexpr, DIM_PAD: tl.constexpr, PAGE: tl.constexpr
) -> tl.tensor:
    """Keys of one head, [DIM_PAD, tokens]; zeros where `there` is false."""
    d = tl.arange(0, DIM_PAD)
    at = page * page_stride + (token % PAGE) * token_stride
    return tl.load(keys + at[None, :] + d[:, None], mask=there[None, :] & (d[:, None] < DIM), other=0.0)


@triton.jit
def value_tile(
    values, page, token, there, page_stride, token_stride, DIM: tl.constexpr, DIM_PAD: tl.constexpr, PAGE: tl.constexpr
) -> tl.tensor:
    """Values of one head, [tokens, DIM_PAD]; zeros where `there` is false."""
    d = tl.arange(0, DIM_PAD)
    at = page * page_stride + (token % PAGE) * token_stride
    return tl.load(values + at[:, None] + d[None, :], mask=there[:, None] & (d[None, :] < DIM), other=0.0)


@triton.jit
def row_of(firsts, item, rows, GROUP: tl.constexpr, QUERIES: tl.constexpr) -> tl.tensor:
    """The row that contains `item`: the last one that starts at or before it, so rows without items are skipped.

    Row i starts at item `firsts[i]`. With QUERIES > 0 items are tiles: it starts at `firsts[i] * GROUP // QUERIES + i`.
    """
    low = item * 0  # a tensor, so that both types stay the same in the loop
    high = low + rows
    while high - low > 1:
        middle = (low + high) // 2
        first = tl.load(firsts + middle)
        if QUERIES > 0:
            first = first * GROUP // QUERIES + middle
        below = first <= item
        low = tl.where(below, middle, low)
        high = tl.where(below, high, middle)
    return low
