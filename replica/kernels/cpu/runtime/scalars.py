"""Scalars in compiled kernels: bfloat16 as bits, addresses, exponentials, softmax. Knows no tensors."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import carray, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

#: Sums may be taken in any order, or no loop over features would use vector registers. NaN and infinity keep their
#: meaning.
FAST_MATH = {"reassoc", "contract", "nsz", "arcp"}
HIGH_BITS, ROUNDING = np.uint32(16), np.uint32(0x7FFF)

#: exp as in Cephes' expf: log2(e), ln 2 in two parts, and the polynomial's coefficients.
LOG2_E, LN2_HIGH, LN2_LOW = np.float32(1.44269504), np.float32(0.693359375), np.float32(-2.12194440e-4)
P0, P1, P2 = np.float32(1.9875691500e-4), np.float32(1.3981999507e-3), np.float32(8.3334519073e-3)
P3, P4, P5 = np.float32(4.1665795894e-2), np.float32(1.6666665459e-1), np.float32(5.0000001201e-1)
HALF, ONE = np.float32(0.5), np.float32(1.0)
#: Beyond these the power of two would leave float32's exponents.
LEAST, GREATEST = np.float32(-87.0), np.float32(88.0)


@dataclass(slots=True, frozen=True)
class Storage:
    """The representation of one dtype in memory, and conversions to float32 and back."""

    kind: Any  #: numpy's type
    widen: Callable[[Any], Any]
    narrow: Callable[[Any], Any]

    @property
    def size(self) -> int:
        return int(np.dtype(self.kind).itemsize)


@intrinsic
def pointer(_, _address):
    def generate(_context, builder, _signature, arguments):
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), generate


@intrinsic
def address_of(_, _pointer):
    def generate(_context, builder, _signature, arguments):
        return builder.ptrtoint(arguments[0], ir.IntType(64))

    return types.int64(types.voidptr), generate


@intrinsic
def bits_of(_, _value):
    def generate(_context, builder, _signature, arguments):
        return builder.bitcast(arguments[0], ir.IntType(32))

    return types.uint32(types.float32), generate


@intrinsic
def float_of(_, _bits):
    def generate(_context, builder, _signature, arguments):
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.uint32), generate


@functools.cache
def storage_of(*dtypes: torch.dtype) -> Storage:
    """The storage of tensors that must share one dtype: a kernel would access memory beside a tensor of another."""
    assert len(set(dtypes)) == 1, f"tensors of different dtypes: {dtypes}"
    if dtypes[0] == torch.bfloat16:
        return Storage(np.uint16, _from_bfloat16, _to_bfloat16)
    assert dtypes[0] == torch.float32, f"no kernel is compiled for {dtypes[0]}"
    return Storage(np.float32, _same, _same)


@njit(fastmath=FAST_MATH, error_model="numpy")
def exponential(x):
    """exp(x) of a float32, to a few units in the last place. LLVM vectorizes it, unlike a call of libm."""
    x = LEAST if x < LEAST else x  # not min(), so that NaN stays NaN
    x = GREATEST if x > GREATEST else x
    power = np.float32(np.floor(x * LOG2_E + HALF))
    rest = x - power * LN2_HIGH - power * LN2_LOW
    polynomial = ((((P0 * rest + P1) * rest + P2) * rest + P3) * rest + P4) * rest + P5
    scale = float_of(np.uint32(np.int32(power) + np.int32(127)) << np.uint32(23))
    return (polynomial * rest * rest + rest + ONE) * scale


@njit(fastmath=FAST_MATH, error_model="numpy")
def softmax_of_heads(scores, group, count, longest, softcap, sinks):
    """In place, of `count` scores of each of a group's heads, which are `longest` scores apart; all are visible.

    `softcap` is 0 for none; `sinks` is the address of the group's float32 sinks, or 0.
    """
    for head in range(group):
        row = carray(pointer(scores + head * longest * 4), (count,), np.float32)
        if softcap > 0:
            for i in range(count):
                # softcap * tanh(score / softcap)
                row[i] = softcap - 2 * softcap / (exponential(2 * row[i] / softcap) + ONE)
        top, total = -np.float32(np.inf), np.float32(0)
        for i in range(count):
            top = row[i] if row[i] > top else top  # a NaN makes the sum NaN
        if sinks:
            sink = carray(pointer(sinks + head * 4), (1,), np.float32)[0]
            top = sink if sink > top else top
            total = exponential(sink - top)
        for i in range(count):
            row[i] = exponential(row[i] - top)
            total += row[i]
        inverse = ONE / total
        for i in range(count):
            row[i] *= inverse


@njit(error_model="numpy")
def _from_bfloat16(bits):
    return float_of(np.uint32(np.uint32(bits) << HIGH_BITS))


@njit(error_model="numpy")
def _to_bfloat16(value):
    """To the nearest, ties to even."""
    bits = bits_of(value)
    return np.uint16(np.uint32(bits + ROUNDING + ((bits >> HIGH_BITS) & np.uint32(1))) >> HIGH_BITS)


@njit(error_model="numpy")
def _same(value):
    return np.float32(value)
