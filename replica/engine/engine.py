"""The engine runs requests one step at a time, joining scheduler, cache, executor and sampler.

It opens no sockets and starts no threads; a single thread owns it. An `Executor` runs each plan (on one rank a model
runner; on several, one that first sends the plan to the others), so the engine is the same for any number of ranks.
"""

import logging
import time
from array import array
from collections.abc import Callable, Iterable, Sequence
from itertools import islice, takewhile
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from ...events.load_report import PrefillSpan, work_of
from ...events.wire.messages import CacheCounters, LoadReport
from ...kvcache.hashing import BlockHasher
from ...kvcache.prefix_cache import PrefixCache
from ...kvcache.sizing import MemoryReading
from ..errors import (
    Draining,
    InvalidRequest,
    RankLost,
)
from ..messages import Generate
from ..structured.guide import Guide, TokenMasks, token_masks
from .answers import Answers, StepResult
from .drafts import Drafter
from .host_blocks import HostBlocks
from .logit_edits import SamplingRow, mask_logits, mover, sampling_row
from .logprobs import ScoredRow, read, score
from .request import RequestKey, RequestPhase, RequestState, admit
from .sampler import Restriction, Sampled, sample
from .scheduler import Scheduler, SchedulerLimits
from .step_plan import Load, Save, StepPlan
from .step_rows import LogitsLayout, ScheduledRow, logits_layout, plan_of_step
from .throughput import SmoothedRates

log = logging.getLogger(__name__)

#: A step with prompts takes about so many seconds: new requests and the next tokens of others wait for it. Not tuned.
STEP_S = 0.1
#: But it computes at least so many prompt tokens: while several tenants have requests, about as many as cost as much as
#: the rest of a step on CPUs; else so many that the rest hardly counts. Not tuned.
SHARED_STEP_TOKENS, LEAST_STEP_TOKENS = 64, 512

#: An embedding request's row, and the sum of the hidden states pooled for it so far.
HiddenSum = tuple[ScheduledRow, npt.NDArray[np.float64]]


