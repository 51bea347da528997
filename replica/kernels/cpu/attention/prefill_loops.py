"""The innermost loops of attention with a query in each lane, written as LLVM's instructions. Knows no pages.

Scores lie key by key, `QUERIES` of them: what a softmax needs of all keys is then counted lane by lane, and no query's
result depends on those beside it. Keys are read where they lie; only queries and values change their order.
"""

from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ..linear.tile import OUTPUTS, ROWS, VECTORS, products
from ..runtime.vectors import (
    FLOAT,
    FLOATS,
    HALF,
    INT64,
    LANES,
    WORD,
    WORDS,
    Dot,
    beyond,
    constant,
    for_all,
    load,
    steps,
    store,
)

#: Side by side in vectors.
QUERIES = OUTPUTS
ADDRESS = 8  #: Bytes.
#: Keys of one product.
KEYS = ROWS


@intrinsic
def bring(_context, _rows, _offset, _lanes):
    """(rows, offset, lanes): bring `LANES` words of as many rows into lanes. All are int64.

    At `rows` lie the rows' addresses; `offset` is that of the words in a row. They are written `QUERIES` words apart.
    """

    def generate(context, builder, _signature, arguments):
        table, offset, lanes = arguments
        rows = [load(builder, each, INT64, HALF) for each in steps(builder, table, ir.Constant(INT64, ADDRESS), LANES)]
        read = [load(builder, builder.add(row, offset), WORDS, HALF) for row in rows]
        for number, found in enumerate(_transposed(builder, read)):
            store(builder, found, beyond(builder, lanes, number * QUERIES), WORD)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), generate


def _transposed(builder: Any, vectors: Sequence[Any]) -> list[Any]:
    """The first words of `LANES` vectors, the second words, and so on: changes one bit of both numbers at a time."""
    found = list(vectors)
    width = 1
    while width < LANES:
        for number in range(LANES):
            if number & width:
                continue
            pair = found[number], found[number | width]
            low = [lane ^ width | LANES if lane & width else lane for lane in range(LANES)]
            high = [lane | LANES if lane & width else lane | width for lane in range(LANES)]
            found[number], found[number | width] = (
                builder.shuffle_vector(*pair, ir.Constant(WORDS, lanes)) for lanes in (low, high)
            )
        width *= 2
    return found


def scores_of(dot: Dot, words: int) -> Any:
    """(keys, step, queries, scores): of `KEYS` keys, `step` bytes apart and of `words` words, with `QUERIES` queries.

    All are int64. At `queries` lie, for each word, those of all queries. Writes float32 [KEYS, QUERIES].
    """

    @intrinsic
    def score(_context, _keys, _step, _queries, _scores):
        def generate(context, builder, _signature, arguments):
            keys, step, queries, scores = arguments
            zeros = [constant(0.0)] * (VECTORS * KEYS)
            rows, count = steps(builder, keys, step, KEYS), ir.Constant(INT64, words)
            sums = products(builder, dot, rows, 1, queries, QUERIES, count, zeros)
            for number, total in enumerate(sums):
                store(builder, total, beyond(builder, scores, number * LANES), WORD)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 4), generate

    return score


def sums_of(dot: Dot, words: int) -> Any:
    """(weights, values, count, shrink, sums, step): shrink the sums of `ROWS` queries and add weighed values to them.

    All are int64. At `weights` lie `count` times words of `QUERIES` queries, at `values` as many times `words` words,
    of which `OUTPUTS` are read; at `shrink` a float32 of each query, which its sums, `step` bytes from the next one's,
    are multiplied with first.
    """

    @intrinsic
    def add(_context, _weights, _values, _count, _shrink, _sums, _step):
        def generate(context, builder, _signature, arguments):
            weights, values, count, shrink, sums, step = arguments
            one = ir.Constant(INT64, WORD)
            factors = [for_all(builder, load(builder, at, FLOAT, WORD)) for at in steps(builder, shrink, one, ROWS)]
            rows = steps(builder, sums, step, ROWS)
            places = [beyond(builder, row, vector * LANES) for row in rows for vector in range(VECTORS)]
            held = [
                builder.fmul(load(builder, place, FLOATS, WORD), factors[number // VECTORS])
                for number, place in enumerate(places)
            ]
            found = products(builder, dot, steps(builder, weights, one, ROWS), QUERIES, values, words, count, held)
            for total, place in zip(found, places, strict=True):
                store(builder, total, place, WORD)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 6), generate

    return add
