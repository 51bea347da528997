"""From a kernel's source to an address that can be called: compiled by numba, or as an earlier process left it.

Compiling a model's kernels keeps a core busy for 4 s, reading them for some milliseconds, and every rank needs them
before it serves. They are kept where numba keeps its own caches (NUMBA_CACHE_DIR); nothing is where that is not set.
numba's `cache=True` would not do: kernels close over other compiled functions, which it takes for new ones in every
process.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, Protocol

import llvmlite
import numba
import numpy as np
from numba import cfunc, types
from numba.core.dispatcher import Dispatcher
from numba.core.registry import cpu_target
from numba.core.runtime import rtsys
from numba.extending import _Intrinsic

from .code_store import CodeStore, MachineCode, open_store
from .openmp import team_functions
from .scalars import FAST_MATH

#: The folder of all CPU kernels (`replica/kernels/cpu`): sources outside of it are not part of the fingerprint.
KERNELS = Path(__file__).resolve().parents[1]

#: What a kernel is called with: the address of its arguments, the thread's number, and how many threads share the work.
CALLED = types.void(types.voidptr, types.int64, types.int64)
#: And the entry of a team's threads.
ENTRY = types.void(types.voidptr)


class Kernel(Protocol):
    """Machine code."""

    @property
    def address(self) -> int:
        """What threads call."""
        ...


@dataclass(slots=True, frozen=True)
class KeptKernel:
    """One that was read."""

    address: int
    library: Any  #: numba's; the code lives as long


def kernel(function: Callable[..., None], signature: Any = CALLED) -> Kernel:
    """Make a kernel of it."""
    return made(function, _store(), signature)


def made(function: Callable[..., None], store: CodeStore | None, signature: Any = CALLED) -> Kernel:
    """From the store where that has it, else compiled, and kept there."""
    team_functions()  # which kept code calls by name
    words = f"{_fingerprint()} {signature} {described(function)}"
    if store is None:
        return compiled(function, signature)
    kept = store.get(words)
    if kept is None:
        with store.turn():
            kept = store.get(words)
            if kept is None:
                found = compiled(function, signature)
                store.put(words, _code_of(found))
                return found
    return _loaded(kept)


def compiled(function: Callable[..., None], signature: Any = CALLED) -> Kernel:
    """By numba."""
    found: Kernel = cfunc(signature, fastmath=FAST_MATH, error_model="numpy")(function)
    return found


def described(value: Any) -> str:
    """All that code is made for, in words that are the same in every process: of functions what they close over.

    Raises TypeError for what has none. What functions and constants say in their modules, `_fingerprint` covers.
    """
    if isinstance(value, Dispatcher):
        return described(value.py_func)
    if isinstance(value, _Intrinsic):
        return described(value._defn)
    if isinstance(value, types.ExternalFunction):
        return str(value.symbol)
    if isinstance(value, bool | int | float | str | np.generic):
        return repr(value)
    if isinstance(value, type):
        return value.__qualname__
    if is_dataclass(value):
        parts = ", ".join(described(getattr(value, each.name)) for each in fields(value))
        return f"{type(value).__qualname__}({parts})"
    if not hasattr(value, "__code__"):
        raise TypeError(f"a kernel closes over {value!r}, which has no words")
    assert KERNELS in Path(value.__code__.co_filename).resolve().parents, (
        f"{value.__qualname__} is not among the kernels"
    )
    cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
    closed = ", ".join(f"{name}={described(cell.cell_contents)}" for name, cell in cells)
    return f"{value.__module__}.{value.__qualname__}({closed})"


@functools.cache
def _store() -> CodeStore | None:
    folder = numba.config.CACHE_DIR
    return open_store(Path(folder)) if folder else None


@functools.cache
def _fingerprint() -> str:
    """The kernels' sources, who compiles them, and the CPU."""
    sources = "".join(path.read_text(encoding="utf-8") for path in sorted(KERNELS.rglob("*.py")))
    compilers = numba.__version__, llvmlite.__version__, *cpu_target.target_context.codegen().magic_tuple()
    return f"{compilers} {sources}"


def _code_of(compiled: Any) -> MachineCode:
    # numba's own caches take the same way, which has no public name.
    library = compiled._library
    assert not library.has_dynamic_globals, f"{compiled.native_name}: its code holds addresses of this process"
    name, _, (code, bitcode) = library.serialize_using_object_code()
    return MachineCode(compiled.native_name, name, code, bitcode)


def _loaded(kept: MachineCode) -> KeptKernel:
    context = cpu_target.target_context
    rtsys.initialize(context)  # defines what generated code may call
    library = context.codegen().unserialize_library((kept.library, "object", (kept.code, kept.bitcode)))
    return KeptKernel(library.get_pointer_to_function(kept.symbol), library)
