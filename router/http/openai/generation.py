"""The choices of one HTTP request: opens their token streams, joins them, and closes all of them in any case.

Between `Backend` and the shapes of answers; knows tokens and text. Runs in callbacks: a token costs no turn of the
event loop and no task.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence

import msgspec

from ....kvcache.hashing import token_bytes
from ....replica.messages import Pin, PositionLogprobs, SamplingParams
from ...backend import GenerationRequest, TokenDelta, TokenStream
from ...errors import RequestFailed, RouterError, Superseded
from ...tenants.rate_limits import Meter
from ...text.answer import AnswerText, Ending, TextDelta
from ...text.logprobs import TokenAt
from .. import metering
from ..errors import fail
from ..front import Front, Served
from ..headers import Caller, answer_headers
from ..protocol.exchange import Account, Exchange, Headers
from . import answers
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


class Choice(msgspec.Struct, eq=False):
    """One sequence under way; its token stream's sink."""

    generation: "Generation"
    index: int
    prompt: Prompt
    stream: TokenStream
    answer: AnswerText
    generated: int = 0
    cached: int = 0
    predicted: int = 0
    pinned: int | None = None
    last_token_at: float | None = None
    ending: Ending | None = None
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    parts: list[str] = []  #: of an answer that is sent whole
    tokens: list[TokenAt] = []  #: the same

    @property
    def text(self) -> str:
        """What was kept of the answer."""
        return "".join(self.parts)

    def delta(self, delta: TokenDelta) -> None:
        """See `TokenSink.delta`."""
        generation = self.generation
        if generation.over or self.ending:
            return
        try:
            first = self._measure(generation)
            shown = self._first(delta) if first else self._next(delta)
            generation.answer.add(self, shown, first=first)
            if shown.ending:
                generation.ended()
        except RouterError as error:
            generation.break_off(error)
        except Exception as error:  # raised further, it would end what others' tokens are part of
            generation.crash(error)

    def failed(self, error: RouterError) -> None:
        """See `TokenSink.failed`."""
        self.generation.fail(error)

    def _measure(self, generation: "Generation") -> bool:
        """Note when tokens came; True for the first ones."""
        last = self.last_token_at
        now = self.last_token_at = generation.front.monotonic()
        if last is None:
            generation.first_token(now)
            return True
        generation.metrics.inter_token(now - last)
        return False

    def _first(self, delta: TokenDelta) -> TextDelta:
        self.pinned, self.prompt_logprobs = delta.pinned_tokens, delta.prompt_logprobs
        if self.generation.discards:
            self._note(delta)
            self.ending = "length"
            return NOTHING
        return self._next(delta)

    def _next(self, delta: TokenDelta) -> TextDelta:
        if delta.cached_tokens is not None or delta.finish_reason is not None:
            self._note(delta)
        self.generated += len(delta.token_ids) + delta.text_tokens
        shown = self.answer.push(delta)
        self.ending = shown.ending
        return shown

    def _note(self, delta: TokenDelta) -> None:
        """What the first or the last delta tells beside tokens."""
        if delta.finish_reason in ("abort", "error"):
            raise RequestFailed(f"the replica ended the request: {delta.finish_reason}")
        if delta.cached_tokens is not None:
            self.cached, self.predicted = delta.cached_tokens, delta.predicted_cached_tokens or 0


#: What `max_tokens: 0` shows of the one token that is generated.
NOTHING = TextDelta("", "length")


