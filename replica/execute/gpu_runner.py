"""A runner that launches steps without waiting: the device draws the tokens and feeds them to the next step.

Steps of decodes and short prompts are replayed from graphs at padded sizes; others run eagerly on the same state. Meant
for GPUs; on a CPU it computes the same results. Independent of requests: a plan gives each row's slot.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from ..attention.paged import Batch, PagedAttention, to_device
from ..config import ReplicaSettings, for_device
from ..engine.logprobs import ScoredRow, Scores, read, score
from ..engine.overlapped import DrawTerms
from ..engine.step_plan import RaggedBatch, StepPlan
from ..kernels.base import NO_TOKEN, TorchKernels
from ..messages import PositionLogprobs
from ..models.base import Model
from ..parallel.rank_group import RankGroup
from ..progress import report
from .cuda_graphs import CudaGraphs, EagerSteps, NotCaptured, collector_paused, graph_sizes, padded_size
from .mixed_step import MixedStep, fits, sizes_for
from .request_table import RequestTable, TableMirror
from .runner import CudaMemory, ModelRunner, resolve_device

log = logging.getLogger(__name__)


class DrawnTokens:
    """A step's tokens and requested logprobs, on their way to the host."""

    def __init__(self, tokens: torch.Tensor, scored: Sequence[tuple[Sequence[ScoredRow], Scores]] = ()) -> None:
        """Start the copies to the host; later steps may then overwrite `tokens`."""
        self._tokens = _to_host(tokens)
        self._scored = [(rows, Scores(*map(_to_host, scores))) for rows, scores in scored]
        self._ready: torch.cuda.Event | None = None
        if tokens.device.type == "cuda":
            self._ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._ready.record()

    def tokens(self) -> list[int | None]:
        """Wait for the step and return its tokens, None where the logits were not finite. Raises the step's error."""
        if self._ready is not None:
            self._ready.synchronize()
        return [None if token == NO_TOKEN else token for token in self._tokens.tolist()]

    def logprobs(self) -> list[PositionLogprobs]:
        """The requested logprobs. Call `tokens` first, as it waits for the step."""
        return [found for rows, scores in self._scored for found in read(rows, scores)]


def _to_host(x: torch.Tensor) -> torch.Tensor:
    if x.device.type != "cuda":
        return x.clone()
    return torch.empty_like(x, device="cpu", pin_memory=True).copy_(x, non_blocking=True)


RunnerLoader = Callable[[ReplicaSettings, Path, int, RankGroup | None], ModelRunner]


def load_runner(
    settings: ReplicaSettings, model_dir: Path, block_size: int, group: RankGroup | None = None
) -> ModelRunner:
    """Load the runner for these settings and this device: a GpuRunner if steps overlap."""
    on, auto = settings.overlap_steps == "on", settings.overlap_steps == "auto"
    overlap = on or (auto and resolve_device(settings).type == "cuda")
    return (GpuRunner if overlap else ModelRunner)(settings, model_dir, block_size, group)


