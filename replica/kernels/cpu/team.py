"""Runs compiled kernels on the threads that torch computes with: one team, or cores would be fought over.

torch's OpenMP keeps a team of threads spinning between operations; a second pool beside it would find no core free. So
kernels are handed to the same library, through the entry that compilers use for `#pragma omp parallel`: a call alone,
or many that the team makes one after the other without coming back to Python.
"""

import ctypes
import functools
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch

from .compilation import Kernel
from .member import member
from .openmp import openmp

#: Bytes that a thread should have to move, or waking it costs more than it saves. Not tuned.
BYTES_PER_THREAD = 16384


@dataclass(slots=True)
class Calls:
    """Calls that were made, to be made again on what their tensors hold then."""

    made: list[bytes] = field(default_factory=list)  #: as `member` reads them
    tensors: list[torch.Tensor] = field(default_factory=list)  #: whose addresses they hold
    threads: int = 1  #: of the call with the most


_noted: ContextVar[Calls | None] = ContextVar("noted", default=None)


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
    made = struct.pack(_format(len(addresses), *map(type, numbers)), *head, *addresses, *numbers)
    noted = _noted.get()
    if noted is not None:
        noted.made.append(made)
        noted.tensors += tensors
        noted.threads = max(noted.threads, threads)
    _parallel()(_ONE_CALL + made, threads, 0)


@functools.cache
def _format(addresses: int, *kinds: type) -> str:
    return f"{3 + addresses}q" + "".join("d" if kind is float else "q" for kind in kinds)


_ONE_CALL = struct.pack("q", 1)


@contextmanager
def noting() -> Iterator[Calls]:
    """Notes all calls that this thread makes meanwhile, beside making them."""
    calls = Calls()
    token = _noted.set(calls)
    try:
        yield calls
    finally:
        _noted.reset(token)


def run_again(made: bytes, threads: int) -> None:
    """Make many calls, each in its own number of threads, at most these."""
    _parallel()(made, threads, 0)


def joined(calls: Calls) -> bytes:
    """The calls as `run_again` takes them."""
    return struct.pack("q", len(calls.made)) + b"".join(calls.made)
