"""The dialect of POST /inference/v1/generate, vLLM's: token ids in, token ids out; and the bodies that it takes.

Such a body is a completion whose prompt is token ids, with the fields of sampling in an object of their own.
"""

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from ...errors import InvalidRequest, RequestAborted, RouterError
from ...text.answer import Ending, TextDelta, TokenAt
from ...text.encoder_threads import Sender
from ..front import Front, Served
from ..generation import Job, RunningChoice
from .bounds import Name, Rendered, TokenId, Unread
from .chunks import DONE, ChunkBuilder, ChunkUsage
from .completions import COMPLETION, CompletionBody, PromptField
from .dialect import Dialect
from .logprobs import PromptLogprobs, TopLogprob, token_entries
from .long_json import LongList, Steps, slices
from .schema import CacheSalt, Priority, RequestId, StreamOptions


class SamplingFields(CompletionBody, kw_only=True, forbid_unknown_fields=True):
    """The fields of vLLM's SamplingParams, as fields of a completion."""

    prompt: PromptField = ""
    detokenize: bool | None = None
    spaces_between_special_tokens: bool | None = None
    output_kind: Unread = None
    extra_args: Unread = None
    shows_text: bool = False
    shows_prompt: bool = False

    #: The second line: fields of a completion that `GenerateBody` has itself, or that its answer has no place for.
    UNUSED = CompletionBody.UNUSED + (
        "spaces_between_special_tokens output_kind extra_args "
        "prompt model stream stream_options rid request_id cache_salt priority return_token_ids echo suffix"
    )


class GenerateBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The request body."""

    model: Name | None = None
    token_ids: Rendered[Annotated[list[TokenId], Meta(min_length=1)]]
    sampling_params: SamplingFields = msgspec.field(default_factory=SamplingFields)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    output_mode: Literal["tokens", "text"] | None = None
    return_token_ids: bool | None = None
    request_id: RequestId | None = None
    cache_salt: CacheSalt | None = None
    priority: Priority | None = None
    # What `/render` of this or another server adds, and what only engines read:
    token_offsets: Unread = None
    features: Unread = None
    reasoning_ended: Unread = None
    kv_transfer_params: Unread = None
    ec_transfer_params: Unread = None


_UNREAD = ("token_offsets", "features", "reasoning_ended", "kv_transfer_params", "ec_transfer_params")


def unused(body: GenerateBody) -> Iterator[str]:
    """What is set although nothing reads it."""
    yield from (name for name in _UNREAD if getattr(body, name) is not None)
    yield from (f"sampling_params.{name}" for name in body.sampling_params.UNUSED.set_in(body.sampling_params))


def completion_of(body: GenerateBody, request_id: str) -> SamplingFields:
    """The completion that a body asks for. Raises InvalidRequest."""
    fields, text = body.sampling_params, body.output_mode == "text"
    if fields.max_tokens == 0:
        raise InvalidRequest.field("sampling_params.max_tokens", "must be at least 1")
    if fields.detokenize is False and (fields.stop or text):
        what = "stop strings need" if fields.stop else "'output_mode': 'text' needs"
        raise InvalidRequest.field("sampling_params.detokenize", f"{what} it to be true")
    return msgspec.structs.replace(
        fields,
        prompt=body.token_ids,
        model=body.model,
        stream=body.stream,
        stream_options=body.stream_options,
        cache_salt=body.cache_salt,
        priority=body.priority,
        request_id=request_id,
        rid=None,
        echo=None,
        suffix=None,
        return_token_ids=True,
        shows_text=text,
        shows_prompt=bool(body.return_token_ids),
    )


async def job(front: Front, served: Served, body: SamplingFields, sender: Sender) -> Job:
    """The job that `body` requests. Raises InvalidRequest, which names the field."""
    if body.max_tokens is None:
        left = served.limits.max_model_len - len(body.prompt)
        body = msgspec.structs.replace(body, max_tokens=front.settings.default_max_tokens or max(1, left))
    try:
        return await COMPLETION.job(front, served, body, sender)
    except RouterError as error:
        if (given := error.param) is not None and given not in GenerateBody.__struct_fields__:
            error.param = "token_ids" if given == "prompt" else f"sampling_params.{given}"
            error.message = error.message.replace(f"'{given}'", f"'{error.param}'")
        raise


class ScoredId(msgspec.Struct, frozen=True):
    """A token by its id; `token` is its name where logprobs are those of chats."""

    token_id: int
    token: str
    logprob: float
    rank: int | None


class ScoredToken(ScoredId, frozen=True):
    """The token at one position, with its most likely alternatives."""

    top_logprobs: list[ScoredId]


class GeneratedLogprobs(msgspec.Struct, frozen=True):
    """`choices[].logprobs`."""

    content: list[ScoredToken]


class GeneratedChoice(msgspec.Struct, frozen=True):
    """One choice, or a chunk's part of it (only there the finish reason may be null)."""

    index: int
    token_ids: list[int] | None
    finish_reason: Ending | Literal["abort"] | None = None
    logprobs: GeneratedLogprobs | None = None
    text: str | UnsetType = UNSET


