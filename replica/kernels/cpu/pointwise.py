"""The small operations around the matrix products: row gathering, norm, rotation and KV store, activation, masks.

torch has all of them, but recorded steps would call its operations one by one (runtime/call_recording.py).
"""

import functools
import math

import numpy as np
import torch
from numba import carray, njit

from ...models.base import Rotary
from .runtime.compilation import Kernel, kernel
from .runtime.scalars import FAST_MATH, LEAST, Storage, exponential, pointer, storage_of
from .runtime.thread_team import run, share, threads_for


def take(table: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    out = torch.empty(len(indices), table.shape[1], dtype=table.dtype)
    numbers = len(indices), table.shape[1], table.stride(0)
    run(_take(storage_of(table.dtype)), (table, indices, out), numbers, threads_for(out.nbytes))
    return out


@functools.cache
def _take(storage: Storage) -> Kernel:
    kind, size = storage.kind, storage.size

    @kernel
    def take(data, number, threads) -> None:
        args = carray(data, (6,), np.int64)
        table, out, rows, features, stride = args[0], args[2], args[3], args[4], args[5]
        indices = carray(pointer(args[1]), (rows,), np.int64)
        first, stop = share(rows, number, threads)
        for row in range(first, stop):
            source = carray(pointer(table + indices[row] * stride * size), (features,), kind)
            target = carray(pointer(out + row * features * size), (features,), kind)
            for i in range(features):
                target[i] = source[i]

    return take


def add_rms_norm(
    x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, features = x.shape
    normed = torch.empty(tokens, features, dtype=x.dtype)
    added = x if delta is None else delta
    storage = storage_of(x.dtype, added.dtype, weight.dtype)
    summed = x if delta is None else torch.empty(tokens, features, dtype=x.dtype)
    numbers = tokens, features, x.stride(0), added.stride(0), float(epsilon)
    compiled = _add_rms_norm(storage, delta is not None)
    run(compiled, (x, added, weight, summed, normed), numbers, threads_for(normed.nbytes))
    return summed, normed


@functools.cache
def _add_rms_norm(storage: Storage, adds: bool) -> Kernel:
    kind, size, widen, narrow = storage.kind, storage.size, storage.widen, storage.narrow

    @kernel
    def add_rms_norm(data, number, threads) -> None:
        args = carray(data, (10,), np.int64)
        epsilon = np.float32(carray(data, (10,), np.float64)[9])
        all_x, all_delta, all_summed, all_normed = args[0], args[1], args[3], args[4]
        tokens, features, x_stride, delta_stride = args[5], args[6], args[7], args[8]
        weight = carray(pointer(args[2]), (features,), kind)
        first, stop = share(tokens, number, threads)
        for token in range(first, stop):
            x = carray(pointer(all_x + token * x_stride * size), (features,), kind)
            row = x
            squares = np.float32(0)
            if adds:
                delta = carray(pointer(all_delta + token * delta_stride * size), (features,), kind)
                row = carray(pointer(all_summed + token * features * size), (features,), kind)
                for i in range(features):
                    row[i] = narrow(widen(x[i]) + widen(delta[i]))
            for i in range(features):
                value = widen(row[i])  # normalize the rounded sum, which the next layer gets
                squares += value * value
            inverse = np.float32(1) / math.sqrt(squares / np.float32(features) + epsilon)
            normed = carray(pointer(all_normed + token * features * size), (features,), kind)
            for i in range(features):
                normed[i] = narrow(widen(row[i]) * inverse * widen(weight[i]))

    return add_rms_norm


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    storage = storage_of(gate_up.dtype)
    tokens, features = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(tokens, features, dtype=gate_up.dtype)
    run(_silu_mul(storage), (gate_up, out), (tokens, features, gate_up.stride(0)), threads_for(gate_up.nbytes))
    return out


@functools.cache
def _silu_mul(storage: Storage) -> Kernel:
    kind, size, widen, narrow = storage.kind, storage.size, storage.widen, storage.narrow

    @kernel
    def silu_mul(data, number, threads) -> None:
        args = carray(data, (5,), np.int64)
        gate_up, all_out, tokens, features, stride = args[0], args[1], args[2], args[3], args[4]
        first, stop = share(tokens, number, threads)
        for token in range(first, stop):
            row = gate_up + token * stride * size
            gates = carray(pointer(row), (features,), kind)
            ups = carray(pointer(row + features * size), (features,), kind)
            out = carray(pointer(all_out + token * features * size), (features,), kind)
            for i in range(features):
                wide = widen(gates[i])
                gate = LEAST if wide < LEAST else wide  # below it, `exponential` is clamped
                out[i] = narrow(gate / (np.float32(1) + exponential(-gate)) * widen(ups[i]))

    return silu_mul


def mask(logits: torch.Tensor, rows: torch.Tensor, bits: torch.Tensor) -> None:
    count, words = bits.shape
    numbers = count, words, logits.shape[1], logits.stride(0)
    run(_mask(), (logits, rows, bits), numbers, threads_for(bits.nbytes))  # one thread for a row of 131,000 tokens


@functools.cache
def _mask() -> Kernel:
    @kernel
    def mask(data, number, threads) -> None:
        args = carray(data, (7,), np.int64)
        all_logits, count, words, vocab, stride = args[0], args[3], args[4], args[5], args[6]
        rows = carray(pointer(args[1]), (count,), np.int64)
        bits = carray(pointer(args[2]), (count * words,), np.int32)
        first, stop = share(count * words, number, threads)
        for place in range(first, stop):
            word = bits[place]
            if word == -1:  # most words allow either all of their tokens or none
                continue
            row, start = place // words, place % words * 32
            width = min(32, vocab - start)
            logits = carray(pointer(all_logits + (rows[row] * stride + start) * 4), (width,), np.float32)
            for i in range(width):
                if not (word >> i) & 1:
                    logits[i] = -np.inf

    return mask


def rotary_table(
    positions: torch.Tensor, frequencies: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    cos, sin = (torch.empty(len(positions), len(frequencies), dtype=dtype) for _ in range(2))
    tensors, numbers = (positions, frequencies, cos, sin), (len(positions), len(frequencies))
    run(_rotary_table(storage_of(dtype)), tensors, numbers, threads_for(cos.nbytes))
    return cos, sin


@functools.cache
def _rotary_table(storage: Storage) -> Kernel:
    kind, size, narrow = storage.kind, storage.size, storage.narrow

    @kernel
    def rotary_table(data, number, threads) -> None:
        args = carray(data, (6,), np.int64)
        all_cos, all_sin, count, width = args[2], args[3], args[4], args[5]
        positions = carray(pointer(args[0]), (count,), np.int64)
        frequencies = carray(pointer(args[1]), (width,), np.float32)
        first, stop = share(count, number, threads)
        for row in range(first, stop):
            cos = carray(pointer(all_cos + row * width * size), (width,), kind)
            sin = carray(pointer(all_sin + row * width * size), (width,), kind)
            for i in range(width):
                angle = np.float32(positions[row]) * frequencies[i]
                cos[i] = narrow(np.float32(math.cos(angle)))
                sin[i] = narrow(np.float32(math.sin(angle)))

    return rotary_table


def rotate_and_store(
    qkv: torch.Tensor, rotary: Rotary, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> torch.Tensor:
    norms = () if rotary.q_norm is None or rotary.k_norm is None else (rotary.q_norm, rotary.k_norm)
    storage = storage_of(*(each.dtype for each in (qkv, keys, values, *norms)))
    table = storage_of(rotary.cos.dtype, rotary.sin.dtype)
    kv_heads, dim = keys.shape[2:]
    tokens, heads = len(qkv), qkv.shape[1] // dim - 2 * kv_heads
    queries = torch.empty(tokens, heads, dim, dtype=qkv.dtype)
    # Without norms, the kernel does not read their arguments.
    tensors = qkv, rotary.cos, rotary.sin, slots, keys, values, queries, *(norms or (qkv, qkv))
    counts = tokens, heads, kv_heads, qkv.stride(0), rotary.cos.stride(0), rotary.sin.stride(0)
    compiled = _rotate_and_store(storage, table, dim, bool(norms))
    run(compiled, tensors, (*counts, float(rotary.epsilon)), threads_for(qkv.nbytes))
    return queries


@functools.cache
def _rotate_and_store(storage: Storage, table: Storage, dim: int, norms: bool) -> Kernel:
    kind, size, widen, narrow = storage.kind, storage.size, storage.widen, storage.narrow
    half, table_kind, table_size, wide = dim // 2, table.kind, table.size, table.widen

    @njit(fastmath=FAST_MATH, error_model="numpy")
    def rotate(source, target, cos, sin, norm, epsilon) -> None:
        """Normalize and rotate one head, in pairs (i, i + dim / 2)."""
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
            target[i] = narrow(one * wide(cos[i]) - other * wide(sin[i]))
            target[half + i] = narrow(other * wide(cos[i]) + one * wide(sin[i]))

    @kernel
    def rotate_and_store(data, number, threads) -> None:
        args = carray(data, (16,), np.int64)
        epsilon = np.float32(carray(data, (16,), np.float64)[15])
        qkv, all_cos, all_sin, keys, values, queries = args[0], args[1], args[2], args[4], args[5], args[6]
        tokens, heads, kv_heads = args[9], args[10], args[11]
        qkv_stride, cos_stride, sin_stride = args[12], args[13], args[14]
        slots = carray(pointer(args[3]), (tokens,), np.int64)
        q_norm, k_norm = carray(pointer(args[7]), (dim,), kind), carray(pointer(args[8]), (dim,), kind)
        first, stop = share(tokens, number, threads)
        for token in range(first, stop):
            row = qkv + token * qkv_stride * size
            cos = carray(pointer(all_cos + token * cos_stride * table_size), (half,), table_kind)
            sin = carray(pointer(all_sin + token * sin_stride * table_size), (half,), table_kind)
            for head in range(heads):
                source = carray(pointer(row + head * dim * size), (dim,), kind)
                target = carray(pointer(queries + (token * heads + head) * dim * size), (dim,), kind)
                rotate(source, target, cos, sin, q_norm, epsilon)
            if slots[token] < 0:
                continue
            at = slots[token] * kv_heads * dim * size
            for head in range(kv_heads):
                source = carray(pointer(row + (heads + head) * dim * size), (dim,), kind)
                target = carray(pointer(keys + at + head * dim * size), (dim,), kind)
                rotate(source, target, cos, sin, k_norm, epsilon)
            fresh = carray(pointer(row + (heads + kv_heads) * dim * size), (kv_heads * dim,), kind)
            stored = carray(pointer(values + at), (kv_heads * dim,), kind)
            for i in range(kv_heads * dim):
                stored[i] = fresh[i]

    return rotate_and_store
