"""The innermost loops of prefill attention, with one query per lane, as LLVM instructions. Independent of pages.

The scores of `QUERIES` queries for one key are adjacent, so the running softmax over all keys is computed per lane and
no query's result depends on the others.
"""

from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ..linear.tile import OUTPUTS, ROWS, VECTORS, products
from ..runtime import tiles
from ..runtime import vectors as v
from ..runtime.scalars import Lowering
from ..runtime.vectors import FLOATS, INT32, INT64, LANES, WORD, WORDS, Dot

#: Queries per tile, one per lane of `VECTORS` vectors.
QUERIES = OUTPUTS
#: Keys whose scores are compared together.
TOGETHER = 8
#: Less than any score: the score of hidden keys, and the greatest score before the first key.
LOWEST = -3e38
#: A polynomial for 2^x with x from -0.5 to 0.5, with a relative error of 2e-9. Exact at 0, because sums are multiplied
#: by 2^0 when the greatest score does not change.
COEFFICIENTS = 1.0, 6.931472029e-01, 2.402264791e-01, 5.550332471e-02, 9.618437361e-03, 1.339887462e-03, 1.535336139e-04
#: Adding it to a float32 leaves the nearest integer in the low bits.
ROUNDER = 1.5 * 2**23
#: Smaller exponents are raised to this one, the least of normal float32 numbers.
MIN_POWER = -126.0
MANTISSA_BITS = 23


def product_of(dot: Dot | None, vectors: int, adds: bool) -> Any:
    """A function (rows, step, lanes, words, out) that multiplies rows with the queries in the first `vectors` vectors.

    All are int64. There are `rows_of(dot, vectors)` rows of `words` words, `step` bytes apart. `lanes` holds the words
    of all queries for each word. The products are written to `out`, float32 [rows, QUERIES], or added to it if `adds`.
    Without `dot`, the matrix registers multiply, for all queries.
    """

    @intrinsic
    def multiply(_context, _rows, _step, _lanes, _words, _out) -> Lowering:
        def generate(context, builder, _signature, arguments) -> Any:
            rows, step, lanes, words, out = arguments
            if dot is None:
                tiles.multiply(builder, rows, step, lanes, words, out, adds)
                return context.get_dummy_value()
            starts = v.strided(builder, rows, step, rows_of(dot, vectors))
            places = [
                v.words_after(builder, out, row * QUERIES + vector * LANES)
                for row in range(len(starts))
                for vector in range(vectors)
            ]
            before = _read(builder, places, FLOATS) if adds else [v.constant(0.0)] * len(places)
            found = products(builder, dot, starts, 1, lanes, QUERIES, words, before)
            for total, place in zip(found, places, strict=True):
                v.store(builder, total, place, WORD)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 5), generate

    return multiply


def rows_of(dot: Dot | None, vectors: int) -> int:
    """Rows per product: equally many sums for any number of vectors."""
    return tiles.TILED_ROWS if dot is None else ROWS * VECTORS // vectors


def copy_of(count: int) -> Any:
    """A function (source, target) that copies `count` bytes; both are addresses as int64."""

    @intrinsic
    def copy(_context, _source, _target) -> Lowering:
        def generate(context, builder, _signature, arguments) -> Any:
            source, target = (v.pointed_by(builder, address) for address in arguments)
            cgutils.raw_memcpy(builder, target, source, _int(count), 1)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 2), generate

    return copy


@intrinsic
def rescale_sums(_, _sums, _rows, _factors) -> Lowering:
    """Multiply each of `rows` rows of `sums`, float32 [rows, QUERIES], by the queries' factors. All are int64."""

    def generate(context, builder, _signature, arguments) -> Any:
        sums, rows, factors = arguments
        by = _read(builder, [v.words_after(builder, factors, vector * LANES) for vector in range(VECTORS)], FLOATS)

        def rescale(row: Any, _values: Any) -> list[Any]:
            start = builder.add(sums, builder.mul(row, _int(QUERIES * WORD)))
            for vector, factor in enumerate(by):
                place = v.words_after(builder, start, vector * LANES)
                v.store(builder, builder.fmul(v.load(builder, place, FLOATS, WORD), factor), place, WORD)
            return []

        v.loop(builder, rows, [], rescale)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), generate


