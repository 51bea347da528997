"""Decode attention in bfloat16 by instructions that multiply pairs of numbers.

For head dims that fill vectors and pages that hold whole vectors of tokens (`fits`); decode.py computes all others.
"""

from itertools import chain
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.extending import intrinsic

from ..runtime import vectors as v
from ..runtime.scalars import FAST_MATH, Storage, pointer, softmax_of_heads
from ..runtime.vectors import FLOAT, FLOATS, HALF, INT64, LANES, WORD, WORDS, Dot

#: Numbers in one vector of words.
CHUNK = 2 * LANES
#: Vectors of sums in one loop: half of AVX-512's registers.
MOST_SUMS = 16


def fits(storage: Storage, key_dim: int, value_dim: int, page: int) -> bool:
    """Whether `attend_of` supports these sizes."""
    return storage.kind is np.uint16 and not (key_dim % CHUNK or value_dim % CHUNK or page % LANES)


def attend_of(storage: Storage, dot: Dot, key_dim: int, value_dim: int, group: int):
    """The compiled function. Its parameters are those of `decode._attend`."""
    kind, narrow = storage.kind, storage.narrow
    chunks = value_dim // CHUNK
    heads_at_once = _greatest_divisor(group, MOST_SUMS // 4)
    chunks_at_once = _greatest_divisor(chunks, MOST_SUMS // 2 // heads_at_once)
    score, add = _scores_of(dot, key_dim), _sums_of(heads_at_once, chunks_at_once)

    @njit(fastmath=FAST_MATH, error_model="numpy")
    def attend(query, found, own, pages, shape, first, length, rule):
        keys, values, table = pages
        kv_heads, head, page, longest = shape
        scale, softcap, sinks = rule
        sums = carray(pointer(own + group * key_dim * WORD), (group * value_dim,), np.float32)
        scores = own + group * (key_dim + value_dim) * WORD
        blocks = carray(pointer(table), (longest,), np.int32)
        step = kv_heads * key_dim * HALF
        # Whole vectors of tokens: the hidden tokens among them are in the same pages, and their scores are not used.
        begin = first - first % LANES
        for at in range(begin, length, LANES):
            place = (np.int64(blocks[at // page]) * page + at % page) * step + head * key_dim * HALF
            for one in range(group):
                score(
                    keys + place,
                    step,
                    query + one * key_dim * HALF,
                    scale,
                    scores + (one * longest + at - begin) * WORD,
                )
        softmax_of_heads(scores + (first - begin) * WORD, group, length - first, longest, softcap, sinks)
        for i in range(group * value_dim):
            sums[i] = np.float32(0)
        step, at = kv_heads * value_dim * HALF, first
        while at < length:
            tokens = min(page - at % page, length - at)
            place = (np.int64(blocks[at // page]) * page + at % page) * step + head * value_dim * HALF
            for one in range(0, group, heads_at_once):
                weights = scores + (one * longest + at - begin) * WORD
                for chunk in range(0, chunks, chunks_at_once):
                    target = own + (group * key_dim + one * value_dim + chunk * CHUNK) * WORD
                    read = values + place + chunk * CHUNK * HALF
                    add(read, step, tokens, weights, longest * WORD, target, np.int64(value_dim * WORD))
            at += tokens
        out = carray(pointer(found), (group * value_dim,), kind)
        for chunk in range(group * chunks):
            for i in range(LANES):
                out[chunk * CHUNK + 2 * i] = narrow(sums[chunk * CHUNK + i])
                out[chunk * CHUNK + 2 * i + 1] = narrow(sums[chunk * CHUNK + LANES + i])

    return attend


def _greatest_divisor(number: int, limit: int) -> int:
    return max(divisor for divisor in range(1, limit + 1) if number % divisor == 0)


def _scores_of(dot: Dot, dim: int) -> Any:
    """(keys, step, query, scale, scores): the scores of `LANES` keys, `step` bytes apart, with one query.

    All but `scale`, a float32, are int64. Writes `LANES` float32.
    """

    @intrinsic
    def score(_context, _keys, _step, _query, _scale, _scores):
        def generate(context, builder, _signature, arguments):
            keys, step, query, scale, scores = arguments
            parts = range(0, dim * HALF, CHUNK * HALF)
            factors = [dot.factor(builder, _words(builder, query, part)) for part in parts]
            sums = []
            for key in v.strided(builder, keys, step, LANES):
                found = ir.Constant(FLOATS, [0.0] * LANES)
                for part, factor in zip(parts, factors, strict=True):
                    found = dot.add(builder, found, _words(builder, key, part), factor)
                sums.append(found)
            total = builder.fmul(_totals(builder, sums), v.splat(builder, scale))
            v.store(builder, total, scores, WORD)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 3, types.float32, types.int64), generate

    return score


def _totals(builder: Any, vectors: list[Any]) -> Any:
    """The sum of each of `LANES` vectors: adds and merges pairs of vectors until one is left."""
    width = 1
    while len(vectors) > 1:
        lanes = range(0, LANES, 2 * width)
        first = [lane + i for start in lanes for lane in (start, LANES + start) for i in range(width)]
        second = [lane + width for lane in first]
        pairs = zip(vectors[::2], vectors[1::2], strict=True)
        masks = [ir.Constant(WORDS, which) for which in (first, second)]
        vectors = [builder.fadd(*(builder.shuffle_vector(*pair, mask) for mask in masks)) for pair in pairs]
        width *= 2
    return vectors[0]


def _sums_of(heads: int, chunks: int) -> Any:
    """(values, step, tokens, weights, weights_step, sums, sums_step): add weighted values to the sums of some heads.

    All are int64. Reads `chunks` chunks of each of `tokens` values, `step` bytes apart. Weights and sums are float32;
    the sums of each chunk are first those of its even numbers, then those of its odd ones.
    """
    assert heads * chunks * 2 <= MOST_SUMS, f"{heads} heads of {chunks} chunks"

    @intrinsic
    def add(_context, _values, _step, _tokens, _weights, _weights_step, _sums, _sums_step):
        def generate(context, builder, _signature, arguments):
            values, step, tokens, weights, weights_step, sums, sums_step = arguments
            places = [
                builder.add(head, ir.Constant(INT64, vector * LANES * WORD))
                for head in v.strided(builder, sums, sums_step, heads)
                for vector in range(2 * chunks)
            ]

            def weigh(token, held):
                value = builder.add(values, builder.mul(token, step))
                weight = builder.add(weights, builder.mul(token, ir.Constant(INT64, WORD)))
                parts = [v.widen_pairs(builder, _words(builder, value, part * CHUNK * HALF)) for part in range(chunks)]
                numbers = list(chain(*parts))
                own = [v.load(builder, place, FLOAT, WORD) for place in v.strided(builder, weight, weights_step, heads)]
                factors = [factor for each in own for factor in [v.splat(builder, each)] * len(numbers)]
                return [v.multiply_add(builder, *each) for each in zip(held, numbers * heads, factors, strict=True)]

            found = v.loop(builder, tokens, [v.load(builder, place, FLOATS, WORD) for place in places], weigh)
            for total, place in zip(found, places, strict=True):
                v.store(builder, total, place, WORD)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 7), generate

    return add


def _words(builder: Any, start: Any, offset: int) -> Any:
    return v.load(builder, builder.add(start, ir.Constant(INT64, offset)), WORDS, HALF)
