"""Runs compiled kernels on the threads that torch computes with: one team, or cores would be fought over.

torch's OpenMP keeps a team of threads spinning between operations; a second pool beside it would find no core free. So
kernels are handed to the same library, through the entry that compilers use for `#pragma omp parallel`: a call alone,
or many that the team makes one after the other without coming back to Python.
"""

import ctypes
import functools
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

from .compilation import Kernel
from .openmp import openmp
from .thread_loop import HEAD, member

#: Bytes that a thread should have to move, or waking it costs more than it saves. Not tuned.
BYTES_PER_THREAD = 16384

#: Told of each call: its words, the tensors whose addresses they hold, and its threads.
Note = Callable[[bytes, Sequence[torch.Tensor], int], None]

_note: ContextVar[Note | None] = ContextVar("note", default=None)


@functools.cache
def _parallel() -> Any:
    entry = openmp().GOMP_parallel
    entry.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    entry.restype = None
    return functools.partial(entry, member().address)


def threads_for(work_bytes: int) -> int:
    """Of torch's threads, as many as the work is worth."""
    return max(1, min(torch.get_num_threads(), work_bytes // BYTES_PER_THREAD))


def run(kernel: Kernel, tensors: Sequence[torch.Tensor], numbers: Sequence[int | float], threads: int) -> None:
    """Call it in so many threads of the calling thread's team, and wait for all.

    Its arguments are 8 bytes each: the tensors' addresses, then the numbers as int64 or float64.
    """
    addresses = [tensor.data_ptr() for tensor in tensors]
    head = kernel.address, threads, len(addresses) + len(numbers)
    call = struct.pack(_format(len(addresses), *map(type, numbers)), *head, *addresses, *numbers)
    note = _note.get()
    if note is not None:
        note(call, tensors, threads)
    run_all(_ONE + call, threads)


def run_all(calls: bytes, threads: int) -> None:
    """Make the calls of `joined`, each in its own number of threads, of which these are the most."""
    _parallel()(calls, threads, 0)


def joined(calls: Sequence[bytes]) -> bytes:
    """Calls as `run_all` takes them."""
    return struct.pack("q", len(calls)) + b"".join(calls)


@contextmanager
def noting(note: Note) -> Iterator[None]:
    """Tell of all calls that this thread makes meanwhile."""
    token = _note.set(note)
    try:
        yield
    finally:
        _note.reset(token)


@functools.cache
def _format(addresses: int, *kinds: type) -> str:
    return f"{HEAD + addresses}q" + "".join("d" if kind is float else "q" for kind in kinds)


_ONE = struct.pack("q", 1)
