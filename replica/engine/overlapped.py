"""An engine that schedules step n+1 while step n runs: tokens stay on the device and reach the host one step later.

It launches a step on the assumption that no request finishes in the previous one, then processes that one's tokens. A
request that did finish has one row too many in flight, whose token is dropped. Its blocks may be reused at once, since
the device runs steps in order. Blocks are committed, and events published, when a step has landed.

Grammars, penalties and bans edit logits depending on the tokens before. A step with such rows is held: it is launched
only up to its logits. While it runs, the previous step lands, and the `DrawTerms` that follow from its tokens reach the
device before the logits are ready. Logprobs are also computed on the device.

Steps run one at a time, as in `Engine`, while an embedding request is running or waiting, and when decodes are expected
to get drafts: only a finished step shows which drafts are right.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from ..errors import RankLost
from ..messages import PositionLogprobs
from ..structured.guide import TokenMasks, token_masks
from .answers import StepResult
from .engine import Engine, Executor, prompt_rows
from .logit_edits import LogitEdits, edits_of, has_edits
from .logprobs import ScoredRow, scored_rows
from .request import RequestPhase, RequestState
from .sampler import Sampled
from .step_plan import SlotStart, StepPlan
from .step_rows import LogitsLayout, ScheduledRow, logits_layout, plan_of_step


@dataclass(slots=True, frozen=True)
class DrawTerms:
    """Inputs of a step's draw that depend on all tokens before it; rows are those of the plan's `drawn`."""

    edits: LogitEdits | None = None
    masks: TokenMasks | None = None
    scored: Sequence[ScoredRow] = ()  #: drawn tokens whose logprobs are requested
    echoed: Sequence[ScoredRow] = ()  #: prompt tokens; `place` counts from the first logits that no token is drawn from


class PendingTokens(Protocol):
    def tokens(self) -> list[int | None]:
        """Wait for the step and return its tokens, ordered as the plan's `drawn`; None where logits were not finite."""

    def logprobs(self) -> list[PositionLogprobs]:
        """The logprobs of the `scored` rows of the draw's terms, then of the `echoed` ones."""


class AsyncExecutor(Executor, Protocol):
    """An executor that can also start a step without waiting for it."""

    def launch(self, plan: StepPlan) -> PendingTokens | None:
        """Start a plan with slots on all ranks; None if it is held, so `draw` must follow. Raises RankLost."""

    def draw(self, terms: DrawTerms) -> PendingTokens:
        """Draw the tokens of the held step that was launched last, in the order of its `drawn`. Raises RankLost."""


@dataclass(slots=True)
class StepInFlight:
    step: int
    rows: list[ScheduledRow]
    preemptions: list[int]  #: each row's `request.preemptions` at launch
    layout: LogitsLayout
    pending: PendingTokens | None  #: None: the step has not drawn yet
    started: float
    scored: Sequence[ScoredRow] = ()


class SlotTable:
    """Assigns slots (1 to `count`) of the device's request table to running requests.

    A request keeps its slot while it runs, and gets a new one after a preemption.
    """

    def __init__(self, count: int) -> None:
        self._free = list(range(count, 0, -1))
        #: By the request's `arrival`: its slot, the request, and its preemption count when it got the slot.
        self._assigned: dict[int, tuple[int, RequestState, int]] = {}

    @property
    def free(self) -> int:
        """Number of slots left free by the latest `assign`."""
        return len(self._free)

    def assign(self, requests: Iterable[RequestState]) -> tuple[list[int], list[RequestState]]:
        """Return a slot for each of these running requests, and the requests whose slot is new."""
        for slot, request, preemptions in list(self._assigned.values()):
            if request.phase is not RequestPhase.RUNNING or request.preemptions != preemptions:
                del self._assigned[request.arrival]
                self._free.append(slot)
        slots: list[int] = []
        started: list[RequestState] = []
        for request in requests:
            if request.arrival not in self._assigned:
                self._assigned[request.arrival] = self._free.pop(), request, request.preemptions
                started.append(request)
            slots.append(self._assigned[request.arrival][0])
        return slots, started

    def check(self) -> None:
        """Assert that no slot is lost or assigned twice."""
        slots = [*self._free, *(slot for slot, _, _ in self._assigned.values())]
        assert len(set(slots)) == len(slots), (self._free, self._assigned)


def needs_terms(request: RequestState) -> bool:
    """Whether drawing a request's next token needs `DrawTerms` from the host."""
    params = request.sampling
    return (
        request.guide is not None
        or has_edits(params)
        or params.logprobs is not None
        or request.generated + request.pending < params.min_tokens
    )


