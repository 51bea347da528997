"""The running choices of one HTTP request: opens their token streams, collects their text, and closes all streams.

Sits between `Backend` and the response writers of a dialect. Everything runs in callbacks: a token costs neither an
iteration of the event loop nor a task.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from ...kvcache.hashing import token_bytes
from ...replica.messages import Constraint, EmbeddingParams, EncodedPosition, Pin, SamplingParams
from ..activity import ChoiceRecord
from ..backend import GenerationRequest, TokenDelta, TokenStream
from ..errors import RequestFailed, RouterError, Superseded
from ..text.answer import (
    AnswerBlock,
    AnswerText,
    ContentTokens,
    Ending,
    LastCall,
    TextDelta,
    TokenAnswerText,
    TokenAt,
    parse_deltas,
    with_deltas,
)
from ..text.conversation import Conversation
from ..text.detokenizer import Detokenizer
from ..text.parsers.deltas import Content, Delta, Reasoning, ToolCallStart
from ..text.parsers.parser import AnswerParser
from .caller import Caller
from .departures import Departure
from .errors import send_error
from .front import Front, Served
from .protocol.exchange import ClientGoneError, Exchange, GenerationSummary, Headers

if TYPE_CHECKING:
    from .dialects.dialect import StreamWriter, WholeWriter

log = logging.getLogger(__name__)

SEED_MASK = 2**64 - 1
#: Choices of a request that its record describes.
MAX_RECORDS = 8
#: Choices that begin or are cancelled in one iteration of the event loop: each takes about 0.1 ms.
CHOICES_AT_ONCE = 32
_encode_text = msgspec.json.Encoder().encode
#: The text of a choice whose token is discarded (`max_tokens: 0`).
_DISCARDED = TextDelta("", "length")


class PinRequest(msgspec.Struct, frozen=True, gc=False):
    """A request to keep the first `num_tokens` tokens of a prompt cached for `ttl_s` seconds."""

    num_tokens: int
    ttl_s: float


class EncodedPrompt(msgspec.Struct, frozen=True, gc=False):
    """One prompt as token ids, with its text if it arrived as text."""

    token_ids: Sequence[int]
    text: str | None = None
    pins: tuple[PinRequest, ...] = ()


class Job(msgspec.Struct, frozen=True, gc=False):
    """Everything that one HTTP request asks to generate, in the form that all dialects share."""

    served: Served
    prompts: Sequence[EncodedPrompt]
    choices_per_prompt: int
    sampling: SamplingParams
    salt: bytes = b""  #: requests share cached blocks only under equal salts
    stops: tuple[str, ...] = ()
    priority: int = 0
    timeout_s: float | None = None
    tokens_per_delta: int = 1  #: more if the response is not streamed
    #: Makes the parser of one choice, if its text may hold reasoning or tool calls.
    parser: Callable[[], AnswerParser] | None = None
    markers: Sequence[str] = ()  #: special tokens that the parser needs to see
    session: str | None = None  #: named in the body; a session named in a header takes precedence
    constraint: Constraint | None = None  #: what each choice must match; already checked
    engine_renders: bool = False  #: external engines get the chat itself, and render and parse it
    chat: bytes = b""  #: that chat in JSON, as the client sent it; empty: the engine gets token ids
    given: dict[str, Any] = {}  #: for external engines that get ids: the fields that the client set
    conversation: Conversation | None = None  #: the conversation that the prompt was rendered from
    show_special: bool = False  #: special tokens are part of the text
    show_stop: bool = False  #: the stop string or stop token that ends the text is part of it
    keep_tokens: bool = False  #: report token ids even if no logprobs are requested
    content_logprobs: bool = False  #: report logprobs of the content only, without reasoning and calls
    embedding: EmbeddingParams | None = None  #: compute the prompts' vectors instead of generating tokens
    discard: bool = False  #: `max_tokens: 0`: one token is generated to score the prompt, but not shown


def generation_request(
    job: Job,
    prompt: EncodedPrompt,
    caller: Caller,
    index: int = 0,
    deadline: float | None = None,
    traceparent: str = "",
) -> GenerationRequest:
    """The backend's request for choice `index` of a prompt: seeded with seed + index; only choice 0 carries pins."""
    sampling, tenant = job.sampling, caller.tenant
    return GenerationRequest(
        trace_id=caller.request_id,
        traceparent=traceparent,
        token_ids=token_bytes(prompt.token_ids),
        sampling=msgspec.structs.replace(sampling, seed=(sampling.seed + index) & SEED_MASK) if index else sampling,
        salt=job.salt,
        session=caller.session or job.session,
        # Any tenant may queue behind the others, but ahead of them only if its limits allow it.
        priority=job.priority if tenant.limits.global_priority else max(0, job.priority),
        own_order=job.priority,
        tenant=tenant.digest,
        weight=tenant.limits.weight,
        deadline=deadline,
        tokens_per_delta=job.tokens_per_delta,
        pins=() if index else tuple([Pin(pin.num_tokens, pin.ttl_s, tenant.digest) for pin in prompt.pins]),
        constraint=job.constraint,
        chat=job.chat,
        embedding=job.embedding,
        given=job.given,
        adapter=job.served.adapter,
    )


