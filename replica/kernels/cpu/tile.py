"""The innermost loop of a product in bfloat16, written as LLVM's instructions. Knows no tensors and no threads.

Numba has no vectors and no bfloat16, and LLVM finds neither the instruction for pairs (AVX-512's VDPBF16PS) nor that a
weight's numbers should be read once for several rows. A word of 32 bits holds two numbers that follow each other, the
first in its low half.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

#: Numbers of a vector register, and such vectors of outputs side by side: with `ROWS` rows these are 16 sums and no
#: instruction waits for the one before it.
LANES, VECTORS = 16, 2
OUTPUTS = LANES * VECTORS
ROWS = 8
WORD = 4  #: Bytes: of a pair of numbers, and of a float32.
HALF = 2  #: Bytes of a bfloat16.

INT16, INT32, INT64 = (ir.IntType(bits) for bits in (16, 32, 64))
FLOATS, WORDS, HALVES = (ir.VectorType(kind, LANES) for kind in (ir.FloatType(), INT32, INT16))


class _BFloat(ir.Type):  # type: ignore[misc]  # which llvmlite has no stubs for
    """LLVM's bfloat, which llvmlite has no name for."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


PAIRS = ir.VectorType(_BFloat(), 2 * LANES)


@dataclass(slots=True, frozen=True)
class Dot:
    """How an instruction set multiplies pairs."""

    spread: Callable[[Any, Any], Any]  #: (builder, a row's word) -> it for every output
    add: Callable[[Any, Any, Any, Any], Any]  #: (builder, sums, weights' words, spread) -> sums


def _for_all(builder: Any, value: Any, kind: Any) -> Any:
    nothing = ir.Constant(kind, ir.Undefined)
    one = builder.insert_element(nothing, value, ir.Constant(INT32, 0))
    return builder.shuffle_vector(one, nothing, ir.Constant(WORDS, [0] * LANES))


def _add_pairs(builder: Any, sums: Any, weights: Any, spread: Any) -> Any:
    kind = ir.FunctionType(FLOATS, [FLOATS, PAIRS, PAIRS])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx512bf16.dpbf16ps.512")
    return builder.call(function, [sums, builder.bitcast(weights, PAIRS), spread])


#: Of processors with AVX-512's bfloat16: a pair's products and their sum in one instruction.
NATIVE = Dot(lambda builder, word: builder.bitcast(_for_all(builder, word, WORDS), PAIRS), _add_pairs)


def _low_and_high(builder: Any, words: Any, kind: Any) -> tuple[Any, Any]:
    """Both halves as float32, whose high half a bfloat16 is."""
    low = builder.shl(words, ir.Constant(words.type, _each(words.type, 16)))
    high = builder.and_(words, ir.Constant(words.type, _each(words.type, 0xFFFF0000)))
    return builder.bitcast(low, kind), builder.bitcast(high, kind)


def _each(kind: Any, value: int) -> Any:
    return [value] * LANES if isinstance(kind, ir.VectorType) else value


def _spread_wide(builder: Any, word: Any) -> Any:
    return tuple(_for_all(builder, half, FLOATS) for half in _low_and_high(builder, word, ir.FloatType()))


def _add_wide(builder: Any, sums: Any, weights: Any, spread: Any) -> Any:
    for weight, number in zip(_low_and_high(builder, weights, FLOATS), spread, strict=True):
        sums = builder.fadd(sums, builder.fmul(weight, number, flags=("contract",)), flags=("contract",))
    return sums


#: Of every other processor: products in float32.
WIDENED = Dot(_spread_wide, _add_wide)


