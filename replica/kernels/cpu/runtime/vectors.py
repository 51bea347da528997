"""Vectors and bfloat16 as LLVM instructions, for loops that numba cannot express. Does not depend on tensors.

Numba supports neither vectors nor bfloat16, and LLVM does not select the instruction for pairs (AVX-512's VDPBF16PS) by
itself. A 32-bit word holds two consecutive bfloat16 numbers, the first in its low half.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from .processor import multiplies_bfloat16

LANES = 16  #: Words per vector register.
WORD = 4  #: Bytes of a pair of bfloat16 numbers, and of a float32.
BF16 = 2  #: Bytes of a bfloat16.

INT8, INT16, INT32, INT64, FLOAT = *(ir.IntType(bits) for bits in (8, 16, 32, 64)), ir.FloatType()
FLOATS, WORDS, HALVES = (ir.VectorType(kind, LANES) for kind in (FLOAT, INT32, INT16))


class _BFloat(ir.Type):  # type: ignore[misc]  # llvmlite has no type stubs
    """LLVM's bfloat, which llvmlite does not define."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


PAIRS = ir.VectorType(_BFloat(), 2 * LANES)


@dataclass(slots=True, frozen=True)
class Dot:
    """How an instruction set multiplies and adds words."""

    factor: Callable[[Any, Any], Any]  #: (builder, words) -> the factor that `add` expects
    add: Callable[[Any, Any, Any, Any], Any]  #: (builder, sums, words, factor) -> sums of float32


def _as_pairs(builder: Any, words: Any) -> Any:
    return builder.bitcast(words, PAIRS)


def _add_pairs(builder: Any, sums: Any, words: Any, factor: Any) -> Any:
    kind = ir.FunctionType(FLOATS, [FLOATS, PAIRS, PAIRS])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx512bf16.dpbf16ps.512")
    return builder.call(function, [sums, builder.bitcast(words, PAIRS), factor])


#: For processors with AVX-512's bfloat16 instructions: multiplies and adds a pair in one instruction.
NATIVE = Dot(_as_pairs, _add_pairs)


def widen_pairs(builder: Any, words: Any) -> tuple[Any, Any]:
    """The low and high halves of words as float32; a bfloat16 is the high half of a float32."""
    low = builder.shl(words, ir.Constant(WORDS, [16] * LANES))
    high = builder.and_(words, ir.Constant(WORDS, [0xFFFF0000] * LANES))
    return builder.bitcast(low, FLOATS), builder.bitcast(high, FLOATS)


def multiply_add(builder: Any, sums: Any, one: Any, other: Any) -> Any:
    return builder.fadd(sums, builder.fmul(one, other, flags=("contract",)), flags=("contract",))


def _add_wide(builder: Any, sums: Any, words: Any, factor: Any) -> Any:
    for one, other in zip(widen_pairs(builder, words), factor, strict=True):
        sums = multiply_add(builder, sums, one, other)
    return sums


#: For all other processors: products in float32.
WIDENED = Dot(widen_pairs, _add_wide)


def _as_floats(builder: Any, words: Any) -> Any:
    return builder.bitcast(words, FLOATS)


def _add_floats(builder: Any, sums: Any, words: Any, factor: Any) -> Any:
    return multiply_add(builder, sums, builder.bitcast(words, FLOATS), factor)


#: For words that hold one float32.
SINGLE = Dot(_as_floats, _add_floats)


def dot() -> Dot:
    return NATIVE if multiplies_bfloat16() else WIDENED


def splat(builder: Any, value: Any) -> Any:
    nothing = ir.Constant(ir.VectorType(value.type, LANES), ir.Undefined)
    one = builder.insert_element(nothing, value, ir.Constant(INT32, 0))
    return builder.shuffle_vector(one, nothing, ir.Constant(WORDS, [0] * LANES))


