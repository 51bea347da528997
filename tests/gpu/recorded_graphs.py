"""Run the GPU engine on a CPU with graphs that record: what a CUDA graph would get wrong is a wrong token or an error.

    TRITON_INTERPRET=1 python -m tests.gpu.recorded_graphs CASE [--fault FAULT]

A capture runs a step once and records its torch operators, Triton launches (interpreted) and calls to other ranks. A
replay runs no Python of the step: it repeats what was recorded on the recorded tensors, and then destroys all memory
that the capture allocated, which another graph of the pool may use. So values that the host baked in, read-backs and
results left in the pool all show. Requests of all kinds must get the tokens that the plain engine gives.
"""

import argparse
import multiprocessing
import socket
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import InterpretedFunction

from homing.replica.attention.paged import PagedAttention
from homing.replica.config import ReplicaSettings
from homing.replica.engine.prompt_lookup import PromptLookup
from homing.replica.errors import RankLost
from homing.replica.execute.cuda_graphs import EagerSteps, NotCaptured
from homing.replica.execute.gpu_runner import DecodeStep, GpuRunner
from homing.replica.execute.runner import ModelRunner
from homing.replica.kernels.triton.triton_kernels import TritonKernels
from homing.replica.messages import Constraint, Generate
from homing.replica.parallel.rank_group import RankGroup
from homing.replica.parallel.step_broadcast import SECRET_BYTES, RankPlace
from homing.replica.parallel.worker import load_rank_0, start_worker

from ..replica.kernels.conftest import round_to_8_bits_as_gpus_do
from ..replica.models.test_fp8 import WIDE, Device, packed
from ..replica.schedules import SAMPLINGS, Ask, Schedule, Setup
from ..replica.toys import save_checkpoint
from .stand_in import as_on_a_gpu

#: The kernels need blocks of at least 16 tokens.
BLOCK, BLOCKS, ROWS = 16, 40, 4
MIXED_SIZES, BUDGET = (16,), 48
MOE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 32}
GPT_OSS = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 12, "head_dim": 32}


@dataclass(frozen=True)
class Case:
    model_type: str
    config: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    ranks: int = 1
    drafts: bool = False
    packed: str = ""  #: how the weights' 8-bit numbers are scaled; empty: weights in full precision


CASES = {
    "llama": Case("llama", {"head_dim": 32}),
    "mistral": Case("mistral", {"head_dim": 32, "sliding_window": 12}),
    "qwen2": Case("qwen2", {"head_dim": 16}),
    "qwen3": Case("qwen3", {"head_dim": 64, "tie_word_embeddings": True}),
    "mixtral": Case("mixtral", {"num_local_experts": 4, "head_dim": 32}),
    "qwen2_moe": Case("qwen2_moe", MOE | {"shared_expert_intermediate_size": 48}),
    "qwen3_moe": Case("qwen3_moe", MOE),
    "a head of 80": Case("llama", {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 80}),
    "16 query heads": Case("llama", {"num_attention_heads": 16, "num_key_value_heads": 1, "head_dim": 16}),
    "softcaps": Case("gemma2", {"sliding_window": 11, "head_dim": 32}, {"model_provider": "transformers"}),
    "sinks": Case("gpt_oss", GPT_OSS, {"model_provider": "transformers"}),
    "8-bit KV": Case("qwen3", {"head_dim": 64}, {"kv_cache_dtype": "fp8"}),
    "8-bit weights": Case("qwen2", WIDE, packed="row"),
    "8-bit blocks": Case("qwen2", WIDE, packed="block"),
    "drafts": Case("qwen3", {"head_dim": 32}, drafts=True),
    "two ranks": Case("llama", {"head_dim": 32}, ranks=2),
    "two ranks with experts": Case("qwen3_moe", MOE, ranks=2),
}

_ALLOCATING = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
_FROM_NUMBERS = ("arange", "full", "ones", "scalar_tensor", "zeros")
_launch: Callable[..., Any] = InterpretedFunction.run  # type: ignore[attr-defined]
_recording: "Recording | None" = None


