"""Embeddings: inputs in every form, both encodings, and errors that name the field."""

from array import array
from base64 import b64decode
from collections.abc import Callable, Iterable

import httpx
import msgspec
import pytest
from openai import AsyncOpenAI
from openai.types import CreateEmbeddingResponse

from homing.kvcache.hashing import token_array
from homing.replica.messages import EmbeddingParams, ModelLimits
from homing.router.backend import GenerationRequest, TokenDelta
from homing.router.errors import ReplicaLost
from homing.router.http.dialects.embeddings import MAX_INPUTS
from homing.router.text.tokenizer import TextModel

from ..fakes import FakeBackend, Item

EMBEDDINGS = "/v1/embeddings"
TEXT = "Tell me a story about a fox."


def vector_of(request: GenerationRequest) -> "array[float]":
    """The vector that the fake replica returns for a request."""
    return array("f", [0.1, len(request.token_ids) / 4])


def embed(request: GenerationRequest) -> Iterable[Item]:
    yield TokenDelta(token_ids=[], finish_reason="stop", cached_tokens=0, embedding=vector_of(request).tobytes())


@pytest.fixture
def limits(limits: ModelLimits) -> ModelLimits:
    return msgspec.structs.replace(limits, embedding_size=128)


@pytest.fixture
def backend(limits: ModelLimits) -> FakeBackend:
    return FakeBackend(limits, embed)


async def test_an_answer_is_openais_to_the_letter(
    client: httpx.AsyncClient, backend: FakeBackend, text_model: TextModel
):
    """Validation is strict; texts get the tokenizer's special tokens, which the usage counts."""
    response = await client.post(EMBEDDINGS, json={"model": "demo", "input": TEXT})

    answer = CreateEmbeddingResponse.model_validate_json(response.content, strict=True)
    prompt = text_model.encode_now([TEXT], special_tokens=True)[0]
    assert token_array(backend.requests[0].token_ids) == prompt
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == len(prompt)
    assert answer.data[0].embedding == vector_of(backend.requests[0]).tolist()
    assert answer.model == "demo"


@pytest.mark.parametrize(("given", "count"), [(TEXT, 1), ([TEXT, "a"], 2), ([5, 6, 7], 1), ([[5, 6, 7], [8]], 2)])
async def test_inputs_come_as_texts_and_as_ids(client: httpx.AsyncClient, backend: FakeBackend, given, count: int):
    """There may be one input or several; vectors have the inputs' order, and Base64 holds the same numbers."""
    plain = (await client.post(EMBEDDINGS, json={"input": given})).json()
    coded = (await client.post(EMBEDDINGS, json={"input": given, "encoding_format": "base64"})).json()

    vectors = [vector_of(request) for request in backend.requests]
    assert [each["index"] for each in plain["data"]] == list(range(count))
    assert [each["embedding"] for each in plain["data"]] == [each.tolist() for each in vectors[:count]]
    assert [b64decode(each["embedding"]) for each in coded["data"]] == [each.tobytes() for each in vectors[count:]]


async def test_what_is_pooled_is_the_requests_or_the_settings(client: httpx.AsyncClient, backend: FakeBackend):
    """The replica also truncates the vector to `dimensions`, before it normalizes it."""
    await client.post(EMBEDDINGS, json={"input": TEXT})
    await client.post(EMBEDDINGS, json={"input": TEXT, "pooling": "mean", "dimensions": 7, "priority": 3})

    assert [each.embedding for each in backend.requests] == [EmbeddingParams("last"), EmbeddingParams("mean", 7)]
    assert backend.requests[1].priority == 3


async def test_openais_client_reads_vectors(openai_client: AsyncOpenAI, backend: FakeBackend):
    """The client requests Base64 by default."""
    answer = await openai_client.embeddings.create(model="demo", input=[TEXT, "a"], dimensions=2, user="u")

    expected = [vector_of(request).tolist() for request in backend.requests]
    assert [each.embedding for each in answer.data] == [pytest.approx(each) for each in expected]


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"input": ["a", "b", [5]]}, "input", "cannot be mixed"),
        ({"input": []}, "input", "at least one"),
        ({"input": [[5], []]}, "input[1]", "no tokens"),
        ({"input": [[5], [6], [7], [8] * 300]}, "input[3]", "300 tokens, the limit is 256"),
        ({"input": [8] * 9000}, "input", "9,000 tokens, the limit is 256"),
        ({"input": [[5, 99_999]]}, "input", "between 0 and 4095"),
        ({"input": ["a"] * (MAX_INPUTS + 1)}, "input", "2,049 inputs, the limit is 2,048"),
        ({"input": "a", "dimensions": 129}, "dimensions", "129, the limit is 128"),
        ({"input": "a", "dimensions": 0}, "dimensions", ">= 1"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format", ""),
        ({"input": "a", "pooling": "max"}, "pooling", ""),
        ({"input": "a", "truncate": True}, "truncate", "unknown"),
        ({}, "input", "required"),
    ],
)
async def test_errors_name_the_field(client: httpx.AsyncClient, backend: FakeBackend, body, param: str, message: str):
    """An invalid batch is refused as a whole, before anything is computed."""
    response = await client.post(EMBEDDINGS, json=body)

    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param)
    assert message in error["message"]
    assert not backend.requests


async def test_replicas_that_make_no_embeddings_are_not_asked(client: httpx.AsyncClient, backend: FakeBackend):
    """External engines are an example."""
    assert backend.limits is not None
    backend.limits = msgspec.structs.replace(backend.limits, embedding_size=0)

    response = await client.post(EMBEDDINGS, json={"input": TEXT})

    assert (response.status_code, response.json()["error"]["param"]) == (400, "model")
    assert not backend.requests


def fails_second() -> Callable[[GenerationRequest], Iterable[Item]]:
    count = iter(range(9))

    def script(request: GenerationRequest) -> Iterable[Item]:
        return [ReplicaLost("it was lost")] if next(count) == 1 else embed(request)

    return script


async def test_one_failed_input_fails_the_batch(client: httpx.AsyncClient, backend: FakeBackend):
    """With vectors missing, clients would assign the others to the wrong texts."""
    backend.script = fails_second()

    response = await client.post(EMBEDDINGS, json={"input": ["a", "b", "c"]})

    assert (response.status_code, response.json()["error"]["code"]) == (502, "replica_lost")
    assert all(stream.cancelled.is_set() for stream in backend.streams)


async def test_replica_of_another_version_gives_no_vector(client: httpx.AsyncClient, backend: FakeBackend):
    """A replica of another version may answer with tokens instead."""
    backend.script = lambda _: [TokenDelta(token_ids=[5], finish_reason="length")]

    response = await client.post(EMBEDDINGS, json={"input": "a"})

    assert (response.status_code, response.json()["error"]["code"]) == (500, "request_failed")
