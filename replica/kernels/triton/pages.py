"""Where keys and values of a row's tokens lie: tiles of them by way of its block table. No other kernel reads pages.

A tile's tokens beyond the row's end are given as zeros: what lies there is not the row's.
"""

import triton
import triton.language as tl


@triton.jit
def pages_of(table, token, there, PAGE: tl.constexpr):
    """The page of each token, which keys and values share."""
    return tl.load(table + token // PAGE, mask=there, other=0).to(tl.int64)


@triton.jit
def key_tile(
    keys, page, token, there, page_stride, token_stride, DIM: tl.constexpr, DIM_PAD: tl.constexpr, PAGE: tl.constexpr
):
    """Keys of one head, [DIM_PAD, tokens]."""
    d = tl.arange(0, DIM_PAD)
    at = page * page_stride + (token % PAGE) * token_stride
    return tl.load(keys + at[None, :] + d[:, None], mask=there[None, :] & (d[:, None] < DIM), other=0.0)


@triton.jit
def value_tile(
    values, page, token, there, page_stride, token_stride, DIM: tl.constexpr, DIM_PAD: tl.constexpr, PAGE: tl.constexpr
):
    """Values of one head, [tokens, DIM_PAD]."""
    d = tl.arange(0, DIM_PAD)
    at = page * page_stride + (token % PAGE) * token_stride
    return tl.load(values + at[:, None] + d[None, :], mask=there[:, None] & (d[None, :] < DIM), other=0.0)
