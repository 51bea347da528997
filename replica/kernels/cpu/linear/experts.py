"""Mixtures of experts in bfloat16: each token's products with the weights of the experts that it chose.

No choice is read back to Python, so steps can be recorded. An expert's weight is read once for all tokens that chose
it, and not at all if none did.
"""

import functools
from dataclasses import dataclass

import numpy as np
import torch
from numba import carray

from ..runtime.compilation import Kernel, kernel
from ..runtime.scalars import Storage, pointer, storage_of
from ..runtime.thread_team import run, share, threads_for
from ..runtime.vectors import BF16, WORD, Dot, dot
from .product import Packed, multiply_blocks, parts_of
from .tile import OUTPUTS


@dataclass(slots=True, frozen=True)
class Grouped:
    """Choices ordered by expert, and by token among those of one expert."""

    firsts: torch.Tensor  #: int64 [experts + 1]; expert e has choices `firsts[e]` up to `firsts[e + 1]`
    tokens: torch.Tensor  #: int64 [choices]: the token that made each choice
    places: torch.Tensor  #: int64 [tokens, choices per token]: where each token's choices are in this order


def group(chosen: torch.Tensor, experts: int) -> Grouped:
    """Group choices [tokens, choices per token] int64, all from 0 up to `experts`."""
    assert chosen.dtype == torch.int64, f"int64 only, not {chosen.dtype}"
    count, per_token = chosen.shape
    chosen = chosen.contiguous()
    firsts = torch.empty(experts + 1, dtype=torch.int64)
    tokens, places = torch.empty(chosen.numel(), dtype=torch.int64), torch.empty_like(chosen)
    run(_group(), (chosen, firsts, tokens, places), (count, per_token, experts), 1)
    return Grouped(firsts, tokens, places)


@functools.cache
def _group() -> Kernel:
    @kernel
    def group(data, _number, _threads) -> None:
        args = carray(data, (7,), np.int64)
        count, per_token, experts = args[4], args[5], args[6]
        chosen = carray(pointer(args[0]), (count * per_token,), np.int64)
        firsts = carray(pointer(args[1]), (experts + 1,), np.int64)
        tokens = carray(pointer(args[2]), (count * per_token,), np.int64)
        places = carray(pointer(args[3]), (count * per_token,), np.int64)
        for expert in range(experts + 1):
            firsts[expert] = 0
        for choice in range(count * per_token):
            firsts[chosen[choice]] += 1
        before = np.int64(0)
        for expert in range(experts + 1):
            own = firsts[expert]
            firsts[expert] = before
            before += own
        for choice in range(count * per_token):
            place = firsts[chosen[choice]]
            places[choice], tokens[place] = place, choice // per_token
            firsts[chosen[choice]] = place + 1
        for expert in range(experts, 0, -1):  # each is now the first choice of the next expert
            firsts[expert] = firsts[expert - 1]
        firsts[0] = 0

    return group


def products(x: torch.Tensor, packed: Packed, firsts: torch.Tensor) -> torch.Tensor:
    """x W^T + b for x [choices, features] in the order of `Grouped`, each with its expert's weight.

    Summed and rounded as by `product.product`, whose layout the result has too.
    """
    choices, features = x.shape
    experts, blocks, pairs = packed.weight.shape[:3]
    assert features == 2 * pairs, f"x of {features} features, weights of {2 * pairs}"
    assert x.dtype == torch.bfloat16, f"bfloat16 only, not {x.dtype}"
    x = x if x.stride(1) == 1 else x.contiguous()
    y = torch.empty(choices, blocks * OUTPUTS, dtype=x.dtype)
    tensors, numbers = (x, packed.weight, packed.bias, y, firsts), (experts, x.stride(0), pairs, blocks)
    run(_products(dot()), tensors, numbers, threads_for(packed.weight.nbytes // experts))
    return y[:, : packed.outputs]


@functools.cache
def _products(dot: Dot) -> Kernel:
    multiply = multiply_blocks(dot)

    @kernel
    def products(data, number, threads) -> None:
        args = carray(data, (9,), np.int64)
        experts, x_step, pairs, blocks = args[5], args[6] * BF16, args[7], args[8]
        firsts = carray(pointer(args[4]), (experts + 1,), np.int64)
        items = np.int64(0)
        for expert in range(experts):
            items += blocks * parts_of(firsts[expert + 1] - firsts[expert])
        first, stop = share(items, number, threads)
        for expert in range(experts):  # `first` and `stop` count from the expert's first item
            tokens, row = firsts[expert + 1] - firsts[expert], firsts[expert]
            items = blocks * parts_of(tokens)
            if max(first, 0) < min(stop, items):
                x, y = args[0] + row * x_step, args[3] + row * blocks * OUTPUTS * BF16
                weights, bias = (
                    args[1] + expert * blocks * pairs * OUTPUTS * WORD,
                    args[2] + expert * blocks * OUTPUTS * WORD,
                )
                multiply(max(first, 0), min(stop, items), tokens, x, x_step, weights, pairs, blocks, bias, y)
            first, stop = first - items, stop - items

    return products


def combine(found: torch.Tensor, places: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The weighted sum of each token's results, found [choices, features] in the order of `Grouped`.

    weights [tokens, choices per token]. Summed in float32 in the order of the token's choices, and rounded once.
    """
    (tokens, per_token), features = places.shape, found.shape[1]
    out = torch.empty(tokens, features, dtype=found.dtype)
    compiled = _combine(storage_of(found.dtype), storage_of(weights.dtype))
    threads = threads_for(found.nbytes)
    tensors = found, places, weights.contiguous(), out, torch.empty(threads, features, dtype=torch.float32)
    run(compiled, tensors, (tokens, per_token, features, found.stride(0)), threads)
    return out


@functools.cache
def _combine(storage: Storage, of_weights: Storage) -> Kernel:
    kind, size, widen, narrow = storage.kind, storage.size, storage.widen, storage.narrow
    weight_kind, wide = of_weights.kind, of_weights.widen

    @kernel
    def combine(data, number, threads) -> None:
        args = carray(data, (9,), np.int64)
        found, all_out, tokens, per_token, features, stride = args[0], args[3], args[5], args[6], args[7], args[8]
        places = carray(pointer(args[1]), (tokens * per_token,), np.int64)
        weights = carray(pointer(args[2]), (tokens * per_token,), weight_kind)
        total = carray(pointer(args[4] + number * features * WORD), (features,), np.float32)
        first, stop = share(tokens, number, threads)
        for token in range(first, stop):
            for i in range(features):
                total[i] = np.float32(0)
            for choice in range(token * per_token, (token + 1) * per_token):
                values = carray(pointer(found + places[choice] * stride * size), (features,), kind)
                weight = wide(weights[choice])
                for i in range(features):
                    total[i] += weight * widen(values[i])
            out = carray(pointer(all_out + token * features * size), (features,), kind)
            for i in range(features):
                out[i] = narrow(total[i])

    return combine
