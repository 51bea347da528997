"""What every thread of a team does: the calls that it is given, one after the other. Knows no tensors and no Python.

Calls lie one behind the other in 64-bit words: how many there are; then of each the kernel's address, its threads, the
number of its arguments, and these.
"""

import functools

import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from .compilation import ENTRY, Kernel, kernel
from .openmp import team_functions
from .scalars import address_of, pointer
from .vectors import INT64

#: Words before a call's arguments.
HEAD = 3
_WORD = 8


@functools.cache
def member() -> Kernel:
    """The entry of a team's threads. Where several threads make a call, they begin when the one before is done."""
    number_of, count_of, meet = team_functions()

    def member(data):
        number, team = np.int64(number_of()), np.int64(count_of())
        calls, place, before = carray(data, (1,), np.int64)[0], address_of(data) + _WORD, np.int64(1)
        for _ in range(calls):
            head = carray(pointer(place), (HEAD,), np.int64)
            threads = min(head[1], team)
            if max(threads, before) > 1:
                meet()
            place += HEAD * _WORD
            if number < threads:
                _invoke(head[0], place, number, threads)
            place += head[2] * _WORD
            before = threads

    return kernel(member, ENTRY)


@intrinsic
def _invoke(_context, _kernel, _arguments, _number, _threads):
    """Call a kernel."""

    def generate(context, builder, _signature, given):
        address, arguments, number, threads = given
        kind = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, INT64, INT64])
        called = builder.inttoptr(address, kind.as_pointer())
        builder.call(called, [builder.inttoptr(arguments, cgutils.voidptr_t), number, threads])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), generate


@njit(error_model="numpy")
def share(count, number, threads):
    """What of `count` equal parts thread `number` does: the first, and the one behind the last."""
    return count * number // threads, count * (number + 1) // threads
