"""One rank's model and KV pool: runs a plan, returns logits. Independent of requests, sockets and sampling."""

import gc
import logging
from collections.abc import Sequence
from dataclasses import astuple
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ...kvcache.sizing import MemoryReading
from ..attention.choice import choose_attention, fp8_kv_problem
from ..attention.paged import Batch, KvPool, PagedAttention
from ..config import ReplicaSettings, for_device
from ..engine.step_plan import BlockCopy, Load, PlanRow, RaggedBatch, Save, StepPlan, lay_out, plan_of_rows
from ..errors import StartupError
from ..kernels.choice import choose_kernels, compiled_problem
from ..models.base import Model
from ..models.loading import TORCH_DTYPES, load_model
from ..models.spec import ModelSpec
from ..parallel.rank_group import RankGroup
from ..progress import report
from .host_store import FAILURES, HostStore

if TYPE_CHECKING:
    from .captured_steps import CapturedSteps, Forward

log = logging.getLogger(__name__)


#: Older GPUs cannot multiply bfloat16.
MIN_CAPABILITY = (8, 0)
#: docs/gpu.md lists which driver each build needs.
CUDA_REMEDY = "see homing doctor and docs/gpu.md, or set device: cpu to serve without GPUs"


def _cuda_problem() -> str:
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:
        return f"torch {torch.__version__} is built for CUDA {torch.version.cuda}: {' '.join(str(error).split())}"
    return "it finds no CUDA device"


def capability_problem(capability: tuple[int, int]) -> str | None:
    """Why a GPU of this compute capability cannot serve, or None."""
    if capability >= MIN_CAPABILITY:
        return None
    return "compute capability {}.{}, but homing needs {}.{}".format(*capability, *MIN_CAPABILITY)


def resolve_device(settings: ReplicaSettings) -> torch.device:
    """The configured device; auto is CUDA if available. Raises StartupError."""
    available = torch.cuda.is_available()
    if settings.device == "cuda" and not available:
        raise StartupError(f"this rank has a GPU, but torch cannot use it: {_cuda_problem()}; {CUDA_REMEDY}")
    device = torch.device("cuda" if available and settings.device != "cpu" else "cpu")
    problem = capability_problem(torch.cuda.get_device_capability(device)) if device.type == "cuda" else None
    if problem is not None:
        raise StartupError(f"this rank's GPU has {problem}; {CUDA_REMEDY}")
    return device


