"""The innermost loops of prefill attention, with a query in each lane, in LLVM's instructions. Knows no pages.

The scores of `QUERIES` queries with one key are adjacent: the softmax over all keys is then computed lane by lane, and
no query's result depends on the others.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ..linear.tile import OUTPUTS, ROWS, VECTORS, products
from ..runtime import vectors as v
from ..runtime.vectors import FLOAT, FLOATS, INT64, LANES, WORD, Dot

#: Queries of a tile, in the lanes of some vectors.
QUERIES = OUTPUTS
#: Keys of one product.
KEYS = ROWS


def scores_of(dot: Dot, words: int) -> Any:
    """(keys, step, queries, scores): the scores of `KEYS` keys of `words` words, `step` bytes apart.

    All are int64. At `queries` are, for each word, the words of all queries. Writes float32 [KEYS, QUERIES].
    """

    @intrinsic
    def score(_context, _keys, _step, _queries, _scores):
        def generate(context, builder, _signature, arguments):
            keys, step, queries, scores = arguments
            zeros = [v.constant(0.0)] * (VECTORS * KEYS)
            rows, count = v.strided(builder, keys, step, KEYS), ir.Constant(INT64, words)
            sums = products(builder, dot, rows, 1, queries, QUERIES, count, zeros)
            for number, total in enumerate(sums):
                v.store(builder, total, v.words_after(builder, scores, number * LANES), WORD)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 4), generate

    return score


def sums_of(dot: Dot, words: int) -> Any:
    """(weights, values, count, rescale, sums, step): rescale the sums of `ROWS` queries and add weighted values.

    All are int64. At `weights` are `count` times the words of `QUERIES` queries, at `values` `count` times `words`
    words, of which `OUTPUTS` are read; at `rescale` a float32 factor for each query's sums, which are `step` bytes
    apart.
    """

    @intrinsic
    def add(_context, _weights, _values, _count, _rescale, _sums, _step):
        def generate(context, builder, _signature, arguments):
            weights, values, count, rescale, sums, step = arguments
            one = ir.Constant(INT64, WORD)
            factors = [
                v.splat(builder, v.load(builder, at, FLOAT, WORD)) for at in v.strided(builder, rescale, one, ROWS)
            ]
            rows = v.strided(builder, sums, step, ROWS)
            places = [v.words_after(builder, row, vector * LANES) for row in rows for vector in range(VECTORS)]
            held = [
                builder.fmul(v.load(builder, place, FLOATS, WORD), factors[number // VECTORS])
                for number, place in enumerate(places)
            ]
            found = products(builder, dot, v.strided(builder, weights, one, ROWS), QUERIES, values, words, count, held)
            for total, place in zip(found, places, strict=True):
                v.store(builder, total, place, WORD)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 6), generate

    return add