def transpose_of(numbers: int) -> Any:
    """A function (source, source_step, target, target_step) that transposes `LANES` tokens' values of `LANES` words.

    All are int64, the steps in bytes. A word holds `numbers` values, each of which gets a row of `target`.
    """

    @intrinsic
    def transpose(_context, _source, _source_step, _target, _target_step) -> Lowering:
        def generate(context, builder, _signature, arguments) -> Any:
            source, source_step, target, target_step = arguments
            rows = _read(builder, v.strided(builder, source, source_step, LANES), WORDS)
            targets = iter(v.strided(builder, target, target_step, LANES * numbers))
            for column in v.transposed(builder, rows):
                for value in [column] if numbers == 1 else v.halves(builder, column):
                    v.store(builder, value, next(targets), WORD)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 4), generate

    return transpose


def weights_of(numbers: int, masked: bool) -> Any:
    """A function (scores, count, scale, state, rescale, first, window) that turns `count` keys' scores into weights.

    A weight is 2^(score * scale) divided by that of the greatest score. All are int64 except `scale`, a positive
    float32. For each query, `state` holds its greatest score so far times scale and the sum of its weights, both
    float32 and updated, and its last key as int32. `rescale` receives the factor for all earlier weights. A word holds
    the weights of `numbers` consecutive keys. If `masked`, the first key is number `first`, and a query sees the
    `window` keys up to its last; otherwise it sees all keys.
    """

    @intrinsic
    def weigh(_context, _scores, _count, _scale, _state, _rescale, _first, _window) -> Lowering:
        def generate(context, builder, _signature, arguments) -> Any:
            scores, count, scale, state, rescale, first, window = arguments
            places = [v.words_after(builder, state, number * LANES) for number in range(3 * VECTORS)]
            tops, totals = (_read(builder, places[at:][:VECTORS], FLOATS) for at in (0, VECTORS))
            lasts = _read(builder, places[2 * VECTORS :], WORDS)
            width = v.splat(builder, builder.trunc(window, INT32))
            visible = [(builder.sub(last, width), last) for last in lasts] if masked else None
            scored = _Scores(builder, scores, first, visible)
            factor = v.splat(builder, scale)

            lowest = [v.constant(LOWEST)] * VECTORS
            greatest = v.loop(builder, builder.sdiv(count, _int(TOGETHER)), lowest, scored.greatest)
            scaled = [builder.fmul(each, factor) for each in greatest]
            new_tops = _greater(builder, scaled, tops)
            factors = [scored.power(builder.fsub(top, new)) for top, new in zip(tops, new_tops, strict=True)]
            negative_tops = [builder.fneg(top) for top in new_tops]

            def store_word(word: Any, sums: Sequence[Any]) -> Sequence[Any]:
                first_key = builder.mul(word, _int(numbers))
                keys = [builder.add(first_key, _int(number)) for number in range(numbers)]
                weights = [scored.weights(key, factor, negative_tops) for key in keys]
                for vector, each in enumerate(_words(builder, weights)):
                    v.store(builder, each, scored.place(word, vector), WORD)
                for of_key in weights:
                    sums = [builder.fadd(total, each) for total, each in zip(sums, of_key, strict=True)]
                return sums

            held = [builder.fmul(total, each) for total, each in zip(totals, factors, strict=True)]
            new_totals = v.loop(builder, builder.sdiv(count, _int(numbers)), held, store_word)
            targets = [
                *places[: 2 * VECTORS],
                *(v.words_after(builder, rescale, at * LANES) for at in range(VECTORS)),
            ]
            for value, place in zip((*new_tops, *new_totals, *factors), targets, strict=True):
                v.store(builder, value, place, WORD)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 2, types.float32, *[types.int64] * 4), generate

    return weigh


