"""Runs a compiled kernel on the threads that torch computes with: one team, or cores would be fought over.

torch's OpenMP keeps a team of threads spinning between operations; a second pool beside it would find no core free. So
kernels are handed to the same library, through the entry that compilers use for `#pragma omp parallel`.
"""

import ctypes
import functools
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from llvmlite import binding as llvm
from numba import njit, types

#: Bytes that a thread should have to move, or waking it costs more than it saves. Not tuned.
BYTES_PER_THREAD = 16384

Arguments = npt.NDArray[np.int64]


@functools.cache
def openmp() -> ctypes.CDLL:
    """The OpenMP library that torch uses. Raises OSError where it has another kind."""
    whole = ctypes.CDLL(None)
    if hasattr(whole, "GOMP_parallel"):  # one that was preloaded
        return whole
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    if not hasattr(library, "GOMP_parallel"):
        raise OSError("torch computes without GNU OpenMP")
    return library


@functools.cache
def _parallel() -> Any:
    entry = openmp().GOMP_parallel
    entry.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    entry.restype = None
    return entry


def _counter(name: str) -> Any:
    address = ctypes.cast(getattr(openmp(), name), ctypes.c_void_p).value
    llvm.add_symbol(name, address)
    return types.ExternalFunction(name, types.int32())


def threads_for(work_bytes: int) -> int:
    """Of torch's threads, as many as the work is worth."""
    return max(1, min(torch.get_num_threads(), work_bytes // BYTES_PER_THREAD))


def run(kernel: Any, arguments: Arguments, threads: int) -> None:
    """Call it in so many threads of the calling thread's team, and wait for all."""
    _parallel()(kernel.address, arguments.ctypes.data, threads, 0)


@functools.cache
def openmp_threads() -> tuple[Any, Any]:
    """What compiled code calls for the number of its thread in the team, and for that of all.

    By name: code that is kept for another process must hold no address of this one.
    """
    return _counter("omp_get_thread_num"), _counter("omp_get_num_threads")


@functools.cache
def share_of() -> Any:
    """The compiled function (count) -> (first, stop): what of `count` equal parts the calling thread does."""
    number, threads = openmp_threads()

    @njit(error_model="numpy")
    def share(count):
        own, all_of_them = np.int64(number()), np.int64(threads())
        return count * own // all_of_them, count * (own + 1) // all_of_them

    return share
