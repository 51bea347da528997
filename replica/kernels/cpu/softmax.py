"""The softmax of a prefill's scores, of which each query may see a part: hides and weighs in one pass over them.

And that of a decoding row's, all of which it sees.
"""

import functools

import numpy as np
import torch
from numba import carray, njit

from .compilation import kernel
from .member import share
from .scalars import FAST_MATH, Storage, exponential, greatest, pointer, same, storage_of_all
from .team import run, threads_for


def causal_softmax(scores: torch.Tensor, count: int, window: int | None) -> torch.Tensor:
    """In place, over the last dimension of contiguous scores [..., count, keys], of float32 or bfloat16.

    Query i sees the keys up to number `keys - count + i`, of these the last `window`; the others weigh nothing.
    """
    storage = storage_of_all(scores.dtype)
    keys = scores.shape[-1]
    threads = threads_for(scores.nbytes)
    scratch = torch.empty(threads, keys, dtype=torch.float32)
    rows = scores.numel() // keys if keys else 0
    run(_compiled(storage), (scores, scratch), (rows, count, keys, window or keys), threads)
    return scores


@functools.cache
def _compiled(storage: Storage):
    kind, size, widen, narrow = storage.kind, storage.size, storage.widen, storage.narrow

    @kernel
    def causal_softmax(data, number, threads):
        given = carray(data, (6,), np.int64)
        count, keys, window = given[3], given[4], given[5]
        exact = given[1] + number * keys * 4
        first, stop = share(given[2], number, threads)
        for row in range(first, stop):
            end = keys - count + 1 + row % count
            begin = max(np.int64(0), end - window)
            whole = given[0] + row * keys * size
            seen = carray(pointer(whole + begin * size), (end - begin,), kind)
            weights = carray(pointer(exact), (end - begin,), np.float32)
            top, total = greatest(seen, widen), np.float32(0)
            for i in range(end - begin):
                weights[i] = exponential(widen(seen[i]) - top)
                total += weights[i]
            inverse = np.float32(1) / total
            for i in range(end - begin):
                seen[i] = narrow(weights[i] * inverse)
            before, after = (
                carray(pointer(whole), (begin,), kind),
                carray(pointer(whole + end * size), (keys - end,), kind),
            )
            for i in range(begin):
                before[i] = 0
            for i in range(keys - end):
                after[i] = 0

    return causal_softmax


@njit(fastmath=FAST_MATH, error_model="numpy")
def softmax_of_heads(scores, group, count, longest):
    """In place, of `count` scores of each of a group's heads, which lie `longest` apart."""
    for head in range(group):
        row = carray(pointer(scores + head * longest * 4), (count,), np.float32)
        top, total = greatest(row, same), np.float32(0)
        for i in range(count):
            row[i] = exponential(row[i] - top)
            total += row[i]
        inverse = np.float32(1) / total
        for i in range(count):
            row[i] *= inverse
