"""A device that is late: what it was asked to do happens only when the host waits for it.

    TRITON_INTERPRET=1 python -m tests.gpu.late_device CASE [--fault FAULT]

Tensors of the device "cuda" hold memory of the CPU. Operators, Triton launches (interpreted) and copies are queued, and
run when the host waits for an event or reads a value; until then, results are NaN or -1. So a host buffer that is
filled again too early, a result that is read before its event, and an operator over tensors of both devices all show as
wrong tokens or errors. Requests of all kinds must get the tokens that the plain engine gives.
"""

import argparse
import ctypes
import sys
import tempfile
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy.typing as npt
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map
from triton.runtime.interpreter import InterpretedFunction

from homing.replica.attention import paged
from homing.replica.execute import gpu_runner, request_table, runner
from homing.replica.execute.cuda_graphs import EagerSteps
from homing.replica.execute.gpu_runner import DrawnTokens, GpuRunner
from homing.replica.kernels.base import NO_TOKEN
from homing.replica.kernels.triton.triton_kernels import TritonKernels

from ..replica.schedules import Setup
from . import recorded_graphs
from .recorded_graphs import BLOCK, BLOCKS, BUDGET, CASES, Guided, answers, differences, made, plain_answers
from .stand_in import as_on_a_gpu

_launch: Callable[..., Any] = InterpretedFunction.run  # type: ignore[attr-defined]


