"""A step as a program: the calls of its kernels, recorded once, then made again without coming back to Python.

What a CUDA graph is on a GPU. A step of one row is a hundred calls of some microseconds each, and Python needs more
than that to prepare one. Recorded are calls of compiled kernels; what else a step asks of torch may make tensors and
views of them, nothing that computes.
"""

import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .thread_team import joined, noting, run_all

#: Bytes of the least piece of memory that an arena gives out.
LEAST_PIECE = 4096
#: What `torch.tensor` ends with: a view by its schema, of numbers that the host had when the step was recorded.
_OF_THE_HOST = (torch.ops.aten.lift_fresh.default,)


class NotRecorded(Exception):  # noqa: N818
    """A step computes by something other than a compiled kernel; the message names it."""


class Arena:
    """Memory of recorded steps, which run one at a time: all of them share it, and it stays while the arena does.

    In pieces of a power of two, so that steps of different sizes find each other's.
    """

    def __init__(self) -> None:
        self._pieces: dict[int, torch.Tensor] = {}  #: by address
        self._free: defaultdict[int, list[torch.Tensor]] = defaultdict(list)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Its memory is given out again when the last view of it is gone."""
        length = prod(shape) * dtype.itemsize
        size = max(LEAST_PIECE, 1 << (length - 1).bit_length())
        free = self._free[size]
        piece = free.pop() if free else self._more(size)
        part = piece.numpy()[:length]
        weakref.finalize(part, free.append, piece).atexit = False
        return torch.from_numpy(part).view(dtype).view(*shape)

    @property
    def pieces(self) -> int:
        """How many there are."""
        return len(self._pieces)

    def _more(self, size: int) -> torch.Tensor:
        piece = torch.empty(size, dtype=torch.uint8)
        self._pieces[piece.data_ptr()] = piece
        return piece

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies in this memory."""
        return tensor.untyped_storage().data_ptr() in self._pieces

    def place_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same numbers, without keeping their memory from being given out."""
        piece = self._pieces[tensor.untyped_storage().data_ptr()]
        return piece.view(tensor.dtype).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


@dataclass(slots=True, frozen=True)
class Program:
    """A recorded step."""

    calls: bytes
    threads: int
    arena: Arena
    kept: list[torch.Tensor]  #: what the calls read and write beyond the arena
    result: torch.Tensor

    def run(self) -> torch.Tensor:
        """The step's result on what its tensors hold now, in memory that the arena's next step uses again."""
        run_all(self.calls, self.threads)
        return self.result


def record(arena: Arena, step: Callable[[], torch.Tensor]) -> Program:
    """Run a step and keep it. Its tensors must stay where they are, but for those that it makes itself.

    Raises NotRecorded, after a part of the step was run.
    """
    recorder = _Recorder(arena)
    with noting(recorder.note), recorder:
        result = step()
    if not arena.holds(result):
        raise NotRecorded("the result is not of its own making")
    return Program(joined(recorder.calls), recorder.threads, arena, recorder.kept, arena.place_of(result))


class _Recorder(TorchDispatchMode):
    """Sees all that a step asks of torch."""

    def __init__(self, arena: Arena) -> None:
        super().__init__()
        self._arena = arena
        self.calls: list[bytes] = []
        self.kept: list[torch.Tensor] = []
        self.threads = 1

    def note(self, call: bytes, tensors: Sequence[torch.Tensor], threads: int) -> None:
        self.calls.append(call)
        self.kept += [tensor for tensor in tensors if not self._arena.holds(tensor)]
        self.threads = max(self.threads, threads)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.empty.memory_format:
            return self._arena.empty(args[0], kwargs.get("dtype") or torch.get_default_dtype())
        if func is torch.ops.aten.new_empty.default:
            return self._arena.empty(args[1], kwargs.get("dtype") or args[0].dtype)
        if not func.is_view or func in _OF_THE_HOST:
            raise NotRecorded(str(func))
        found = func(*args, **(kwargs or {}))
        if not isinstance(found, torch.Tensor):
            raise NotRecorded(f"{func}, which makes several views")
        if found.untyped_storage().data_ptr() != args[0].untyped_storage().data_ptr():
            raise NotRecorded(f"{func}, which copies")
        return found
