"""The engine: requests in, one step at a time, tokens out. Scheduler, cache, executor and sampler, joined.

Knows no sockets and no threads: one thread owns it. A plan is run by an `Executor` (a local runner, or rank 0's runner
that first tells the other ranks), so that the engine is the same with one rank and with many.
"""

import logging
import math
import time
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice, takewhile
from typing import Protocol

import torch

from ...events.load_report import PrefillSpan, work_of
from ...events.wire.messages import CacheCounters, LoadReport
from ...kvcache.hashing import BlockHasher
from ...kvcache.prefix_cache import PrefixCache
from ..errors import Draining, InvalidRequest, OddLogits, RankLost, ReplicaError, StepFailed
from ..messages import FinishReason, Generate, PositionLogprobs, Refused, TokenOutput
from ..validation import Admissible
from .batch import Wanted, plan_of_step, wanted_logits
from .request import Phase, RequestKey, RequestState
from .sampler import Sampled, SamplingRow, banned_before, prompt_logprobs, sample
from .scheduler import Drafter, Limits, ScheduledRow, Scheduler
from .step_plan import StepPlan
from .throughput import Rates

log = logging.getLogger(__name__)


class Executor(Protocol):
    """Runs a plan on all ranks."""

    def execute(self, plan: StepPlan) -> torch.Tensor:
        """Logits [len(plan.logits_at), vocab], float32. Raises RankLost when a rank is gone."""
        ...


@dataclass(slots=True, frozen=True)
class EngineModel:
    """What the engine knows of the model."""

    vocab_size: int
    eos_token_ids: tuple[int, ...]


@dataclass(slots=True)
class StepResult:
    """What one step gave, by source (the router's id)."""

    step: int
    outputs: dict[str, list[TokenOutput]] = field(default_factory=lambda: defaultdict(list))
    refused: dict[str, list[Refused]] = field(default_factory=lambda: defaultdict(list))
    rows: int = 0
    error: ReplicaError | None = None


