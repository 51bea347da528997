"""Products of bfloat16 matrices by the processor's matrix registers (Intel AMX), as LLVM instructions.

Such a register holds 16 rows of 64 bytes. Registers are numbered by hand: a kernel configures all of them when it
begins, and releases them when it ends, so that the operating system has less to save and libraries find them unused.
Source of the instructions and of the configuration's format: "Intel Architecture Instruction Set Extensions Programming
Reference", chapter 3.
"""

import ctypes
import functools
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from . import vectors as v
from .processor import has_tiles
from .scalars import Lowering
from .vectors import INT8, INT64, WORD

#: Rows of a register, and words per row.
SIDE = 16
#: Rows and lanes of one product: two registers of rows times two of lanes, with four of sums.
TILED_ROWS = TILED_LANES = 2 * SIDE
SUMS, ROWS, LANES = (0, 1, 2, 3), (4, 5), (6, 7)

#: The format's only palette; where each register's bytes per row (two bytes) and rows (one byte) lie in it.
PALETTE, ROW_BYTES_AT, ROWS_AT = 1, 16, 48
#: Linux on x86-64: the call by which a process asks for registers that it doesn't get unasked, and their number.
ARCH_PRCTL, REQUEST, TILE_DATA = 158, 0x1023, 18


@functools.cache
def tiles_usable() -> bool:
    """Whether the processor has matrix registers for bfloat16, and the operating system lets this process use them."""
    return has_tiles() and ctypes.CDLL(None).syscall(ARCH_PRCTL, REQUEST, TILE_DATA) == 0


@intrinsic
def configure_tiles(_, _address) -> Lowering:
    """Configure all of the thread's registers as full. The 64 bytes at the address (int64) are overwritten."""

    def generate(context, builder, _signature, arguments) -> Any:
        configuration = bytearray(64)
        configuration[0] = PALETTE
        for register in (*SUMS, *ROWS, *LANES):
            configuration[ROW_BYTES_AT + 2 * register] = SIDE * WORD
            configuration[ROWS_AT + register] = SIDE
        kind = ir.VectorType(INT8, len(configuration))
        v.store(builder, ir.Constant(kind, list(configuration)), arguments[0], WORD)
        _call(builder, "ldtilecfg", v.pointed_by(builder, arguments[0]))
        return context.get_dummy_value()

    return types.void(types.int64), generate


@intrinsic
def release_tiles(_) -> Lowering:
    def generate(context, builder, _signature, _arguments) -> Any:
        _call(builder, "tilerelease")
        return context.get_dummy_value()

    return types.void(), generate


def multiply(builder: Any, rows: Any, step: Any, lanes: Any, words: Any, out: Any, adds: bool) -> None:
    """Write the products of `TILED_ROWS` rows, `step` bytes apart, and `TILED_LANES` lanes to `out`, or add them.

    A row has `words` words of two bfloat16, a multiple of `SIDE`; `lanes` holds the words of all lanes for each word.
    `out` is float32 [TILED_ROWS, TILED_LANES]. All are int64 values.
    """
    line = ir.Constant(INT64, TILED_LANES * WORD)

    def after(start: Any, row_bytes: Any, rows: int, words: int) -> Any:
        return v.words_after(builder, builder.add(start, builder.mul(row_bytes, ir.Constant(INT64, rows))), words)

    places = [after(out, line, row, lane) for row in (0, SIDE) for lane in (0, SIDE)]
    for register, place in zip(SUMS, places, strict=True):
        if adds:
            _move(builder, "tileloadd64", register, place, line)
        else:
            _call(builder, "tilezero", _register(register))

    def add(number: Any, _values: Any) -> list[Any]:
        word = builder.mul(number, ir.Constant(INT64, SIDE))
        row = builder.add(rows, builder.mul(word, ir.Constant(INT64, WORD)))
        lane = builder.add(lanes, builder.mul(word, line))
        for half in range(2):
            _move(builder, "tileloadd64", ROWS[half], after(row, step, half * SIDE, 0), step)
            _move(builder, "tileloadd64", LANES[half], v.words_after(builder, lane, half * SIDE), line)
        for register in SUMS:
            factors = ROWS[register // 2], LANES[register % 2]
            _call(builder, "tdpbf16ps", *map(_register, (register, *factors)))
        return []

    v.loop(builder, builder.sdiv(words, ir.Constant(INT64, SIDE)), [], add)
    for register, place in zip(SUMS, places, strict=True):
        _move(builder, "tilestored64", register, place, line)


def _move(builder: Any, name: str, register: int, address: Any, row_bytes: Any) -> None:
    _call(builder, name, _register(register), v.pointed_by(builder, address), row_bytes)


def _call(builder: Any, name: str, *arguments: Any) -> None:
    kind = ir.FunctionType(ir.VoidType(), [each.type for each in arguments])
    builder.call(cgutils.get_or_insert_function(builder.module, kind, f"llvm.x86.{name}"), arguments)


def _register(number: int) -> Any:
    return ir.Constant(INT8, number)
