"""The choices of one HTTP request: opens their token streams, joins them, and closes all of them in any case.

Between `Backend` and the shapes of answers; knows tokens and text. Runs in callbacks: a token costs no turn of the
event loop and no task.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence

import msgspec

from ...kvcache.hashing import token_bytes
from ...replica.messages import Pin, PositionLogprobs, SamplingParams
from ..backend import GenerationRequest, TokenDelta, TokenStream
from ..errors import RequestFailed, RouterError
from ..meter import Meter
from ..text.answer import AnswerText, Ending
from ..text.logprobs import TokenAt
from . import answers, metering
from .errors import fail
from .exchange import Account, Exchange, Headers
from .front import Front, Served
from .headers import Caller, answer_headers
from .pins import PinWish
from .validate import choice_seed

log = logging.getLogger(__name__)


class ClientGoneError(Exception):
    """The client left before its request was sent on: there is nobody to tell."""


class Prompt(msgspec.Struct, frozen=True, gc=False):
    """One prompt: its ids and, where it came as text, that text."""

    token_ids: Sequence[int]
    text: str | None = None
    pins: tuple[PinWish, ...] = ()


class Job(msgspec.Struct, frozen=True, gc=False):
    """Everything that an HTTP request wants generated."""

    served: Served
    prompts: Sequence[Prompt]
    choices_per_prompt: int
    sampling: SamplingParams
    stops: tuple[str, ...] = ()
    priority: int = 0
    timeout_s: float | None = None
    tokens_per_delta: int = 1  #: more where nobody reads the answer as it comes
    discard: bool = False  #: `max_tokens: 0`: one token is generated for the prompt's sake and not shown


class Choice:
    """One sequence under way; its token stream's sink."""

    __slots__ = (
        "answer",
        "cached",
        "ending",
        "generated",
        "generation",
        "index",
        "last_token_at",
        "pinned",
        "predicted",
        "prompt",
        "stream",
    )

    def __init__(
        self, generation: "Generation", index: int, prompt: Prompt, stream: TokenStream, answer: AnswerText
    ) -> None:
        self.generation = generation
        self.index = index
        self.prompt = prompt
        self.stream = stream
        self.answer = answer
        self.generated = 0
        self.cached = 0
        self.predicted = 0
        self.pinned: int | None = None
        self.last_token_at: float | None = None
        self.ending: Ending | None = None

    def delta(self, delta: TokenDelta) -> None:
        """See `TokenSink.delta`."""
        self.generation.take(self, delta)

    def failed(self, error: RouterError) -> None:
        """See `TokenSink.failed`."""
        self.generation.fail(error)


class Step(msgspec.Struct, frozen=True, gc=False):
    """What one delta added to a choice."""

    choice: Choice
    text: str
    tokens: Sequence[TokenAt] = ()
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    ending: Ending | None = None
    first: bool = False


class Answer(ABC):
    """What becomes of the steps of a generation."""

    @abstractmethod
    def step(self, step: Step) -> None:
        """The next step of any choice."""

    @abstractmethod
    def end(self, generation: "Generation") -> None:
        """Every choice has ended well."""

    @abstractmethod
    def fail(self, generation: "Generation", error: RouterError) -> bool:
        """It broke; False when nothing was sent, so that an ordinary error response still can be."""


def generation_request(
    job: Job, prompt: Prompt, caller: Caller, index: int, deadline: float | None
) -> GenerationRequest:
    """Choice `index` of a prompt, as the backend takes it. The first one's replica is where the prompt is pinned."""
    wishes = prompt.pins if index == 0 else ()
    return GenerationRequest(
        trace_id=caller.request_id,
        token_ids=token_bytes(prompt.token_ids),
        sampling=choice_seed(job.sampling, index),
        salt=caller.salt,
        session=caller.session,
        priority=job.priority,
        tenant=caller.tenant.digest,
        weight=caller.tenant.limits.weight,
        deadline=deadline,
        tokens_per_delta=job.tokens_per_delta,
        pins=tuple(Pin(wish.num_tokens, wish.ttl_s, caller.tenant.digest) for wish in wishes),
    )


