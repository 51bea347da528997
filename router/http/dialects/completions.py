"""The dialect of POST /v1/completions: OpenAI's text completions, `echo` and `best_of` included."""

from array import array
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from math import inf
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from ....replica.messages import EncodedPosition, PositionLogprobs, decoded_positions
from ...errors import InvalidRequest
from ...text.answer import Ending, TextDelta, TokenAt
from ...text.encoder import TokenIds
from ...text.encoder_threads import Sender
from ..front import Front, Served
from ..generation import EncodedPrompt, Job, RunningChoice
from . import validate
from .bounds import Name, Rendered
from .chunks import ChunkBuilder, ChunkUsage, if_given
from .dialect import Dialect
from .logprobs import PromptLogprobs, finite
from .long_json import LongList, Steps, slices
from .pins import whole_prompt
from .schema import Body, unknown_format_keys

#: A prompt as text or token ids, or several of them; `prompts` tells them apart, because msgspec can decode only one
#: array type in a union.
PromptField = Rendered[str | list[str | int | list[int]]]
#: Output limit of a completion that sets none: models that only continue a text often never stop.
FALLBACK_MAX_TOKENS = 512


class CompletionBody(Body, kw_only=True, forbid_unknown_fields=True):
    """The request body."""

    prompt: PromptField
    best_of: Annotated[int, Meta(ge=0, le=1024)] | None = None  #: 0: same as null
    echo: bool | None = None
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    suffix: Name | None = None

    @property
    def echoes(self) -> bool:
        return bool(self.echo)


def unknown(body: CompletionBody) -> Iterator[tuple[str, str]]:
    """Unknown keys of the format."""
    return unknown_format_keys(body.response_format)


async def job(front: Front, served: Served, body: CompletionBody, sender: Sender) -> Job:
    """The job that `body` requests. Raises InvalidRequest and its subclasses, which name the field."""
    kept, scored = body.n or 1, body.logprobs
    best_of = body.best_of or None
    if best_of is not None and best_of < kept:
        raise InvalidRequest.field("best_of", f"must be at least n, which is {kept}")
    if best_of is not None and best_of > kept:
        if body.stream:
            raise InvalidRequest.field(
                "best_of", "cannot be streamed, because the best choices are only known at the end"
            )
        scored = scored or 0  # choices are ranked by their logprobs
    if body.suffix:
        raise InvalidRequest.field("suffix", "insertion is not supported")
    if body.max_tokens == 0 and not body.echo:
        raise InvalidRequest.field("max_tokens", "0 is only allowed with 'echo'")
    if body.echo and body.stream and body.logprobs is not None:
        raise InvalidRequest.field("echo", "cannot be streamed together with 'logprobs'")
    validate.check_choices(front.settings, best_of or kept, _num_prompts(body.prompt), "best_of" if best_of else "n")
    given = prompts(body.prompt, served.limits.vocab_size, "prompt")
    texts = [each for each in given if isinstance(each, str)]
    encoded = [each for each in given if not isinstance(each, str)]
    if texts:
        context: int | None = served.limits.max_model_len
        if body.truncate_prompt_tokens is not None:
            sender, context = sender.unlimited(), None
        encoded = await served.text.encode(texts, special_tokens=True, sender=sender, context=context, param="prompt")
    if body.truncate_prompt_tokens is not None:
        whole = encoded
        encoded = [validate.truncated(each, body, served.limits.max_model_len) for each in whole]
        if encoded != whole:
            texts = []  # they no longer match the truncated ids
    if body.echo and not texts:
        texts = await served.text.decode_long(encoded, sender)
    if not all(encoded):
        raise InvalidRequest.field("prompt", "a prompt has no tokens")
    output = {"response_format": body.response_format} if body.response_format is not None else {}
    asked = await validate.requested_output(front.settings, served, body, sender, output)
    mark = validate.mark(body.cache_control, "cache_control")
    return await validate.job(
        front,
        served,
        body,
        sender,
        [
            EncodedPrompt(ids, text, whole_prompt(mark, front.settings, ids))
            for ids, text in zip_longest(encoded, texts)
        ],
        prompt_param="prompt",
        wanted=body.max_tokens,
        fallback_max_tokens=FALLBACK_MAX_TOKENS,
        best_of=best_of,
        logprobs=scored,
        prompt_logprobs=body.logprobs if body.echo else None,
        constraint=None if asked is None else await served.text.constraints.check(asked, sender.tenant),
        session=body.prompt_cache_key if isinstance(body.prompt_cache_key, str) else None,
    )