class DecodeStep:
    """A decode step that reads the request table and writes to it: embedding, layers, sampler, write-back.

    Its only input besides the table is the slots in `rows`. It allocates only through torch and reads nothing back to
    the host, so a CUDA graph can capture it. A batch of fewer than `max_rows` rows uses the front of the buffers.

    It has two halves, so that masks that depend on the previous step's tokens can reach the device in between.
    """

    def __init__(
        self,
        model: Model,
        attention: PagedAttention,
        kernels: TorchKernels,
        table: RequestTable,
        *,
        max_rows: int,
        block_size: int,
        group: RankGroup | None,
    ) -> None:
        device = table.seq_lens.device
        self._model, self._attention, self._kernels, self._table = model, attention, kernels, table
        self._block_size = block_size
        self._group = group
        #: [max_rows, vocab] of the last step; None on ranks that draw no tokens.
        self.logits: torch.Tensor | None = None
        if group is None or group.rank == 0:
            self.logits = torch.zeros(max_rows, model.spec.vocab_size, dtype=torch.float32, device=device)
        #: Each row's slot; 0 for padding rows.
        self.rows = torch.zeros(max_rows, dtype=torch.int64, device=device)
        #: The latest drawn tokens; `NO_TOKEN` where the logits were not finite.
        self.tokens = torch.zeros(max_rows, dtype=torch.int64, device=device)

    def run(self, size: int) -> None:
        """Compute and draw one token for each of the first `size` rows."""
        self.compute(size)
        self.draw(size)

    def compute(self, size: int) -> None:
        """Compute the logits of the first `size` rows."""
        table = self._table
        step = self._kernels.decode_rows(
            self.rows[:size], table.last_tokens, table.seq_lens, table.block_tables, self._block_size
        )
        self._attention.begin_decode(step.slots, step.tables, step.seq_lens)
        logits = self._model.forward(step.token_ids, step.positions, self._attention, None)
        if logits is not None:
            assert self.logits is not None, "logits on a rank that draws nothing"
            self.logits[:size].copy_(logits)

    def draw(self, size: int) -> None:
        """Draw one token for each of the first `size` rows from their logits."""
        table, rows, tokens = self._table, self.rows[:size], self.tokens[:size]
        if self.logits is not None:
            self._kernels.sample(self.logits[:size], table.sampling(rows), tokens)
        if self._group is not None:
            self._group.broadcast(tokens)
            table.last_tokens.index_copy_(0, rows, tokens)


#: Draws the tokens of a launched step.
_Draw = Callable[[DrawTerms], DrawnTokens]


#: The name of a part of a step, the size to capture, and the function that runs the part at a given size.
_Part = tuple[str, int, Callable[[int], None]]


@dataclass(slots=True, frozen=True)
class _DeviceState:
    """The state that is allocated and freed together with a KV pool."""

    attention: PagedAttention
    table: RequestTable
    mirror: TableMirror
    decode: DecodeStep
    mixed: MixedStep | None  #: None if steps with prompts are not captured


