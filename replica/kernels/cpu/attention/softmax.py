"""The softmax of the scores of a decoding row, which sees all of its keys."""

import numpy as np
from numba import carray, njit

from ..runtime.scalars import FAST_MATH, exponential, greatest, pointer, same


@njit(fastmath=FAST_MATH, error_model="numpy")
def softmax_of_heads(scores, group, count, longest, softcap, sinks):
    """In place, of `count` scores of each of a group's heads, which are `longest` scores apart.

    `softcap` is 0 for none; `sinks` is the address of the group's float32 sinks, or 0.
    """
    for head in range(group):
        row = carray(pointer(scores + head * longest * 4), (count,), np.float32)
        if softcap > 0:
            for i in range(count):
                # softcap * tanh(score / softcap)
                row[i] = softcap - 2 * softcap / (exponential(2 * row[i] / softcap) + np.float32(1))
        top, total = greatest(row, same), np.float32(0)
        if sinks:
            sink = carray(pointer(sinks + head * 4), (1,), np.float32)[0]
            top = sink if sink > top else top  # so that NaN stays NaN
            total = exponential(sink - top)
        for i in range(count):
            row[i] = exponential(row[i] - top)
            total += row[i]
        inverse = np.float32(1) / total
        for i in range(count):
            row[i] *= inverse