class Generated(msgspec.Struct, frozen=True, kw_only=True):
    """A response that is not streamed, or one event of a stream."""

    request_id: str
    created: int
    model: str
    output_mode: Literal["tokens", "text"]
    choices: list[GeneratedChoice]
    usage: ChunkUsage = UNSET
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None
    kv_transfer_params: None = None


class TokensBuilder(ChunkBuilder):
    """Builds the bodies of one response."""

    __slots__ = ("_mode", "_shows_prompt", "_top")

    whole_type = chunk_type = Generated

    def __init__(self, served: Served, body: SamplingFields, response_id: str, created: int) -> None:
        super().__init__(served, body, response_id, created)
        del self._common["id"]
        self._mode = "text" if body.shows_text else "tokens"
        self._common |= {"request_id": f"generate-tokens-{body.request_id}", "output_mode": self._mode}
        self._top = body.logprobs if body.logprobs is None else len(body.logprob_token_ids or ()) or body.logprobs
        self._shows_prompt = body.shows_prompt

    def choices(self, choices: Sequence[RunningChoice]) -> Iterator[Steps[GeneratedChoice]]:
        return map(self._choice, choices)

    def _choice(self, choice: RunningChoice) -> Steps[GeneratedChoice]:
        ids, ending = self._ids(choice.tokens), choice.ending or "stop"
        scores: Any = None
        if self._top is not None:
            entries = LongList()
            for part in slices(choice.tokens, self._top + 1):
                yield
                entries.add(self._entries(part))
            scores = GeneratedLogprobs(entries.ended())
        return GeneratedChoice(choice.index, ids, ending, scores, choice.text if self._mode == "text" else UNSET)

    def extras(self, choices: Sequence[RunningChoice]) -> Steps[dict[str, Any]]:
        scores = yield from self._scores(choices[0])
        return {
            "prompt_token_ids": self._prompt_ids(choices[0]) if self._shows_prompt else None,
            "prompt_logprobs": scores,
        }

    def parts(self, choice: RunningChoice, shown: TextDelta, *, first: bool) -> list[GeneratedChoice]:  # noqa: ARG002
        ids = [token.token_id for token in shown.tokens]
        if not ids and not shown.ending and (self._mode == "tokens" or not shown.text):
            return []
        scores = None if self._top is None else GeneratedLogprobs(self._entries(shown.tokens))
        text = shown.text if self._mode == "text" else UNSET
        return [GeneratedChoice(choice.index, ids, shown.ending, scores, text)]

    def error(self, error: RouterError) -> bytes:
        """A stream that was aborted ends in vLLM's way, so that its reader does not take that for a fault."""
        if isinstance(error, RequestAborted):
            return self._chunk([GeneratedChoice(0, [], "abort")], UNSET) + DONE
        return super().error(error)

    def _entries(self, tokens: Sequence[TokenAt]) -> list[ScoredToken]:
        piece, by_id, top = self._model_text.piece, self._mode == "tokens", max(1, self._top or 0)
        named = token_entries(tokens, top, piece, by_id=by_id)
        scored = [token.logprobs for token in tokens if token.logprobs]
        made = []
        for position, entry in zip(scored, named, strict=True):
            ranks = {each.token_id: rank for rank, each in enumerate(position.top, 1)}
            chosen = position.chosen.token_id
            others = [_scored(*pair, ranks) for pair in zip(position.top, entry.top_logprobs, strict=False)]
            own = chosen, entry.token, entry.logprob, ranks.get(chosen)
            made.append(ScoredToken(*own, others or [ScoredId(*own)]))
        return made


def _scored(token: Any, named: TopLogprob, ranks: dict[int, int]) -> ScoredId:
    return ScoredId(token.token_id, named.token, named.logprob, ranks.get(token.token_id))


TOKEN_IDS = Dialect(msgspec.json.Decoder(SamplingFields), job, TokensBuilder)
GENERATE_BODY = msgspec.json.Decoder(GenerateBody)