class _Scores:
    """A block's scores. `visible`: per vector of queries, the key before the first visible one, and the last."""

    def __init__(self, builder: Any, start: Any, first: Any, visible: list[tuple[Any, Any]] | None) -> None:
        self._builder, self._start, self._first, self._visible = builder, start, first, visible

    def place(self, key: Any, vector: int) -> Any:
        offset = self._builder.mul(key, _int(QUERIES * WORD))
        return v.words_after(self._builder, self._builder.add(self._start, offset), vector * LANES)

    def greatest(self, number: Any, before: Sequence[Any]) -> list[Any]:
        """The greatest of `before` and the scores of `TOGETHER` keys, by a tree of independent comparisons."""
        first = self._builder.mul(number, _int(TOGETHER))
        keys = [self._builder.add(first, _int(key)) for key in range(TOGETHER)]
        found = [self._or_hidden(key, self._read(key), LOWEST) for key in keys]
        while len(found) > 1:
            found = [_greater(self._builder, *pair) for pair in zip(found[::2], found[1::2], strict=True)]
        return _greater(self._builder, found[0], before)

    def weights(self, key: Any, factor: Any, negative_tops: Sequence[Any]) -> list[Any]:
        """2^(score * factor + negative_top) for each query."""
        scores = zip(self._read(key), negative_tops, strict=True)
        exponents = [v.multiply_add(self._builder, negative, score, factor) for score, negative in scores]
        return self._or_hidden(key, [self.power(exponent) for exponent in exponents], 0.0)

    def _read(self, key: Any) -> list[Any]:
        return _read(self._builder, [self.place(key, vector) for vector in range(VECTORS)], FLOATS)

    def _or_hidden(self, key: Any, values: list[Any], hidden: float) -> list[Any]:
        if self._visible is None:
            return values
        builder, found = self._builder, []
        number = v.splat(builder, builder.trunc(builder.add(self._first, key), INT32))
        for value, (before, last) in zip(values, self._visible, strict=True):
            seen = builder.and_(builder.icmp_signed("<=", number, last), builder.icmp_signed(">", number, before))
            found.append(builder.select(seen, value, v.constant(hidden)))
        return found

    def power(self, exponent: Any) -> Any:
        """2^exponent. NaN stays NaN."""
        builder, least = self._builder, v.constant(MIN_POWER)
        exponent = builder.select(builder.fcmp_ordered("<", exponent, least), least, exponent)
        shifted = builder.fadd(exponent, v.constant(ROUNDER))
        rest = builder.fsub(exponent, builder.fsub(shifted, v.constant(ROUNDER)))
        found = v.constant(COEFFICIENTS[-1])
        for coefficient in COEFFICIENTS[-2::-1]:
            found = v.multiply_add(builder, v.constant(coefficient), found, rest)
        whole = builder.shl(builder.bitcast(shifted, WORDS), ir.Constant(WORDS, [MANTISSA_BITS] * LANES))
        return builder.bitcast(builder.add(builder.bitcast(found, WORDS), whole), FLOATS)


def _words(builder: Any, weights: Sequence[Sequence[Any]]) -> list[Any]:
    """One key's weights unchanged, or two keys' weights rounded to bfloat16, ties up. Weights are not negative.

    NaN stays NaN if its low 16 bits are zero, which holds for bfloat16 inputs and for NaN produced by processors.
    """
    bits = [[builder.bitcast(each, WORDS) for each in of_key] for of_key in weights]
    if len(bits) == 1:
        return bits[0]
    half, low, high = (ir.Constant(WORDS, [value] * LANES) for value in (0x8000, 16, 0xFFFF0000))
    lower, upper = ([builder.add(each, half) for each in of_key] for of_key in bits)
    pairs = zip(lower, upper, strict=True)
    return [builder.or_(builder.and_(other, high), builder.lshr(one, low)) for one, other in pairs]


def _read(builder: Any, places: Sequence[Any], kind: Any) -> list[Any]:
    return [v.load(builder, place, kind, WORD) for place in places]


def _greater(builder: Any, some: Sequence[Any], others: Sequence[Any]) -> list[Any]:
    pairs = zip(some, others, strict=True)
    return [builder.select(builder.fcmp_ordered(">", one, other), one, other) for one, other in pairs]


def _int(value: int) -> Any:
    return ir.Constant(INT64, value)