class RunningChoice(msgspec.Struct, eq=False):
    """One sequence being generated; the sink of its token stream."""

    generation: "Generation"
    index: int
    prompt: EncodedPrompt
    stream: TokenStream
    answer: AnswerText
    # Read for every token, so next to each other:
    generated: int = 0
    last_token_at: float | None = None
    ending: Ending | None = None
    parser: AnswerParser | None = None
    content_tokens: ContentTokens | None = None
    calls: int = 0  #: tool calls so far
    last_call: LastCall | None = None  #: of an answer that an engine has parsed
    #: set by builders of streams: the bytes before and after the JSON string of an event that is only text
    around_text: tuple[bytes, bytes] | None = None
    #: the answer's decoder, if its text needs nothing else: no stop strings, parser or logprobs
    plain: Detokenizer | None = None
    # Read once or rarely:
    cached: int = 0
    loaded: tuple[tuple[str, int], ...] = ()  #: the part of `cached` loaded from tiers, by medium
    waited_s: float | None = None
    pinned: int | None = None
    prompt_logprobs: list[EncodedPosition] | None = None
    reasoning_tokens: int = 0
    blocks: list[AnswerBlock] = []  #: the answer so far, if the response is not streamed
    tokens: list[TokenAt] = []  #: the answer's tokens, if logprobs or token ids were requested
    embedding: bytes | None = None  #: the prompt's vector, float32 LE

    @property
    def text(self) -> str:
        """The answer's text without reasoning and calls; empty if the response is streamed."""
        return "".join([block.text for block in self.blocks if block.kind == "text"])

    def delta(self, delta: TokenDelta) -> None:
        generation = self.generation
        if generation.over or self.ending:
            return
        try:
            last = self.last_token_at
            now = self.last_token_at = generation.front.monotonic()
            if last is None:
                generation.first_token(now)
                self.pinned, self.prompt_logprobs = delta.pinned_tokens, delta.prompt_logprobs
                self.embedding = delta.embedding
            else:
                generation.metrics.inter_token(now - last)
            if (
                self.around_text is not None
                and self.plain is not None
                and delta.finish_reason is None
                and delta.text is None
                and delta.cached_tokens is None
            ):  # most deltas of a stream; the general way below takes 5 % more CPU per chunk
                self.generated += len(delta.token_ids)
                if text := self.plain.push(delta.token_ids):
                    before, after = self.around_text
                    generation.send_chunk(before + _encode_text(text) + after)
                return
            if delta.finish_reason in ("abort", "error"):
                raise RequestFailed(f"the replica ended the request: {delta.finish_reason}")
            if delta.cached_tokens is not None:
                self.cached, self.waited_s = delta.cached_tokens, delta.waited_s
                self.loaded = delta.loaded_tokens
            if last is None and generation.job.discard:  # there is only one token then
                shown = _DISCARDED
            else:
                self.generated += len(delta.token_ids) + delta.text_tokens
                shown = self.answer.push(delta)
                received = shown.text
                if delta.deltas or (self.parser is not None if delta.deltas is None else self.calls):
                    shown = self._parsed(shown, delta)
                if self.content_tokens is not None:
                    shown = self.content_tokens.push(received, shown)
            self.ending = shown.ending
            generation.writer.add(self, shown, first=last is None)
            if shown.ending:
                generation.choice_ended(self)
        except RouterError as error:
            generation.abort(error)
        except Exception as error:  # if it propagated, it would interrupt the delivery of other requests' tokens
            generation.crash(error)

    def _parsed(self, shown: TextDelta, delta: TokenDelta) -> TextDelta:
        received = shown.text
        if delta.deltas is None:
            found: Sequence[Delta] = parse_deltas(self.parser, shown)
            called = self.parser is not None and self.parser.called
        else:
            found = delta.deltas or [Content(shown.text)]
            self.last_call = self.last_call or LastCall()
            self.last_call.add(found)
            called = bool(shown.ending) and self.last_call.complete
        shown = with_deltas(shown, found, called=called)
        if shown.deltas:
            self.calls += sum([type(each) is ToolCallStart for each in shown.deltas])
            if reasoned := sum([len(each.text) for each in shown.deltas if type(each) is Reasoning]):
                # A delta of many tokens may hold markers or the answer, too: the text's share is that of the tokens.
                tokens = len(delta.token_ids) + delta.text_tokens
                self.reasoning_tokens += -(-tokens * reasoned // max(len(received), reasoned))
        return shown

    def failed(self, error: RouterError) -> None:
        self.generation.fail(error)


class Generation:
    """The choices of a job, from `begin` until every choice has ended, one has failed, or the client has left."""

    __slots__ = (
        *("_caller", "_departure", "_exchange", "_prepare_s", "_ttft_s"),
        *("choices", "front", "job", "left", "metrics", "over", "send_chunk", "writer"),
    )

    def __init__(
        self,
        front: Front,
        job: Job,
        exchange: Exchange,
        caller: Caller,
        writer: "StreamWriter | WholeWriter",
        departure: Callable[[int], Departure | None] | None = None,
    ) -> None:
        """`departure`: finds the prompt's departure, given the number of known prompt tokens."""
        self.front = front
        self.job = job
        self.metrics = job.served.metrics
        self.writer = writer
        #: Sends a part of a stream that has begun and not ended.
        self.send_chunk: Callable[[bytes], None] = exchange.wire.send_chunk
        self.choices: list[RunningChoice] = []
        self.over = False
        exchange.model = job.served.limits.name
        self._exchange = exchange
        self._caller = caller
        self._departure = departure
        self.left = 0  #: choices that have not ended
        self._ttft_s: float | None = None
        self._prepare_s = front.monotonic() - exchange.started_at  #: reading, decoding and tokenizing the request

    async def begin(self) -> None:
        """Send all choices to the backend: many in turns, among tenants.

        Raises the errors of backend and rate limiter, and ClientGoneError.
        """
        exchange, job = self._exchange, self.job
        if exchange.gone:
            raise ClientGoneError
        # Each choice counts with its prompt, as each is a request to the replicas.
        self._caller.begin([len(prompt.token_ids) for prompt in job.prompts for _ in range(job.choices_per_prompt)])
        limit_s = self.front.settings.request_timeout_s
        timeout_s = limit_s if job.timeout_s is None else min(limit_s, job.timeout_s)
        deadline = exchange.started_at + timeout_s
        try:
            for prompt in job.prompts:
                for index in range(job.choices_per_prompt):
                    if self.choices and not len(self.choices) % CHOICES_AT_ONCE:
                        await self.front.body_reader.turn(exchange, self.tenant)
                    self._begin_choice(prompt, index, deadline)
        except BaseException:
            self._cancel()
            self._caller.refund()
            raise
        self.left = len(self.choices)
        exchange.on_gone, exchange.generation = self._client_left, self
        for number, choice in enumerate(self.choices):
            if number and not number % CHOICES_AT_ONCE:  # many may have ended meanwhile
                await self.front.body_reader.turn(exchange, self.tenant)
            if self.over:
                return
            choice.stream.listen(choice)

    def _begin_choice(self, prompt: EncodedPrompt, index: int, deadline: float) -> None:
        job, served = self.job, self.job.served
        request = generation_request(job, prompt, self._caller, index, deadline, self._exchange.traceparent)
        stream = served.backend.generate(request)
        parser = job.parser() if job.parser is not None else None
        detokenizer = served.text.detokenizer(job.markers, special=job.show_special)
        kind = TokenAnswerText if job.keep_tokens else AnswerText
        answer = kind(detokenizer, job.stops, min_tokens=job.sampling.min_tokens, show_stop=job.show_stop)
        choice = RunningChoice(self, len(self.choices), prompt, stream, answer, parser=parser)
        if job.content_logprobs:
            choice.content_tokens = ContentTokens()
        if parser is None and not job.stops and not job.keep_tokens and job.sampling.logprobs is None:
            choice.plain = detokenizer
        self.choices.append(choice)

    @property
    def tenant(self) -> bytes:
        return self._caller.tenant.digest

    def first_token(self, now: float) -> None:
        ttft_s = now - self._exchange.started_at
        self.metrics.first_token(ttft_s)
        if self._ttft_s is None:
            self._ttft_s = ttft_s

    def choice_ended(self, choice: RunningChoice) -> None:
        """Finish the response after the last choice; before, only the stream of this one, if it hit a stop string."""
        self.left -= 1
        if self.left:
            choice.stream.cancel(answered=True)
            return
        self._close()
        self.writer.end(self)
        self.choices = []

    def fail(self, error: RouterError) -> None:
        """Abort because a choice failed; if its model was replaced before the first token, restart the request."""
        if self.over:
            return
        if isinstance(error, Superseded) and all(choice.last_token_at is None for choice in self.choices):
            self.over = True
            self._cancel()
            self._caller.refund()
            self.choices = []
            self._exchange.generation = None
            self._exchange.restart()
        else:
            self.abort(error)

    def abort(self, error: RouterError) -> None:
        """End the response with an error, even if all choices have ended and only its last part could not be built."""
        self._exchange.error = error
        if not self.over:
            self._close()
        if not self.writer.fail(self, error):
            send_error(self._exchange, error)
        self.choices = []

    def crash(self, cause: Exception) -> None:
        """End the response with an error after a fault in this process."""
        log.exception("answer_crashed request_id=%s", self._exchange.id)
        self.abort(RouterError(f"internal error: {type(cause).__name__}"))

    def _client_left(self) -> None:
        self._close()
        self.choices = []

    def _close(self) -> None:
        """Close all streams and account for their tokens, whatever ended the response.

        The caller then empties `choices`: this breaks a reference cycle, so the garbage collector has nothing to do.
        """
        self.over = True
        self._cancel()
        summary = self._exchange.summary = self._summary()
        self._exchange.generation = None
        if self.front.history is not None:
            summary.choices, summary.hidden = self.records()
        self.metrics.tokens(summary.prompt_tokens, summary.output_tokens)
        self._caller.end(summary.output_tokens)

    def _cancel(self) -> None:
        """Cancel all choices, the last first: they may still wait, and would only be sent to be cancelled."""
        _cancel_some(self.choices[::-1])

    def _summary(self) -> GenerationSummary:
        choices, caller, job = self.choices, self._caller, self.job
        first = choices[0].stream.forecast if choices else None
        prompt_tokens = predicted = cached = generated = reasoning = pinned = moves = 0
        replicas: dict[str, None] = {}
        loaded: dict[str, int] = {}
        for prompt in job.prompts:
            prompt_tokens += len(prompt.token_ids)
        for index, choice in enumerate(choices):
            if name := choice.stream.replica_id:
                replicas[name] = None
            if not index % job.choices_per_prompt:  # prompts count once
                predicted += forecast.cached_tokens if (forecast := choice.stream.forecast) is not None else 0
                cached += choice.cached
                for medium, tokens in choice.loaded:
                    loaded[medium] = loaded.get(medium, 0) + tokens
            generated += choice.generated
            reasoning += choice.reasoning_tokens
            pinned += choice.pinned or 0
            moves += choice.stream.continuations
        return GenerationSummary(
            caller.tenant.label,
            ",".join(replicas),
            prompt_tokens,
            predicted,
            cached,
            generated,
            self._ttft_s,
            reasoning,
            pinned,
            None if first is None else self._prepare_s + first.queue_s,
            caller.session or job.session,
            caller.agent,
            caller.parent,
            first,
            moves,
            job.served.limits.name,
            choices[0].waited_s if choices else None,
            loaded_tokens=loaded,
        )

    def records(self) -> tuple[list[ChoiceRecord], int]:
        """What has become of the first choices so far, and the number of further ones."""
        now, offset_s = self.front.monotonic(), self.front.clock_offset_s
        found = []
        for choice in self.choices[:MAX_RECORDS]:
            record = choice.stream.record(offset_s)
            if record.missing is not None:
                record = msgspec.structs.replace(record, missing=self.front.shown(record.missing, admin=True))
            if not self.over:
                since = choice.last_token_at or self._exchange.started_at
                record = msgspec.structs.replace(record, silent_s=max(0.0, now - since))
            found.append(record)
        return found, max(0, len(self.choices) - MAX_RECORDS)

    def summary(self) -> GenerationSummary:
        """The request's token counts and times: so far, or final once it has ended."""
        return self._exchange.summary or self._summary()

    def headers(self) -> Headers:
        """Response headers: replicas, cached tokens and, where they apply, loaded and pinned ones and the departure."""
        summary = self.summary()
        headers: list[tuple[str, object]] = [("x-homing-cached-tokens", summary.cached_tokens)]
        if summary.loaded_tokens:
            loaded = ", ".join(f"{medium}={tokens}" for medium, tokens in summary.loaded_tokens.items())
            headers.append(("x-homing-loaded-tokens", loaded))
        pinned = [choice.pinned for choice in self.choices if choice.pinned is not None]
        if pinned:
            headers.append(("x-homing-pinned-tokens", sum(pinned)))
        if summary.replicas:
            headers.append(("x-homing-replica", summary.replicas))
        if self._departure is not None:
            forecast = self.choices[0].stream.forecast
            departure = self._departure(0 if forecast is None else forecast.known_tokens)
            if departure is not None:
                self._exchange.departure = departure.token, departure.at
                headers.append(("x-homing-departure", departure.header()))
        return headers


def _cancel_some(choices: Sequence[RunningChoice]) -> None:
    """Cancel choices, and those behind them in later iterations of the event loop."""
    for choice in choices[:CHOICES_AT_ONCE]:
        choice.stream.cancel(answered=choice.ending is not None)
    if rest := choices[CHOICES_AT_ONCE:]:
        asyncio.get_running_loop().call_soon(_cancel_some, rest)
