"""The innermost loop of a product in bfloat16, written as LLVM's instructions. Knows no tensors and no threads."""

from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ..runtime.vectors import (
    FLOATS,
    HALF,
    INT32,
    INT64,
    LANES,
    WORD,
    WORDS,
    Dot,
    ask_for,
    for_all,
    load,
    looped,
    rounded,
    steps,
    store,
)

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
        return types.void(*[types.int64] * 8), _multiplying(dot)

    return multiply


def asking_tile(dot: Dot) -> Any:
    """(..., ahead, ahead_step): as `tile`, and for each pair memory is brought near, so many bytes after the last."""

    @intrinsic
    def multiply_and_ask(_context, _rows, _x, _x_step, _weights, _pairs, _bias, _y, _y_step, _ahead, _ahead_step):
        return types.void(*[types.int64] * 10), _multiplying(dot)

    return multiply_and_ask


def _multiplying(dot: Dot) -> Any:
    def generate(context: Any, builder: Any, _signature: Any, arguments: Sequence[Any]) -> Any:
        rows, x, x_step, weights, pairs, bias, y, y_step, *ahead = arguments
        end = builder.append_basic_block("end")
        switch = builder.switch(rows, end)
        for count in range(1, ROWS + 1):
            block = builder.append_basic_block(f"rows.{count}")
            switch.add_case(ir.Constant(INT64, count), block)
            builder.position_at_end(block)
            found = _sums(builder, dot, steps(builder, x, x_step, count), weights, pairs, ahead)
            _write(builder, found, bias, steps(builder, y, y_step, count))
            builder.branch(end)
        builder.position_at_end(end)
        return context.get_dummy_value()

    return generate


def _sums(
    builder: Any, dot: Dot, rows: Sequence[Any], weights: Any, pairs: Any, ahead: Sequence[Any]
) -> list[list[Any]]:
    """For each row its sums, a vector of them after the other."""
    zero = ir.Constant(FLOATS, [0.0] * LANES)
    sums = products(builder, dot, rows, 1, weights, OUTPUTS, pairs, [zero] * (VECTORS * len(rows)), ahead)
    return [sums[first : first + VECTORS] for first in range(0, len(sums), VECTORS)]


def products(
    builder: Any,
    dot: Dot,
    rows: Sequence[Any],
    row_step: int,
    weights: Any,
    weights_step: int,
    count: Any,
    held: Sequence[Any],
    ahead: Sequence[Any] = (),
) -> list[Any]:
    """The loop over `count` words of each row, `row_step` words apart: adds to the sums, `VECTORS` of each row.

    At `weights` lie, for each word, those of all outputs; from one to the next it is `weights_step` words. Where
    `ahead` gives an address and a step in bytes, each word also has a line of that memory brought near.
    """

    def add(number: Any, sums: Sequence[Any]) -> list[Any]:
        if ahead:
            start, step = ahead
            ask_for(builder, builder.add(start, builder.mul(number, step)))
        read = [
            load(builder, _nth(builder, weights, number, vector, weights_step), WORDS, HALF)
            for vector in range(VECTORS)
        ]
        words = [load(builder, _nth(builder, row, number, 0, row_step), INT32, HALF) for row in rows]
        factors = [dot.factor(builder, for_all(builder, word)) for word in words]
        by_row = [(factor, weight) for factor in factors for weight in read]
        return [dot.add(builder, each, weight, factor) for each, (factor, weight) in zip(sums, by_row, strict=True)]

    return looped(builder, count, held, add)


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
