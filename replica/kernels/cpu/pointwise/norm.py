"""The residual sum and the norm that follows it: one pass writes the sum, one the norm, a token at a time."""

import functools
import math

import numpy as np
import torch
from numba import carray

from ..runtime.compilation import kernel
from ..runtime.scalars import Storage, pointer, storage_of_all
from ..runtime.thread_loop import share
from ..runtime.thread_team import run, threads_for


def add_rms_norm(
    x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `base.Kernels.add_rms_norm`."""
    tokens, features = x.shape
    normed = torch.empty(tokens, features, dtype=x.dtype)
    added = x if delta is None else delta
    storage = storage_of_all(x.dtype, added.dtype, weight.dtype)
    summed = x if delta is None else torch.empty(tokens, features, dtype=x.dtype)
    numbers = tokens, features, x.stride(0), added.stride(0), float(epsilon)
    compiled = _compiled(storage, delta is not None)
    run(compiled, (x, added, weight, summed, normed), numbers, threads_for(normed.nbytes))
    return summed, normed


@functools.cache
def _compiled(storage: Storage, adds: bool):
    kind, size, widen, narrow = storage.kind, storage.size, storage.widen, storage.narrow

    @kernel
    def add_rms_norm(data, number, threads):
        given = carray(data, (10,), np.int64)
        epsilon = np.float32(carray(data, (10,), np.float64)[9])
        tokens, features = given[5], given[6]
        weight = carray(pointer(given[2]), (features,), kind)
        first, stop = share(tokens, number, threads)
        for token in range(first, stop):
            x = carray(pointer(given[0] + token * given[7] * size), (features,), kind)
            row = x
            squares = np.float32(0)
            if adds:
                delta = carray(pointer(given[1] + token * given[8] * size), (features,), kind)
                row = carray(pointer(given[3] + token * features * size), (features,), kind)
                for i in range(features):
                    row[i] = narrow(widen(x[i]) + widen(delta[i]))
            for i in range(features):
                value = widen(row[i])  # the norm of what the next layer will see
                squares += value * value
            inverse = np.float32(1) / math.sqrt(squares / np.float32(features) + epsilon)
            normed = carray(pointer(given[4] + token * features * size), (features,), kind)
            for i in range(features):
                normed[i] = narrow(widen(row[i]) * inverse * widen(weight[i]))

    return add_rms_norm
