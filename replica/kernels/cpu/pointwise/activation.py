"""silu(gate) * up, where both lie in one row."""

import functools

import numpy as np
import torch
from numba import carray

from ..runtime.compilation import kernel
from ..runtime.scalars import LEAST, Storage, exponential, pointer, storage_of_all
from ..runtime.thread_loop import share
from ..runtime.thread_team import run, threads_for


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """As `base.Kernels.silu_mul`."""
    storage = storage_of_all(gate_up.dtype)
    tokens, features = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(tokens, features, dtype=gate_up.dtype)
    run(_compiled(storage), (gate_up, out), (tokens, features, gate_up.stride(0)), threads_for(gate_up.nbytes))
    return out


@functools.cache
def _compiled(storage: Storage):
    kind, size, widen, narrow = storage.kind, storage.size, storage.widen, storage.narrow

    @kernel
    def silu_mul(data, number, threads):
        given = carray(data, (5,), np.int64)
        features = given[3]
        first, stop = share(given[2], number, threads)
        for token in range(first, stop):
            row = given[0] + token * given[4] * size
            gates = carray(pointer(row), (features,), kind)
            ups = carray(pointer(row + features * size), (features,), kind)
            out = carray(pointer(given[1] + token * features * size), (features,), kind)
            for i in range(features):
                given_gate = widen(gates[i])
                gate = LEAST if given_gate < LEAST else given_gate  # below, `exponential` is no longer exp
                out[i] = narrow(gate / (np.float32(1) + exponential(-gate)) * widen(ups[i]))

    return silu_mul