class Late(torch.Tensor):
    """A tensor on the late device; `held` is its memory."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> "Late":
        made: Late = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device="cuda:0",
        )
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return DEVICE.call(func, args, kwargs or {})


def _held(value: Any) -> Any:
    return value.held if isinstance(value, Late) else value


def _late(value: Any) -> Any:
    return Late(value) if isinstance(value, torch.Tensor) else value


def _spoil(tensor: torch.Tensor) -> torch.Tensor:
    """NaN to floating-point tensors, -1 to integers."""
    memory = tensor.untyped_storage()
    torch.empty(0, dtype=torch.uint8).set_(memory).fill_(255)  # type: ignore[call-overload]
    return tensor


#: Memory that the device may read and write by itself, by address. Kept, so that no address occurs twice.
_pinned: dict[int, torch.UntypedStorage] = {}


def pin(tensor: torch.Tensor) -> torch.Tensor:
    memory = tensor.untyped_storage()
    _pinned[memory._cdata] = memory
    return tensor


def is_pinned(tensor: torch.Tensor) -> bool:
    return tensor.untyped_storage()._cdata in _pinned


class LateDevice(TorchDispatchMode):
    """The queue of one stream. As a mode, it also sees the operators that make the device's tensors."""

    def __init__(self) -> None:
        super().__init__()
        self._queue: deque[Callable[[], Any]] = deque()
        self._done = 0
        self.waits: list[str] = []  #: what waited for everything that was asked
        self.most = 0  #: the most that was queued at once

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.call(func, args, kwargs or {})

    def ask(self, work: Callable[[], Any]) -> None:
        self._queue.append(work)
        self.most = max(self.most, len(self._queue))

    def mark(self) -> int:
        return self._done + len(self._queue)

    def wait(self, mark: int | None = None, why: str = "") -> None:
        """Do what was asked before this mark, or everything."""
        if why:
            self.waits.append(why)
        with _disable_current_modes(), torch.inference_mode():
            while self._queue and (mark is None or self._done < mark):
                self._queue.popleft()()
                self._done += 1

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        name = func.overloadpacket.__name__
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
            with self:
                return func.decompose(*args, **kwargs)
        with _disable_current_modes():
            return self._call(func, name, args, kwargs)

    def _call(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        late = any(isinstance(each, Late) for each in tensors)
        device = kwargs.get("device")
        to = torch.device(device).type if device is not None else "cuda" if late else "cpu"
        held, held_kwargs = tree_map(_held, (args, kwargs))
        if not late and to != "cuda":
            return func(*args, **kwargs)
        if name in ("copy_", "_to_copy"):
            return self._copy(func, name, args, kwargs, to)
        if "device" in kwargs:  # a new tensor, on either device
            pinned = kwargs.get("pin_memory", False)
            new = func(*held, **held_kwargs | {"device": "cpu"} | ({"pin_memory": False} if pinned else {}))
            new = _spoil(new) if "empty" in name else new
            if pinned:
                pin(new)
            return Late(new) if to == "cuda" else new
        if any(not isinstance(each, Late) and each.dim() for each in tensors):
            raise RuntimeError(f"{func}: tensors of both devices")
        if func.is_view or name in ("detach", "alias"):
            return tree_map(_late, func(*held, **held_kwargs))
        if func._schema.is_mutable:
            self.ask(lambda: func(*held, **held_kwargs))
            written = [each for each, about in zip(args, func._schema.arguments, strict=False) if about.is_write]
            return kwargs["out"] if "out" in kwargs else written[0]
        depends = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(func.tags)
        masks = name == "index" and any(
            each is not None and each.dtype in (torch.bool, torch.uint8) for each in args[1]
        )
        if masks or (depends and name != "index"):
            self.wait(why=str(func))
            return tree_map(_late, func(*held, **held_kwargs))
        like = func(*tree_map(_on_meta, held), **tree_map(_on_meta, held_kwargs))
        found = tree_map(_as_spoiled, like)
        self.ask(lambda: tree_map(_fill, found, func(*held, **held_kwargs)))
        return tree_map(_late, found)

    def _copy(self, func: Any, name: str, args: Any, kwargs: Any, to: str) -> Any:
        source = args[1] if name == "copy_" else args[0]
        waits = not (kwargs.get("non_blocking") or (len(args) > 2 and args[2]))
        here = isinstance(source, Late)
        if name == "copy_":
            target = args[0]
        else:
            dtype = kwargs.get("dtype") or source.dtype
            empty = torch.empty_like(_held(source), dtype=dtype, device="cpu")
            target = Late(_spoil(empty)) if to == "cuda" else _spoil(empty)
        into, value = _held(target), _held(source)
        if not here and not is_pinned(source):
            value = value.clone()  # the driver stages what is not pinned
        self.ask(lambda: into.copy_(value))
        if here and not isinstance(target, Late) and (waits or not is_pinned(target)):
            self.wait(why=f"{func} to the host")
        return target


def _on_meta(value: Any) -> Any:
    return value.to("meta") if isinstance(value, torch.Tensor) else value


def _as_spoiled(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return _spoil(torch.empty_strided(value.size(), value.stride(), dtype=value.dtype))


def _fill(into: Any, value: Any) -> Any:
    return into.copy_(value) if isinstance(into, torch.Tensor) else into


DEVICE = LateDevice()


class Event:
    """Of torch.cuda."""

    def record(self) -> None:
        self._mark = DEVICE.mark()

    def synchronize(self) -> None:
        DEVICE.wait(self._mark)


class NoMemory:
    """Readings are not what this is about."""

    def begin(self) -> None:
        pass


class Steps(EagerSteps):
    """Steps at padded sizes, as graphs have them."""

    pads_mixed: ClassVar[bool] = True


def _launch_late(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
    tensors = [each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor)]
    assert all(isinstance(each, Late) for each in tensors), f"{kernel.fn.__name__} was given memory of the host"
    held, held_kwargs = tree_map(_held, (args, kwargs))
    DEVICE.ask(lambda: _launch(kernel, *held, grid=grid, warmup=warmup, **held_kwargs))


def _guard_as_meta() -> None:
    """A build of torch for CPUs has no guard of CUDA devices, which slices need; meta's does nothing."""
    cuda, meta = 1, 14  # c10::DeviceType
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    guards = (ctypes.c_void_p * 20).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    assert guards[meta]
    guards[cuda] = guards[cuda] or guards[meta]


def set_up() -> None:
    """Make "cuda" the late device, for the rest of the process."""
    as_on_a_gpu(recorded_graphs.MIXED_SIZES)
    TritonKernels.warm_up = lambda *_: None  # type: ignore[method-assign]  # the interpreter has nothing to compile
    InterpretedFunction.run = _launch_late  # type: ignore[attr-defined]
    cuda: Any = torch.cuda
    cuda._lazy_init = lambda: None
    cuda.get_device_capability = lambda *_: (9, 0)
    cuda.get_device_properties = lambda *_: SimpleNamespace(
        multi_processor_count=4, shared_memory_per_multiprocessor=228 * 1024
    )
    cuda.Event = Event
    runner.resolve_device = lambda _: torch.device("cuda:0")
    _guard_as_meta()
    make = torch.tensor
    torch.tensor = lambda data, *, device=None, **kwargs: make(data, **kwargs).to(device)  # type: ignore[assignment]
    torch.Tensor.pin_memory = lambda tensor: pin(tensor.clone())  # type: ignore[assignment,method-assign]


_buffers: dict[tuple[Any, ...], torch.Tensor] = {}


def _reused_buffer(values: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """Like to_device, through one pinned buffer for all arrays of a shape."""
    buffer = _buffers.setdefault((values.shape, values.dtype), pin(torch.from_numpy(values.copy())))
    buffer.copy_(torch.from_numpy(values))
    return buffer.to(device, non_blocking=True)


def _not_copied(values: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    return torch.from_numpy(values)


def _before_its_event(drawn: DrawnTokens) -> list[int | None]:
    return [None if token == NO_TOKEN else token for token in drawn._tokens.tolist()]


def _use(to_device: Any) -> None:
    for module in (paged, request_table, gpu_runner):
        module.to_device = to_device


#: Mistakes that must be noticed, and what makes them.
FAULTS: dict[str, Callable[[], None]] = {
    "a host buffer filled again": lambda: _use(_reused_buffer),
    "an array of the host": lambda: _use(_not_copied),
    "tokens read before their event": lambda: setattr(DrawnTokens, "tokens", _before_its_event),
}


def late_answers(case: recorded_graphs.Case, folder: Path) -> list[tuple[list[int], str | None]]:
    settings = recorded_graphs.settings_of(case, overlap_steps="on")
    with DEVICE:
        late = GpuRunner(settings, folder, BLOCK, graphs=Steps(), memory=NoMemory())  # type: ignore[arg-type]
        late.allocate_kv(BLOCKS)
        DEVICE.wait()
        DEVICE.waits.clear()
        return answers(Guided(late, Setup(BUDGET, BLOCKS - 1)))


def main() -> int:
    parser = argparse.ArgumentParser()
    plain = [
        name for name, case in CASES.items() if case.ranks == 1 and not (case.packed or case.settings or case.drafts)
    ]
    parser.add_argument("case", choices=plain)
    parser.add_argument("--fault", choices=FAULTS, help="make this mistake, which must be noticed")
    options = parser.parse_args()
    case = CASES[options.case]
    with tempfile.TemporaryDirectory() as root:
        folder = made(case, Path(root))
        wanted = plain_answers(case, folder)
        set_up()
        if options.fault:
            FAULTS[options.fault]()
        got = late_answers(case, folder)
    found = list(differences(wanted, got))
    print(f"{len(wanted) - len(found)} of {len(wanted)} answers equal; at most {DEVICE.most} calls late")
    print("\n".join(found + [f"waited in {why}" for why in sorted(set(DEVICE.waits))]))
    return 1 if found or len(got) != len(wanted) else 0


if __name__ == "__main__":
    sys.exit(main())
