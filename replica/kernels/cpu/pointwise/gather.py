"""Rows of a table: an embedding's, or the tokens whose logits are wanted."""

import functools

import numpy as np
import torch
from numba import carray

from ..runtime.compilation import kernel
from ..runtime.scalars import Storage, pointer, storage_of_all
from ..runtime.thread_loop import share
from ..runtime.thread_team import run, threads_for


def take(table: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """As `base.Kernels.take`."""
    taken = torch.empty(len(places), table.shape[1], dtype=table.dtype)
    numbers = len(places), table.shape[1], table.stride(0)
    run(_compiled(storage_of_all(table.dtype)), (table, places, taken), numbers, threads_for(taken.nbytes))
    return taken


@functools.cache
def _compiled(storage: Storage):
    kind, size = storage.kind, storage.size

    @kernel
    def take(data, number, threads):
        given = carray(data, (6,), np.int64)
        features = given[4]
        places = carray(pointer(given[1]), (given[3],), np.int64)
        first, stop = share(given[3], number, threads)
        for row in range(first, stop):
            source = carray(pointer(given[0] + places[row] * given[5] * size), (features,), kind)
            target = carray(pointer(given[2] + row * features * size), (features,), kind)
            for i in range(features):
                target[i] = source[i]

    return take