class GpuRunner(ModelRunner):
    """A `ModelRunner` that can also launch plans with slots."""

    def __init__(
        self,
        settings: ReplicaSettings,
        model_dir: Path,
        block_size: int,
        group: RankGroup | None = None,
        *,
        model: Model | None = None,
        graphs: EagerSteps | None = None,
        memory: CudaMemory | None = None,
    ) -> None:
        super().__init__(settings, model_dir, block_size, group, model=model, memory=memory)
        limits = for_device(settings, cuda=self.device.type == "cuda")
        self._max_rows = min(limits.max_running_requests, limits.max_batched_tokens)
        self._max_model_len = settings.max_model_len or self.spec.max_positions
        self._graphs: EagerSteps = graphs or (CudaGraphs() if self.device.type == "cuda" else EagerSteps())
        self._sizes = graph_sizes(self._max_rows)
        self._state: _DeviceState | None = None
        #: Draws the tokens of the held step that was launched last; None if there is none.
        self._undrawn: _Draw | None = None

    def close(self) -> None:
        """Free the graphs and the request table, then the KV pool."""
        self._graphs.clear()
        self._state = self._undrawn = None
        super().close()

    def _allocate(self, num_blocks: int) -> None:
        """Allocate the KV pool and the request table, and capture a graph for each batch size."""
        super()._allocate(num_blocks)
        with collector_paused():
            self._capture_steps(num_blocks)

    def _capture_steps(self, num_blocks: int) -> None:
        assert self._attention is not None
        pages = min(num_blocks, -(-self._max_model_len // self.block_size) + 1)
        table = RequestTable(self._max_rows, pages, self.device)
        decode = DecodeStep(
            self._model,
            self._attention,
            self._kernels,
            table,
            max_rows=self._max_rows,
            block_size=self.block_size,
            group=self._group,
        )
        mixed = self._mixed_step(self._attention, decode, pages)
        self._state = _DeviceState(self._attention, table, TableMirror(self.block_size), decode, mixed)
        parts: list[_Part] = [
            (name, size, run)
            for size in reversed(self._sizes)  # largest first, so that the others fit into its memory
            for name, run in (("compute", decode.compute), ("draw", decode.draw))
        ]
        problem = self._model.capture_problem or self._capture(parts)
        if problem is None:
            log.info("graphs_captured sizes=%d largest=%d", len(self._sizes), self._max_rows)
            return
        log.warning("graphs_unusable reason=%r", problem)
        self._graphs.clear()
        self._graphs, self._state = EagerSteps(), replace(self._state, mixed=None)
        self._capture(parts)
        if self._kernels.compiles:
            decode.run(self._sizes[0])  # a capture would have compiled its kernels

    def _mixed_step(self, attention: PagedAttention, decode: DecodeStep, pages: int) -> MixedStep | None:
        """Capture steps with prompts; None where attention, device or model do not allow it."""
        if self._model.capture_problem or not (attention.mixes and self._graphs.pads_mixed):
            return None
        sizes = sizes_for(self.spec.hidden_size, len(self.spec.kv_shapes))
        pages = max(pages, -(-sizes[-1] // self.block_size))
        mixed = MixedStep(self._model, attention, decode.logits, sizes=sizes, max_rows=self._max_rows, pages=pages)
        problem = self._capture([("mixed", size, mixed.run) for size in reversed(sizes)])
        if problem is None:
            return mixed
        log.info("mixed_graphs_unusable reason=%r", problem)
        self._graphs.clear()
        return None

    def _capture(self, parts: Sequence[_Part]) -> str | None:
        """Capture parts of steps. Returns why that is impossible, or None on success."""
        try:
            for done, (name, size, run) in enumerate(parts):
                report("capturing graphs", done, len(parts))
                self._graphs.capture((name, size), partial(run, size))
        except NotCaptured as error:
            return str(error)
        return None

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> DrawnTokens | None:
        """Start a step whose rows have slots. All ranks must be called with the same plan.

        If the plan is held, rank 0 returns None and draws when `draw` is called, which must be before the next launch.
        The other ranks' devices wait for rank 0's tokens.
        """
        state = self._state
        assert state is not None, "launch before allocate_kv"
        self._undrawn = None  # left over from a step that failed before it could draw
        state.table.apply(state.mirror.delta(plan))
        decodes = plan.drawn == plan.slots and plan.q_lens == [1] * len(plan.slots) and not plan.copies
        draw = self._replay(plan, state.decode) if decodes else self._run_mixed(plan, state)
        if plan.held and (self._group is None or self._group.rank == 0):
            self._undrawn = draw
            return None
        return draw(DrawTerms())

    @torch.inference_mode()
    def draw(self, terms: DrawTerms) -> DrawnTokens:
        """Draw the tokens of the held step that was launched last."""
        draw, self._undrawn = self._undrawn, None
        assert draw is not None, "no held step to draw for"
        return draw(terms)

    def _draw(
        self,
        logits: torch.Tensor | None,
        terms: DrawTerms,
        sample: Callable[[], torch.Tensor],
        others: torch.Tensor | None = None,
    ) -> DrawnTokens:
        """Draw with `sample` from `logits` [rows, vocab] under these terms. `others`: logits for prompt logprobs."""
        move = partial(to_device, device=self.device)
        raw = None
        if logits is not None:
            if terms.scored:
                raw = logits.index_select(0, move(np.array([row.place for row in terms.scored], dtype=np.int64)))
            if terms.edits is not None:
                terms.edits.apply(logits, move)
            if terms.masks is not None:
                self._kernels.mask(logits, move(terms.masks.rows), move(terms.masks.bits))
        tokens = sample()
        wanted = ((terms.scored, raw), (terms.echoed, others))
        return DrawnTokens(
            tokens, [(rows, score(x, rows, tokens, move)) for rows, x in wanted if rows and x is not None]
        )

    def _replay(self, plan: StepPlan, decode: DecodeStep) -> _Draw:
        count = self._set_rows(plan.slots, decode)
        self._graphs.replay(("compute", count))
        return self._replayed_draw(len(plan.slots), decode)

    def _set_rows(self, slots: Sequence[int], decode: DecodeStep) -> int:
        """Make these slots the rows of the next draw. Returns the size that they are padded to."""
        size = padded_size(len(slots), self._sizes)
        assert size is not None, f"{len(slots)} rows, {self._max_rows} at most"
        rows = np.zeros(size, dtype=np.int64)
        rows[: len(slots)] = slots
        decode.rows[:size].copy_(to_device(rows, self.device))
        return size

    def _replayed_draw(self, count: int, decode: DecodeStep, others: torch.Tensor | None = None) -> _Draw:
        def sample() -> torch.Tensor:
            if count:
                self._graphs.replay(("draw", padded_size(count, self._sizes)))
            return decode.tokens[:count]

        return lambda terms: self._draw(decode.logits, terms, sample, others)

    def _run_mixed(self, plan: StepPlan, state: _DeviceState) -> _Draw:
        """Run a step with prompts, from a graph if one of its kind is captured."""
        ragged, mixed, decode = self._lay_out(plan), state.mixed, state.decode
        size = padded_size(len(ragged.token_ids), mixed.sizes) if mixed is not None else None
        if mixed is None or size is None or not fits(ragged, min(size, self._max_rows)):
            return self._run(plan, ragged, state)
        self._copy(ragged)
        mixed.write(ragged, size, partial(to_device, device=self.device))
        self._feed(plan, mixed.token_ids, state.table)
        self._graphs.replay(("mixed", size))
        self._advance(plan, ragged, state.table)
        self._set_rows(plan.drawn, decode)
        count = len(plan.drawn)
        others = None if decode.logits is None else decode.logits[count : len(plan.logits_at)]
        return self._replayed_draw(count, decode, others)

    def _copy(self, ragged: RaggedBatch) -> None:
        """Make the KV copies of a step; its graph does not include them."""
        assert self.pool is not None, "launch before allocate_kv"
        if ragged.copied_slots.size:
            self.pool.copy(to_device(ragged.copied_slots, self.device), self._kernels)

    def _feed(self, plan: StepPlan, token_ids: torch.Tensor, table: RequestTable) -> None:
        """Fill in the tokens that are only known on the device."""
        if plan.fed:
            ends = np.cumsum(plan.q_lens)[plan.fed] - 1
            fed = to_device(np.asarray(plan.slots, dtype=np.int64)[plan.fed], self.device)
            token_ids.index_copy_(0, to_device(ends, self.device), table.last_tokens[fed].clamp(min=0))

    def _advance(self, plan: StepPlan, ragged: RaggedBatch, table: RequestTable) -> None:
        """Set the table's lengths to those after the step."""
        slots = to_device(np.asarray(plan.slots, dtype=np.int64), self.device)
        lengths = to_device(np.asarray(ragged.kv_lens, dtype=np.int32), self.device)
        table.seq_lens.index_copy_(0, slots, lengths)

    def _run(self, plan: StepPlan, ragged: RaggedBatch, state: _DeviceState) -> _Draw:
        """Run a step of any shape without a graph."""
        table = state.table
        batch = Batch.on_device(ragged, self.device)
        drawn = to_device(np.asarray(plan.drawn, dtype=np.int64), self.device)
        self._feed(plan, batch.token_ids, table)
        self._copy(ragged)
        state.attention.begin(batch)
        logits = self._model.forward(batch.token_ids, batch.positions, state.attention, batch.logits_at)
        self._advance(plan, ragged, table)
        chosen = None if logits is None else logits[: len(drawn)].float()

        def sample() -> torch.Tensor:
            tokens = torch.zeros(len(drawn), dtype=torch.int64, device=self.device)
            if len(drawn):
                if chosen is not None:
                    self._kernels.sample(chosen, table.sampling(drawn), tokens)
                if self._group is not None:
                    self._group.broadcast(tokens)
                    table.last_tokens.index_copy_(0, drawn, tokens)
            return tokens

        others = None if logits is None else logits[len(drawn) :]
        return lambda terms: self._draw(chosen, terms, sample, others)