def _tensors(*values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def _memory(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _destroy(storage: torch.UntypedStorage) -> None:
    """NaN to floating-point tensors, -1 to integers."""
    if storage.nbytes():
        torch.empty(0, dtype=torch.uint8).set_(storage).fill_(255)  # type: ignore[call-overload]


class Recording(TorchDispatchMode):
    """Everything that a step did, in order, and the memory that it allocated."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Callable[[], Any]] = []
        self._own: dict[int, torch.UntypedStorage] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name, given = func.overloadpacket.__name__, _tensors(args, kwargs)
        self._refuse(func, name, args, given)
        found = func(*args, **kwargs)
        known = {_memory(tensor) for tensor in given}
        fresh = [tensor for tensor in _tensors(found) if _memory(tensor) not in known]
        if name in _ALLOCATING:
            self.own(fresh)
            self.steps.append(lambda: [_destroy(tensor.untyped_storage()) for tensor in fresh])
            self.steps[-1]()
        elif fresh:
            self.repeat(lambda: func(*args, **kwargs), found)
        elif func._schema.is_mutable:
            self.steps.append(lambda: func(*args, **kwargs))
        return found  # any other operator returns a view, which stays valid

    @staticmethod
    def _refuse(func: Any, name: str, args: Any, given: list[torch.Tensor]) -> None:
        """Raise NotCaptured for what a stream cannot capture: reading back, shapes that depend on values, host data."""
        masks = name in ("index", "index_put", "index_put_") and any(
            tensor.dtype in (torch.bool, torch.uint8) for tensor in _tensors(args[1])
        )
        depends = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(func.tags)
        if masks or (depends and name != "index"):
            raise NotCaptured(f"{func} waits for the device")
        if name == "lift_fresh" or not (given or name in _ALLOCATING or name in _FROM_NUMBERS):
            raise NotCaptured(f"{func} of a value on the host")

    def own(self, tensors: Iterable[torch.Tensor]) -> None:
        self._own |= {_memory(tensor): tensor.untyped_storage() for tensor in tensors}

    def repeat(self, call: Callable[[], Any], found: Any) -> None:
        """Record a call that returned fresh tensors."""
        tensors = _tensors(found)
        self.own(tensors)

        def step() -> None:
            for old, new in zip(tensors, _tensors(call()), strict=True):
                old.copy_(new)

        self.steps.append(step)

    def replay(self) -> None:
        with torch.inference_mode():
            for step in self.steps:
                step()
            self.destroy()

    def destroy(self) -> None:
        for storage in self._own.values():
            _destroy(storage)


class RecordedGraphs(EagerSteps):
    """Graphs that replay recordings."""

    pads_mixed = True

    def __init__(self) -> None:
        super().__init__()
        self.replays: Counter[Hashable] = Counter()

    def capture(self, key: Hashable, run: Callable[[], None]) -> None:
        global _recording
        _recording = recording = Recording()
        try:
            with recording:
                run()
        finally:
            _recording = None
        recording.destroy()
        self._replays[key] = recording.replay

    def replay(self, key: Hashable) -> None:
        assert isinstance(key, tuple)
        self.replays[key[0]] += 1
        super().replay(key)


def _record_launches() -> None:
    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        if _recording is not None:
            _recording.steps.append(lambda: _launch(kernel, *args, grid=grid, warmup=warmup, **kwargs))
        with _disable_current_modes():
            return _launch(kernel, *args, grid=grid, warmup=warmup, **kwargs)

    InterpretedFunction.run = run  # type: ignore[attr-defined]


def _record_collectives() -> None:
    """As nodes of a graph, they read and write the same memory in each replay."""
    sum_of, parts_of, copy_to = RankGroup.all_reduce, RankGroup.gather, RankGroup.broadcast

    def all_reduce(group: RankGroup, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()  # then the sum is in place
        if _recording is not None:
            _recording.steps.append(lambda: sum_of(group, x))
        with _disable_current_modes():
            return sum_of(group, x)

    def gather(group: RankGroup, x: torch.Tensor) -> list[torch.Tensor] | None:
        x = x.contiguous()
        with _disable_current_modes():
            parts = parts_of(group, x)
        if _recording is not None:
            _recording.repeat(lambda: parts_of(group, x), parts)
        return parts

    def broadcast(group: RankGroup, x: torch.Tensor) -> None:
        if _recording is not None:
            _recording.steps.append(lambda: copy_to(group, x))
        with _disable_current_modes():
            copy_to(group, x)

    RankGroup.all_reduce, RankGroup.gather, RankGroup.broadcast = all_reduce, gather, broadcast  # type: ignore[method-assign]


class EveryThird:
    """A guide that excludes a third of the vocabulary, another one after each token."""

    restricts, ended, problem = True, False, ""

    def __init__(self) -> None:
        self._accepted = 0

    def accept(self, token_ids: list[int]) -> None:
        self._accepted += len(token_ids)

    def fill(self, words: npt.NDArray[np.int32], address: int) -> None:
        bits = (np.arange(len(words) * 32) + self._accepted) % 3 != 0
        words[:] = np.packbits(bits, bitorder="little").view(np.int32)


class Guided(Schedule):
    """A schedule whose requests of priority 1 are guided."""

    def _request(self, number: int, ask: Ask, *rest: Any) -> Generate:
        made = super()._request(number, ask, *rest)
        return msgspec.structs.replace(made, constraint=Constraint(kind="json_object")) if ask.priority else made

    def guide(self, ask: Ask) -> Any:
        return EveryThird() if ask.priority else None


def asks() -> list[Ask]:
    """Every way to sample, prompts of one to 40 tokens that share prefixes, and joins between steps."""
    random = Random(3)
    shared = [random.randrange(3, 200) for _ in range(30)]

    def own() -> list[int]:
        return [random.randrange(3, 200) for _ in range(random.randrange(1, 12))]

    return [
        Ask(
            prompt=(
                *shared[: random.randrange(30)],
                *(random.randrange(3, 200) for _ in range(random.randrange(1, 12))),
            ),
            sampling=sampling,
            max_tokens=random.randrange(2, 6),
            steps_before=random.randrange(3),
            choices=2 if number == 1 else 1,
            logprobs=2 if number % 5 == 0 else None,
            priority=int(number % 4 == 2),
        )
        for number, sampling in enumerate(SAMPLINGS)
    ]


def answers(schedule: Schedule) -> list[tuple[list[int], str | None]]:
    return [(got.tokens, got.finish_reason) for got in schedule.run(asks()).values()]


def settings_of(case: Case, **more: Any) -> ReplicaSettings:
    given = {"dtype": "float32", "device": "cpu", "max_running_requests": ROWS, "max_model_len": 200}
    given |= {"max_batched_tokens": BUDGET}  # before it serves, a runner tries the largest step
    return msgspec.convert(given | case.settings | more, ReplicaSettings)


def load(settings: ReplicaSettings, folder: Path, block_size: int, group: RankGroup | None = None) -> GpuRunner:
    return GpuRunner(settings, folder, block_size, group, graphs=RecordedGraphs())


def place_of(rank: int, port: int) -> RankPlace:
    return RankPlace(rank=rank, size=2, host="127.0.0.1", port=port, secret=bytes(SECRET_BYTES))


def set_up(case: Case) -> None:
    as_on_a_gpu(MIXED_SIZES, Device() if case.packed else None)
    TritonKernels.warm_up = lambda *_: None  # type: ignore[method-assign]  # the interpreter has nothing to compile
    round_to_8_bits_as_gpus_do()
    _record_launches()
    _record_collectives()


def work(case: Case, folder: Path, port: int) -> None:
    """Rank 1, in its own process."""
    set_up(case)
    settings = settings_of(case, overlap_steps="on", tensor_parallel_size=2)
    worker = start_worker(settings, block_size=BLOCK, model_dir=folder, place=place_of(1, port), load_runner=load)
    try:
        worker.run()
    except RankLost as error:
        print(error, file=sys.stderr)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def made(case: Case, root: Path) -> Path:
    folder = save_checkpoint(root / "model", case.model_type, **case.config)
    return packed(folder, root / "packed", case.packed) if case.packed else folder


def plain_answers(case: Case, folder: Path) -> list[tuple[list[int], str | None]]:
    """The plain engine's, or for weights of 8 bits, which only GPUs multiply, those of steps without graphs."""
    if case.packed:
        runner: ModelRunner = GpuRunner(settings_of(case, overlap_steps="on"), folder, BLOCK, graphs=EagerSteps())
    else:
        runner = ModelRunner(settings_of(case), folder, BLOCK)
    runner.allocate_kv(BLOCKS)
    return answers(Guided(runner, Setup(BUDGET, BLOCKS - 1)))


def recorded_answers(case: Case, folder: Path) -> tuple[list[tuple[list[int], str | None]], Counter[Hashable]]:
    settings = settings_of(case, overlap_steps="on", tensor_parallel_size=case.ranks)
    place, worker = None, None
    if case.ranks > 1:
        place = place_of(0, free_port())
        worker = multiprocessing.get_context("spawn").Process(target=work, args=(case, folder, place.port))
        worker.start()
    runner, executor, _ = load_rank_0(settings, folder, BLOCK, place, load)
    executor.allocate_kv(BLOCKS)
    graphs = runner._graphs
    assert isinstance(graphs, RecordedGraphs), "the graphs were refused: see the log"
    drafter = PromptLookup(4) if case.drafts else None
    got = answers(Guided(runner, Setup(BUDGET, BLOCKS - 1), drafter, executor=executor))
    executor.close()
    if worker is not None:
        worker.join()
        assert worker.exitcode == 0, f"rank 1 ended with {worker.exitcode}"
    return got, graphs.replays


def _baked(attention: PagedAttention, slots: torch.Tensor, tables: torch.Tensor, seq_lens: torch.Tensor) -> None:
    with _disable_current_modes():
        seq_lens = seq_lens.clone()
    begin_decode(attention, slots, tables, seq_lens)


def _read_back(attention: PagedAttention, slots: torch.Tensor, tables: torch.Tensor, seq_lens: torch.Tensor) -> None:
    assert int(seq_lens.max()) >= 0
    begin_decode(attention, slots, tables, seq_lens)


def _left_in_pool(step: DecodeStep, size: int) -> None:
    compute(step, size)
    assert step.logits is not None
    step.logits = step.logits.clone()


begin_decode, compute = PagedAttention.begin_decode, DecodeStep.compute
#: Mistakes that a capture must not hide, and what makes them.
FAULTS: dict[str, tuple[type, str, Any]] = {
    "a length from the host": (PagedAttention, "begin_decode", _baked),
    "a read-back": (PagedAttention, "begin_decode", _read_back),
    "logits left in the pool": (DecodeStep, "compute", _left_in_pool),
}


def differences(wanted: list[Any], got: list[Any]) -> Iterator[str]:
    for ask, one, other in zip(asks(), wanted, got, strict=False):
        if one != other:
            yield f"{ask.sampling}: {other} instead of {one}"


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("case", choices=CASES)
    parser.add_argument("--fault", choices=FAULTS, help="make this mistake, which must be noticed")
    options = parser.parse_args()
    case = CASES[options.case]
    with tempfile.TemporaryDirectory() as root:
        folder = made(case, Path(root))
        if not case.packed:
            wanted = plain_answers(case, folder)
        set_up(case)
        if case.packed:
            wanted = plain_answers(case, folder)
        if options.fault:
            setattr(*FAULTS[options.fault])
        got, replays = recorded_answers(case, folder)
    found = list(differences(wanted, got))
    print(f"{len(wanted) - len(found)} of {len(wanted)} answers equal;", *(f"{n} {key}" for key, n in replays.items()))
    print("\n".join(found))
    return 1 if found or len(got) != len(wanted) else 0


if __name__ == "__main__":
    sys.exit(main())
