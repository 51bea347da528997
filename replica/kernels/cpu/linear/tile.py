"""The innermost loop of a bfloat16 product, as LLVM instructions. Does not depend on tensors or threads."""

from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ..runtime import vectors as v
from ..runtime.scalars import Lowering
from ..runtime.vectors import BF16, FLOATS, INT32, INT64, LANES, WORD, WORDS, Dot

#: Vectors of outputs per tile. With `ROWS` rows that is 16 independent sums, which hide the products' latency.
VECTORS = 2
OUTPUTS = LANES * VECTORS
ROWS = 8


def tile(dot: Dot, prefetches: bool) -> Any:
    """A function (rows, x, x_step, weights, pairs, bias, y, y_step, ahead, ahead_step) for `rows` rows of a product.

    It computes up to `ROWS` rows of `OUTPUTS` outputs. All arguments are int64: addresses, and row strides in bytes.
    `weights` holds the words of all outputs for each of `pairs` feature pairs; `bias` a float32 per output. With
    `prefetches`, each pair also prefetches one cache line, starting at `ahead` and `ahead_step` bytes apart.
    """

    @intrinsic
    def multiply(_context, _rows, _x, _x_step, _weights, _pairs, _bias, _y, _y_step, _ahead, _ahead_step) -> Lowering:
        def generate(context, builder, _signature, arguments) -> Any:
            rows, x, x_step, weights, pairs, bias, y, y_step, *ahead = arguments
            end = builder.append_basic_block("end")
            switch = builder.switch(rows, end)
            for count in range(1, ROWS + 1):
                block = builder.append_basic_block(f"rows.{count}")
                switch.add_case(ir.Constant(INT64, count), block)
                builder.position_at_end(block)
                zeros = [v.constant(0.0)] * (VECTORS * count)
                inputs, outputs = (v.strided(builder, *each, count) for each in ((x, x_step), (y, y_step)))
                lines = ahead if prefetches else ()
                sums = products(builder, dot, inputs, 1, weights, OUTPUTS, pairs, zeros, lines)
                _write(builder, sums, bias, outputs)
                builder.branch(end)
            builder.position_at_end(end)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 10), generate

    return multiply


def products(
    builder: Any,
    dot: Dot,
    rows: Sequence[Any],
    row_step: int,
    weights: Any,
    weights_step: int,
    count: Any,
    sums: Sequence[Any],
    ahead: Sequence[Any] = (),
) -> list[Any]:
    """Add the products of `count` words of each row, `row_step` words apart, to `sums`, equally many vectors per row.

    For each word, `weights` holds the words of all outputs, `weights_step` words apart. If `ahead` is given as an
    address and a step in bytes, each word also prefetches one cache line from there.
    """

    vectors = len(sums) // len(rows)

    def at(start: Any, number: Any, words: int) -> Any:
        return builder.add(start, builder.mul(number, ir.Constant(INT64, words * WORD)))

    def add(number: Any, totals: Sequence[Any]) -> list[Any]:
        if ahead:
            start, step = ahead
            v.prefetch(builder, builder.add(start, builder.mul(number, step)), 2)
        first = at(weights, number, weights_step)
        read = [v.load(builder, v.words_after(builder, first, each * LANES), WORDS, BF16) for each in range(vectors)]
        words = [v.load(builder, at(row, number, row_step), INT32, BF16) for row in rows]
        factors = [dot.factor(builder, v.splat(builder, word)) for word in words]
        by_row = [(factor, weight) for factor in factors for weight in read]
        return [dot.add(builder, each, weight, factor) for each, (factor, weight) in zip(totals, by_row, strict=True)]

    return v.loop(builder, count, sums, add)


def _write(builder: Any, sums: Sequence[Any], bias: Any, rows: Sequence[Any]) -> None:
    for vector in range(VECTORS):
        of_outputs = v.load(builder, v.words_after(builder, bias, vector * LANES), FLOATS, WORD)
        for row, total in zip(rows, sums[vector::VECTORS], strict=True):
            result = v.to_bfloat16(builder, builder.fadd(total, of_outputs))
            v.store(builder, result, builder.add(row, ir.Constant(INT64, vector * LANES * BF16)), BF16)