class Answer(ABC):
    """What becomes of the text of a generation."""

    @abstractmethod
    def add(self, choice: Choice, shown: TextDelta, *, first: bool) -> None:
        """What any choice shows next; `first`: nothing came of it yet."""

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

    __slots__ = (
        "_exchange",
        "_job",
        "_left",
        "_meter",
        "_tenant",
        "_ttft_s",
        "answer",
        "choices",
        "front",
        "metrics",
        "over",
    )

    def __init__(self, front: Front, job: Job, exchange: Exchange, answer: Answer) -> None:
        self.front = front
        self.metrics = job.served.metrics
        self.answer = answer
        self.choices: list[Choice] = []
        self.over = False
        self._job = job
        self._exchange = exchange
        self._left = 0  #: choices that have not ended
        self._tenant = ""
        self._meter: Meter | None = None
        self._ttft_s: float | None = None

    def begin(self, caller: Caller) -> None:
        """Send everything to the backend. Raises what the backend and the meter refuse with, and ClientGoneError."""
        exchange, job = self._exchange, self._job
        if exchange.gone:
            raise ClientGoneError
        meter = self.front.meters.get(caller.tenant.digest)
        if meter is not None:
            metering.begin(self.front, exchange, meter, [len(prompt.token_ids) for prompt in job.prompts])
        self._tenant = caller.tenant.label
        timeout_s = self.front.settings.request_timeout_s
        if job.timeout_s is not None:
            timeout_s = min(timeout_s, job.timeout_s)
        try:
            for prompt in job.prompts:
                self._open_prompt(prompt, caller, exchange.started_at + timeout_s)
        except BaseException:
            self._cancel()
            if meter is not None:
                metering.undo(self.front, exchange, meter, [len(prompt.token_ids) for prompt in job.prompts])
            raise
        self._meter = meter
        self._left = len(self.choices)
        exchange.on_gone = self._lose
        for choice in self.choices:
            choice.stream.listen(choice)

    def _open_prompt(self, prompt: Prompt, caller: Caller, deadline: float) -> None:
        for index in range(self._job.choices_per_prompt):
            stream = self._job.served.backend.generate(generation_request(self._job, prompt, caller, index, deadline))
            answer = AnswerText(self._job.served.text.detokenizer(), self._job.stops)
            self.choices.append(Choice(self, len(self.choices), prompt, stream, answer))

    # From the choices

    def first_token(self, now: float) -> None:
        """A choice got its first token."""
        ttft_s = now - self._exchange.started_at
        self.metrics.first_token(ttft_s)
        if self._ttft_s is None:
            self._ttft_s = ttft_s

    def ended(self) -> None:
        """A choice ended well."""
        self._left -= 1
        if self._left:
            self._cancel_ended()
            return
        self._close()
        self.answer.end(self)
        self._let_go()

    def fail(self, error: RouterError) -> None:
        """A choice broke, and with it the answer."""
        if self.over:
            return
        if isinstance(error, Superseded) and all(choice.last_token_at is None for choice in self.choices):
            self._begin_anew()
        else:
            self.break_off(error)

    def break_off(self, error: RouterError) -> None:
        """What came could not be made an answer of; once all choices are over, the whole could not."""
        if not self.over:
            self._close()
        if not self.answer.fail(self, error):
            fail(self._exchange, error)
        self._let_go()

    def crash(self, cause: Exception) -> None:
        """The same, by a fault of ours."""
        log.exception("answer_crashed request_id=%s", self._exchange.id)
        self.break_off(RouterError(f"internal error: {type(cause).__name__}"))

    def _begin_anew(self) -> None:
        """Nothing came yet: whoever serves the model now may as well answer, and nobody need know."""
        self.over = True
        self._cancel()
        meter, self._meter = self._meter, None
        if meter is not None:
            metering.undo(self.front, self._exchange, meter, [len(prompt.token_ids) for prompt in self._job.prompts])
        self._let_go()
        self._exchange.begin_anew()

    def _lose(self) -> None:
        """The client left."""
        self._close()
        self._let_go()

    def _let_go(self) -> None:
        """Choices and generation know each other: apart, they need no garbage collector."""
        self.choices = []

    def _cancel_ended(self) -> None:
        """After a stop string the replica would go on."""
        for choice in self.choices:
            if choice.ending:
                choice.stream.cancel()

    def _close(self) -> None:
        """No stream stays open, whatever ended the answer, and its tokens are counted."""
        self.over = True
        self._cancel()
        account = self._exchange.account = self._account()
        self.metrics.tokens(account.prompt_tokens, account.output_tokens)
        meter, self._meter = self._meter, None
        if meter is not None:
            meter.end(account.output_tokens, self.front.monotonic())

    def _cancel(self) -> None:
        for choice in self.choices:
            choice.stream.cancel()

    # Totals

    @property
    def discards(self) -> bool:
        """Whether what is generated is not shown."""
        return self._job.discard

    @property
    def prompt_tokens(self) -> int:
        """Of all prompts, each counted once."""
        return sum([len(prompt.token_ids) for prompt in self._job.prompts])

    def _account(self) -> Account:
        choices = self.choices
        first = choices[:: self._job.choices_per_prompt]  # prompts count once
        return Account(
            self._tenant,
            self.replicas(),
            self.prompt_tokens,
            sum([choice.predicted for choice in first]),
            sum([choice.cached for choice in first]),
            sum([choice.generated for choice in choices]),
            self._ttft_s,
        )

    def usage(self) -> answers.Usage:
        """What the whole request used; after its end."""
        account = self._exchange.account
        assert account is not None, "the usage of a generation that is not over"
        return answers.usage(account.prompt_tokens, account.output_tokens, account.cached_tokens)

    def headers(self) -> Headers:
        """What the answer's head tells of all this."""
        account = self._exchange.account or self._account()
        pinned = [choice.pinned for choice in self.choices if choice.pinned is not None]
        return answer_headers(account.replicas, account.cached_tokens, sum(pinned) if pinned else None)

    def replicas(self) -> str:
        """Where the choices run, each replica once."""
        if len(self.choices) == 1:
            return self.choices[0].stream.replica_id or ""
        return ",".join(dict.fromkeys([name for choice in self.choices if (name := choice.stream.replica_id)]))