def _num_prompts(field: str | list[Any]) -> int:
    return 1 if isinstance(field, str) or not field or isinstance(field[0], int) else len(field)


def prompts(field: PromptField, vocab_size: int, param: str) -> list[str] | list[TokenIds]:
    """The separate prompts: all of them texts, or all of them ids below `vocab_size`.

    Raises InvalidRequest, with `param` as the name of the field.
    """
    if isinstance(field, str):
        return [field]
    if not field:
        raise InvalidRequest.field(param, "at least one prompt or token id is needed")
    given: list[Any] = field
    if isinstance(given[0], int):
        return [token_prompt(given, vocab_size, param)]
    if all(isinstance(each, str) for each in given):
        return given
    if all(isinstance(each, list) for each in given):
        return [token_prompt(each, vocab_size, param) for each in given]
    raise _mixed(param)


def token_prompt(ids: list[Any], vocab_size: int, param: str) -> TokenIds:
    """The ids as an array, which takes a tenth of a list's memory and whose constructor checks the elements."""
    try:
        made = array("I", ids)
    except TypeError:
        raise _mixed(param) from None
    except OverflowError:
        raise validate.no_such_token(vocab_size, param) from None
    if ids and max(ids) >= vocab_size:
        raise validate.no_such_token(vocab_size, param)
    return made


