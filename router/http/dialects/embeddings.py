"""POST /v1/embeddings: OpenAI's API for the vectors of texts, from the served model's last hidden states."""

from array import array
from base64 import b64encode
from collections.abc import Sequence
from itertools import zip_longest
from typing import ClassVar, Literal

import msgspec

from ....replica.messages import EmbeddingParams, Pooling, SamplingParams
from ...errors import ContextTooLong, InvalidRequest, RequestFailed
from ...text.encoder_threads import Sender
from ..front import Front, Served
from ..generation import EncodedPrompt, Job, RunningChoice
from ..protocol.exchange import GenerationSummary
from .bounds import Name, Seconds, Unread
from .completions import PromptField, prompts
from .dialect import WholeBuilder
from .long_json import LongList, Steps, pieces_of, slices
from .schema import CacheSalt, PositiveCount, Priority, Unused

#: Maximum number of inputs in one request, as in OpenAI's API.
MAX_INPUTS = 2048
#: Numbers in an answer that count as one of `max_answer_values`, which bounds the answer to about 45 MB.
NUMBERS_PER_VALUE, BASE64_PER_VALUE = 4, 16
#: Bytes of a vector that take about as long to encode as a logprob: ten numbers.
VECTOR_BYTES_PER_VALUE = 40


class EmbeddingsBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The request body."""

    model: Name | None = None
    input: PromptField
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: PositiveCount | None = None
    pooling: Pooling | None = None  #: None: as the setting says
    cache_salt: CacheSalt | None = None
    priority: Priority | None = None
    timeout: Seconds | None = None
    user: Unread = None

    UNUSED: ClassVar[Unused] = Unused("user")


async def job(front: Front, served: Served, body: EmbeddingsBody, sender: Sender) -> Job:
    """The job that `body` requests. Raises InvalidRequest and its subclasses, which name the field."""
    limits = served.limits
    if not limits.embedding_size:
        raise InvalidRequest.field("model", f"the replicas of {limits.name!r} make no embeddings")
    if body.dimensions is not None and body.dimensions > limits.embedding_size:
        raise InvalidRequest.field("dimensions", f"{body.dimensions:,}, the limit is {limits.embedding_size:,}")
    given = prompts(body.input, limits.vocab_size, "input")
    if len(given) > MAX_INPUTS:
        raise InvalidRequest.field("input", f"{len(given):,} inputs, the limit is {MAX_INPUTS:,}")
    texts = [each for each in given if isinstance(each, str)]
    encoded = [each for each in given if not isinstance(each, str)]
    if texts:
        encoded = await served.text.encode(texts, special_tokens=True, sender=sender, param="input")
    several = isinstance(body.input, list) and not isinstance(body.input[0], int)
    for index, ids in enumerate(encoded):
        param = f"input[{index}]" if several else "input"
        if not ids:
            raise InvalidRequest.field(param, "it has no tokens")
        if len(ids) > limits.max_model_len:
            message = f"field {param!r}: {len(ids):,} tokens, the limit is {limits.max_model_len:,}"
            raise ContextTooLong(message, param=param)
    size = min(body.dimensions or limits.embedding_size, limits.embedding_size)
    values = len(encoded) * size // (BASE64_PER_VALUE if body.encoding_format == "base64" else NUMBERS_PER_VALUE)
    if values > front.settings.max_answer_values:
        raise InvalidRequest.field(
            "input",
            f"{len(encoded):,} vectors of {size:,} numbers are too many for one answer: send fewer inputs"
            + ("" if body.encoding_format == "base64" else ", or ask for the 'encoding_format' base64"),
        )
    return Job(
        served=served,
        prompts=[EncodedPrompt(ids, text) for ids, text in zip_longest(encoded, texts)],
        choices_per_prompt=1,
        sampling=SamplingParams(max_tokens=1),
        salt=sender.salt,
        priority=body.priority or 0,
        timeout_s=body.timeout,
        embedding=EmbeddingParams(body.pooling or front.settings.embedding_pooling, body.dimensions),
    )


class Embedding(msgspec.Struct, frozen=True):
    """The vector of one input: a list of numbers, or Base64 of float32 in little-endian order."""

    index: int
    embedding: list[float] | str
    object: Literal["embedding"] = "embedding"


class EmbeddingsUsage(msgspec.Struct, frozen=True):
    """The number of tokens of all inputs."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingsResponse(msgspec.Struct, frozen=True):
    """The response body."""

    data: list[Embedding]
    model: str
    usage: EmbeddingsUsage
    object: Literal["list"] = "list"


class EmbeddingBuilder(WholeBuilder):
    """Builds the body of one response."""

    def __init__(self, served: Served, body: EmbeddingsBody) -> None:
        self._model = served.limits.name
        self._base64 = body.encoding_format == "base64"

    def whole(self, choices: Sequence[RunningChoice], summary: GenerationSummary) -> Steps[list[bytes]]:
        data, tokens = LongList(), summary.prompt_tokens
        for part in slices(choices, len(choices[0].embedding or b"") // VECTOR_BYTES_PER_VALUE):
            if len(data.pieces) > 1:
                yield
            data.add([Embedding(choice.index, self._encoded(choice.embedding)) for choice in part])
        return pieces_of(EmbeddingsResponse(data.ended(), self._model, EmbeddingsUsage(tokens, tokens)))

    def _encoded(self, vector: bytes | None) -> list[float] | str:
        if vector is None:
            raise RequestFailed("the replica returned no embedding")
        return b64encode(vector).decode() if self._base64 else array("f", vector).tolist()
