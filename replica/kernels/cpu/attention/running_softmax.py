"""The running softmax of scores that lie key by key, a query in each lane, as LLVM's instructions. Knows no pages."""

from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ..linear.tile import VECTORS
from ..runtime.vectors import (
    FLOATS,
    INT32,
    INT64,
    LANES,
    WORD,
    WORDS,
    beyond,
    constant,
    for_all,
    load,
    looped,
    multiplied,
    store,
)
from .prefill_loops import KEYS, QUERIES

#: Less than any score: what hidden keys count as, and what nothing but them has as its greatest.
LOWEST = -3e38
#: 2^x for x from -0.5 to 0.5, to 1e-04 and to 2e-9 of its value; 1 at 0, as sums that stay are multiplied with it.
COARSE = 1.0, 6.932829280e-01, 2.422109693e-01, 5.500893239e-02
FINE = 1.0, 6.931472029e-01, 2.402264791e-01, 5.550332471e-02, 9.618437361e-03, 1.339887462e-03, 1.535336139e-04
#: Added to a float32 it leaves the nearest whole number in the low bits.
ROUNDER = 1.5 * 2**23
#: 2^x of less is taken for this: float32's exponents end there.
LEAST_POWER = -126.0
MANTISSA_BITS = 23


def weights_of(numbers: int, masked: bool) -> Any:
    """(scores, count, scale, state, shrink, first, window): make the weights of `count` keys of their scores, in place.

    A weight is 2^(score * scale) over that of the greatest score. All but `scale`, a positive float32, are int64. At
    `state` lie, of each query, its greatest score so far, times scale, and the sum of its weights, both float32, which
    are brought up to date, and as int32 its last key. At `shrink` is left what all earlier weights are to be multiplied
    with. `numbers` weights of keys that follow each other make a word.

    `masked`: the scores' first key is number `first`, and a query sees the keys up to its last, of these `window`.
    """

    @intrinsic
    def weigh(_context, _scores, _count, _scale, _state, _shrink, _first, _window):
        def generate(context, builder, _signature, arguments):
            scores, count, scale, state, shrink, first, window = arguments
            places = [beyond(builder, state, number * LANES) for number in range(3 * VECTORS)]
            tops, totals = (_read(builder, places[at:][:VECTORS], FLOATS) for at in (0, VECTORS))
            lasts = _read(builder, places[2 * VECTORS :], WORDS)
            scored = _Scores(builder, scores, _Sight(builder, lasts, first, window) if masked else None)
            powers, factor = _Powers(builder, COARSE if numbers == 2 else FINE), for_all(builder, scale)

            greatest = looped(builder, _parts(builder, count, KEYS), [constant(LOWEST)] * VECTORS, scored.greatest)
            scaled = [builder.fmul(each, factor) for each in greatest]
            new_tops = [_greater(builder, each, top) for each, top in zip(scaled, tops, strict=True)]
            shrinks = [powers.of(builder.fsub(top, new)) for top, new in zip(tops, new_tops, strict=True)]
            below = [builder.fneg(top) for top in new_tops]

            def weigh_word(word: Any, sums: Sequence[Any]) -> Sequence[Any]:
                first_key = builder.mul(word, _int(numbers))
                keys = [builder.add(first_key, _int(number)) for number in range(numbers)]
                weights = [scored.weights(key, factor, below, powers) for key in keys]
                for vector, each in enumerate(_words(builder, weights)):
                    store(builder, each, scored.place(word, vector), WORD)
                for of_key in weights:
                    sums = [builder.fadd(total, each) for total, each in zip(sums, of_key, strict=True)]
                return sums

            held = [builder.fmul(total, each) for total, each in zip(totals, shrinks, strict=True)]
            new_totals = looped(builder, _parts(builder, count, numbers), held, weigh_word)
            left = [beyond(builder, shrink, vector * LANES) for vector in range(VECTORS)]
            for value, place in zip((*new_tops, *new_totals, *shrinks), (*places[: 2 * VECTORS], *left), strict=True):
                store(builder, value, place, WORD)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 2, types.float32, *[types.int64] * 4), generate

    return weigh


class _Sight:
    """Which of the queries see a key."""

    def __init__(self, builder: Any, lasts: Sequence[Any], first: Any, window: Any) -> None:
        self._builder = builder
        self._first = first
        self._lasts = lasts
        width = for_all(builder, builder.trunc(window, INT32))
        self._before = [builder.sub(last, width) for last in lasts]

    def of(self, key: Any) -> list[Any]:
        """A vector of booleans for each vector of queries."""
        builder = self._builder
        number = for_all(builder, builder.trunc(builder.add(self._first, key), INT32))
        return [
            builder.and_(builder.icmp_signed("<=", number, last), builder.icmp_signed(">", number, before))
            for last, before in zip(self._lasts, self._before, strict=True)
        ]


