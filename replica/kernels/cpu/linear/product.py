"""Products with a bfloat16 weight, read once for any number of rows, as one sequential stream from large pages.

Measured on two cores of an AMD EPYC (avx512_bf16) with 200 MB of weights, alternating with oneDNN's packed products:
one row 6.3 ms (oneDNN 9.9), 8 rows 6.4 (10.2), 64 rows 30.1 (33.7), 512 rows 245 (257). Prefetching the weight gains
nothing up to 8 rows. With more rows, arithmetic takes as long as reading and prefetching helps: 16 rows 9.2 ms (13.0
without), 24 rows 13.2 (16.6), 32 rows 16.5 (18.3).
"""

import functools
import logging
import mmap
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numba import carray, njit

from ..runtime.compilation import Kernel, kernel
from ..runtime.thread_team import run, share, threads_for
from ..runtime.vectors import BF16, WORD, Dot, dot
from .tile import OUTPUTS, ROWS, tile

log = logging.getLogger(__name__)

LARGE_PAGE_BYTES = 2 << 20


@functools.cache
def _has_large_pages() -> bool:
    """Whether the system provides large pages on request; if not, logs the reason once."""
    try:
        _map(LARGE_PAGE_BYTES)
    except (AttributeError, OSError) as error:
        log.info("large_pages_unusable reason=%r", f"{type(error).__name__}: {error}")
        return False
    return True


def _map(size: int) -> mmap.mmap:
    area = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    area.madvise(mmap.MADV_HUGEPAGE)
    return area


def in_large_pages(weight: torch.Tensor) -> torch.Tensor:
    """A copy of a weight, in large pages if the system has them and the weight fills at least half of one."""
    if weight.nbytes < LARGE_PAGE_BYTES // 2 or not _has_large_pages():
        return weight.clone(memory_format=torch.contiguous_format)
    whole = torch.frombuffer(_map(weight.nbytes + 2 * LARGE_PAGE_BYTES), dtype=torch.uint8)
    start = -whole.data_ptr() % LARGE_PAGE_BYTES
    return whole[start : start + weight.nbytes].view(weight.dtype).view(weight.shape).copy_(weight)


@dataclass(slots=True, frozen=True)
class Packed:
    """A weight in the order in which the kernel reads it."""

    weight: torch.Tensor  #: [outputs / 32, features / 2, 32, 2], or several such weights [experts, ...]
    bias: torch.Tensor  #: float32, zeros if there is none; one entry per output, padding included
    outputs: int


def pack(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Packed:
    """Pack a bfloat16 weight [outputs, features] or [experts, outputs, features] with an even number of features."""
    *experts, outputs, features = weight.shape
    assert features % 2 == 0, f"an odd number of features: {features}"
    assert weight.dtype == torch.bfloat16, f"bfloat16 only, not {weight.dtype}"
    padding = -outputs % OUTPUTS
    padded = torch.nn.functional.pad(weight, (0, 0, 0, padding)) if padding else weight
    blocks = padded.unflatten(-1, (-1, 2)).unflatten(-3, (-1, OUTPUTS)).transpose(-3, -2)
    padded_bias = torch.zeros(*experts, outputs + padding)
    if bias is not None:
        padded_bias[..., :outputs] = bias
    return Packed(in_large_pages(blocks), padded_bias, outputs)


def product(x: torch.Tensor, packed: Packed) -> torch.Tensor:
    """x W^T + b for x [T, features]. Summed in float32, in the same order for any T, and rounded once.

    The result's rows are not contiguous if the outputs do not fill whole blocks: a copy would be a torch operation.
    """
    tokens, features = x.shape
    blocks, pairs = packed.weight.shape[:2]
    assert features == 2 * pairs, f"x of {features} features, weight of {2 * pairs}"
    assert x.dtype == torch.bfloat16, f"bfloat16 only, not {x.dtype}"
    x = x if x.stride(1) == 1 else x.contiguous()
    y = torch.empty(tokens, blocks * OUTPUTS, dtype=x.dtype)
    tensors, numbers = (x, packed.weight, packed.bias, y), (tokens, x.stride(0), pairs, blocks)
    run(compiled(dot()), tensors, numbers, threads_for(packed.weight.nbytes))
    return y[:, : packed.outputs]


@functools.cache
def compiled(dot: Dot) -> Kernel:
    multiply = multiply_blocks(dot)

    @kernel
    def product(data, number, threads) -> None:
        args = carray(data, (8,), np.int64)
        x, weights, bias, y = args[0], args[1], args[2], args[3]
        tokens, x_step, pairs, blocks = args[4], args[5] * BF16, args[6], args[7]
        first, stop = share(blocks * parts_of(tokens), number, threads)
        multiply(first, stop, tokens, x, x_step, weights, pairs, blocks, bias, y)

    return product


@njit(error_model="numpy")
def parts_of(tokens) -> int:
    """The number of tiles that `tokens` rows need."""
    return (tokens + ROWS - 1) // ROWS


def multiply_blocks(dot: Dot) -> Any:
    """A function that computes items `first` up to `stop` of a product: tiles of `ROWS` rows by a block of outputs.

    It multiplies all rows by one block of weights before the next, to keep the block in cache. Each tile prefetches a
    part of the next block. So the memory-bound first tile of a block overlaps with the other tiles, which are bound by
    arithmetic. With a single tile, prefetching costs a little and gains nothing.
    """
    multiply, multiply_and_prefetch = tile(dot, prefetches=False), tile(dot, prefetches=True)

    @njit(error_model="numpy")
    def blocks_from(first, stop, tokens, all_x, x_step, all_weights, pairs, blocks, all_bias, all_y) -> None:
        parts, y_step = parts_of(tokens), blocks * OUTPUTS * BF16
        size, last = pairs * OUTPUTS * WORD, (stop - 1) // parts
        for item in range(first, stop):
            block, part = item // parts, item % parts
            row, weights = part * ROWS, all_weights + block * size
            rows, x = min(tokens - row, ROWS), all_x + row * x_step
            bias, y = all_bias + block * OUTPUTS * WORD, all_y + row * y_step + block * OUTPUTS * BF16
            step = OUTPUTS * WORD // parts
            ahead = weights + size + part * pairs * step
            if parts == 1 or block == last:
                multiply(rows, x, x_step, weights, pairs, bias, y, y_step, ahead, step)
            else:
                multiply_and_prefetch(rows, x, x_step, weights, pairs, bias, y, y_step, ahead, step)

    return blocks_from
