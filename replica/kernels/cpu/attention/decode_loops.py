"""The innermost loops of decode attention: scores and weighted sums for one page's tokens. Independent of block tables.

All addresses and counts are int64. The scores and weights of consecutive query heads are `PART` words apart.
"""

from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.extending import intrinsic

from ..runtime import vectors as v
from ..runtime.scalars import FAST_MATH, Lowering, Storage, pointer, prefetch_line
from ..runtime.vectors import BF16, FLOAT, FLOATS, INT64, LANES, WORD, WORDS, Dot

#: Tokens per softmax, in whole vectors: their scores and keys fit a core's cache, and a row has work for many threads.
PART = 512
#: bfloat16 numbers in one vector of words.
CHUNK = 2 * LANES
#: Bytes of a cache line.
LINE = 64
#: Most vectors of sums in one loop: half of AVX-512's registers.
MAX_SUMS = 16


@dataclass(slots=True, frozen=True)
class Sizes:
    key_dim: int
    value_dim: int
    group: int  #: query heads per KV head


@dataclass(slots=True, frozen=True)
class Loops:
    """Loops over all query heads of one KV head.

    They also prefetch as many tokens at `ahead`, spread between their instructions. One row of 16,384 tokens (32 heads,
    8 KV heads, 12 layers, an AMD EPYC core) takes 38 ms; with a page prefetched at once, half as long again.
    """

    align: int  #: the first token that `score` gets is a multiple of this
    #: (keys, step, tokens, queries, scale, scores, ahead): score keys that are `step` bytes apart. May write scores up
    #: to the next multiple of `align`, for tokens in the same page.
    score: Any
    #: (values, step, tokens, weights, sums, ahead): add the weighted values to each query's sums, which are float32.
    add: Any
    #: (sums, out): store the sums in the storage's type. Their order is private to `add` and `store`.
    store: Any


def fills_vectors(storage: Storage, key_dim: int, value_dim: int, page: int) -> bool:
    """Whether `loops_of_pairs` supports these: bfloat16, heads of whole vectors, pages of whole vectors of tokens."""
    return storage.kind is np.uint16 and not (key_dim % CHUNK or value_dim % CHUNK or page % LANES)


def plain_loops(storage: Storage, sizes: Sizes) -> Loops:
    """Loops for all sizes and processors, four tokens at a time."""
    kind, narrow, count = storage.kind, storage.narrow, sizes.group * sizes.value_dim

    @njit(error_model="numpy")
    def store(sums, out) -> None:
        exact, stored = carray(pointer(sums), (count,), np.float32), carray(pointer(out), (count,), kind)
        for i in range(count):
            stored[i] = narrow(exact[i])

    return Loops(1, _plain_score(storage, sizes), _plain_add(storage, sizes), store)


@njit(error_model="numpy")
def _prefetch(start, step, size) -> None:
    """Prefetch `size` bytes of each of four tokens."""
    for token in range(4):
        for line in range(0, size, LINE):
            prefetch_line(start + token * step + line)


def _plain_score(storage: Storage, sizes: Sizes) -> Any:
    kind, size, widen, key_dim, group = storage.kind, storage.size, storage.widen, sizes.key_dim, sizes.group

    @njit(fastmath=FAST_MATH, error_model="numpy")
    def score(keys, step, tokens, queries, scale, scores, ahead) -> None:
        token = 0
        while token + 4 <= tokens:
            _prefetch(ahead + token * step, step, key_dim * size)
            k0 = carray(pointer(keys + token * step), (key_dim,), kind)
            k1 = carray(pointer(keys + (token + 1) * step), (key_dim,), kind)
            k2 = carray(pointer(keys + (token + 2) * step), (key_dim,), kind)
            k3 = carray(pointer(keys + (token + 3) * step), (key_dim,), kind)
            for head in range(group):
                given = carray(pointer(queries + head * key_dim * size), (key_dim,), kind)
                s0 = s1 = s2 = s3 = np.float32(0)
                for i in range(key_dim):
                    query = widen(given[i])
                    s0 += query * widen(k0[i])
                    s1 += query * widen(k1[i])
                    s2 += query * widen(k2[i])
                    s3 += query * widen(k3[i])
                found = carray(pointer(scores + (head * PART + token) * WORD), (4,), np.float32)
                found[0], found[1], found[2], found[3] = s0 * scale, s1 * scale, s2 * scale, s3 * scale
            token += 4
        while token < tokens:
            k0 = carray(pointer(keys + token * step), (key_dim,), kind)
            for head in range(group):
                given = carray(pointer(queries + head * key_dim * size), (key_dim,), kind)
                s0 = np.float32(0)
                for i in range(key_dim):
                    s0 += widen(given[i]) * widen(k0[i])
                carray(pointer(scores + (head * PART + token) * WORD), (1,), np.float32)[0] = s0 * scale
            token += 1

    return score


