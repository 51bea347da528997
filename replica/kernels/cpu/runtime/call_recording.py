"""Records the operations of a step once and repeats them without the Python code that issued them.

The CPU counterpart of a CUDA graph. A step of one row is hundreds of operations of a few microseconds each, and Python
takes longer than that to prepare one. Consecutive compiled kernels become one call. torch operations are called one by
one, on the same tensors as in the recording; views are created only while recording.
"""

import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from math import prod
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from .thread_team import join_calls, observing_calls, run_calls

#: Bytes of the smallest piece of memory that an arena allocates.
SMALLEST_PIECE = 4096


class NotRecorded(Exception):  # noqa: N818
    """A step cannot be repeated, for example because its shapes depend on data. The message names the cause."""


class Arena:
    """Memory that all recorded steps share, because they run one at a time. It is freed with the arena.

    Pieces have power-of-two sizes, so that steps of different sizes can reuse each other's.
    """

    def __init__(self) -> None:
        self._pieces: dict[int, torch.Tensor] = {}  #: by address
        self._free: defaultdict[int, list[torch.Tensor]] = defaultdict(list)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor whose memory is reused once its last view is garbage-collected."""
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
        return torch.from_numpy(part).view(dtype).view(tuple(shape))

    @property
    def pieces(self) -> int:
        return len(self._pieces)

    def holds(self, tensor: torch.Tensor) -> bool:
        return address_of_storage(tensor) in self._pieces

    def unowned(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same tensor, but one that does not prevent reuse of its memory."""
        piece = self._pieces[tensor.untyped_storage().data_ptr()]
        return piece.view(tensor.dtype).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def address_of_storage(tensor: torch.Tensor) -> int | None:
    """The address of the tensor's memory; None for weights packed by oneDNN, which have none."""
    return None if tensor.is_mkldnn else tensor.untyped_storage().data_ptr()


@dataclass(slots=True, frozen=True)
class CallRecording:
    parts: list[bytes | Callable[[], object]]  #: joined kernel calls (bytes), and torch operations
    threads: int
    arena: Arena
    kept: list[torch.Tensor]  #: keeps alive the tensors outside the arena that kernels use
    result: torch.Tensor

    def run(self) -> torch.Tensor:
        """Repeat the step on the current contents of its tensors. The arena's next step overwrites the result."""
        for part in self.parts:
            if isinstance(part, bytes):
                run_calls(part, self.threads)
            else:
                part()
        return self.result


def record(arena: Arena, step: Callable[[], torch.Tensor]) -> CallRecording:
    """Run a step and record its operations. Tensors that the step does not create must keep their addresses.

    Raises NotRecorded, possibly after a part of the step has run.
    """
    recorder = _Recorder(arena)
    with observing_calls(recorder.add), recorder:
        result = step()
    if not arena.holds(result):
        raise NotRecorded("the result was not computed")
    return CallRecording(recorder.parts(), recorder.threads, arena, recorder.kept, arena.unowned(result))


aten = torch.ops.aten
#: Operations that read values on the host, or whose result's shape depends on values. torch tags most of them, but not
#: these, which it composes of others.
_READ_BACK = (aten.resolve_conj.default, aten.resolve_neg.default, aten.lift_fresh.default)  # tolist, numpy, tensor
_COMPOSED = (
    "where.default",
    "nonzero_numpy",
    "argwhere",
    "bincount",
    "masked_select",
    "repeat_interleave.Tensor",
    "repeat_interleave.self_Tensor",
)
_EMPTY = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided")


def refuse_unrepeatable(func: Any, args: Any) -> None:
    """Raise NotRecorded for an operation whose result's shape depends on values, or that reads values on the host."""
    tensors = [each for each in pytree.tree_leaves(args) if isinstance(each, torch.Tensor)]
    unfixed = torch.Tag.dynamic_output_shape in func.tags
    if func is aten.index.Tensor:  # data-dependent only with a mask
        unfixed = any(each.dtype in (torch.bool, torch.uint8) for each in tensors[1:])
    composed = any(str(func).startswith(f"aten.{name}") for name in _COMPOSED)
    if unfixed or composed or func in _READ_BACK or torch.Tag.data_dependent_output in func.tags:
        raise NotRecorded(str(func))