class Executor(Protocol):
    """Runs step plans on all ranks. With a single rank, the model runner itself is the executor."""

    def allocate_kv(self, num_blocks: int) -> None:
        """Allocate the KV pool on all ranks, replacing any previous one."""

    def allocate_host(self, slots: int) -> None:
        """Allocate host memory for so many blocks on all ranks; 0 frees it. Raises StartupError."""

    def move(self, saves: Sequence[Save], loads: Sequence[Load]) -> Sequence[str | None]:
        """Move blocks between the pool and host memory, saves first, before later steps. For each load, why it failed,
        or None. Raises RankLost.
        """

    def readings(self) -> list[MemoryReading]:
        """Memory readings of all ranks since `allocate_kv`, in rank order."""

    def forward(self, plan: StepPlan) -> torch.Tensor | None:
        """Logits [len(plan.logits_at), vocab], float32; never None on rank 0. Raises RankLost."""

    def forward_hidden(self, plan: StepPlan, hidden_at: Sequence[int]) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Like `forward`, plus the last hidden states [len(hidden_at), hidden] at these flat token indexes."""

    def close(self) -> None:
        """Free the KV pool and stop the other ranks."""


class Engine:
    """Runs the requests of any number of routers on one model."""

    def __init__(
        self,
        *,
        limits: SchedulerLimits,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        cache: PrefixCache,
        hasher: BlockHasher,
        executor: Executor,
        rates: SmoothedRates,
        epoch: int,
        clock: Callable[[], float] = time.perf_counter,
        wall_clock: Callable[[], float] = time.time,
        drafter: Drafter | None = None,
        mask: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None] = mask_logits,
        evicted: Callable[[], None] = lambda: None,
        host: HostBlocks | None = None,
    ) -> None:
        """`drafter` proposes tokens so that one step can draw several; it does not affect which tokens are drawn.

        `mask` does what `logit_edits.mask_logits` does, on the logits' device. `evicted` is called before a step that
        needed evictions. `host`: keeps what the cache evicts; it must be the cache's lower tier.
        """
        self.scheduler = Scheduler(limits, cache, hasher, drafter, host)
        self._host = host
        self.rates = rates
        self.draining = False
        #: Failed steps since the last successful one.
        self.failures_in_a_row = 0
        self._vocab_size, self._eos_token_ids = vocab_size, eos_token_ids
        self._hasher = hasher
        self._cache = cache
        self._answers = Answers(self.scheduler, hasher, eos_token_ids, clock)
        self._executor = executor
        self._epoch = epoch
        self._clock, self._wall_clock = clock, wall_clock
        self._mask = mask
        self._evicted = evicted
        self._steps = 0
        self._prefilled_tokens = 0
        self._accepted: dict[str, int] = {}

    @property
    def has_work(self) -> bool:
        return len(self.scheduler) > 0

    def add(self, source: str, request: Generate, guide: Guide | None = None) -> None:
        """Accept a request, with the guide for its constraint if it has one.

        Raises RequestError; the engine is then unchanged, except that `accepted` in the load report includes the id.
        """
        self.arrived(source, request.request_id)
        if self.draining:
            raise Draining("this replica is draining and accepts no new requests")
        if self.scheduler.get(RequestKey(source, request.request_id)):
            raise InvalidRequest(f"request_id: {request.request_id} is already running")
        admitted = admit(source, request, self._vocab_size, self._hasher.block_size, guide)
        admitted.arrived_at = self._clock()
        self.scheduler.add(admitted)

    def arrived(self, source: str, request_id: int) -> None:
        """Record that a request has arrived, so that its router does not send it again. `add` does this, too."""
        self._accepted[source] = max(request_id, self._accepted.get(source, request_id))

    def abort(self, source: str, request_ids: Iterable[int]) -> None:
        """End these requests and free their blocks. Ignores unknown ids: the request may have just finished."""
        for request_id in request_ids:
            if request := self.scheduler.get(RequestKey(source, request_id)):
                self.scheduler.finish(request)

    def forget(self, source: str) -> int:
        """End all requests of a router that has disconnected. Returns how many there were."""
        orphans = [request for request in self.scheduler.requests() if request.key.source == source]
        for request in orphans:
            self.scheduler.finish(request)
        self._accepted.pop(source, None)
        return len(orphans)

    def drain(self) -> None:
        self.draining = True

    def step(self) -> StepResult:
        """Run one step. If it fails, only its own requests go back to their routers; RankLost propagates."""
        self.expire_pins()
        rows = self._schedule(self.scheduler.add_drafts)
        result = StepResult(step=self._steps, rows=len(rows))
        if not rows:
            return result
        self._steps += 1
        started = self._clock()
        try:
            self._run(rows, result)
        except RankLost:
            raise
        except Exception as error:
            self._fail(rows, error, result)
            return result
        self.failures_in_a_row = 0
        self._measure(rows, self._clock() - started)
        return result

    def _schedule(
        self, add_drafts: Callable[[list[ScheduledRow]], list[ScheduledRow]] = lambda rows: rows
    ) -> list[ScheduledRow]:
        """Plan a step. Its evictions are announced before it runs, as it may take long."""
        before = self._cache.counters.evicted_tokens
        least = SHARED_STEP_TOKENS if self.scheduler.shared else LEAST_STEP_TOKENS
        allowance = self.rates.allowance(STEP_S, least, decodes=self.scheduler.decodes)
        rows = add_drafts(self.scheduler.schedule(allowance))
        for row in rows:
            if row.request.waited_s is None:
                row.request.waited_s = max(0.0, self._clock() - row.request.arrived_at)
        if self._cache.counters.evicted_tokens > before:
            if self._host is not None:
                self._host.save()
            self._evicted()
        return rows

    def expire_pins(self) -> None:
        """End expired pins. `step` does this too; an idle engine needs the explicit call."""
        if len(self._cache.pins):
            self._cache.expire_pins(self._clock())

    def load(self) -> LoadReport:
        backlog, cost = self.scheduler.backlog(), self.rates.prefill_cost
        stats, pins, host, size = self._cache.counters, self._cache.pins.stats, self._host, self._cache.block_size
        return LoadReport(
            epoch=self._epoch,
            step=self._steps,
            ts=self._wall_clock(),
            running=backlog.running,
            waiting=backlog.waiting,
            queued_prefill_tokens=backlog.queued_prefill.tokens,
            decode_context_tokens=backlog.decode_context_tokens,
            free_blocks=self._cache.free_blocks,
            cached_free_blocks=self._cache.cached_free_blocks,
            total_blocks=self._cache.total_blocks,
            prefill_tokens_per_s=self.rates.prefill_tokens_per_s,
            decode_step_s=self.rates.decode_step_s,
            counters=CacheCounters(
                query_tokens=stats.query_tokens,
                hit_tokens=stats.hit_tokens,
                partial_hit_tokens=stats.partial_hit_tokens,
                evicted_tokens=stats.evicted_tokens,
                collisions=stats.collisions,
                preemptions=self.scheduler.preemptions,
                generated_tokens=self._answers.generated_tokens,
                prefilled_tokens=self._prefilled_tokens,
                pins_set=pins.set,
                pins_refused=pins.refused,
                pins_expired=pins.expired,
                pins_broken=pins.broken,
                host_hit_tokens=stats.host_hit_tokens,
                demoted_tokens=host.saved * size if host else 0,
                promoted_tokens=host.loaded * size if host else 0,
                tier_evicted_tokens=host.tier.evicted * size if host else 0,
                tier_failures=dict(host.failures) if host else {},
            ),
            tiers=(host.report(),) if host else (),
            accepted=dict(self._accepted),
            draining=self.draining,
            pinned_blocks=len(self._cache.pins),
            prefill_cost=cost,
            queued_prefill_s=cost.total(backlog.queued_prefill),
            queued_prefill=backlog.queued_prefill,
            prefill_sums=self.rates.prefill_sums,
            waiting_blocks=backlog.waiting_blocks,
        )

    def _run(self, rows: list[ScheduledRow], result: StepResult) -> None:
        """Run the rows of a step. Everything that can fail comes before the first change to a request."""
        layout = logits_layout(rows)
        plan = plan_of_step(self._steps, rows, layout.logits_at)
        pooled: list[HiddenSum] = []
        if layout.hidden:
            logits, pooled = self._forward_hidden(plan, layout)
        else:
            logits = self._executor.forward(plan)
        assert logits is not None, "rank 0 has the logits"
        # Each row samples its next token, and one after each draft in case all drafts up to that one are right.
        sampling = [
            self._sampling_row(row.request, row.drafts[:count])
            for row in layout.samplers
            for count in range(1 + len(row.drafts))
        ]
        split = len(sampling)
        # Rows with a guide have no drafts, so no draft needs a mask.
        guides = [row.request.guide for row in layout.samplers for _ in range(1 + len(row.drafts))]
        masks = token_masks(guides, self._vocab_size)
        restriction = None if masks is None else self._restriction(masks, logits.device)
        samples = iter(sample(logits[:split], sampling, restriction) if split else ())
        drawn = [_confirmed([*islice(samples, 1 + len(row.drafts))], row.drafts) for row in layout.samplers]
        echoes = prompt_rows(layout)
        scores = read(echoes, score(logits[split:], echoes, logits, mover(logits.device))) if echoes else []

        # Before the step commits any blocks: KV that led to non-finite logits must not become a cached prefix.
        for row, tokens in zip(layout.samplers, drawn, strict=True):
            if not tokens:
                self._answers.end_non_finite(row.request, result)
        self._answers.echo(layout, scores, result)
        for row, total in pooled:
            if not np.isfinite(total).all():
                self._answers.end_non_finite(row.request, result)
            row.request.hidden_sum = total
        for row in rows:
            self.scheduler.complete(row)
        for row, tokens in zip(layout.samplers, drawn, strict=True):
            if row.request.phase is RequestPhase.RUNNING:
                if row.drafts:
                    row.request.drafting.learn(len(row.drafts), len(tokens) - 1, row.request.generated + len(tokens))
                self._answers.advance(row.request, tokens, result)
        for row, total in pooled:
            if row.request.phase is RequestPhase.RUNNING and row.end == row.request.num_tokens:
                self._answers.embed(row.request, total, result)

    def _forward_hidden(self, plan: StepPlan, layout: LogitsLayout) -> tuple[torch.Tensor | None, "list[HiddenSum]"]:
        """The step's logits, and each embedding row's sum of pooled hidden states, earlier steps included."""
        places = [place for _, span in layout.hidden for place in span]
        logits, hidden = self._executor.forward_hidden(plan, places)
        parts = torch.split(hidden, [len(span) for _, span in layout.hidden])
        pooled: list[HiddenSum] = []
        for (row, _), part in zip(layout.hidden, parts, strict=True):
            total: npt.NDArray[np.float64] = part.sum(0, dtype=torch.float64).cpu().numpy()
            before = row.request.hidden_sum
            pooled.append((row, total if before is None else before + total))
        return logits, pooled

    def _restriction(self, masks: TokenMasks, device: torch.device) -> Restriction:
        rows, bits = torch.from_numpy(masks.rows).to(device), torch.from_numpy(masks.bits).to(device)
        return Restriction(rows, lambda logits: self._mask(logits, rows, bits))

    def _sampling_row(self, request: RequestState, drafts: Sequence[int] = ()) -> SamplingRow:
        tokens = request.tokens + array("I", drafts) if drafts else request.tokens
        return sampling_row(request.sampling, tokens, request.prompt_tokens, self._eos_token_ids)

    def _measure(self, rows: Sequence[ScheduledRow], seconds: float) -> None:
        prefills = [row for row in rows if not row.decodes]
        work = work_of([PrefillSpan(row.request.cached_now, row.start, row.end) for row in prefills])
        self._prefilled_tokens += work.tokens
        self.rates.observe(work, len(rows) - len(prefills), seconds)

    def _fail(self, rows: Iterable[ScheduledRow], error: Exception, result: StepResult) -> None:
        self.failures_in_a_row += 1
        self._answers.fail(self._steps, rows, error, result)


def _confirmed(drawn: Sequence[Sampled], drafts: Sequence[int]) -> Sequence[Sampled]:
    """The tokens that matched their drafts, and the one drawn after them.

    Stops before the first token drawn from non-finite logits; unless it is the first of all, the next step redraws it.
    """
    pairs = enumerate(zip(drawn, drafts, strict=False))
    right = next((place for place, (sampled, draft) in pairs if sampled.token_id != draft), len(drafts))
    return [*takewhile(lambda sampled: sampled.finite, drawn[: right + 1])]


def prompt_rows(layout: LogitsLayout) -> list[ScoredRow]:
    """The prompt tokens that a step scores; `place` counts from the first logits that no token is drawn from."""
    wanted = [(row.request, position) for row, positions in layout.prompts for position in positions]
    return [
        ScoredRow(place, request.tokens[position + 1], request.sampling.prompt_logprobs or 0)
        for place, (request, position) in enumerate(wanted)
    ]
