"""Helpers that the attention kernels share: tiles of keys and values by block table, matrix products, row searches."""

import torch
import triton
import triton.language as tl

from .. import base

FP8_MOST = tl.constexpr(base.FP8_MOST)


def upcasts(x: torch.Tensor) -> bool:
    """Whether `dot` must widen operands: Triton's interpreter (on a CPU) takes bfloat16 for integers in a product."""
    return x.device.type == "cpu" and x.dtype == torch.bfloat16


@triton.jit
def dot(a, b, UPCASTS: tl.constexpr):
    """a @ b summed in float32; float32 operands are not rounded to tf32."""
    if UPCASTS:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def stored(x, pages):
    """As `base.as_stored`, for a pointer to KV."""
    kind = pages.dtype.element_ty
    if kind == tl.float8e4nv:
        wide = x.to(tl.float32)
        near = tl.minimum(tl.maximum(wide, -FP8_MOST), FP8_MOST)
        return tl.where(tl.abs(wide) < float("inf"), near, float("nan")).to(kind)
    return x.to(kind)


@triton.jit
def pages_of(table, token, there, PAGE: tl.constexpr):
    """The page of each token, which keys and values share."""
    return tl.load(table + token // PAGE, mask=there, other=0).to(tl.int64)


@triton.jit
def key_tile(
    keys, page, token, there, page_stride, token_stride, DIM: tl.constexpr, DIM_PAD: tl.constexpr, PAGE: tl.constexpr
):
    """Keys of one head, [DIM_PAD, tokens]; zeros for tokens that are not there."""
    d = tl.arange(0, DIM_PAD)
    at = page * page_stride + (token % PAGE) * token_stride
    return tl.load(keys + at[None, :] + d[:, None], mask=there[None, :] & (d[:, None] < DIM), other=0.0)


@triton.jit
def value_tile(
    values, page, token, there, page_stride, token_stride, DIM: tl.constexpr, DIM_PAD: tl.constexpr, PAGE: tl.constexpr
):
    """Values of one head, [tokens, DIM_PAD]; zeros for tokens that are not there."""
    d = tl.arange(0, DIM_PAD)
    at = page * page_stride + (token % PAGE) * token_stride
    return tl.load(values + at[:, None] + d[None, :], mask=there[:, None] & (d[None, :] < DIM), other=0.0)


@triton.jit
def row_of(firsts, item, rows, GROUP: tl.constexpr, QUERIES: tl.constexpr):
    """The last row whose first item is not after `item`: skips rows without items.

    Row i's first item is `firsts[i]`, or with QUERIES its first tile: `firsts[i] * GROUP // QUERIES + i`.
    """
    low = item * 0  # of the types that they have after a step
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
