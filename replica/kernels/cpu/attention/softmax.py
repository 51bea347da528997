"""The softmax of a decoding row's scores, all of which it sees."""

import numpy as np
from numba import carray, njit

from ..runtime.scalars import FAST_MATH, exponential, greatest, pointer, same


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