class CudaMemory:
    """Memory use of one CUDA device according to torch, for kvcache/sizing.py. Not run on a GPU yet."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._allocated = 0

    def begin(self) -> None:
        """Start measuring the peak above the memory that is held now."""
        gc.collect()  # a freed pool must not count as held
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)
        self._allocated = torch.cuda.memory_allocated(self._device)

    def read(self) -> MemoryReading:
        """The memory held now, and the peak above the memory held at `begin`."""
        torch.cuda.synchronize(self._device)
        peak = torch.cuda.max_memory_allocated(self._device) - self._allocated
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self._device)
        # Reserved rather than allocated: graphs keep their steps' memory, though no tensor lives in it between replays.
        return MemoryReading(total, free, torch.cuda.memory_reserved(self._device), peak)


def captured_steps_for(device: torch.device, group: RankGroup | None, forward: "Forward") -> "CapturedSteps | None":
    """None unless a single rank runs on a CPU with compiled kernels: a capture cannot contain communication."""
    if device.type != "cpu":
        return None
    problem = compiled_problem() if group is None else f"{group.size} ranks sum between kernels"
    if problem is not None:
        log.info("captured_steps_unusable reason=%r", problem)
        return None
    from .captured_steps import CapturedSteps  # needs numba

    return CapturedSteps(forward)


def _with_kv(spec: ModelSpec, kind: str, device: torch.device) -> ModelSpec:
    """The spec with the KV dtype that `kv_cache_dtype` sets. Raises StartupError if it cannot be used."""
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    problem = fp8_kv_problem(capability, spec.dtype) if kind == "fp8" else None
    if problem is not None:
        raise StartupError(f"kv_cache_dtype: fp8 cannot be used: {problem}; use auto")
    return spec.with_kv(kind)


def largest_step(tokens: int, longest: int, block_size: int) -> StepPlan:
    """A decode, prompts that fill a step of this many tokens, and a KV copy: a step that launches every kernel.

    All tokens share block 1. Some kernels have variants for many tokens, which a short step would not compile.
    """
    longest = max(1, min(longest - 1, tokens))
    lengths = [1] + [longest] * (tokens // longest)
    rows = [PlanRow([0] * length, 0, [1] * -(-length // block_size)) for length in lengths]
    return plan_of_rows(0, rows, copies=[BlockCopy(1, 1, 1)] if block_size > 1 else [])


class ModelRunner:
    """Weights and KV tensors of one rank. Not thread-safe: one engine thread calls it."""

    def __init__(
        self,
        settings: ReplicaSettings,
        model_dir: Path,
        block_size: int,
        group: RankGroup | None = None,
        *,
        model: Model | None = None,
        memory: CudaMemory | None = None,
    ) -> None:
        """Load the weights from a Hugging Face folder, unless `model` is given. Raises StartupError."""
        self.block_size = block_size
        self.device = resolve_device(settings)
        #: None before `allocate_kv`.
        self.pool: KvPool | None = None
        #: None without a host tier.
        self.host: HostStore | None = None
        self.captured_steps: CapturedSteps | None = None
        self._attention_backend = settings.attention_backend
        self._step_tokens = for_device(settings, cuda=self.device.type == "cuda").max_batched_tokens
        self._attention: PagedAttention | None = None
        self._group = group if group is not None and group.size > 1 else None
        self._memory = memory or (CudaMemory(self.device) if self.device.type == "cuda" else None)
        self._model: Model = model or load_model(settings, model_dir, self._group, device=self.device)
        self._longest = settings.max_model_len or self._model.spec.max_positions
        self.spec = _with_kv(self._model.spec, settings.kv_cache_dtype, self.device)
        self._kernels = choose_kernels(self.device, TORCH_DTYPES[self.spec.dtype])
        self._kernels.warm_up(self.spec, block_size, self.device)

    @torch.inference_mode()
    def allocate_kv(self, num_blocks: int) -> None:
        """Allocate zeroed KV for `num_blocks` blocks; block 0 is the null block. Call before `forward`.

        Frees the pool of an earlier call first.
        """
        self.close()
        self._allocate(num_blocks)
        if self._memory is not None:
            self._memory.begin()

    def allocate_host(self, slots: int) -> None:
        """Allocate host memory for so many blocks; 0 frees it. Call after `allocate_kv`. Raises StartupError."""
        assert self.pool is not None, "allocate_host before allocate_kv"
        self.host = HostStore(slots, self.pool) if slots else None

    def move(self, saves: Sequence[Save], loads: Sequence[Load]) -> list[str | None]:
        """Move blocks between the pool and host memory, before later steps. For each load, why it failed, or None.

        All ranks must be called with the same blocks; a load that failed on one of them has failed.
        """
        assert self.host is not None, "move before allocate_host"
        codes = self.host.move(saves, loads)
        if self._group is not None and loads:
            # One row for each kind, as the codes of several ranks cannot be told from their sum.
            kinds = range(1, 1 + len(FAILURES))
            failed = torch.tensor([[code == kind for code in codes] for kind in kinds], dtype=torch.int32)
            sums = self._group.all_reduce(failed.to(self.device)).tolist()
            codes = [
                next((kind for kind, row in zip(kinds, sums, strict=True) if row[at]), 0) for at in range(len(codes))
            ]
        return [FAILURES[code - 1] if code else None for code in codes]

    def readings(self) -> list[MemoryReading]:
        """Memory readings of all ranks since `allocate_kv`, in rank order; empty above rank 0. Call on all ranks."""
        assert self._memory is not None, f"nothing is measured on {self.device}"
        own = self._memory.read()
        if self._group is None:
            return [own]
        parts = self._group.gather(torch.tensor(astuple(own), device=self.device))
        return [MemoryReading(*part.tolist()) for part in parts or ()]

    def close(self) -> None:
        """Free the KV pool and captured steps. Call before the rank group is freed, which may hang otherwise."""
        self.pool, self.host, self._attention, self.captured_steps = None, None, None, None

    @torch.inference_mode()
    def forward(self, plan: StepPlan) -> torch.Tensor | None:
        """Run one step: [len(plan.logits_at), vocab] float32 on rank 0, None on other ranks.

        The caller may change the tensor. All ranks must be called with the same plan.
        """
        assert self.pool is not None, "forward before allocate_kv"
        ragged = self._lay_out(plan)
        captured = self.captured_steps.run(ragged) if self.captured_steps else None
        if captured is not None:
            return captured.to(torch.float32, copy=True)  # the next step overwrites it
        batch = Batch.on_device(ragged, self.device)
        if plan.copies:
            self.pool.copy(batch.copied_slots, self._kernels)
        logits = self.batch_logits(batch)
        return None if logits is None else logits.float()

    @torch.inference_mode()
    def forward_hidden(self, plan: StepPlan, hidden_at: Sequence[int]) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Like `forward`, plus the last hidden states [len(hidden_at), hidden_size] at these flat token indexes.

        The other ranks may call `forward`.
        """
        assert self.pool is not None, "forward before allocate_kv"
        assert self._attention is not None, "forward before allocate_kv"
        batch = Batch.on_device(self._lay_out(plan), self.device)
        if plan.copies:
            self.pool.copy(batch.copied_slots, self._kernels)
        self._attention.begin(batch)
        at = torch.tensor(hidden_at, dtype=torch.int64, device=self.device)
        logits, hidden = self._model.forward_hidden(
            batch.token_ids, batch.positions, self._attention, batch.logits_at, at
        )
        return None if logits is None else logits.float(), hidden

    def batch_logits(self, batch: Batch) -> torch.Tensor | None:
        """Run the model on a batch. Returns logits in the model's dtype on rank 0, None on other ranks."""
        assert self._attention is not None, "forward before allocate_kv"
        self._attention.begin(batch)
        return self._model.forward(batch.token_ids, batch.positions, self._attention, batch.logits_at)

    def _allocate(self, num_blocks: int) -> None:
        dtype = getattr(torch, self.spec.kv_dtype or self.spec.dtype)
        self.pool = KvPool(self.spec, num_blocks, self.block_size, dtype, self.device)
        backend, heads = self._attention_backend, self.spec.query_heads
        self._attention = choose_attention(self.pool, self.device, backend, rules=self._model.rules, query_heads=heads)
        self._compile(self._attention.kernel_lengths)
        if self._kernels.compiles:
            report("compiling kernels")
            self.forward(largest_step(self._step_tokens, self._longest, self.block_size))
        self.captured_steps = captured_steps_for(self.device, self._group, self.batch_logits)

    def _compile(self, lengths: Sequence[int]) -> None:
        """Run a prompt of each length, all in one block, so that kernels are compiled before the replica is ready."""
        for done, length in enumerate(lengths):
            if length <= self.spec.max_positions:
                report("compiling attention", done, len(lengths))
                self.forward(plan_of_rows(0, [PlanRow([0] * length, 0, [1] * -(-length // self.block_size))]))

    def _lay_out(self, plan: StepPlan) -> RaggedBatch:
        """Lay out a plan. Asserts that ids are in the vocabulary, since kernels read the embedding unchecked."""
        ragged = lay_out(plan, self.block_size)
        highest, vocabulary = ragged.token_ids.max(initial=0), self.spec.vocab_size
        assert highest < vocabulary, f"token id {highest}, a vocabulary of {vocabulary}"
        return ragged
