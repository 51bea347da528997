"""Compiles a kernel with numba, or loads the machine code that an earlier process stored.

Compiling a model's kernels keeps a core busy for 4 s, loading them takes a few milliseconds, and every rank needs them
before it serves. They are stored in numba's cache folder (NUMBA_CACHE_DIR), or not at all if that is not set. numba's
own `cache=True` does not work here: kernels close over other compiled functions, which numba considers new in every
process.
"""

import ctypes
import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Protocol

import llvmlite
import numba
import numpy as np
import torch
from llvmlite import binding as llvm
from numba import cfunc, types
from numba.core.dispatcher import Dispatcher
from numba.core.registry import cpu_target
from numba.core.runtime import rtsys
from numba.extending import _Intrinsic

from ....progress import during
from .code_store import CodeStore, MachineCode, open_store
from .scalars import FAST_MATH

#: The folder of all CPU kernels (`replica/kernels/cpu`). Sources outside it are not part of the fingerprint.
KERNELS = Path(__file__).resolve().parents[1]

#: A kernel's signature: the address of its arguments, the thread number, the number of threads.
KERNEL_ENTRY = types.void(types.voidptr, types.int64, types.int64)
#: The signature of the function that each thread of a team runs.
THREAD_ENTRY = types.void(types.voidptr)


@functools.cache
def openmp() -> ctypes.CDLL:
    """The OpenMP library that torch uses. Raises OSError if it is not GNU's."""
    whole = ctypes.CDLL(None)
    if hasattr(whole, "GOMP_parallel"):  # a preloaded library
        return whole
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    if not hasattr(library, "GOMP_parallel"):
        raise OSError("torch does not use GNU OpenMP")
    return library


@functools.cache
def team_functions() -> tuple[Any, Any, Any]:
    """Functions for code in a team of threads: the thread's number (int32, from 0), their count (int32), a barrier.

    They are called by name: code that is stored for other processes must not contain this process's addresses.
    """

    def named(name: str, result: Any) -> Any:
        llvm.add_symbol(name, ctypes.cast(getattr(openmp(), name), ctypes.c_void_p).value)
        return types.ExternalFunction(name, result())

    counts = (named(name, types.int32) for name in ("omp_get_thread_num", "omp_get_num_threads"))
    return (*counts, named("GOMP_barrier", types.void))


#: Numbers the kernels that this process compiles.
_numbers = itertools.count(1)


class Kernel(Protocol):
    """A compiled kernel and the address that threads call."""

    @property
    def address(self) -> int: ...


@dataclass(slots=True, frozen=True)
class StoredKernel:
    address: int
    library: Any  #: numba's code library, which keeps the code alive


def kernel(function: Callable[..., None], signature: Any = KERNEL_ENTRY) -> Kernel:
    """Decorator that compiles a function to a kernel, or loads its stored code."""
    return load_or_compile(function, store(), signature)


def load_or_compile(function: Callable[..., None], store: CodeStore | None, signature: Any = KERNEL_ENTRY) -> Kernel:
    team_functions()  # stored code calls them by name
    if store is None:
        return _compile(function, signature)
    key = key_of(function, signature)
    stored = store.get(key)
    if stored is None:
        with during("waiting for another process to compile kernels"), store.lock(key):
            stored = store.get(key)
            if stored is None:
                compiled = _compile(function, signature)
                store.put(key, _machine_code(compiled))
                return compiled
    context = cpu_target.target_context
    rtsys.initialize(context)  # defines functions that generated code may call
    library = context.codegen().unserialize_library((stored.library, "object", (stored.code, stored.bitcode)))
    return StoredKernel(library.get_pointer_to_function(stored.symbol), library)


def key_of(function: Callable[..., None], signature: Any = KERNEL_ENTRY) -> str:
    """A text with everything that a kernel's machine code depends on."""
    return f"{software()} {processor_name()} {signature} {description(function)}"


def description(value: Any) -> str:
    """A text, the same in every process, of what code is specialized for. For a function, that is its closure.

    Raises TypeError for values of unknown types. `_fingerprint` covers module-level functions and constants.
    """
    if isinstance(value, Dispatcher):
        return description(value.py_func)
    if isinstance(value, _Intrinsic):
        return description(value._defn)
    if isinstance(value, types.ExternalFunction):
        return str(value.symbol)
    if value is None or isinstance(value, bool | int | float | str | np.generic):
        return repr(value)
    if isinstance(value, type):
        return value.__qualname__
    if is_dataclass(value):
        parts = ", ".join(description(getattr(value, each.name)) for each in fields(value))
        return f"{type(value).__qualname__}({parts})"
    if not hasattr(value, "__code__"):
        raise TypeError(f"a kernel closes over {value!r}, which cannot be described")
    assert KERNELS in Path(value.__code__.co_filename).resolve().parents, (
        f"{value.__qualname__} is not among the kernels"
    )
    cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
    closed = ", ".join(f"{name}={description(cell.cell_contents)}" for name, cell in cells)
    return f"{value.__module__}.{value.__code__.co_qualname}({closed})"  # `_name_by_content` changes __qualname__


@functools.cache
def store() -> CodeStore | None:
    folder = numba.config.CACHE_DIR
    return open_store(Path(folder)) if folder else None


@functools.cache
def software() -> str:
    """The kernels' sources and the compilers' versions."""
    sources = "".join(path.read_text(encoding="utf-8") for path in sorted(KERNELS.rglob("*.py")))
    return f"{numba.__version__} {llvmlite.__version__} {sources}"


@functools.cache
def processor_name() -> str:
    """The CPU and those of its features that kernels are compiled for."""
    return str(cpu_target.target_context.codegen().magic_tuple())


def _compile(function: Callable[..., None], signature: Any) -> Kernel:
    _name_by_content(function)
    with during(f"compiling kernels for this processor, number {next(_numbers)}"):
        compiled: Kernel = cfunc(signature, fastmath=FAST_MATH, error_model="numpy")(function)
    return compiled


def _name_by_content(value: Any) -> None:
    """Rename a function and the functions that it closes over, by a digest of what they are specialized for.

    numba distinguishes functions with equal names by a number that each process counts from 0. So two processes may
    store different functions under one symbol; if both are loaded, the linker uses the first for both.
    """
    if isinstance(value, Dispatcher):
        _name_by_content(value.py_func)
    elif hasattr(value, "__code__") and "<locals>" in value.__qualname__:
        digest = sha256(description(value).encode()).hexdigest()[:16]
        value.__qualname__ = f"{value.__code__.co_qualname}_{digest}"
        for cell in value.__closure__ or ():
            _name_by_content(cell.cell_contents)


def _machine_code(compiled: Any) -> MachineCode:
    # numba's own caches use the same functions; there are no public ones.
    library = compiled._library
    assert not library.has_dynamic_globals, f"{compiled.native_name}: its code holds addresses of this process"
    name, _, (code, bitcode) = library.serialize_using_object_code()
    return MachineCode(compiled.native_name, name, code, bitcode)
