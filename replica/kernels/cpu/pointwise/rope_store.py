"""Norm and rotation of queries and keys, and the store of keys and values into their slots, a token at a time."""

import functools
import math

import numpy as np
import torch
from numba import carray, njit

from ....models.base import Rotary
from ..runtime.compilation import kernel
from ..runtime.scalars import FAST_MATH, Storage, pointer, storage_of_all
from ..runtime.thread_loop import share
from ..runtime.thread_team import run, threads_for


def rotate_and_store(
    qkv: torch.Tensor, rotary: Rotary, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> torch.Tensor:
    """As `base.Kernels.rotate_and_store`."""
    norms = () if rotary.q_norm is None or rotary.k_norm is None else (rotary.q_norm, rotary.k_norm)
    storage = storage_of_all(*(each.dtype for each in (qkv, keys, values, *norms)))
    waves = storage_of_all(rotary.cos.dtype, rotary.sin.dtype)
    kv_heads, dim = keys.shape[2:]
    tokens, heads = len(qkv), qkv.shape[1] // dim - 2 * kv_heads
    queries = torch.empty(tokens, heads, dim, dtype=qkv.dtype)
    # Where a model has no norms, what stands in their places is not read.
    tensors = qkv, rotary.cos, rotary.sin, slots, keys, values, queries, *(norms or (qkv, qkv))
    counts = tokens, heads, kv_heads, qkv.stride(0), rotary.cos.stride(0), rotary.sin.stride(0)
    compiled = _compiled(storage, waves, dim, bool(norms))
    run(compiled, tensors, (*counts, float(rotary.epsilon)), threads_for(qkv.nbytes))
    return queries


@functools.cache
def _compiled(storage: Storage, waves: Storage, dim: int, norms: bool):
    kind, size = storage.kind, storage.size
    half, wave_kind, wave_size = dim // 2, waves.kind, waves.size
    turn = _turn(storage, waves, dim, norms)

    @kernel
    def rotate_and_store(data, number, threads):
        given = carray(data, (16,), np.int64)
        epsilon = np.float32(carray(data, (16,), np.float64)[15])
        heads, kv_heads = given[10], given[11]
        slots = carray(pointer(given[3]), (given[9],), np.int64)
        q_norm, k_norm = carray(pointer(given[7]), (dim,), kind), carray(pointer(given[8]), (dim,), kind)
        first, stop = share(given[9], number, threads)
        for token in range(first, stop):
            row = given[0] + token * given[12] * size
            cos = carray(pointer(given[1] + token * given[13] * wave_size), (half,), wave_kind)
            sin = carray(pointer(given[2] + token * given[14] * wave_size), (half,), wave_kind)
            for head in range(heads):
                source = carray(pointer(row + head * dim * size), (dim,), kind)
                target = carray(pointer(given[6] + (token * heads + head) * dim * size), (dim,), kind)
                turn(source, target, cos, sin, q_norm, epsilon)
            if slots[token] < 0:
                continue
            place = slots[token] * kv_heads * dim * size
            for head in range(kv_heads):
                source = carray(pointer(row + (heads + head) * dim * size), (dim,), kind)
                target = carray(pointer(given[4] + place + head * dim * size), (dim,), kind)
                turn(source, target, cos, sin, k_norm, epsilon)
            fresh = carray(pointer(row + (heads + kv_heads) * dim * size), (kv_heads * dim,), kind)
            stored = carray(pointer(given[5] + place), (kv_heads * dim,), kind)
            for i in range(kv_heads * dim):
                stored[i] = fresh[i]

    return rotate_and_store


def _turn(storage: Storage, waves: Storage, dim: int, norms: bool):
    half, widen, narrow, wave = dim // 2, storage.widen, storage.narrow, waves.widen

    @njit(fastmath=FAST_MATH, error_model="numpy")
    def turn(source, target, cos, sin, norm, epsilon):
        """One head, pairs (i, i + dim / 2)."""
        inverse = np.float32(1)
        if norms:
            squares = np.float32(0)
            for i in range(dim):
                squares += widen(source[i]) * widen(source[i])
            inverse = np.float32(1) / math.sqrt(squares / np.float32(dim) + epsilon)
        for i in range(half):
            one, other = widen(source[i]), widen(source[half + i])
            if norms:
                one, other = one * inverse * widen(norm[i]), other * inverse * widen(norm[half + i])
            target[i] = narrow(one * wave(cos[i]) - other * wave(sin[i]))
            target[half + i] = narrow(other * wave(cos[i]) + one * wave(sin[i]))

    return turn
