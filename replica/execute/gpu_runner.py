"""A runner that launches steps without waiting for them: tokens are drawn on the device and fed to the next step there.

Steps of decodes alone are replayed from graphs at padded sizes; others run eagerly on the same state. Knows nothing of
requests: a plan says which slot a row is.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from ..attention.base import Batch
from ..attention.paged import PagedAttention
from ..config import ReplicaSettings
from ..engine.step_plan import StepPlan
from ..kernels.base import NO_TOKEN
from ..kernels.choice import choose_kernels
from ..load.device_memory import DeviceMemory
from ..models.base import Model
from ..parallel.rank_group import RankGroup
from .cuda_graphs import EagerGraphs, Graphs, NotCaptured, graph_sizes, graphs_for, padded_size
from .decode_step import DecodeStep
from .request_table import RequestTable
from .runner import ModelRunner, resolve_device
from .staging import to_device
from .table_mirror import TableMirror

log = logging.getLogger(__name__)


class Drawn:
    """Tokens on their way to the host."""

    def __init__(self, tokens: torch.Tensor) -> None:
        """Start the copy; `tokens` may be overwritten by later steps."""
        self._ready: torch.cuda.Event | None = None
        if tokens.device.type != "cuda":
            self._tokens = tokens.clone()
            return
        self._tokens = torch.empty(len(tokens), dtype=tokens.dtype, pin_memory=True)
        self._tokens.copy_(tokens, non_blocking=True)
        self._ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._ready.record()

    def tokens(self) -> list[int | None]:
        """Waits for the step; raises what it raised. None: there is no token, as the logits were no numbers."""
        if self._ready is not None:
            self._ready.synchronize()
        return [None if token == NO_TOKEN else token for token in self._tokens.tolist()]


RunnerLoader = Callable[[ReplicaSettings, Path, int, RankGroup | None], ModelRunner]


def load_runner(
    settings: ReplicaSettings, model_dir: Path, block_size: int, group: RankGroup | None = None
) -> ModelRunner:
    """The runner that the settings and the device call for."""
    wanted = settings.overlap_steps
    resident = wanted == "on" or (wanted == "auto" and resolve_device(settings).type == "cuda")
    return (ResidentRunner if resident else ModelRunner)(settings, model_dir, block_size, group)


@dataclass(slots=True, frozen=True)
class _Resident:
    """What goes with one pool of KV."""

    paged: PagedAttention
    table: RequestTable
    mirror: TableMirror
    decode: DecodeStep


class ResidentRunner(ModelRunner):
    """`ModelRunner` that can also launch plans with slots."""

    def __init__(
        self,
        settings: ReplicaSettings,
        model_dir: Path,
        block_size: int,
        group: RankGroup | None = None,
        *,
        model: Model | None = None,
        graphs: Graphs | None = None,
        memory: DeviceMemory | None = None,
    ) -> None:
        super().__init__(settings, model_dir, block_size, group, model=model, memory=memory)
        self._most_rows = min(settings.max_running_requests, settings.max_batched_tokens)
        self._max_model_len = settings.max_model_len or self.spec.max_positions
        self._kernels = choose_kernels(self.device)
        self._graphs = graphs if graphs is not None else graphs_for(self.device)
        self._sizes = graph_sizes(self._most_rows)
        self._resident: _Resident | None = None

    def _release(self) -> None:
        self._graphs.clear()
        self._resident = None
        super()._release()

    def _allocate(self, num_blocks: int) -> None:
        """Also the table, and a graph for each size."""
        super()._allocate(num_blocks)
        assert self._pool is not None
        if not isinstance(self._attention, PagedAttention):
            self._attention = PagedAttention(self._pool, self._kernels)
        pages = min(num_blocks, -(-self._max_model_len // self.block_size) + 1)
        table = RequestTable(self._most_rows, pages, self.device)
        decode = DecodeStep(
            self._model,
            self._attention,
            self._kernels,
            table,
            most=self._most_rows,
            block_size=self.block_size,
            group=self._group,
        )
        self._resident = _Resident(self._attention, table, TableMirror(self.block_size), decode)
        self._capture(decode)

    def _capture(self, decode: DecodeStep) -> None:
        """A graph for each size, the largest first: the others fit into its memory. Steps that have none are called."""
        problem = self._model.uncapturable
        if problem is None:
            try:
                for size in reversed(self._sizes):
                    self._graphs.capture(size, partial(decode.run, size))
                log.info("graphs_captured sizes=%d largest=%d", len(self._sizes), self._most_rows)
                return
            except NotCaptured as error:
                problem = str(error)
        log.warning("graphs_unusable reason=%r", problem)
        self._graphs.clear()
        self._graphs = EagerGraphs()
        for size in self._sizes:
            self._graphs.capture(size, partial(decode.run, size))

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Drawn:
        """Start a step whose rows have slots. All ranks must be called with the same plan."""
        resident = self._there()
        resident.table.apply(resident.mirror.delta(plan))
        if plan.drawn == plan.slots and plan.q_lens == [1] * len(plan.slots) and not plan.copies:
            return Drawn(self._replay(plan, resident.decode))
        return Drawn(self._run(plan, resident))

    def _there(self) -> _Resident:
        assert self._resident is not None, "launch before allocate_kv"
        return self._resident

    def _replay(self, plan: StepPlan, decode: DecodeStep) -> torch.Tensor:
        count = len(plan.slots)
        size = padded_size(count, self._sizes)
        assert size is not None, f"{count} rows, {self._most_rows} at most"
        rows = np.zeros(size, dtype=np.int64)
        rows[:count] = plan.slots
        decode.rows[:size].copy_(to_device(rows, self.device))
        self._graphs.replay(size)
        return decode.tokens[:count]

    def _run(self, plan: StepPlan, resident: _Resident) -> torch.Tensor:
        """A step of any shape, not from a graph."""
        assert self._pool is not None, "launch before allocate_kv"
        ragged = self._laid_out(plan)
        batch = Batch.on_device(ragged, self.device)
        slots = to_device(np.asarray(plan.slots, dtype=np.int64), self.device)
        drawn = to_device(np.asarray(plan.drawn, dtype=np.int64), self.device)
        if plan.fed:
            ends = np.cumsum(plan.q_lens)[plan.fed] - 1
            fed = to_device(np.asarray(plan.slots, dtype=np.int64)[plan.fed], self.device)
            batch.token_ids.index_copy_(0, to_device(ends, self.device), resident.table.last_tokens[fed])
        if plan.copies:
            self._pool.copy(*batch.copied_slots)
        resident.paged.begin(batch)
        logits = self._model.forward(batch.token_ids, batch.positions, resident.paged, batch.logits_at)
        ends = np.asarray(ragged.kv_lens, dtype=np.int64)
        resident.table.seq_lens.index_copy_(0, slots, to_device(ends, self.device).int())
        return self._drawn(logits, drawn, resident.table)

    def _drawn(self, logits: torch.Tensor | None, slots: torch.Tensor, table: RequestTable) -> torch.Tensor:
        tokens = torch.zeros(len(slots), dtype=torch.int64, device=self.device)
        if not len(slots):
            return tokens
        if logits is not None:
            inputs = table.sampling(slots, table.seq_lens[slots])
            self._kernels.sample(logits[: len(slots)].float(), inputs, tokens)
        if self._group is not None:
            self._group.broadcast(tokens)
        table.last_tokens.index_copy_(0, slots, tokens.clamp(min=0))
        return tokens