def _mixed(param: str) -> InvalidRequest:
    return InvalidRequest.field(param, "texts and token ids cannot be mixed in one list")


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """`choices[].logprobs`: one element per token in each list."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(msgspec.Struct, frozen=True):
    """One choice, or a chunk's part of it (only there the finish reason may be null)."""

    index: int
    text: str
    finish_reason: Ending | None = None
    logprobs: CompletionLogprobs | None = None
    # Of a response that is not streamed, null if they were not requested: clients of vLLM read them in any case.
    token_ids: list[int] | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType | None = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType | None = UNSET


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """A response that is not streamed, or one event of a stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: ChunkUsage = UNSET


class CompletionBuilder(ChunkBuilder):
    """Builds the bodies of one completion. With `echo`, the prompt precedes the generated text."""

    __slots__ = ("_best_of", "_echo", "_n", "_top")

    whole_type = chunk_type = Completion

    def __init__(self, served: Served, body: CompletionBody, response_id: str, created: int) -> None:
        super().__init__(served, body, f"cmpl-{response_id}", created)
        self._top = body.logprobs if body.logprobs is None else len(body.logprob_token_ids or ()) or body.logprobs
        self._echo = bool(body.echo)
        self._n = body.n or 1
        self._best_of = body.best_of or self._n

    def choices(self, choices: Sequence[RunningChoice]) -> Iterator[Steps[CompletionChoice]]:
        return (self._choice(index, each) for index, each in enumerate(self._ranked(choices)))

    def parts(self, choice: RunningChoice, shown: TextDelta, *, first: bool) -> list[CompletionChoice]:
        text = self._echoed(choice.prompt) + shown.text if first else shown.text
        ids, prompt = self._ids(shown.tokens), self._prompt_ids(choice) if first else None
        given = if_given(ids), if_given(prompt)
        return [CompletionChoice(choice.index, text, shown.ending, self.logprobs(shown.tokens), *given)]

    def _choice(self, index: int, choice: RunningChoice) -> Steps[CompletionChoice]:
        echo = self._echoed(choice.prompt)
        return CompletionChoice(
            index,
            echo + choice.text,
            choice.ending or "stop",
            (yield from self._all_logprobs(choice, echo)),
            self._ids(choice.tokens),
            self._prompt_ids(choice),
            (yield from self._scores(choice)),
        )

    def _all_logprobs(self, choice: RunningChoice, echo: str) -> Steps[CompletionLogprobs | None]:
        """`logprobs` of the echoed prompt, whose text is `echo`, and of the answer after it."""
        if self._top is None:
            return None
        columns, first = [LongList() for _ in CompletionLogprobs.__struct_fields__], True
        for tokens in self._token_slices(choice, echo):
            if not first:
                yield
            first = False
            for column, values in zip(columns, msgspec.structs.astuple(self._columns(tokens, self._top)), strict=True):
                column.add(values)
        return CompletionLogprobs(*[column.ended() for column in columns])

    def _token_slices(self, choice: RunningChoice, echo: str) -> Iterator[Sequence[TokenAt]]:
        each = (self._top or 0) + 1
        if self._echo:
            yield from self._echoed_tokens(choice.prompt, echo, choice.prompt_logprobs or (), each)
        for part in slices(choice.tokens, each):
            yield [TokenAt(token.token_id, token.offset + len(echo), token.logprobs) for token in part]

    def _echoed(self, prompt: EncodedPrompt) -> str:
        """The prompt's text if it is to be echoed, else empty; special tokens among given ids are shown by name."""
        return (prompt.text or "") if self._echo else ""

    def _echoed_tokens(
        self, prompt: EncodedPrompt, text: str, logprobs: Sequence[EncodedPosition], values_each: int
    ) -> Iterator[Sequence[TokenAt]]:
        """The prompt's tokens with the offsets of their text; none if an engine reported no logprobs for them.

        Special tokens that the tokenizer added around `text` are not part of it: their offsets are at its ends.
        """
        detokenizer, starts, parts, at = self._model_text.detokenizer(special=True), array("Q"), [], 0
        for token_ids in slices(prompt.token_ids):
            for token_id in token_ids:
                starts.append(at)
                parts.append(detokenizer.push([token_id]))
                at += len(parts[-1])
            if len(starts) < len(prompt.token_ids):
                yield ()
        added = max(0, "".join(parts).find(text))
        for numbers in slices(range(min(len(starts), len(logprobs))), values_each):
            positions = decoded_positions(logprobs[numbers[0] : numbers[-1] + 1])
            yield [
                TokenAt(prompt.token_ids[number], min(max(0, starts[number] - added), len(text)), position)
                for number, position in zip(numbers, positions, strict=True)
            ]

    def _ranked(self, choices: Sequence[RunningChoice]) -> Sequence[RunningChoice]:
        """The `n` best of each prompt's choices, best first; all choices in order if no more were generated."""
        if self._best_of == self._n:
            return choices
        by_prompt = [choices[start : start + self._best_of] for start in range(0, len(choices), self._best_of)]
        ranked = [sorted(each, key=_mean_logprob, reverse=True) for each in by_prompt]
        return [choice for each in ranked for choice in each[: self._n]]

    def logprobs(self, tokens: Sequence[TokenAt]) -> CompletionLogprobs | None:
        """Parallel lists over the tokens; None if logprobs were not requested."""
        return None if self._top is None else self._columns(tokens, self._top)

    def _columns(self, tokens: Sequence[TokenAt], top: int) -> CompletionLogprobs:
        return CompletionLogprobs(
            text_offset=[token.offset for token in tokens],
            token_logprobs=[finite(token.logprobs.chosen.logprob) if token.logprobs else None for token in tokens],
            tokens=[self._name(token.token_id) for token in tokens],
            top_logprobs=[self._alternatives(token.logprobs, top) for token in tokens],
        )

    def _alternatives(self, position: PositionLogprobs | None, top: int) -> dict[str, float] | None:
        """The `top` most likely tokens and the chosen one; None for the first token of a prompt."""
        if position is None:
            return None
        names: dict[str, float] = {}
        for each in [*position.top[:top], position.chosen]:
            names.setdefault(self._name(each.token_id), finite(each.logprob))
        return names

    def _name(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._by_id else unique_name(self._model_text.piece(token_id))


def _mean_logprob(choice: RunningChoice) -> float:
    """Mean logprob per token; a choice without tokens ranks last."""
    scores = [each.logprobs.chosen.logprob for each in choice.tokens if each.logprobs is not None]
    return sum(scores) / len(scores) if scores else -inf


def unique_name(piece: bytes) -> str:
    """A token as text; partial characters as `bytes:\\xe2\\x80`, so that different tokens keep different names."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


COMPLETION = Dialect(msgspec.json.Decoder(CompletionBody), job, CompletionBuilder, unknown)