class OverlappedEngine(Engine):
    """`Engine` with one step in flight."""

    def __init__(self, *, executor: AsyncExecutor, **options: Any) -> None:
        super().__init__(executor=executor, **options)
        self.slots = SlotTable(self.scheduler.limits.running)
        self._launcher = executor
        self._in_flight: StepInFlight | None = None
        self._landed_at = 0.0

    @property
    def has_work(self) -> bool:
        return self._in_flight is not None or super().has_work

    def step(self) -> StepResult:
        """Launch the next step, then land the previous one and return its result."""
        embeds = any(request.embedding is not None for request in self.scheduler.requests())
        alone = embeds or self.scheduler.expects_drafts()
        if alone and self._in_flight is None:
            return super().step()
        previous, self._in_flight = self._in_flight, None
        rows: list[ScheduledRow] = []
        if not alone:
            self.expire_pins()
            rows = self._schedule()
        result = StepResult(step=previous.step if previous else self._steps, rows=len(rows))
        launched = self._try_launch(rows) if rows else None
        if previous is not None:
            self._land(previous, result)
        if isinstance(launched, StepInFlight) and launched.pending is None:
            launched = self._try_draw(launched)
        if isinstance(launched, Exception):
            self._fail(rows, launched, result)
        else:
            self._in_flight = launched
        return result

    def _try_launch(self, rows: list[ScheduledRow]) -> StepInFlight | Exception:
        """Launch these rows; returns the error if that fails."""
        self._steps += 1
        started = self._clock()
        layout = logits_layout(rows)
        preemptions = [row.request.preemptions for row in rows]
        plan = self._plan(rows, layout)
        for row in rows:
            self.scheduler.launch(row)
        try:
            pending = self._launcher.launch(plan)
        except RankLost:
            raise
        except Exception as error:
            return error
        return StepInFlight(self._steps, rows, preemptions, layout, pending, started)

    def _try_draw(self, step: StepInFlight) -> StepInFlight | Exception:
        """Draw for a held step, now that the tokens before it are known; returns the error if that fails."""
        requests = [row.request for row in step.layout.samplers]
        step.scored = scored_rows([request.sampling for request in requests])
        terms = DrawTerms(
            edits=edits_of([self._sampling_row(request) for request in requests]),
            masks=token_masks([request.guide for request in requests], self._vocab_size),
            scored=step.scored,
            echoed=prompt_rows(step.layout),
        )
        try:
            step.pending = self._launcher.draw(terms)
        except RankLost:
            raise
        except Exception as error:
            return error
        return step

    def _plan(self, rows: list[ScheduledRow], layout: LogitsLayout) -> StepPlan:
        slots, starting = self.slots.assign(row.request for row in rows)
        slot_of = {id(row.request): slot for row, slot in zip(rows, slots, strict=True)}
        return msgspec.structs.replace(
            plan_of_step(self._steps, rows, layout.logits_at),
            slots=slots,
            drawn=[slot_of[id(row.request)] for row in layout.samplers],
            held=bool(layout.prompts) or any(needs_terms(row.request) for row in layout.samplers),
            fed=[index for index, row in enumerate(rows) if row.end > len(row.request.tokens)],
            started=[
                SlotStart(
                    slot=slot_of[id(request)],
                    prompt_tokens=request.prompt_tokens,
                    seed=request.sampling.seed,
                    temperature=request.sampling.temperature,
                    top_k=min(request.sampling.top_k, self._vocab_size),  # the device holds it as int32
                    top_p=request.sampling.top_p,
                    min_p=request.sampling.min_p,
                )
                for request in starting
            ],
        )

    def _land(self, step: StepInFlight, result: StepResult) -> None:
        """Process a step's tokens. If the step failed, its requests go back to their routers."""
        assert step.pending is not None, f"step {step.step} lands before it has drawn"
        try:
            tokens, scores = step.pending.tokens(), step.pending.logprobs()
        except RankLost:
            raise
        except Exception as error:
            self._fail(step.rows, error, result)
            return
        self.failures_in_a_row = 0
        self._answers.echo(step.layout, scores[len(step.scored) :], result)
        logprobs = {row.place: found for row, found in zip(step.scored, scores, strict=False)}
        samplers = step.layout.samplers
        for row, token in zip(samplers, tokens, strict=True):
            if token is None:  # finish it before it lands, so its blocks are not cached
                self._answers.end_non_finite(row.request, result)
        for row, preemptions in zip(step.rows, step.preemptions, strict=True):
            self.scheduler.land(row, preemptions)
        for place, (row, token) in enumerate(zip(samplers, tokens, strict=True)):
            if token is not None and row.request.phase is not RequestPhase.FINISHED:  # else it ended while in flight
                self._answers.advance(row.request, [Sampled(token, logprobs.get(place))], result)
        now = self._clock()
        self._measure(step.rows, now - max(step.started, self._landed_at))
        self._landed_at = now
