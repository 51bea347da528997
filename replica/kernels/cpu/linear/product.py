"""Products with a weight in bfloat16, which is read once for any number of rows, in the order in which it lies.

Measured on two cores of an AMD EPYC (avx512_bf16) with 200 MB of weights, oneDNN's packed products in turns with these:
one row 9.9 ms and 6.3, 8 rows 10.2 and 6.4, 64 rows 33.7 and 30.1, 512 rows 257 and 245. What these do is read a single
stream from large pages. Asking for it ahead of time gains nothing up to 8 rows; beyond, where arithmetic takes as long
as reading, it does: 16 rows 13.0 ms and 9.2, 24 rows 16.6 and 13.2, 32 rows 18.3 and 16.5.
"""

import functools
import logging
import mmap
from dataclasses import dataclass

import numpy as np
import torch
from numba import carray

from ..runtime.compilation import kernel
from ..runtime.thread_loop import share
from ..runtime.thread_team import run, threads_for
from ..runtime.vectors import HALF, WORD, Dot, dot
from .tile import OUTPUTS, ROWS, asking_tile, tile

log = logging.getLogger(__name__)

LARGE_PAGE_BYTES = 2 << 20


@functools.cache
def _has_large_pages() -> bool:
    """Whether the system gives them to who asks; says once in the log why not."""
    try:
        _area(LARGE_PAGE_BYTES)
    except (AttributeError, OSError) as error:
        log.info("large_pages_unusable reason=%r", f"{type(error).__name__}: {error}")
        return False
    return True


def _area(size: int) -> mmap.mmap:
    area = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    area.madvise(mmap.MADV_HUGEPAGE)
    return area


def in_large_pages(weight: torch.Tensor) -> torch.Tensor:
    """A copy in memory of its own, in large pages where the system has them and it fills at least half of one."""
    if weight.nbytes < LARGE_PAGE_BYTES // 2 or not _has_large_pages():
        return weight.clone(memory_format=torch.contiguous_format)
    whole = torch.frombuffer(_area(weight.nbytes + 2 * LARGE_PAGE_BYTES), dtype=torch.uint8)
    start = -whole.data_ptr() % LARGE_PAGE_BYTES
    return whole[start : start + weight.nbytes].view(weight.dtype).view(weight.shape).copy_(weight)


@dataclass(slots=True, frozen=True)
class Packed:
    """A weight as the kernel reads it."""

    weight: torch.Tensor  #: [outputs / 32, features / 2, 32, 2]
    bias: torch.Tensor  #: [outputs], float32, zeros where there is none; outputs as many as `weight` has
    outputs: int


def pack(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Packed:
    """Copy a weight [outputs, features] in bfloat16, an even number of features."""
    outputs, features = weight.shape
    assert features % 2 == 0, f"an odd number of features: {features}"
    assert weight.dtype == torch.bfloat16, f"bfloat16 only, not {weight.dtype}"
    beyond = -outputs % OUTPUTS
    blocks = torch.nn.functional.pad(weight, (0, 0, 0, beyond)).view(-1, OUTPUTS, features // 2, 2).transpose(1, 2)
    exact = torch.zeros(outputs + beyond)
    if bias is not None:
        exact[:outputs] = bias
    return Packed(in_large_pages(blocks), exact, outputs)


def product(x: torch.Tensor, packed: Packed) -> torch.Tensor:
    """x W^T + b of x [T, features]. Summed in float32, feature after feature for any T, and rounded once.

    Rows of a number of outputs that fills no block lie apart: a copy without gaps could not be recorded.
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
def compiled(dot: Dot):
    """The kernel. A thread takes blocks of outputs, and all rows with one before the next: it stays in its cache.

    With several parts of rows to a block, each brings a part of the next block near: what is bounded by reading, the
    first part, and by arithmetic, the others, then go on side by side. With one it costs a little and gains nothing.
    """
    multiply, multiply_and_ask = tile(dot), asking_tile(dot)

    @kernel
    def product(data, number, threads):
        given = carray(data, (8,), np.int64)
        tokens, pairs, blocks = given[4], given[6], given[7]
        x_step, y_step = given[5] * HALF, blocks * OUTPUTS * HALF
        parts = (tokens + ROWS - 1) // ROWS
        first, stop = share(blocks * parts, number, threads)
        size, last = pairs * OUTPUTS * WORD, (stop - 1) // parts
        for item in range(first, stop):
            block, part = item // parts, item % parts
            row, weights = part * ROWS, given[1] + block * size
            rows, x = min(tokens - row, ROWS), given[0] + row * x_step
            bias, y = given[2] + block * OUTPUTS * WORD, given[3] + row * y_step + block * OUTPUTS * HALF
            if parts == 1 or block == last:
                multiply(rows, x, x_step, weights, pairs, bias, y, y_step)
            else:
                step = OUTPUTS * WORD // parts
                ahead = weights + size + part * pairs * step
                multiply_and_ask(rows, x, x_step, weights, pairs, bias, y, y_step, ahead, step)

    return product