class Engine:
    """Runs the requests of any number of routers on one model."""

    def __init__(
        self,
        *,
        limits: Limits,
        model: EngineModel,
        cache: PrefixCache,
        hasher: BlockHasher,
        executor: Executor,
        rates: Rates,
        epoch: int,
        clock: Callable[[], float] = time.perf_counter,
        wall_clock: Callable[[], float] = time.time,
        drafter: Drafter | None = None,
    ) -> None:
        """`drafter`: guesses at tokens, to draw several in one step; they are the same with and without it."""
        self.scheduler = Scheduler(limits, cache, hasher, drafter)
        self.rates = rates
        self.draining = False
        #: Steps that raised since the last one that did not.
        self.failures_in_a_row = 0
        self._model = model
        self._cache = cache
        self._admissible = Admissible(vocab_size=model.vocab_size, block_size=hasher.block_size)
        self._executor = executor
        self._epoch = epoch
        self._clock, self._wall_clock = clock, wall_clock
        self._steps = 0
        self._generated_tokens = 0
        self._prefilled_tokens = 0
        self._accepted: dict[str, int] = {}

    @property
    def has_work(self) -> bool:
        return len(self.scheduler) > 0

    def add(self, source: str, request: Generate) -> None:
        """Take a request. Raises RequestError; the engine is then as it was, but for the id counted as seen."""
        self._accepted[source] = max(request.request_id, self._accepted.get(source, request.request_id))
        if self.draining:
            raise Draining("this replica is draining and takes no new requests")
        if self.scheduler.get(RequestKey(source, request.request_id)):
            raise InvalidRequest(f"request_id: {request.request_id} is running already")
        self.scheduler.add(self._admissible.state_of(source, request))

    def abort(self, source: str, request_ids: Iterable[int]) -> None:
        """End these requests and free their blocks; ids that are not alive are ignored (they may just have ended)."""
        for request_id in request_ids:
            if request := self.scheduler.get(RequestKey(source, request_id)):
                self.scheduler.finish(request)

    def forget(self, source: str) -> int:
        """A router is gone: end all its requests. Returns how many there were."""
        orphans = [request for request in self.scheduler.requests() if request.key.source == source]
        for request in orphans:
            self.scheduler.finish(request)
        self._accepted.pop(source, None)
        return len(orphans)

    def drain(self) -> None:
        """Finish what is here, take nothing new."""
        self.draining = True

    def step(self) -> StepResult:
        """Run one step. A step that raises ends its own requests with an error, no others; RankLost is passed on."""
        self.expire_pins()
        rows = self.scheduler.schedule()
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

    def _measure(self, rows: Sequence[ScheduledRow], seconds: float) -> None:
        prefills = [row for row in rows if not row.decodes]
        spans = [PrefillSpan(row.request.cached_now, row.start, row.end) for row in prefills]
        work = work_of(spans)
        self._prefilled_tokens += work.tokens
        self.rates.observe(work, len(rows) - len(prefills), seconds)

    def expire_pins(self) -> None:
        """End the pins whose time is over. `step` does; an idle engine has to be told."""
        if len(self._cache.pins):
            self._cache.expire_pins(self._clock())

    def load(self) -> LoadReport:
        """How busy this replica is now."""
        backlog, cost = self.scheduler.backlog(), self.rates.prefill_cost
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
            counters=self._counters(),
            accepted=dict(self._accepted),
            draining=self.draining,
            pinned_blocks=len(self._cache.pins),
            prefill_cost=cost,
            queued_prefill_s=cost.total(backlog.queued_prefill),
            queued_prefill=backlog.queued_prefill,
            prefill_sums=self.rates.prefill_sums,
        )

    def _counters(self) -> CacheCounters:
        stats, pins = self._cache.counters, self._cache.pins.stats
        return CacheCounters(
            query_tokens=stats.query_tokens,
            hit_tokens=stats.hit_tokens,
            partial_hit_tokens=stats.partial_hit_tokens,
            evicted_tokens=stats.evicted_tokens,
            collisions=stats.collisions,
            preemptions=self.scheduler.preemptions,
            generated_tokens=self._generated_tokens,
            prefilled_tokens=self._prefilled_tokens,
            pins_set=pins.set,
            pins_refused=pins.refused,
            pins_expired=pins.expired,
            pins_broken=pins.broken,
        )

    def _run(self, rows: list[ScheduledRow], result: StepResult) -> None:
        """Everything that can fail comes before the first change of a request."""
        wanted = wanted_logits(rows)
        logits = self._executor.execute(plan_of_step(self._steps, rows, wanted.logits_at))
        sampling = [each for row in wanted.samplers for each in self._sampling_rows(row)]
        split = len(sampling)
        answers = iter(sample(logits[:split], sampling) if split else ())
        drawn = [_confirmed([*islice(answers, 1 + len(row.drafts))], row.drafts) for row in wanted.samplers]
        echoes = _prompt_logprobs(logits[split:], wanted)

        self._give_up_what_is_odd(wanted, drawn, echoes, result)
        for request, values in echoes:
            assert request.prompt_logprobs is not None, f"request {request.key} asked for no prompt logprobs"
            request.prompt_logprobs += values
        for row in rows:
            self.scheduler.complete(row)
        for row, tokens in zip(wanted.samplers, drawn, strict=True):
            output = self._advance(row.request, tokens) if row.request.phase is Phase.RUNNING else None
            if output is not None:
                result.outputs[row.request.key.source].append(output)

    def _give_up_what_is_odd(
        self,
        wanted: Wanted,
        drawn: Sequence[Sequence[Sampled]],
        echoes: Sequence[tuple[RequestState, list[PositionLogprobs]]],
        result: StepResult,
    ) -> None:
        """End requests whose logits are no numbers, before anything of their step is committed."""
        for row, tokens in zip(wanted.samplers, drawn, strict=True):
            if not tokens:
                self._give_up(row.request, result)
        for request, values in echoes:
            if any(math.isnan(value.chosen.logprob) for value in values):
                self._give_up(request, result)

    def _give_up(self, request: RequestState, result: StepResult) -> None:
        """One request's logits are no numbers: it ends with an error, and nobody else notices."""
        if request.phase is Phase.FINISHED:
            return
        error = OddLogits(
            f"the model's logits after token {len(request.tokens)} are NaN or infinite: they left the range of its "
            "dtype (float16 has the least: use --dtype bfloat16 or float32), or its weights are damaged"
        )
        log.error("request_failed request=%s reason=%r", request.key, str(error))
        self.scheduler.finish(request)
        source, request_id = request.key
        result.refused[source].append(Refused(request_id=request_id, reason=error.reason, message=str(error)))

    def _sampling_rows(self, row: ScheduledRow) -> list[SamplingRow]:
        """For the next token, and for that after each of the drafts if all up to it are right."""
        return [self._sampling_row(row.request, row.drafts[:count]) for count in range(1 + len(row.drafts))]

    def _sampling_row(self, request: RequestState, drafts: Sequence[int]) -> SamplingRow:
        params, generated = request.sampling, request.generated + len(drafts)
        penalised = params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1
        return SamplingRow(
            params=params,
            position=generated,
            prompt_ids=request.tokens[: request.prompt_tokens] if penalised else (),
            generated_ids=request.tokens[request.prompt_tokens :] + array("I", drafts) if penalised else (),
            banned_ids=banned_before(params, generated, self._model.eos_token_ids),
        )

    def _advance(self, request: RequestState, drawn: Sequence[Sampled]) -> TokenOutput | None:
        """Add the tokens, and say so when it is time; a request that ends gives its blocks back here.

        All but the last were drafted, so that their KV is there.
        """
        first = not request.answered
        pinned = self.scheduler.pin(request, self._clock()) if first and request.pins else None
        stop_id = finish_reason = None
        for place, sampled in enumerate(drawn):
            if place:
                self.scheduler.accept(request)
            self._add(request, sampled)
            stop_id = self._stop_id(request, sampled.token_id)
            finish_reason = self._finish_reason(request, stop_id)
            if finish_reason is not None:
                break
        if not first and finish_reason is None and len(request.untold) < request.tokens_per_output:
            return None
        told, request.untold = request.untold, []
        logprobs, request.untold_logprobs = request.untold_logprobs, []
        output = TokenOutput(
            request_id=request.key.request_id,
            index=request.generated - len(told),
            token_ids=told,
            finish_reason=finish_reason,
            cached_tokens=request.cached_tokens if first else None,
            logprobs=logprobs or None,
            prompt_logprobs=request.prompt_logprobs if first else None,
            stop_token_id=stop_id,
            pinned_tokens=pinned,
        )
        request.answered = True
        if output.finish_reason:
            self.scheduler.finish(request)
        return output

    def _add(self, request: RequestState, sampled: Sampled) -> None:
        self.scheduler.append(request, sampled.token_id)
        self._generated_tokens += not request.warm_up
        request.untold.append(sampled.token_id)
        if sampled.logprobs:
            request.untold_logprobs.append(sampled.logprobs)

    def _stop_id(self, request: RequestState, token_id: int) -> int | None:
        params = request.sampling
        if request.generated < params.min_tokens:  # banned from sampling until then; this holds for any sampler
            return None
        ends = token_id in params.stop_token_ids or (not params.ignore_eos and token_id in self._model.eos_token_ids)
        return token_id if ends else None

    def _finish_reason(self, request: RequestState, stop_id: int | None) -> FinishReason | None:
        if stop_id is not None:
            return "stop"
        full = len(request.tokens) >= self.scheduler.limits.max_model_len
        return "length" if full or request.generated >= request.sampling.max_tokens else None

    def _fail(self, rows: list[ScheduledRow], error: Exception, result: StepResult) -> None:
        """End the requests of a step that raised: their KV may be half written, so nothing of it is committed."""
        self.failures_in_a_row += 1
        message = f"step {self._steps} failed: {type(error).__name__}: {error}"
        result.error = StepFailed(message)
        log.error("step_failed step=%d requests=%d", self._steps, len(rows), exc_info=error)
        for row in rows:
            source, request_id = row.request.key
            self.scheduler.finish(row.request)
            refused = Refused(request_id=request_id, reason="internal", message=message)
            result.refused[source].append(refused)


def _confirmed(drawn: Sequence[Sampled], drafts: Sequence[int]) -> Sequence[Sampled]:
    """Tokens drawn after drafts that are all right; the last of them was not drafted, or wrongly.

    None are left where the first is none: later ones are looked at again when they are first.
    """
    pairs = enumerate(zip(drawn, drafts, strict=False))
    right = next((place for place, (sampled, draft) in pairs if sampled.token_id != draft), len(drafts))
    return [*takewhile(lambda sampled: sampled.finite, drawn[: right + 1])]


def _prompt_logprobs(logits: torch.Tensor, wanted: Wanted) -> list[tuple[RequestState, list[PositionLogprobs]]]:
    """The logprobs of the prompt tokens that this step's rows reached, by request."""
    found: list[tuple[RequestState, list[PositionLogprobs]]] = []
    first = 0
    for row, positions in wanted.prompts:
        request, stop = row.request, first + len(positions)
        next_ids = request.tokens[positions[0] + 1 : positions[-1] + 2]
        found.append((request, prompt_logprobs(logits[first:stop], next_ids, request.sampling.prompt_logprobs or 0)))
        first = stop
    return found
