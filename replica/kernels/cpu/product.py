"""Products of a few tokens with a weight in bfloat16, at the speed at which memory hands the weight out.

A token's products are reading: each number of a weight is used once. So one row after the other is read, as a single
stream that the CPU foresees, and from large pages: it took 1.6 times as long with small ones, and 1.3 (two threads) to
2.3 times (one) with two rows side by side.
"""

import functools
import logging
import mmap

import numpy as np
import torch
from numba import carray

from .compilation import kernel
from .scalars import HIGH_BITS, float_of, pointer, storage_of_all
from .team import openmp_threads, run, share_of, threads_for

log = logging.getLogger(__name__)

LARGE_PAGE_BYTES = 2 << 20
HIGH_HALF = np.uint32(0xFFFF0000)
WIDE = 4  #: Bytes of a float32.


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


def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x W^T + b of x [T, features] and a contiguous weight [outputs, features], an even number of features.

    Summed in float32, and rounded once.
    """
    (tokens, features), outputs = x.shape, len(weight)
    assert features == weight.shape[1], f"x of {features} features, weight of {weight.shape[1]}"
    assert features % 2 == 0, f"an odd number of features: {features}"
    dtypes = x.dtype, weight.dtype, (weight if bias is None else bias).dtype
    assert storage_of_all(*dtypes).kind is np.uint16, "bfloat16 only"
    x, y = x.contiguous(), torch.empty(tokens, outputs, dtype=x.dtype)
    threads = threads_for(weight.nbytes)
    halves = torch.empty(threads * tokens * features, dtype=torch.float32)
    tensors = x.data_ptr(), weight.data_ptr(), 0 if bias is None else bias.data_ptr(), y.data_ptr(), halves.data_ptr()
    run(compiled(), np.array([*tensors, tokens, features, outputs], dtype=np.int64), threads)
    return y


@functools.cache
def compiled():
    """The kernel. A word holds two numbers of a row: its high half is one as float32, its low half after a shift."""
    storage, share = storage_of_all(torch.bfloat16), share_of()
    kind, size, widen, narrow = storage.kind, storage.size, storage.widen, storage.narrow
    thread = openmp_threads()[0]

    @kernel
    def product(data):
        given = carray(data, (8,), np.int64)
        tokens, features, outputs = given[5], given[6], given[7]
        words = features // 2
        halves = given[4] + np.int64(thread()) * tokens * features * WIDE
        for token in range(tokens):
            x = carray(pointer(given[0] + token * features * size), (words,), np.uint32)
            low = carray(pointer(halves + token * features * WIDE), (words,), np.float32)
            high = carray(pointer(halves + (token * features + words) * WIDE), (words,), np.float32)
            for i in range(words):
                low[i] = float_of(np.uint32(x[i] << HIGH_BITS))
                high[i] = float_of(np.uint32(x[i] & HIGH_HALF))
        bias = carray(pointer(given[2]), (outputs,), kind)
        first, stop = share(outputs)
        for output in range(first, stop):
            row = carray(pointer(given[1] + output * features * size), (words,), np.uint32)
            for token in range(tokens):
                low = carray(pointer(halves + token * features * WIDE), (words,), np.float32)
                high = carray(pointer(halves + (token * features + words) * WIDE), (words,), np.float32)
                of_low, of_high = np.float32(0), np.float32(0)
                for i in range(words):
                    of_low += low[i] * float_of(np.uint32(row[i] << HIGH_BITS))
                    of_high += high[i] * float_of(np.uint32(row[i] & HIGH_HALF))
                if given[2]:
                    of_low += widen(bias[output])
                y = carray(pointer(given[3] + token * outputs * size), (outputs,), kind)
                y[output] = narrow(of_low + of_high)

    return product
