"""Scalars in compiled kernels: bfloat16 as bits, addresses, exponentials, counters. Does not depend on tensors."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from .vectors import INT32, pointed_by, prefetch

#: Allows sums in any order; otherwise no loop over features would use vector registers. NaN and infinity keep their
#: meaning.
FAST_MATH = {"reassoc", "contract", "nsz", "arcp"}
HIGH_BITS, ROUNDING = np.uint32(16), np.uint32(0x7FFF)

#: Constants of Cephes' expf: log2(e), ln 2 in two parts, and the polynomial's coefficients.
LOG2_E, LN2_HIGH, LN2_LOW = np.float32(1.44269504), np.float32(0.693359375), np.float32(-2.12194440e-4)
P0, P1, P2 = np.float32(1.9875691500e-4), np.float32(1.3981999507e-3), np.float32(8.3334519073e-3)
P3, P4, P5 = np.float32(4.1665795894e-2), np.float32(1.6666665459e-1), np.float32(5.0000001201e-1)
ONE_HALF, ONE = np.float32(0.5), np.float32(1.0)
#: Arguments of `exponential` are clamped to these: beyond them, the power of two would exceed float32's exponents.
LEAST, GREATEST = np.float32(-87.0), np.float32(88.0)


#: What a function under numba's `intrinsic` returns: its signature, and what generates its LLVM code.
Lowering = tuple[Any, Callable[..., Any]]


@dataclass(slots=True, frozen=True)
class Storage:
    """How a dtype is represented in memory, with conversions to float32 and back."""

    kind: Any  #: numpy's type
    widen: Callable[[Any], Any]
    narrow: Callable[[Any], Any]

    @property
    def size(self) -> int:
        return int(np.dtype(self.kind).itemsize)


@intrinsic
def pointer(_, _address) -> Lowering:
    def generate(_context, builder, _signature, arguments) -> Any:
        return pointed_by(builder, arguments[0])

    return types.voidptr(types.int64), generate


@intrinsic
def address_of(_, _pointer) -> Lowering:
    def generate(_context, builder, _signature, arguments) -> Any:
        return builder.ptrtoint(arguments[0], ir.IntType(64))

    return types.int64(types.voidptr), generate


@intrinsic
def bits_of(_, _value) -> Lowering:
    def generate(_context, builder, _signature, arguments) -> Any:
        return builder.bitcast(arguments[0], ir.IntType(32))

    return types.uint32(types.float32), generate


@intrinsic
def float_of(_, _bits) -> Lowering:
    def generate(_context, builder, _signature, arguments) -> Any:
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.uint32), generate


@intrinsic
def prefetch_line(_, _address) -> Lowering:
    def generate(context, builder, _signature, arguments) -> Any:
        prefetch(builder, arguments[0], 1)
        return context.get_dummy_value()

    return types.void(types.int64), generate


@intrinsic
def count_up(_, _address) -> Lowering:
    """Add 1 to the int32 at an address; returns the old value. Writes before an add are visible after a later one."""

    def generate(_context, builder, _signature, arguments) -> Any:
        place = pointed_by(builder, arguments[0], INT32.as_pointer())
        return builder.atomic_rmw("add", place, ir.Constant(INT32, 1), "acq_rel")

    return types.int32(types.int64), generate


@functools.cache
def storage_of(*dtypes: torch.dtype) -> Storage:
    """The storage of tensors that must share a dtype: with another one, a kernel would access memory out of bounds."""
    assert len(set(dtypes)) == 1, f"tensors of different dtypes: {dtypes}"
    if dtypes[0] == torch.bfloat16:
        return Storage(np.uint16, _from_bfloat16, _to_bfloat16)
    assert dtypes[0] == torch.float32, f"no kernel is compiled for {dtypes[0]}"
    return Storage(np.float32, _same, _same)


@njit(fastmath={"contract"}, error_model="numpy")
def _less_powers_of_two(x, power) -> np.float32:
    """x - power * ln 2. In this order, the first product is exact: the sum of the two parts has lost LN2_LOW's bits."""
    return x - power * LN2_HIGH - power * LN2_LOW


@njit(fastmath=FAST_MATH, error_model="numpy")
def exponential(x) -> np.float32:
    """exp(x) of a float32, to a few units in the last place. Unlike a libm call, LLVM can vectorize it."""
    x = LEAST if x < LEAST else x  # not min(), so that NaN stays NaN
    x = GREATEST if x > GREATEST else x
    power = np.float32(np.floor(x * LOG2_E + ONE_HALF))
    rest = _less_powers_of_two(x, power)
    polynomial = ((((P0 * rest + P1) * rest + P2) * rest + P3) * rest + P4) * rest + P5
    scale = float_of(np.uint32(np.int32(power) + np.int32(127)) << np.uint32(23))
    return (polynomial * rest * rest + rest + ONE) * scale


@njit(error_model="numpy")
def order_of(x) -> np.int32:
    """An int32 that orders float32 numbers: LLVM vectorizes the maximum of integers. NaN is above or below all others.

    `number_of` is its inverse.
    """
    return _flipped(np.int32(bits_of(x)))


@njit(error_model="numpy")
def number_of(order) -> np.float32:
    return float_of(np.uint32(_flipped(order)))


@njit(error_model="numpy")
def _flipped(bits) -> np.int32:
    return bits ^ ((bits >> np.int32(31)) & np.int32(0x7FFFFFFF))


@njit(error_model="numpy")
def _from_bfloat16(bits) -> np.float32:
    return float_of(np.uint32(np.uint32(bits) << HIGH_BITS))


@njit(error_model="numpy")
def _to_bfloat16(value) -> np.uint16:
    """Round to nearest, ties to even."""
    bits = bits_of(value)
    return np.uint16(np.uint32(bits + ROUNDING + ((bits >> HIGH_BITS) & np.uint32(1))) >> HIGH_BITS)


@njit(error_model="numpy")
def _same(value) -> np.float32:
    return np.float32(value)