@cache
def writing_variant(func: Any) -> Any:
    """The overload of an operation that writes its only result to a given tensor, or None."""

    def signature(each: Any) -> list[tuple[str, str]]:
        return [(arg.name, str(arg.type)) for arg in each._schema.arguments if not arg.kwarg_only]

    packet = func.overloadpacket
    for overload in (getattr(packet, name) for name in packet.overloads()):
        outs = [each.name for each in overload._schema.arguments if each.is_out]
        if outs == ["out"] and len(func._schema.returns) == 1 and signature(overload) == signature(func):
            return overload
    return None


class _Recorder(TorchDispatchMode):
    """Allocates a step's tensors in the arena, and refuses operations that cannot be repeated."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Without this, torch imports its compiler at the first call. That takes 1.5 s of CPU and compiles nothing."""
        return False

    def __init__(self, arena: Arena) -> None:
        super().__init__()
        self._arena = arena
        self._parts: list[list[bytes] | Callable[[], object]] = []
        self.kept: list[torch.Tensor] = []
        self.threads = 1

    def parts(self) -> list[bytes | Callable[[], object]]:
        return [join_calls(part) if isinstance(part, list) else part for part in self._parts]

    def add(self, call: bytes, tensors: Sequence[torch.Tensor], threads: int) -> None:
        if not self._parts or not isinstance(self._parts[-1], list):
            self._parts.append([])
        calls = self._parts[-1]
        assert isinstance(calls, list), type(calls)
        calls.append(call)
        self.kept += [tensor for tensor in tensors if not self._arena.holds(tensor)]
        self.threads = max(self.threads, threads)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        refuse_unrepeatable(func, args)
        result = func(*args, **kwargs)
        tensors = list(result) if isinstance(result, tuple | list) else [result]
        if not tensors or not all(isinstance(each, torch.Tensor) for each in tensors):
            raise NotRecorded(f"{func}, which returns no tensor")
        if torch.Tag.inplace_view in func.tags:
            return result
        if func._schema.is_mutable:
            self._parts.append(partial(func, *self._unowned(args), **self._unowned(kwargs)))
            return result
        inputs = {address_of_storage(each) for each in pytree.tree_leaves(args) if isinstance(each, torch.Tensor)}
        if func.is_view and all(address_of_storage(each) in inputs for each in tensors):
            return result
        targets = [self._arena.empty(each.shape, each.dtype) for each in tensors]
        if func.overloadpacket.__name__ not in _EMPTY:
            for target, each in zip(targets, tensors, strict=True):
                target.copy_(each)
            self._parts.append(self._again(func, args, kwargs, [self._arena.unowned(each) for each in targets]))
        return type(result)(targets) if isinstance(result, tuple | list) else targets[0]

    def _unowned(self, arguments: Any) -> Any:
        """Arguments of an operation, in a form that does not prevent reuse of their memory."""
        return pytree.tree_map_only(
            torch.Tensor, lambda each: self._arena.unowned(each) if self._arena.holds(each) else each, arguments
        )

    def _again(self, func: Any, args: Any, kwargs: Any, targets: list[torch.Tensor]) -> Callable[[], object]:
        """A call that repeats the operation and puts its results in `targets`, directly if possible, else by a copy."""
        args, kwargs = self._unowned(args), self._unowned(kwargs)
        into = writing_variant(func)
        if into is not None:
            names = {each.name for each in into._schema.arguments}
            return partial(
                into, *args, **{name: each for name, each in kwargs.items() if name in names}, out=targets[0]
            )

        def copied() -> None:
            found = func(*args, **kwargs)
            for target, each in zip(targets, [found] if isinstance(found, torch.Tensor) else found, strict=True):
                target.copy_(each)

        return copied