class Generation:
    """The running choices of a job, from `begin` until every choice ended, one failed, or the client left."""

    def __init__(self, front: Front, job: Job, exchange: Exchange, answer: Answer) -> None:
        self.front = front
        self.choices: list[Choice] = []
        self.over = False
        self.prompt_tokens = sum([len(prompt.token_ids) for prompt in job.prompts])  #: each prompt counted once
        self._job = job
        self._exchange = exchange
        self._answer = answer
        self._left = 0  #: choices that have not ended
        self._tenant = ""
        self._meter: Meter | None = None
        self._ttft_s: float | None = None

    def begin(self, caller: Caller) -> None:
        """Send everything to the backend. Raises what the backend and the meter refuse with, and ClientGoneError."""
        if self._exchange.gone:
            raise ClientGoneError
        lengths = [len(prompt.token_ids) for prompt in self._job.prompts]
        meter = metering.check(self.front, self._exchange, caller.tenant, lengths)
        self._tenant = caller.tenant.name or caller.tenant.digest.hex()[:8]
        timeout_s = min(self._job.timeout_s or float("inf"), self.front.settings.request_timeout_s)
        try:
            for prompt in self._job.prompts:
                self._open_prompt(prompt, caller, self._exchange.started_at + timeout_s)
        except BaseException:
            self._cancel()
            raise
        if meter is not None:
            self._meter = meter
            metering.begin(self.front, self._exchange, meter, self.prompt_tokens)
        self._left = len(self.choices)
        self._exchange.on_gone = self._lose
        for choice in self.choices:
            choice.stream.listen(choice)

    def _open_prompt(self, prompt: Prompt, caller: Caller, deadline: float) -> None:
        for index in range(self._job.choices_per_prompt):
            stream = self.front.backend.generate(generation_request(self._job, prompt, caller, index, deadline))
            answer = AnswerText(self._job.served.text.detokenizer(), self._job.stops)
            self.choices.append(Choice(self, len(self.choices), prompt, stream, answer))

    # From the token streams

    def take(self, choice: Choice, delta: TokenDelta) -> None:
        """The next tokens of a choice."""
        if self.over or choice.ending:
            return
        try:
            step = self._step(choice, delta)
            self._answer.step(step)
            if step.ending:
                self._ended(choice)
        except RouterError as error:
            self._break(error)
        except Exception as error:  # raised further, it would end what others' tokens are part of
            log.exception("answer_crashed request_id=%s", self._exchange.id)
            self._break(RouterError(f"internal error: {type(error).__name__}"))

    def fail(self, error: RouterError) -> None:
        """A choice broke, and with it the answer."""
        if not self.over:
            self._break(error)

    def _break(self, error: RouterError) -> None:
        """What came could not be made an answer of; once all choices are over, the whole could not."""
        if not self.over:
            self._close()
        if not self._answer.fail(self, error):
            fail(self._exchange, error)
        self._let_go()

    def _lose(self) -> None:
        """The client left."""
        self._close()
        self._let_go()

    def _let_go(self) -> None:
        """Choices and generation know each other: apart, they need no garbage collector."""
        self.choices = []

    def _ended(self, choice: Choice) -> None:
        choice.stream.cancel()  # after a stop string the replica would go on
        self._left -= 1
        if not self._left:
            self._close()
            self._answer.end(self)
            self._let_go()

    def _close(self) -> None:
        """No stream stays open, whatever ended the answer, and its tokens are counted."""
        self.over = True
        self._cancel()
        self.front.metrics.tokens(self.prompt_tokens, self.generated_tokens)
        meter, self._meter = self._meter, None
        if meter is not None:
            meter.end(self.generated_tokens, self.front.monotonic())
        self._exchange.account = Account(
            self._tenant,
            ",".join(self.replicas),
            self.prompt_tokens,
            sum([choice.predicted for choice in self._first_choices]),
            self.cached_tokens,
            self.generated_tokens,
            self._ttft_s,
        )

    def _cancel(self) -> None:
        for choice in self.choices:
            choice.stream.cancel()

    def _step(self, choice: Choice, delta: TokenDelta) -> Step:
        if delta.finish_reason in ("abort", "error"):
            raise RequestFailed(f"the replica ended the request: {delta.finish_reason}")
        first = choice.last_token_at is None
        self._measure(choice)
        if delta.cached_tokens is not None:
            choice.cached, choice.predicted = delta.cached_tokens, delta.predicted_cached_tokens or 0
        if delta.pinned_tokens is not None:
            choice.pinned = delta.pinned_tokens
        if self._job.discard:
            choice.ending = "length"
            return Step(choice, "", (), delta.prompt_logprobs, "length", first)
        choice.generated += len(delta.token_ids) + delta.text_tokens
        shown = choice.answer.push(delta)
        choice.ending = shown.ending
        return Step(choice, shown.text, shown.tokens, delta.prompt_logprobs, shown.ending, first)

    def _measure(self, choice: Choice) -> None:
        now = self.front.monotonic()
        if choice.last_token_at is not None:
            self.front.metrics.inter_token(now - choice.last_token_at)
        else:
            ttft_s = now - self._exchange.started_at
            self.front.metrics.first_token(ttft_s)
            self._ttft_s = ttft_s if self._ttft_s is None else self._ttft_s
        choice.last_token_at = now

    # Totals

    def usage(self) -> answers.Usage:
        """What the whole request used until now."""
        return answers.usage(self.prompt_tokens, self.generated_tokens, self.cached_tokens)

    @property
    def generated_tokens(self) -> int:
        """Of all choices."""
        return sum([choice.generated for choice in self.choices])

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens found in caches: of each prompt's first choice, since prompts count once."""
        return sum([choice.cached for choice in self._first_choices])

    @property
    def _first_choices(self) -> list[Choice]:
        return self.choices[:: self._job.choices_per_prompt]

    @property
    def pinned_tokens(self) -> int | None:
        """Prompt tokens that are kept now, over all prompts; None where nothing was to be kept."""
        told = [choice.pinned for choice in self.choices if choice.pinned is not None]
        return sum(told) if told else None

    def headers(self) -> Headers:
        """What the answer's head tells of all this."""
        return answer_headers(self.replicas, self.cached_tokens, self.pinned_tokens)

    @property
    def replicas(self) -> list[str]:
        """Where the choices run, each replica once."""
        return list(dict.fromkeys(choice.stream.replica_id for choice in self.choices if choice.stream.replica_id))
