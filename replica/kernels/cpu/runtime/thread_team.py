"""Runs compiled kernels on torch's own threads.

torch's OpenMP library keeps a team of threads spinning between operations, so a second pool would find no free core.
Kernels therefore run through the library's entry point that compilers use for `#pragma omp parallel`: one call, or many
that the team makes in sequence without returning to Python.

Calls are stored as 64-bit words: first the number of calls; then, for each, the kernel's address, its number of
threads, its number of arguments, and the arguments.
"""

import ctypes
import functools
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import carray, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from .compilation import THREAD_ENTRY, Kernel, kernel, openmp, team_functions
from .scalars import Lowering, address_of, pointer
from .vectors import INT64

#: Fewest bytes that a thread should move; with fewer, waking it costs more than it saves. Not tuned.
BYTES_PER_THREAD = 16384
#: Words of a call that precede its arguments.
HEAD = 3
_WORD = 8
_ONE_CALL = struct.pack("q", 1)

#: Receives each call: its words, the tensors whose addresses they contain, and its number of threads.
CallObserver = Callable[[bytes, Sequence[torch.Tensor], int], None]

_observer: ContextVar[CallObserver | None] = ContextVar("observer", default=None)


def threads_for(work_bytes: int) -> int:
    return max(1, min(torch.get_num_threads(), work_bytes // BYTES_PER_THREAD))


def run(kernel: Kernel, tensors: Sequence[torch.Tensor], numbers: Sequence[int | float], threads: int) -> None:
    """Call a kernel in `threads` threads of the calling thread's team, and wait for all of them.

    Its arguments are 8 bytes each: the tensors' addresses, then the numbers as int64 or float64.
    """
    addresses = [tensor.data_ptr() for tensor in tensors]
    head = kernel.address, threads, len(addresses) + len(numbers)
    call = struct.pack(_format(len(addresses), *map(type, numbers)), *head, *addresses, *numbers)
    observer = _observer.get()
    if observer is not None:
        observer(call, tensors, threads)
    run_calls(_ONE_CALL + call, threads)


def run_calls(calls: bytes, threads: int) -> None:
    """Make the calls from `join_calls`, each with its own number of threads; `threads` is the largest."""
    _parallel()(calls, threads, 0)


def join_calls(calls: Sequence[bytes]) -> bytes:
    """The calls in the form that `run_calls` expects."""
    return struct.pack("q", len(calls)) + b"".join(calls)


@contextmanager
def observing_calls(observer: CallObserver) -> Iterator[None]:
    token = _observer.set(observer)
    try:
        yield
    finally:
        _observer.reset(token)


@njit(error_model="numpy")
def share(count, number, threads) -> tuple[int, int]:
    """The range of `count` equal items that thread `number` processes: first item, and end (exclusive)."""
    return count * number // threads, count * (number + 1) // threads


@functools.cache
def _format(addresses: int, *kinds: type) -> str:
    return f"{HEAD + addresses}q" + "".join("d" if kind is float else "q" for kind in kinds)


@functools.cache
def _parallel() -> Any:
    """A function that makes calls in a team of threads, with a barrier between two if either has several threads."""
    entry = openmp().GOMP_parallel
    entry.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    entry.restype = None
    number_of, count_of, barrier = team_functions()

    def thread_loop(data) -> None:
        number, team = np.int64(number_of()), np.int64(count_of())
        calls, place, before = carray(data, (1,), np.int64)[0], address_of(data) + _WORD, np.int64(1)
        for _ in range(calls):
            head = carray(pointer(place), (HEAD,), np.int64)
            threads = min(head[1], team)
            if max(threads, before) > 1:
                barrier()
            place += HEAD * _WORD
            if number < threads:
                _invoke(head[0], place, number, threads)
            place += head[2] * _WORD
            before = threads

    return functools.partial(entry, kernel(thread_loop, THREAD_ENTRY).address)


@intrinsic
def _invoke(_context, _kernel, _arguments, _number, _threads) -> Lowering:
    def generate(context, builder, _signature, operands) -> Any:
        address, arguments, number, threads = operands
        kind = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, INT64, INT64])
        called = builder.inttoptr(address, kind.as_pointer())
        builder.call(called, [builder.inttoptr(arguments, cgutils.voidptr_t), number, threads])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), generate
