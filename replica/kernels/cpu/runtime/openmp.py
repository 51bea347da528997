"""The OpenMP library that torch computes with, for Python and for compiled code. Knows no kernels."""

import ctypes
import functools
from pathlib import Path
from typing import Any, NamedTuple

import torch
from llvmlite import binding as llvm
from numba import types


@functools.cache
def openmp() -> ctypes.CDLL:
    """The library. Raises OSError where torch uses another OpenMP than GNU's."""
    whole = ctypes.CDLL(None)
    if hasattr(whole, "GOMP_parallel"):  # one that was preloaded
        return whole
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    if not hasattr(library, "GOMP_parallel"):
        raise OSError("torch computes without GNU OpenMP")
    return library


class TeamFunctions(NamedTuple):
    """The functions that compiled code calls inside a team of threads."""

    number: Any  #: () -> int32 of the calling thread, from 0
    count: Any  #: () -> int32 of the team's threads
    barrier: Any  #: () -> None, after all threads of the team have called it


@functools.cache
def team_functions() -> TeamFunctions:
    """The functions by name: code that is stored for other processes must not contain addresses of this one."""
    number, count = (_named(name, types.int32()) for name in ("omp_get_thread_num", "omp_get_num_threads"))
    return TeamFunctions(number, count, _named("GOMP_barrier", types.void()))


def _named(name: str, signature: Any) -> Any:
    llvm.add_symbol(name, ctypes.cast(getattr(openmp(), name), ctypes.c_void_p).value)
    return types.ExternalFunction(name, signature)
