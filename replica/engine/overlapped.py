"""The engine that schedules step n+1 while step n runs: tokens stay on the device, the host learns them a step later.

It launches a step on the assumption that every request goes on, then takes in the tokens of the step before. A request
that turns out to have ended has one row too many in flight, whose token is dropped; its blocks may be given away at
once, since the device runs steps in order. Blocks are committed, and events told, when a step has landed.

What needs the host between two steps (penalties, biases, bans, logprobs, pins that are due) cannot be launched ahead:
while such a request is alive, all steps run one by one as in `Engine`. So do all where a drafter guesses tokens: which
guesses are right is known when the step is over.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from ..errors import RankLost
from ..execute.slots import SlotBook
from .batch import Wanted, plan_of_step, wanted_logits
from .engine import Engine, Executor, StepResult
from .request import Phase, RequestState
from .sampler import Sampled
from .scheduler import ScheduledRow
from .step_plan import SlotStart, StepPlan


class Launched(Protocol):
    """A step that runs, or has run."""

    def tokens(self) -> list[int | None]:
        """What was drawn, in the order of the plan's `drawn`; None: nothing, the logits were no numbers. Waits."""
        ...


class Launcher(Executor, Protocol):
    """An executor that can also start a step and go on."""

    def launch(self, plan: StepPlan) -> Launched:
        """Start a plan with slots on all ranks. Raises RankLost."""
        ...


@dataclass(slots=True, frozen=True)
class Flight:
    """A launched step."""

    step: int
    rows: list[ScheduledRow]
    preemptions: list[int]  #: of each row's request when it was launched
    wanted: Wanted
    launched: Launched
    started: float


def needs_host(request: RequestState) -> bool:
    """Whether a request's next token depends on more than the device knows."""
    params = request.sampling
    return bool(
        params.logit_bias
        or params.logprobs is not None
        or params.prompt_logprobs is not None
        or params.repetition_penalty != 1.0
        or params.presence_penalty != 0.0
        or params.frequency_penalty != 0.0
        or request.generated + request.pending < params.min_tokens
        or (request.pins and not request.answered)
    )


class OverlappedEngine(Engine):
    """`Engine` with one step in flight."""

    def __init__(self, *, executor: Launcher, **options: Any) -> None:
        super().__init__(executor=executor, **options)
        self._launcher = executor
        self._drafts = options.get("drafter") is not None
        self._slots = SlotBook(self.scheduler.limits.running)
        self._flight: Flight | None = None
        self._landed_at = 0.0

    @property
    def has_work(self) -> bool:
        return self._flight is not None or super().has_work

    def step(self) -> StepResult:
        """Launch the next step and land the one before; the result is that of the landed one."""
        if self._drafts or any(needs_host(request) for request in self.scheduler.requests()):
            return self._step_alone()
        self.expire_pins()
        flight, self._flight = self._flight, None
        rows = self.scheduler.schedule()
        result = StepResult(step=flight.step if flight else self._steps, rows=len(rows))
        launch_error = self._try_launch(rows)
        if flight is not None:
            self._land(flight, result)
        if launch_error is not None:
            self._fail([row for row in rows if row.request.phase is not Phase.FINISHED], launch_error, result)
        return result

    def _step_alone(self) -> StepResult:
        if self._flight is None:
            return super().step()
        flight, self._flight = self._flight, None
        result = StepResult(step=flight.step, rows=0)
        self._land(flight, result)
        return result

    def _try_launch(self, rows: list[ScheduledRow]) -> Exception | None:
        """Launch rows if there are any; what went wrong."""
        if not rows:
            return None
        self._steps += 1
        started = self._clock()
        wanted = wanted_logits(rows)
        preemptions = [row.request.preemptions for row in rows]
        plan = self._plan(rows, wanted)
        for row in rows:
            self.scheduler.launch(row)
        try:
            launched = self._launcher.launch(plan)
        except RankLost:
            raise
        except Exception as error:
            return error
        self._flight = Flight(self._steps, rows, preemptions, wanted, launched, started)
        return None

    def _plan(self, rows: list[ScheduledRow], wanted: Wanted) -> StepPlan:
        slots, started = self._slots.assign(row.request for row in rows)
        slot_of = dict(zip((id(row) for row in rows), slots, strict=True))
        begun = {id(request) for request in started}
        return msgspec.structs.replace(
            plan_of_step(self._steps, rows, wanted.logits_at),
            slots=slots,
            drawn=[slot_of[id(row)] for row in wanted.samplers],
            fed=[index for index, row in enumerate(rows) if row.end > len(row.request.tokens)],
            started=[
                _start(slot_of[id(row)], row.request, self._model.vocab_size)
                for row in rows
                if id(row.request) in begun
            ],
        )

    def _land(self, flight: Flight, result: StepResult) -> None:
        """Take in a step's tokens. A step that raised ends its own requests."""
        try:
            tokens = flight.launched.tokens()
        except RankLost:
            raise
        except Exception as error:
            self._fail([row for row in flight.rows if row.request.phase is not Phase.FINISHED], error, result)
            return
        self.failures_in_a_row = 0
        for row, token in zip(flight.wanted.samplers, tokens, strict=True):
            if token is None:  # before it lands: its blocks are nobody's prefix
                self._give_up(row.request, result)
        for row, preemptions in zip(flight.rows, flight.preemptions, strict=True):
            self.scheduler.land(row, preemptions)
        for row, token in zip(flight.wanted.samplers, tokens, strict=True):
            if token is None or row.request.phase is Phase.FINISHED:  # it ended while this row was in flight
                continue
            output = self._advance(row.request, [Sampled(token, None)])
            if output is not None:
                result.outputs[row.request.key.source].append(output)
        now = self._clock()
        self._measure(flight.rows, now - max(flight.started, self._landed_at))
        self._landed_at = now


def _start(slot: int, request: RequestState, vocab_size: int) -> SlotStart:
    params = request.sampling
    return SlotStart(
        slot=slot,
        prompt_tokens=request.prompt_tokens,
        seed=params.seed,
        temperature=params.temperature,
        top_k=min(params.top_k, vocab_size),  # the device has 32 bits for it
        top_p=params.top_p,
        min_p=params.min_p,
    )
