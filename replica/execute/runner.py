"""One rank's model and KV memory: a plan goes in, logits come out. Knows nothing of requests, sockets or sampling."""

import logging
from dataclasses import astuple
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ...kvcache.sizing import MemoryReading
from ..attention.base import AttentionBackend, Batch, KvPool, attend_of
from ..attention.choice import choose_attention
from ..config import ReplicaSettings
from ..engine.step_plan import RaggedBatch, StepPlan, lay_out
from ..errors import StartupError
from ..kernels.choice import compiled_problem
from ..load.cpu_threads import ThreadChoice, ThreadKeeper, read_cpu_times, usable_cores
from ..load.device_memory import DeviceMemory, memory_of
from ..models import resolve
from ..models.base import Model
from ..models.loading import DTYPES
from ..models.spec import ModelSpec
from ..parallel.rank_group import RankGroup

if TYPE_CHECKING:
    from .captured_steps import DecodePrograms, Forward

log = logging.getLogger(__name__)


def resolve_device(settings: ReplicaSettings) -> torch.device:
    """The device asked for; auto is CUDA where there is one. Raises StartupError."""
    available = torch.cuda.is_available()
    if settings.device == "cuda" and not available:
        raise StartupError("device: cuda was asked for, but torch finds no CUDA device; use device: auto or cpu")
    return torch.device("cuda" if available and settings.device != "cpu" else "cpu")


def thread_keeper(settings: ReplicaSettings, cores: int | None = None) -> ThreadKeeper:
    """torch's threads of one rank: as set, or as many as other processes leave of its share of the cores."""
    cores = cores or usable_cores()
    if settings.cpu_threads:
        fixed = ThreadChoice(cores, settings.cpu_threads, settings.cpu_threads)
        return ThreadKeeper(fixed, torch.set_num_threads, lambda: None)
    most = max(1, cores // settings.tensor_parallel_size)
    return ThreadKeeper(ThreadChoice(cores, most), torch.set_num_threads, read_cpu_times)


def programs_for(device: torch.device, group: RankGroup | None, forward: "Forward") -> "DecodePrograms | None":
    """On a CPU, where kernels are compiled; ranks speak with each other between them, which no program holds."""
    if device.type != "cpu":
        return None
    problem = compiled_problem() if group is None else f"{group.size} ranks sum between kernels"
    if problem is not None:
        log.info("decode_programs_unusable reason=%r", problem)
        return None
    from .captured_steps import DecodePrograms  # needs numba

    return DecodePrograms(forward)


class ModelRunner:
    """Weights and KV tensors of one rank. Not thread-safe: one engine thread calls it."""

    spec: ModelSpec
    block_size: int

    def __init__(
        self,
        settings: ReplicaSettings,
        model_dir: Path,
        block_size: int,
        group: RankGroup | None = None,
        *,
        model: Model | None = None,
        memory: DeviceMemory | None = None,
    ) -> None:
        """Load the weights from a Hugging Face folder, unless there is a model already. Raises StartupError."""
        self.block_size = block_size
        self._attention_backend = settings.attention_backend
        self.device = resolve_device(settings)
        self._group = group if group is not None and group.size > 1 else None
        self._memory = memory or memory_of(self.device)
        loaded = model or resolve(settings, model_dir, self._group, device=self.device)
        self._model: Model = loaded
        self._pool: KvPool | None = None
        self._attention: AttentionBackend | None = None
        self._programs: DecodePrograms | None = None
        self.spec = self._model.spec

    @torch.inference_mode()
    def allocate_kv(self, num_blocks: int) -> None:
        """Make room for the KV of `num_blocks` blocks (zeroed; block 0 is the null block); call before `forward`.

        What an earlier call made is given back first.
        """
        self._release()
        self._allocate(num_blocks)
        if self._memory is not None:
            self._memory.begin()

    def readings(self) -> list[MemoryReading]:
        """How each rank's memory looks since `allocate_kv`, in rank order; empty on other ranks. Ask all of them."""
        assert self._memory is not None, f"nothing is measured on {self.device}"
        own = self._memory.read()
        if self._group is None:
            return [own]
        parts = self._group.gather(torch.tensor(astuple(own), device=self.device))
        return [MemoryReading(*part.tolist()) for part in parts or ()]

    def close(self) -> None:
        """Give back the KV, and the graphs before the group of ranks that they call: otherwise its end may hang."""
        self._release()

    def _release(self) -> None:
        """Drop what `_allocate` made."""
        self._pool, self._attention, self._programs = None, None, None

    def _allocate(self, num_blocks: int) -> None:
        self._pool = KvPool(self.spec, num_blocks, self.block_size, DTYPES[self.spec.dtype], self.device)
        self._attention = choose_attention(self._pool, self.device, self._attention_backend)
        self._programs = programs_for(self.device, self._group, self._whole_logits)

    @torch.inference_mode()
    def forward(self, plan: StepPlan) -> torch.Tensor | None:
        """Run one step: [len(plan.logits_at), vocab] float32 on rank 0, None on other ranks.

        The tensor is the caller's to change. All ranks must be called with the same plan.
        """
        assert self._pool is not None, "forward before allocate_kv"
        ragged = self._laid_out(plan)
        recorded = self._programs.run(ragged) if self._programs else None
        if recorded is not None:
            return recorded.to(torch.float32, copy=True)  # the next step writes there
        batch = Batch.on_device(ragged, self.device)
        if plan.copies:
            self._pool.copy(*batch.copied_slots)
        logits = self._logits(batch)
        return None if logits is None else logits.float()

    def _laid_out(self, plan: StepPlan) -> RaggedBatch:
        """The plan as arrays. Asserts what kernels trust: they read the rows of an embedding unasked."""
        ragged = lay_out(plan, self.block_size)
        highest, vocabulary = ragged.token_ids.max(initial=0), self.spec.vocab_size
        assert highest < vocabulary, f"token id {highest}, a vocabulary of {vocabulary}"
        return ragged

    def _whole_logits(self, batch: Batch) -> torch.Tensor:
        logits = self._logits(batch)
        assert logits is not None, "the only rank has the logits"
        return logits

    def _logits(self, batch: Batch) -> torch.Tensor | None:
        assert self._attention is not None, "forward before allocate_kv"
        self._attention.begin(batch)
        return self._model.forward(batch.token_ids, batch.positions, attend_of(self._attention), batch.logits_at)
