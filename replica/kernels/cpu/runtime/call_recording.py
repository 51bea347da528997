"""Records the kernel calls of a step once and repeats them without returning to Python.

What a CUDA graph is on a GPU. A step of one row is a hundred calls of some microseconds each, and Python needs longer
than that to prepare one. Only calls of compiled kernels are recorded: other torch operations of a step may create
tensors and views of them, but not compute.
"""

import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .thread_team import join_calls, observing_calls, run_calls

#: Bytes of the smallest piece of memory that an arena gives out.
SMALLEST_PIECE = 4096


class NotRecorded(Exception):  # noqa: N818
    """A step computes by something other than a compiled kernel; the message names the operation."""


class Arena:
    """Memory that all recorded steps share, as they run one at a time. It stays as long as the arena.

    In pieces of a power of two, so that steps of different sizes reuse each other's.
    """

    def __init__(self) -> None:
        self._pieces: dict[int, torch.Tensor] = {}  #: by address
        self._free: defaultdict[int, list[torch.Tensor]] = defaultdict(list)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor whose memory is reused when its last view is gone."""
        length = prod(shape) * dtype.itemsize
        size = max(SMALLEST_PIECE, 1 << (length - 1).bit_length())
        free = self._free[size]
        if free:
            piece = free.pop()
        else:
            piece = torch.empty(size, dtype=torch.uint8)
            self._pieces[piece.data_ptr()] = piece
        part = piece.numpy()[:length]
        weakref.finalize(part, free.append, piece).atexit = False
        return torch.from_numpy(part).view(dtype).view(*shape)

    @property
    def pieces(self) -> int:
        return len(self._pieces)

    def holds(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._pieces

    def unowned(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same tensor, without keeping its memory from being reused."""
        piece = self._pieces[tensor.untyped_storage().data_ptr()]
        return piece.view(tensor.dtype).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


@dataclass(slots=True, frozen=True)
class CallRecording:
    calls: bytes
    threads: int
    arena: Arena
    kept: list[torch.Tensor]  #: the tensors outside of the arena that the calls read and write
    result: torch.Tensor

    def run(self) -> torch.Tensor:
        """The step's result on the present contents of its tensors. The arena's next step overwrites it."""
        run_calls(self.calls, self.threads)
        return self.result


def record(arena: Arena, step: Callable[[], torch.Tensor]) -> CallRecording:
    """Run a step and record its calls. Tensors that the step does not create itself must keep their addresses.

    Raises NotRecorded, after a part of the step has run.
    """
    recorder = _Recorder(arena)
    with observing_calls(recorder.add), recorder:
        result = step()
    if not arena.holds(result):
        raise NotRecorded("the result was not computed by a compiled kernel")
    return CallRecording(join_calls(recorder.calls), recorder.threads, arena, recorder.kept, arena.unowned(result))


class _Recorder(TorchDispatchMode):
    """Allocates a step's tensors in the arena, and refuses operations that compute."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Else torch imports its compiler at the first call, which takes 1.5 s of CPU. Nothing is compiled here."""
        return False

    def __init__(self, arena: Arena) -> None:
        super().__init__()
        self._arena = arena
        self.calls: list[bytes] = []
        self.kept: list[torch.Tensor] = []
        self.threads = 1

    def add(self, call: bytes, tensors: Sequence[torch.Tensor], threads: int) -> None:
        self.calls.append(call)
        self.kept += [tensor for tensor in tensors if not self._arena.holds(tensor)]
        self.threads = max(self.threads, threads)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.empty.memory_format:
            return self._arena.empty(args[0], kwargs.get("dtype") or torch.get_default_dtype())
        if func is torch.ops.aten.new_empty.default:
            return self._arena.empty(args[1], kwargs.get("dtype") or args[0].dtype)
        # The last operation of `torch.tensor` is a view by its schema, of numbers that the host had when recording.
        if not func.is_view or func is torch.ops.aten.lift_fresh.default:
            raise NotRecorded(str(func))
        found = func(*args, **(kwargs or {}))
        if not isinstance(found, torch.Tensor):
            raise NotRecorded(f"{func}, which makes several views")
        if found.untyped_storage().data_ptr() != args[0].untyped_storage().data_ptr():
            raise NotRecorded(f"{func}, which copies")
        return found
