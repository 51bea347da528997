"""The innermost loop of a product in bfloat16, written as LLVM's instructions. Knows no tensors and no threads."""

from collections.abc import Sequence
from itertools import chain
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from .vectors import FLOATS, HALF, INT32, INT64, LANES, WORD, WORDS, Dot, counted, for_all, load, rounded, steps, store

#: Vectors of outputs side by side: with `ROWS` rows these are 16 sums, and no instruction waits for the one before it.
VECTORS = 2
OUTPUTS = LANES * VECTORS
ROWS = 8


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
                found = _sums(builder, dot, steps(builder, x, x_step, count), weights, pairs)
                _write(builder, found, bias, steps(builder, y, y_step, count))
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
    pair = counted(builder, INT64, ir.Constant(INT64, 0), before)
    zero = ir.Constant(FLOATS, [0.0] * LANES)
    sums = [[counted(builder, FLOATS, zero, before) for _ in range(VECTORS)] for _ in rows]
    read = [load(builder, _nth(builder, weights, pair, v, OUTPUTS), WORDS, WORD) for v in range(VECTORS)]
    added = []
    for row, of_row in zip(rows, sums, strict=True):
        word = load(builder, _nth(builder, row, pair, 0, 1), INT32, HALF)
        number = dot.factor(builder, for_all(builder, word, WORDS))
        added.append([dot.add(builder, each, weight, number) for each, weight in zip(of_row, read, strict=True)])
    following = builder.add(pair, ir.Constant(INT64, 1))
    for phi, value in [(pair, following), *zip(chain(*sums), chain(*added), strict=True)]:
        phi.add_incoming(value, loop)
    builder.cbranch(builder.icmp_signed("<", following, pairs), loop, after)
    builder.position_at_end(after)
    return added


def _write(builder: Any, sums: Sequence[Sequence[Any]], bias: Any, rows: Sequence[Any]) -> None:
    """Sums and bias, rounded."""
    for vector in range(VECTORS):
        of_outputs = load(builder, builder.add(bias, ir.Constant(INT64, vector * LANES * WORD)), FLOATS, WORD)
        for row, of_row in zip(rows, sums, strict=True):
            exact = builder.fadd(of_row[vector], of_outputs)
            store(builder, rounded(builder, exact), builder.add(row, ir.Constant(INT64, vector * LANES * HALF)), HALF)


def _nth(builder: Any, start: Any, number: Any, vector: int, words: int) -> Any:
    """The address of a vector in group `number`, of so many words each."""
    offset = builder.mul(number, ir.Constant(INT64, words * WORD))
    return builder.add(builder.add(start, offset), ir.Constant(INT64, vector * LANES * WORD))