def _plain_add(storage: Storage, sizes: Sizes) -> Any:
    kind, size, widen, value_dim, group = storage.kind, storage.size, storage.widen, sizes.value_dim, sizes.group

    @njit(fastmath=FAST_MATH, error_model="numpy")
    def add(values, step, tokens, weights, sums, ahead) -> None:
        token = 0
        while token + 4 <= tokens:
            _prefetch(ahead + token * step, step, value_dim * size)
            v0 = carray(pointer(values + token * step), (value_dim,), kind)
            v1 = carray(pointer(values + (token + 1) * step), (value_dim,), kind)
            v2 = carray(pointer(values + (token + 2) * step), (value_dim,), kind)
            v3 = carray(pointer(values + (token + 3) * step), (value_dim,), kind)
            for head in range(group):
                total = carray(pointer(sums + head * value_dim * WORD), (value_dim,), np.float32)
                weight = carray(pointer(weights + (head * PART + token) * WORD), (4,), np.float32)
                w0, w1, w2, w3 = weight[0], weight[1], weight[2], weight[3]
                for i in range(value_dim):
                    total[i] += (w0 * widen(v0[i]) + w1 * widen(v1[i])) + (w2 * widen(v2[i]) + w3 * widen(v3[i]))
            token += 4
        while token < tokens:
            v0 = carray(pointer(values + token * step), (value_dim,), kind)
            for head in range(group):
                total = carray(pointer(sums + head * value_dim * WORD), (value_dim,), np.float32)
                w0 = carray(pointer(weights + (head * PART + token) * WORD), (1,), np.float32)[0]
                for i in range(value_dim):
                    total[i] += w0 * widen(v0[i])
            token += 1

    return add


