"""The choices of one HTTP request: opens their token streams, joins them, and closes all of them in any case.

Between `Backend` and the endpoints; knows tokens and text, but no shapes of answers.
"""

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from ...kvcache.hashing import token_bytes
from ...replica.messages import Pin, PositionLogprobs, SamplingParams
from ..backend import GenerationRequest, TokenDelta, TokenStream
from ..errors import RequestFailed, RouterError
from ..text.answer import AnswerText, Ending
from ..text.logprobs import TokenAt
from .front import Front, Served
from .headers import Caller
from .pins import PinWish
from .validate import choice_seed

#: Deltas that wait for a slow client when several choices share a connection; a choice then stops being read.
MERGE_QUEUE = 64


@dataclass(slots=True, frozen=True)
class Prompt:
    """One prompt: its ids and, where it came as text, that text."""

    token_ids: Sequence[int]
    text: str | None = None
    pins: tuple[PinWish, ...] = ()


@dataclass(slots=True, frozen=True)
class Job:
    """Everything that an HTTP request wants generated."""

    served: Served
    prompts: Sequence[Prompt]
    choices_per_prompt: int
    sampling: SamplingParams
    stops: tuple[str, ...] = ()
    priority: int = 0
    timeout_s: float | None = None
    discard: bool = False  #: `max_tokens: 0`: one token is generated for the prompt's sake and not shown


@dataclass(slots=True)
class Choice:
    """One sequence under way."""

    index: int
    prompt: Prompt
    stream: TokenStream
    answer: AnswerText
    generated: int = 0
    cached: int = 0
    pinned: int | None = None
    last_token_at: float | None = None
    ending: Ending | None = None


@dataclass(slots=True)
class Step:
    """What one delta added to a choice."""

    choice: Choice
    text: str
    tokens: list[TokenAt] = field(default_factory=list)
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    ending: Ending | None = None
    first: bool = False


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
        deadline=deadline,
        pins=tuple(Pin(wish.num_tokens, wish.ttl_s, caller.tenant.digest) for wish in wishes),
    )


class Generation:
    """The running choices of a job."""

    def __init__(self, front: Front, job: Job, caller: Caller, started_at: float) -> None:
        self._front = front
        self._job = job
        self._started_at = started_at
        self.choices: list[Choice] = []
        self._open(caller)

    def _open(self, caller: Caller) -> None:
        timeout_s = min(self._job.timeout_s or float("inf"), self._front.settings.request_timeout_s)
        try:
            for prompt in self._job.prompts:
                self._open_prompt(prompt, caller, self._started_at + timeout_s)
        except BaseException:
            self.cancel()
            raise

    def _open_prompt(self, prompt: Prompt, caller: Caller, deadline: float) -> None:
        for index in range(self._job.choices_per_prompt):
            stream = self._front.backend.generate(generation_request(self._job, prompt, caller, index, deadline))
            answer = AnswerText(self._job.served.text.detokenizer(), self._job.stops)
            self.choices.append(Choice(len(self.choices), prompt, stream, answer))

    def cancel(self) -> None:
        """Stop every choice; harmless for those that are over."""
        for choice in self.choices:
            choice.stream.cancel()

    @contextmanager
    def closing(self) -> Iterator["Generation"]:
        """Inside, steps are read; whatever way it is left, no stream stays open and the tokens are counted."""
        try:
            yield self
        finally:
            self.cancel()
            self._front.metrics.tokens(self.prompt_tokens, self.generated_tokens)

    # Reading

    def steps(self) -> AsyncGenerator[Step, None]:
        """Every step of every choice, as they come; to be closed. Raises RouterError when a stream breaks."""
        return self._steps_of(self.choices[0]) if len(self.choices) == 1 else self._merged()

    async def _steps_of(self, choice: Choice) -> AsyncGenerator[Step, None]:
        async for delta in choice.stream:
            yield self._take(choice, delta)
            if choice.ending:
                choice.stream.cancel()
                return
        raise RequestFailed("the token stream ended without a finish reason")

    async def _merged(self) -> AsyncGenerator[Step, None]:
        queue: asyncio.Queue[Step | RouterError | None] = asyncio.Queue(MERGE_QUEUE)
        readers = [asyncio.create_task(self._feed(choice, queue)) for choice in self.choices]
        try:
            remaining = len(readers)
            while remaining:
                item = await queue.get()
                if isinstance(item, RouterError):
                    raise item
                if item is None:
                    remaining -= 1
                else:
                    yield item
        finally:
            for reader in readers:
                reader.cancel()

    async def _feed(self, choice: Choice, queue: "asyncio.Queue[Step | RouterError | None]") -> None:
        try:
            async for step in self._steps_of(choice):
                await queue.put(step)
            await queue.put(None)
        except RouterError as error:
            await queue.put(error)
        except Exception as error:  # a reader that died silently would hang the answer
            await queue.put(RequestFailed(f"internal error: {error!r}"))

    def _take(self, choice: Choice, delta: TokenDelta) -> Step:
        if delta.finish_reason in ("abort", "error"):
            raise RequestFailed(f"the replica ended the request: {delta.finish_reason}")
        first = choice.last_token_at is None
        self._measure(choice)
        if delta.cached_tokens is not None:
            choice.cached = delta.cached_tokens
        if delta.pinned_tokens is not None:
            choice.pinned = delta.pinned_tokens
        if self._job.discard:
            choice.ending = "length"
            return Step(choice, "", [], delta.prompt_logprobs, "length", first)
        choice.generated += len(delta.token_ids)
        shown = choice.answer.push(delta)
        choice.ending = shown.ending
        return Step(choice, shown.text, shown.tokens, delta.prompt_logprobs, shown.ending, first)

    def _measure(self, choice: Choice) -> None:
        now = self._front.monotonic()
        if choice.last_token_at is None:
            self._front.metrics.first_token(now - self._started_at)
        else:
            self._front.metrics.inter_token(now - choice.last_token_at)
        choice.last_token_at = now

    # Totals

    @property
    def prompt_tokens(self) -> int:
        """Of all prompts, each counted once."""
        return sum(len(prompt.token_ids) for prompt in self._job.prompts)

    @property
    def generated_tokens(self) -> int:
        """Of all choices."""
        return sum(choice.generated for choice in self.choices)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens found in caches: of each prompt's first choice, since prompts count once."""
        return sum(choice.cached for choice in self.choices[:: self._job.choices_per_prompt])

    @property
    def pinned_tokens(self) -> int | None:
        """Prompt tokens that are kept now, over all prompts; None where nothing was to be kept."""
        told = [choice.pinned for choice in self.choices if choice.pinned is not None]
        return sum(told) if told else None

    @property
    def replicas(self) -> list[str]:
        """Where the choices run, each replica once."""
        return list(dict.fromkeys(choice.stream.replica_id for choice in self.choices if choice.stream.replica_id))