def tile(dot: Dot) -> Any:
    """(rows, x, x_step, weights, pairs, bias, y, y_step): up to `ROWS` rows of y, `OUTPUTS` outputs of each.

    All are int64: addresses, and what lies between rows in bytes. At `weights` lie, for each of `pairs` pairs of
    features, the words of all outputs; at `bias` a float32 for each output.
    """

    @intrinsic
    def multiply(_context, _rows, _x, _x_step, _weights, _pairs, _bias, _y, _y_step):
        def generate(context, builder, _signature, arguments):
            rows, x, x_step, weights, pairs, bias, y, y_step = arguments
            end = builder.append_basic_block("end")
            switch = builder.switch(rows, end)
            for count in range(1, ROWS + 1):
                block = builder.append_basic_block(f"rows.{count}")
                switch.add_case(ir.Constant(INT64, count), block)
                builder.position_at_end(block)
                found = _sums(builder, dot, _steps(builder, x, x_step, count), weights, pairs)
                _write(builder, found, bias, _steps(builder, y, y_step, count))
                builder.branch(end)
            builder.position_at_end(end)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 8), generate

    return multiply


def _sums(builder: Any, dot: Dot, rows: Sequence[Any], weights: Any, pairs: Any) -> list[list[Any]]:
    """The loop over pairs: for each row its sums, a vector of them after the other."""
    before, loop, after = builder.basic_block, builder.append_basic_block("pairs"), builder.append_basic_block("summed")
    builder.branch(loop)
    builder.position_at_end(loop)
    pair = _counted(builder, INT64, ir.Constant(INT64, 0), before)
    zero = ir.Constant(FLOATS, [0.0] * LANES)
    sums = [[_counted(builder, FLOATS, zero, before) for _ in range(VECTORS)] for _ in rows]
    read = [_load(builder, _nth(builder, weights, pair, v, OUTPUTS), WORDS, WORD) for v in range(VECTORS)]
    added = []
    for row, of_row in zip(rows, sums, strict=True):
        word = _load(builder, _nth(builder, row, pair, 0, 1), INT32, HALF)
        spread = dot.spread(builder, word)
        added.append([dot.add(builder, each, weight, spread) for each, weight in zip(of_row, read, strict=True)])
    following = builder.add(pair, ir.Constant(INT64, 1))
    for phi, value in [(pair, following), *zip(chain(*sums), chain(*added), strict=True)]:
        phi.add_incoming(value, loop)
    builder.cbranch(builder.icmp_signed("<", following, pairs), loop, after)
    builder.position_at_end(after)
    return added


def _write(builder: Any, sums: Sequence[Sequence[Any]], bias: Any, rows: Sequence[Any]) -> None:
    """Sums and bias, rounded to the nearest bfloat16, ties to even."""
    bits, rounding, one = (ir.Constant(WORDS, [value] * LANES) for value in (16, 0x7FFF, 1))
    for vector in range(VECTORS):
        offset = ir.Constant(INT64, vector * LANES * WORD)
        of_outputs = _load(builder, builder.add(bias, offset), FLOATS, WORD)
        for row, of_row in zip(rows, sums, strict=True):
            exact = builder.bitcast(builder.fadd(of_row[vector], of_outputs), WORDS)
            odd = builder.and_(builder.lshr(exact, bits), one)
            rounded = builder.lshr(builder.add(exact, builder.add(rounding, odd)), bits)
            place = builder.add(row, ir.Constant(INT64, vector * LANES * HALF))
            store = builder.store(builder.trunc(rounded, HALVES), builder.inttoptr(place, HALVES.as_pointer()))
            store.align = HALF


def _counted(builder: Any, kind: Any, first: Any, before: Any) -> Any:
    phi = builder.phi(kind)
    phi.add_incoming(first, before)
    return phi


def _steps(builder: Any, start: Any, step: Any, count: int) -> list[Any]:
    return [builder.add(start, builder.mul(step, ir.Constant(INT64, number))) for number in range(count)]


def _nth(builder: Any, start: Any, number: Any, vector: int, words: int) -> Any:
    """The address of a vector in group `number`, of so many words each."""
    offset = builder.mul(number, ir.Constant(INT64, words * WORD))
    return builder.add(builder.add(start, offset), ir.Constant(INT64, vector * LANES * WORD))


def _load(builder: Any, address: Any, kind: Any, alignment: int) -> Any:
    value = builder.load(builder.inttoptr(address, kind.as_pointer()))
    value.align = alignment
    return value
