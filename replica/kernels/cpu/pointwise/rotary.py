"""The cosines and sines of rotary embeddings."""

import functools
import math

import numpy as np
import torch
from numba import carray

from ..runtime.compilation import kernel
from ..runtime.scalars import Storage, pointer, storage_of_all
from ..runtime.thread_loop import share
from ..runtime.thread_team import run, threads_for


def waves(positions: torch.Tensor, frequencies: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """As `base.Kernels.waves`, of frequencies in float32."""
    cos, sin = (torch.empty(len(positions), len(frequencies), dtype=dtype) for _ in range(2))
    kernel = _compiled(storage_of_all(dtype))
    run(kernel, (positions, frequencies, cos, sin), (len(positions), len(frequencies)), threads_for(cos.nbytes))
    return cos, sin


@functools.cache
def _compiled(storage: Storage):
    kind, size, narrow = storage.kind, storage.size, storage.narrow

    @kernel
    def waves(data, number, threads):
        given = carray(data, (6,), np.int64)
        count, width = given[4], given[5]
        positions = carray(pointer(given[0]), (count,), np.int64)
        frequencies = carray(pointer(given[1]), (width,), np.float32)
        first, stop = share(count, number, threads)
        for row in range(first, stop):
            cos = carray(pointer(given[2] + row * width * size), (width,), kind)
            sin = carray(pointer(given[3] + row * width * size), (width,), kind)
            for i in range(width):
                angle = np.float32(positions[row]) * frequencies[i]
                cos[i] = narrow(np.float32(math.cos(angle)))
                sin[i] = narrow(np.float32(math.sin(angle)))

    return waves
