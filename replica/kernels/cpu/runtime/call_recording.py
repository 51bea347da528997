"""Records the operations of a step once and repeats them without the Python code that asked for them.

What a CUDA graph is on a GPU. A step of one row is hundreds of operations of some microseconds each, and Python needs
longer than that to prepare one. Compiled kernels that follow each other are one call. Operations of torch are called
one by one, on the same tensors as when they were recorded; views of tensors are made only then.
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

#: Bytes of the smallest piece of memory that an arena gives out.
SMALLEST_PIECE = 4096


class NotRecorded(Exception):  # noqa: N818
    """A step depends on numbers in a way that cannot be repeated; the message names the operation."""


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
        return torch.from_numpy(part).view(dtype).view(tuple(shape))

    @property
    def pieces(self) -> int:
        return len(self._pieces)

    def holds(self, tensor: torch.Tensor) -> bool:
        return address_of_storage(tensor) in self._pieces

    def unowned(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same tensor, without keeping its memory from being reused."""
        piece = self._pieces[tensor.untyped_storage().data_ptr()]
        return piece.view(tensor.dtype).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def address_of_storage(tensor: torch.Tensor) -> int | None:
    """None: a weight that oneDNN packed, which has none."""
    return None if tensor.is_mkldnn else tensor.untyped_storage().data_ptr()


@dataclass(slots=True, frozen=True)
class CallRecording:
    parts: list[bytes | Callable[[], object]]  #: calls of kernels, and operations of torch
    threads: int
    arena: Arena
    kept: list[torch.Tensor]  #: the tensors outside of the arena that the kernels read and write
    result: torch.Tensor

    def run(self) -> torch.Tensor:
        """The step's result on the present contents of its tensors. The arena's next step overwrites it."""
        for part in self.parts:
            if isinstance(part, bytes):
                run_calls(part, self.threads)
            else:
                part()
        return self.result


def record(arena: Arena, step: Callable[[], torch.Tensor]) -> CallRecording:
    """Run a step and record its operations. Tensors that the step does not create itself must keep their addresses.

    Raises NotRecorded, after a part of the step has run.
    """
    recorder = _Recorder(arena)
    with observing_calls(recorder.add), recorder:
        result = step()
    if not arena.holds(result):
        raise NotRecorded("the result was not computed")
    return CallRecording(recorder.parts(), recorder.threads, arena, recorder.kept, arena.unowned(result))


aten = torch.ops.aten
#: Operations that read numbers on the host, or whose result has as many elements as the numbers say. torch marks most
#: of them; not these, which it composes of others.
_READ_BACK = (aten.resolve_conj.default, aten.resolve_neg.default, aten.lift_fresh.default)  # tolist, numpy, tensor
_COMPOSED = ("where.default", "nonzero_numpy", "argwhere", "bincount", "masked_select", "repeat_interleave")
_EMPTY = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided")


def refuse_unrepeatable(func: Any, args: Any) -> None:
    """Raise NotRecorded for an operation whose result has another shape with other numbers, or goes to the host."""
    tensors = [each for each in pytree.tree_leaves(args) if isinstance(each, torch.Tensor)]
    unfixed = torch.Tag.dynamic_output_shape in func.tags
    if func is aten.index.Tensor:  # only with a mask
        unfixed = any(each.dtype in (torch.bool, torch.uint8) for each in tensors[1:])
    composed = any(str(func).startswith(f"aten.{name}") for name in _COMPOSED)
    if unfixed or composed or func in _READ_BACK or torch.Tag.data_dependent_output in func.tags:
        raise NotRecorded(str(func))


@cache
def writing_variant(func: Any) -> Any:
    """The form of an operation that writes its one result into a given tensor, or None."""

    def signature(each: Any) -> list[tuple[str, str]]:
        return [(given.name, str(given.type)) for given in each._schema.arguments if not given.kwarg_only]

    packet = func.overloadpacket
    for overload in (getattr(packet, name) for name in packet.overloads()):
        outs = [each.name for each in overload._schema.arguments if each.is_out]
        if outs == ["out"] and len(func._schema.returns) == 1 and signature(overload) == signature(func):
            return overload
    return None


class _Recorder(TorchDispatchMode):
    """Gives a step's tensors memory of the arena, and refuses operations that cannot be repeated."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Else torch imports its compiler at the first call, which takes 1.5 s of CPU. Nothing is compiled here."""
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
        found = func(*args, **kwargs)
        tensors = list(found) if isinstance(found, tuple | list) else [found]
        if not tensors or not all(isinstance(each, torch.Tensor) for each in tensors):
            raise NotRecorded(f"{func}, which returns no tensor")
        if torch.Tag.inplace_view in func.tags:
            return found
        if func._schema.is_mutable:
            self._parts.append(partial(func, *self._unowned(args), **self._unowned(kwargs)))
            return found
        given = {address_of_storage(each) for each in pytree.tree_leaves(args) if isinstance(each, torch.Tensor)}
        if func.is_view and all(address_of_storage(each) in given for each in tensors):
            return found
        held = [self._arena.empty(each.shape, each.dtype) for each in tensors]
        if func.overloadpacket.__name__ not in _EMPTY:
            for target, each in zip(held, tensors, strict=True):
                target.copy_(each)
            self._parts.append(self._again(func, args, kwargs, [self._arena.unowned(each) for each in held]))
        return type(found)(held) if isinstance(found, tuple | list) else held[0]

    def _unowned(self, arguments: Any) -> Any:
        """Arguments of an operation, without keeping their memory from being reused."""
        return pytree.tree_map_only(
            torch.Tensor, lambda each: self._arena.unowned(each) if self._arena.holds(each) else each, arguments
        )

    def _again(self, func: Any, args: Any, kwargs: Any, targets: list[torch.Tensor]) -> Callable[[], object]:
        """The operation with results where they are now: written there by it if it can do so, else copied."""
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