class _Scores:
    """Scores where they lie."""

    def __init__(self, builder: Any, start: Any, sight: _Sight | None) -> None:
        self._builder = builder
        self._start = start
        self._sight = sight

    def place(self, key: Any, vector: int) -> Any:
        offset = self._builder.mul(key, _int(QUERIES * WORD))
        return beyond(self._builder, self._builder.add(self._start, offset), vector * LANES)

    def greatest(self, turn: Any, held: Sequence[Any]) -> list[Any]:
        """Of `KEYS` keys a turn and of what is held, two by two: none waits for the one before it."""
        first = self._builder.mul(turn, _int(KEYS))
        keys = [self._builder.add(first, _int(number)) for number in range(KEYS)]
        found = [self._or_hidden(key, self._read(key), LOWEST) for key in keys]
        while len(found) > 1:
            found = [self._greater(one, other) for one, other in zip(found[::2], found[1::2], strict=True)]
        return self._greater(found[0], held)

    def _greater(self, some: Sequence[Any], others: Sequence[Any]) -> list[Any]:
        return [_greater(self._builder, one, other) for one, other in zip(some, others, strict=True)]

    def weights(self, key: Any, factor: Any, below: Sequence[Any], powers: "_Powers") -> list[Any]:
        """2^(score * factor + below)."""
        scores = zip(self._read(key), below, strict=True)
        exponents = [multiplied(self._builder, under, score, factor) for score, under in scores]
        return self._or_hidden(key, [powers.of(exponent) for exponent in exponents], 0.0)

    def _read(self, key: Any) -> list[Any]:
        return _read(self._builder, [self.place(key, vector) for vector in range(VECTORS)], FLOATS)

    def _or_hidden(self, key: Any, values: list[Any], hidden: float) -> list[Any]:
        if self._sight is None:
            return values
        seen = self._sight.of(key)
        return [self._builder.select(sees, value, constant(hidden)) for sees, value in zip(seen, values, strict=True)]


class _Powers:
    """Powers of 2. NaN stays NaN."""

    def __init__(self, builder: Any, coefficients: Sequence[float]) -> None:
        self._builder = builder
        self._coefficients = coefficients

    def of(self, exponent: Any) -> Any:
        builder, least = self._builder, constant(LEAST_POWER)
        exponent = builder.select(builder.fcmp_ordered("<", exponent, least), least, exponent)
        shifted = builder.fadd(exponent, constant(ROUNDER))
        rest = builder.fsub(exponent, builder.fsub(shifted, constant(ROUNDER)))
        found = constant(self._coefficients[-1])
        for coefficient in self._coefficients[-2::-1]:
            found = multiplied(builder, constant(coefficient), found, rest)
        whole = builder.shl(builder.bitcast(shifted, WORDS), ir.Constant(WORDS, [MANTISSA_BITS] * LANES))
        return builder.bitcast(builder.add(builder.bitcast(found, WORDS), whole), FLOATS)


def _words(builder: Any, weights: Sequence[Sequence[Any]]) -> list[Any]:
    """One key's weights as they are, or two keys' as bfloat16s: to the nearest, halves up. None is negative.

    NaN stays NaN as it comes from numbers of 16 bits, and as processors make it.
    """
    bits = [[builder.bitcast(each, WORDS) for each in of_key] for of_key in weights]
    if len(bits) == 1:
        return bits[0]
    half, low, high = (ir.Constant(WORDS, [value] * LANES) for value in (0x8000, 16, 0xFFFF0000))
    lower, upper = ([builder.add(each, half) for each in of_key] for of_key in bits)
    pairs = zip(lower, upper, strict=True)
    return [builder.or_(builder.and_(other, high), builder.lshr(one, low)) for one, other in pairs]


def _read(builder: Any, places: Sequence[Any], kind: Any) -> list[Any]:
    return [load(builder, place, kind, WORD) for place in places]


def _parts(builder: Any, count: Any, of: int) -> Any:
    return builder.sdiv(count, _int(of))


def _greater(builder: Any, one: Any, other: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", one, other), one, other)


def _int(value: int) -> Any:
    return ir.Constant(INT64, value)
