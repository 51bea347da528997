"""The innermost loops of decode attention in bfloat16, in LLVM's instructions. Knows no pages and no tensors."""

from itertools import chain
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ..runtime import vectors as v
from ..runtime.vectors import FLOAT, FLOATS, HALF, INT64, LANES, WORD, WORDS, Dot

#: Numbers in one vector of words.
CHUNK = 2 * LANES
#: Vectors of sums in one loop: half of AVX-512's registers.
MOST_SUMS = 16


def scores_of(dot: Dot, dim: int) -> Any:
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
        vectors = [builder.fadd(*(_picked(builder, pair, which) for which in (first, second))) for pair in pairs]
        width *= 2
    return vectors[0]


def _picked(builder: Any, pair: tuple[Any, Any], lanes: list[int]) -> Any:
    return builder.shuffle_vector(*pair, ir.Constant(WORDS, lanes))


def sums_of(heads: int, chunks: int) -> Any:
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