def loops_of_pairs(storage: Storage, sizes: Sizes, dot: Dot) -> Loops:
    """Loops with instructions that multiply pairs of numbers, `LANES` tokens at a time."""
    kind, narrow, key_dim, value_dim, group = storage.kind, storage.narrow, sizes.key_dim, sizes.value_dim, sizes.group
    chunks = value_dim // CHUNK
    heads_at_once = _greatest_divisor(group, MAX_SUMS // 4)
    chunks_at_once = _greatest_divisor(chunks, MAX_SUMS // 2 // heads_at_once)
    keys_ahead = -(-LANES // group)  # each head prefetches a part of them
    scores_of, add_some = _scores_of(dot, key_dim, keys_ahead), _sums_of(heads_at_once, chunks_at_once)

    @njit(fastmath=FAST_MATH, error_model="numpy")
    def score(keys, step, tokens, queries, scale, scores, ahead) -> None:
        for token in range(0, tokens, LANES):
            for head in range(group):
                query, found = queries + head * key_dim * BF16, scores + (head * PART + token) * WORD
                later = ahead + (token + head * keys_ahead) * step
                scores_of(keys + token * step, step, query, scale, found, later)

    @njit(fastmath=FAST_MATH, error_model="numpy")
    def add(values, step, tokens, weights, sums, ahead) -> None:
        for head in range(0, group, heads_at_once):
            for chunk in range(0, chunks, chunks_at_once):
                read, target = values + chunk * CHUNK * BF16, sums + (head * value_dim + chunk * CHUNK) * WORD
                own, later = weights + head * PART * WORD, ahead + chunk * CHUNK * BF16
                add_some(read, step, tokens, own, np.int64(PART * WORD), target, np.int64(value_dim * WORD), later)

    @njit(error_model="numpy")
    def store(sums, out) -> None:
        exact = carray(pointer(sums), (group * value_dim,), np.float32)
        stored = carray(pointer(out), (group * value_dim,), kind)
        for chunk in range(0, group * value_dim, CHUNK):
            for i in range(LANES):
                stored[chunk + 2 * i] = narrow(exact[chunk + i])
                stored[chunk + 2 * i + 1] = narrow(exact[chunk + LANES + i])

    return Loops(LANES, score, add, store)


def _greatest_divisor(number: int, limit: int) -> int:
    return max(divisor for divisor in range(1, limit + 1) if number % divisor == 0)


def _scores_of(dot: Dot, dim: int, keys_ahead: int) -> Any:
    """A function (keys, step, query, scale, scores, ahead) that scores `LANES` keys, `step` bytes apart, for one query.

    All are int64 except `scale`, a float32. Writes `LANES` float32 to `scores`. Prefetches `keys_ahead` keys at
    `ahead`.
    """

    @intrinsic
    def score(_context, _keys, _step, _query, _scale, _scores, _ahead) -> Lowering:
        def generate(context, builder, _signature, arguments) -> Any:
            keys, step, query, scale, scores, ahead = arguments
            parts = range(0, dim * BF16, CHUNK * BF16)
            factors = [dot.factor(builder, _words(builder, query, part)) for part in parts]
            sums = []
            lines = [(key, part) for key in v.strided(builder, ahead, step, keys_ahead) for part in parts]
            for number, key in enumerate(v.strided(builder, keys, step, LANES)):
                for line, part in lines[number * len(lines) // LANES : (number + 1) * len(lines) // LANES]:
                    v.prefetch(builder, builder.add(line, ir.Constant(INT64, part)), 1)
                found = ir.Constant(FLOATS, [0.0] * LANES)
                for part, factor in zip(parts, factors, strict=True):
                    found = dot.add(builder, found, _words(builder, key, part), factor)
                sums.append(found)
            total = builder.fmul(_totals(builder, sums), v.splat(builder, scale))
            v.store(builder, total, scores, WORD)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 3, types.float32, *[types.int64] * 2), generate

    return score


def _totals(builder: Any, vectors: list[Any]) -> Any:
    """The sums of `LANES` vectors, one per lane: adds and merges pairs of vectors until one is left."""
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
    """A function (values, step, tokens, weights, weights_step, sums, sums_step, ahead) to add weighted values.

    It adds to the sums of `heads` heads. All are int64. Reads `chunks` chunks of each of `tokens` values, `step` bytes
    apart, and prefetches as many at `ahead`. Weights and sums are float32. Each chunk's sums are first those of its
    even numbers, then of its odd ones.
    """
    assert heads * chunks * 2 <= MAX_SUMS, f"{heads} heads of {chunks} chunks"

    @intrinsic
    def add(_context, _values, _step, _tokens, _weights, _weights_step, _sums, _sums_step, _ahead) -> Lowering:
        def generate(context, builder, _signature, arguments) -> Any:
            values, step, tokens, weights, weights_step, sums, sums_step, ahead = arguments
            places = [
                builder.add(head, ir.Constant(INT64, vector * LANES * WORD))
                for head in v.strided(builder, sums, sums_step, heads)
                for vector in range(2 * chunks)
            ]

            def weigh(token, held) -> list[Any]:
                value, lines = (builder.add(each, builder.mul(token, step)) for each in (values, ahead))
                for part in range(chunks):
                    v.prefetch(builder, builder.add(lines, ir.Constant(INT64, part * CHUNK * BF16)), 1)
                weight = builder.add(weights, builder.mul(token, ir.Constant(INT64, WORD)))
                parts = [v.widen_pairs(builder, _words(builder, value, part * CHUNK * BF16)) for part in range(chunks)]
                numbers = list(chain(*parts))
                own = [v.load(builder, place, FLOAT, WORD) for place in v.strided(builder, weight, weights_step, heads)]
                factors = [factor for each in own for factor in [v.splat(builder, each)] * len(numbers)]
                return [v.multiply_add(builder, *each) for each in zip(held, numbers * heads, factors, strict=True)]

            found = v.loop(builder, tokens, [v.load(builder, place, FLOATS, WORD) for place in places], weigh)
            for total, place in zip(found, places, strict=True):
                v.store(builder, total, place, WORD)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 8), generate

    return add


def _words(builder: Any, start: Any, offset: int) -> Any:
    return v.load(builder, builder.add(start, ir.Constant(INT64, offset)), WORDS, BF16)