def transposed(builder: Any, rows: Sequence[Any]) -> list[Any]:
    """The columns of `LANES` vectors, by swapping halves, then quarters and so on between pairs of them."""
    found, distance = list(rows), LANES // 2
    while distance:
        for one in (number for number in range(LANES) if not number & distance):
            pair = found[one], found[one + distance]
            low = [LANES + lane - distance if lane & distance else lane for lane in range(LANES)]
            high = [LANES + lane if lane & distance else lane + distance for lane in range(LANES)]
            for number, lanes in ((one, low), (one + distance, high)):
                found[number] = builder.shuffle_vector(*pair, ir.Constant(WORDS, lanes))
        distance //= 2
    return found


def constant(value: float) -> Any:
    return ir.Constant(FLOATS, [value] * LANES)


def to_bfloat16(builder: Any, exact: Any) -> Any:
    """A vector of float32 rounded to bfloat16, ties to even."""
    bits, half, one = (ir.Constant(WORDS, [value] * LANES) for value in (16, 0x7FFF, 1))
    words = builder.bitcast(exact, WORDS)
    lowest_kept_bit = builder.and_(builder.lshr(words, bits), one)
    return builder.trunc(builder.lshr(builder.add(words, builder.add(half, lowest_kept_bit)), bits), HALVES)


def halves(builder: Any, words: Any) -> tuple[Any, Any]:
    """The low and the high 16 bits of words."""
    return tuple(builder.trunc(each, HALVES) for each in (words, builder.lshr(words, ir.Constant(WORDS, [16] * LANES))))


def loop(
    builder: Any, count: Any, initial: Sequence[Any], body: Callable[[Any, Sequence[Any]], Sequence[Any]]
) -> list[Any]:
    """The values after `count` (at least 1) iterations of `body`, which maps a number and values to the next values."""
    before, block, after = builder.basic_block, *(builder.append_basic_block(name) for name in ("loop", "after"))
    builder.branch(block)
    builder.position_at_end(block)
    number, *values = phis = [builder.phi(each.type) for each in (count, *initial)]
    following = builder.add(number, ir.Constant(INT64, 1))
    results = list(body(number, values))
    for phi, first, then in zip(phis, (ir.Constant(INT64, 0), *initial), (following, *results), strict=True):
        phi.add_incoming(first, before)
        phi.add_incoming(then, block)
    builder.cbranch(builder.icmp_signed("<", following, count), block, after)
    builder.position_at_end(after)
    return results


def strided(builder: Any, start: Any, step: Any, count: int) -> list[Any]:
    return [builder.add(start, builder.mul(step, ir.Constant(INT64, number))) for number in range(count)]


def words_after(builder: Any, start: Any, words: int) -> Any:
    return builder.add(start, ir.Constant(INT64, words * WORD))


def pointed_by(builder: Any, address: Any, kind: Any = cgutils.voidptr_t) -> Any:
    """A pointer of LLVM type `kind` to an address.

    LLVM may turn the sum that makes an address into a pointer and an offset, either part as the pointer. When a linked
    function is optimized again, a pointer that turns out to be 0 is taken as invalid and its store is dropped, unless
    the function says otherwise. Only code that other processes load was affected.
    """
    set.add(builder.function.attributes, "null_pointer_is_valid")  # llvmlite's own `add` does not know it
    return builder.inttoptr(address, kind)


def load(builder: Any, address: Any, kind: Any, alignment: int) -> Any:
    value = builder.load(pointed_by(builder, address, kind.as_pointer()))
    value.align = alignment
    return value


def prefetch(builder: Any, address: Any, level: int) -> None:
    """Prefetch the cache line of an address into the L1 or L2 cache (`level`). Invalid addresses are ignored."""
    kind = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, INT32, INT32, INT32])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    read, locality, data = (ir.Constant(INT32, value) for value in (0, 4 - level, 1))
    builder.call(function, [pointed_by(builder, address), read, locality, data])


def store(builder: Any, value: Any, address: Any, alignment: int) -> None:
    written = builder.store(value, pointed_by(builder, address, value.type.as_pointer()))
    written.align = alignment
