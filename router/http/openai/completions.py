"""POST /v1/completions: from body to job, and from choices to OpenAI's completion shapes, `echo` included."""

from collections.abc import Sequence
from math import inf

import msgspec
from msgspec import UNSET

from ...config import RouterSettings
from ...errors import InvalidRequest
from ...text.answer import TextDelta
from ...text.logprobs import CompletionLogprobs, TokenAt, completion_logprobs, prompt_tokens
from ..front import Front, Served
from . import validate
from .answers import Completion, CompletionChoice, Usage
from .generation import Choice, Job, Prompt
from .pins import whole_prompt
from .schema import CacheControl, CompletionBody
from .sse import ChunkWriter


async def encoded_prompts(front: Front, served: Served, body: CompletionBody) -> list[Prompt]:
    """The body's prompts as ids; texts are encoded together."""
    given = validate.prompts(body.prompt, served.limits.vocab_size)
    texts = [each for each in given if isinstance(each, str)]
    if texts:
        encoded = await served.text.encode(texts, special_tokens=True)
        prompts = [Prompt(ids, text) for ids, text in zip(encoded, texts, strict=True)]
    else:
        prompts = [Prompt(each) for each in given if not isinstance(each, str)]
    if not all(prompt.token_ids for prompt in prompts):
        raise InvalidRequest("field 'prompt': a prompt has no tokens", param="prompt")
    if body.cache_control is None:
        return prompts
    return [_pinned(prompt, body.cache_control, front.settings) for prompt in prompts]


def _pinned(prompt: Prompt, control: CacheControl, settings: RouterSettings) -> Prompt:
    return Prompt(prompt.token_ids, prompt.text, whole_prompt(control, settings, prompt.token_ids))


def output_limit(front: Front, served: Served, prompts: Sequence[Prompt], body: CompletionBody) -> int:
    """Tokens that each prompt may get; the longest prompt decides about room."""
    longest = max(len(prompt.token_ids) for prompt in prompts)
    room = validate.room_for_answer(longest, body.max_tokens, served.limits, param="prompt", limit_param="max_tokens")
    if body.max_tokens is None:
        return min(front.settings.default_max_tokens, room)
    return max(body.max_tokens, 1)


def scored_alternatives(body: CompletionBody) -> int | None:
    """Alternatives to score at each token; None: not even the token. Among `best_of` answers logprobs decide."""
    if body.logprobs is None and body.best_of is not None and body.best_of > (body.n or 1):
        return 0
    return body.logprobs


def mean_logprob(choice: Choice) -> float:
    """How likely the model finds an answer, per token; of one without tokens nothing is known."""
    scores = [each.logprobs.chosen.logprob for each in choice.tokens if each.logprobs is not None]
    return sum(scores) / len(scores) if scores else -inf


async def job(front: Front, served: Served, body: CompletionBody) -> Job:
    """What `body` asks for. Raises InvalidRequest and its kin, each naming the field."""
    validate.check_completion(body)
    prompts = await encoded_prompts(front, served, body)
    shared = validate.sampling(
        body,
        served.limits,
        max_tokens=output_limit(front, served, prompts, body),
        seed=front.random_bits(64) if body.seed is None else body.seed,
        logprobs=scored_alternatives(body),
    )
    if body.echo and body.logprobs is not None:
        shared = msgspec.structs.replace(shared, prompt_logprobs=body.logprobs)
    return Job(
        served=served,
        prompts=prompts,
        choices_per_prompt=validate.choices_per_prompt(body, len(prompts), front.settings.max_choices),
        sampling=shared,
        stops=validate.stop_strings(body),
        priority=body.priority or 0,
        timeout_s=body.timeout,
        tokens_per_delta=validate.tokens_per_delta(body),
        discard=body.max_tokens == 0,
    )


class CompletionShape:
    """What all parts of one completion have in common."""

    def __init__(self, served: Served, body: CompletionBody, answer_id: str, created: int) -> None:
        self.id = f"cmpl-{answer_id}"
        self.created = created
        self.model = served.limits.name
        self._text = served.text
        self._logprobs = body.logprobs
        self._echo = bool(body.echo)
        self._kept = body.n or 1
        self._drawn = body.best_of or self._kept

    def echoed(self, prompt: Prompt) -> str:
        """What stands before the answer."""
        if not self._echo:
            return ""
        return self._text.decode(prompt.token_ids, skip_special_tokens=True) if prompt.text is None else prompt.text

    def best(self, choices: Sequence[Choice]) -> Sequence[Choice]:
        """Of each prompt's answers the `n` best, the best one first; all in their order where no more were drawn."""
        if self._drawn == self._kept:
            return choices
        prompts = [choices[start : start + self._drawn] for start in range(0, len(choices), self._drawn)]
        ranked = [sorted(answers, key=mean_logprob, reverse=True) for answers in prompts]
        return [each for answers in ranked for each in answers[: self._kept]]

    def logprobs(self, tokens: Sequence[TokenAt], before: int) -> CompletionLogprobs | None:
        """Logprobs of an answer's tokens, whose text begins `before` characters into the whole."""
        if self._logprobs is None:
            return None
        moved = [TokenAt(each.token_id, each.offset + before, each.logprobs) for each in tokens] if before else tokens
        return completion_logprobs(moved, self._logprobs, self._text.piece)

    def echoed_tokens(self, choice: Choice) -> list[TokenAt]:
        """The prompt's tokens with their logprobs, if they were asked for."""
        if choice.prompt_logprobs is None:
            return []
        return prompt_tokens(choice.prompt.token_ids, choice.prompt_logprobs, self._text.detokenizer())

    def whole_logprobs(self, choice: Choice, before: int) -> CompletionLogprobs | None:
        """Logprobs of echoed prompt and answer."""
        if self._logprobs is None:
            return None
        moved = [TokenAt(each.token_id, each.offset + before, each.logprobs) for each in choice.tokens]
        return self.logprobs([*self.echoed_tokens(choice), *moved], 0)

    def whole(self, choices: Sequence[Choice], counts: Usage) -> object:
        """The body of an answer that is not streamed."""
        told = [self._choice(index, each) for index, each in enumerate(self.best(choices))]
        return Completion(id=self.id, created=self.created, model=self.model, choices=told, usage=counts)

    def _choice(self, index: int, made: Choice) -> CompletionChoice:
        echo = self.echoed(made.prompt)
        return CompletionChoice(index, echo + made.text, made.ending or "stop", self.whole_logprobs(made, len(echo)))


class CompletionChunks(ChunkWriter):
    """Chunks of a streamed completion; with `echo` the prompt stands on a choice's first chunk."""

    def __init__(self, shape: CompletionShape, body: CompletionBody) -> None:
        super().__init__(body.stream_options)
        self._shape = shape

    def chunk(self, choice: Choice, shown: TextDelta, counts: Usage | None, *, first: bool) -> object:
        """See `ChunkWriter.chunk`."""
        shape = self._shape
        text = shape.echoed(choice.prompt) + shown.text if first else shown.text
        told = CompletionChoice(choice.index, text, shown.ending, shape.logprobs(shown.tokens, 0))
        usage = counts if counts is not None else (None if self.include_usage else UNSET)
        return Completion(id=shape.id, created=shape.created, model=shape.model, choices=[told], usage=usage)

    def last(self, counts: Usage) -> object:
        """See `ChunkWriter.last`."""
        shape = self._shape
        return Completion(id=shape.id, created=shape.created, model=shape.model, choices=[], usage=counts)
