"""Every kind of response against OpenAI's schema: no unknown fields, and no null where a field must be absent.

OpenAI's Python types accept unknown fields and a null for any optional field; the schema behind them does not.
"""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.shared import ErrorObject
from pydantic import BaseModel

from homing.router.config import RouterSettings
from homing.router.errors import ReplicaLost
from homing.router.http.front import Front

from ..fakes import FakeBackend, reply

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
#: Fields that are optional in the Python types and nullable in the schema.
NULLABLE = {
    "Choice.finish_reason",
    "CompletionChoice.logprobs",
    "ErrorObject.code",
    "ErrorObject.param",
    "ChatCompletionMessage.refusal",
    "ChatCompletionChunk.usage",
    "Choice.logprobs",
    "ChoiceLogprobs.refusal",
    "Completion.usage",
}
#: Fields that vLLM adds to whole responses, null if they were not requested: its clients read them in any case.
EXTENSIONS = {"token_ids", "prompt_token_ids", "prompt_logprobs"}
CHATS: list[dict[str, Any]] = [
    {},
    {"n": 2},
    {"logprobs": True},
    {"logprobs": True, "top_logprobs": 2, "n": 2},
    {"max_tokens": 1},
    {"stop": ["met"]},
    {"response_format": {"type": "text"}, "tools": [{"type": "function", "function": {"name": "f"}}]},
]
COMPLETED: list[dict[str, Any]] = [
    {},
    {"n": 2, "prompt": ["a", "b"]},
    {"prompt": [5, 6, 7]},
    {"prompt": [[5, 6], [7]]},
    {"logprobs": 0},
    {"logprobs": 3, "n": 2},
    {"echo": True},
    {"max_tokens": 1, "stop": "met"},
]
WHOLE: list[dict[str, Any]] = [
    {"best_of": 3},
    {"best_of": 3, "n": 2, "logprobs": 1},
    {"echo": True, "logprobs": 1},
    {"echo": True, "logprobs": 0, "max_tokens": 0},
]
USAGE: list[dict[str, Any]] = [
    {},
    {"stream_options": {"include_usage": True}},
    {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
]


def violations(value: object, place: str) -> Iterator[str]:
    """Yield the parts of a parsed response that the schema does not allow."""
    if isinstance(value, list):
        for index, each in enumerate(value):
            yield from violations(each, f"{place}[{index}]")
    if not isinstance(value, BaseModel):
        return
    yield from (f"{place}.{name} is unknown" for name in value.model_extra or () if name not in EXTENSIONS)
    for name, field in type(value).model_fields.items():
        held = getattr(value, name)
        null = name in value.model_fields_set and held is None
        if null and not field.is_required() and f"{type(value).__name__}.{name}" not in NULLABLE:
            yield f"{place}.{name} is null"
        yield from violations(held, f"{place}.{name}")


def check(kind: type[BaseModel], data: dict[str, Any]) -> None:
    """Assert that `data` is strictly valid as `kind`."""
    found = list(violations(kind.model_validate(data, strict=True), kind.__name__))
    assert not found, f"{found} in {data}"


def with_numbers(answer: dict[str, Any]) -> dict[str, Any]:
    """Replace the two nulls that OpenAI's own responses have contrary to its types; docs/api.md names them."""
    for choice in answer["choices"]:
        choice["finish_reason"] = choice["finish_reason"] or "stop"
        if choice["logprobs"] and choice["logprobs"]["token_logprobs"][:1] == [None]:
            choice["logprobs"]["token_logprobs"][0] = 0.0
            choice["logprobs"]["top_logprobs"][0] = {}
    return answer


def chunks(response: httpx.Response) -> list[dict[str, Any]]:
    """The data of a stream's events, without the final `[DONE]`."""
    *events, done = [block.removeprefix("data: ") for block in response.text.split("\n\n") if block]
    assert done == "[DONE]"
    return [json.loads(event) for event in events]


def chat(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "Tell me a story."}]} | fields


def completion(**fields: Any) -> dict[str, Any]:
    return {"prompt": "Tell me a story."} | fields


@pytest.mark.parametrize("fields", CHATS)
async def test_a_whole_chat(client: httpx.AsyncClient, backend: FakeBackend, fields: dict[str, Any]):
    """The body is what OpenAI's `create` returns without `stream`."""
    answer = (await client.post(CHAT, json=chat(**fields))).raise_for_status().json()

    check(ChatCompletion, answer)
    assert len(answer["choices"]) == fields.get("n", 1)


@pytest.mark.parametrize("usage", USAGE)
@pytest.mark.parametrize("fields", CHATS)
async def test_a_streamed_chat(client: httpx.AsyncClient, backend: FakeBackend, fields, usage):
    """Each chunk is valid by itself, and usage appears exactly where it was requested."""
    events = chunks(await client.post(CHAT, json=chat(stream=True, **fields, **usage)))

    for event in events:
        check(ChatCompletionChunk, event)
        assert ("usage" in event) == bool(usage)
    assert (events[-1]["choices"] == []) == bool(usage)


@pytest.mark.parametrize("fields", [*COMPLETED, *WHOLE])
async def test_a_whole_completion(client: httpx.AsyncClient, backend: FakeBackend, fields: dict[str, Any]):
    """The cases include echo with logprobs, as lm-eval requests them."""
    answer = (await client.post(COMPLETIONS, json=completion(**fields))).raise_for_status().json()

    check(Completion, with_numbers(answer))
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(answer["choices"])))


@pytest.mark.parametrize("usage", USAGE)
@pytest.mark.parametrize("fields", COMPLETED)
async def test_a_streamed_completion(client: httpx.AsyncClient, backend: FakeBackend, fields, usage):
    """Same as for streamed chats."""
    events = chunks(await client.post(COMPLETIONS, json=completion(stream=True, **fields, **usage)))

    for event in events:
        check(Completion, with_numbers(event))
        assert ("usage" in event) == bool(usage)
    assert (events[-1]["choices"] == []) == bool(usage)


async def test_models(client: httpx.AsyncClient, backend: FakeBackend):
    """`max_model_len` is vLLM's addition, which benchmarks read."""
    listed = (await client.get("/v1/models")).json()
    card = (await client.get("/v1/models/demo")).json()

    assert listed == {"object": "list", "data": [card]}
    assert card.pop("max_model_len") == 256
    check(Model, card)


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "a", "suffix": "b"},
        {"prompt": "a", "nonsense": 1},
        {"prompt": 1},
        {"prompt": "a", "model": "other"},
        {"prompt": "a", "stream": True},
    ],
)
async def test_errors(client: httpx.AsyncClient, backend: FakeBackend, body: dict[str, Any]):
    """The cases are errors of the caller and of a replica."""
    backend.script = lambda _: [ReplicaLost("gone")]
    answer = await client.post(COMPLETIONS, json=body)

    assert answer.status_code >= 400
    assert set(answer.json()) == {"error"}
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    check(ErrorObject, answer.json()["error"])


async def test_the_event_that_ends_a_broken_stream(client, backend: FakeBackend, answer_ids: list[int]):
    """The event has the format of an error body."""
    backend.script = lambda request: [*list(reply(answer_ids)(request))[:2], ReplicaLost("gone")]
    response = await client.post(COMPLETIONS, json=completion(stream=True))
    last = json.loads([block for block in response.text.split("\n\n") if block][-1].removeprefix("data: "))

    check(ErrorObject, last["error"])


class TestUnknownFields:
    """Other servers ignore unknown fields, and clients send back the fields that those servers add to messages."""

    @pytest.fixture
    def settings(self) -> RouterSettings:
        return RouterSettings(default_max_tokens=64)

    async def test_they_are_ignored_named_and_counted(self, client: httpx.AsyncClient, front: Front, backend):
        messages = [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": "ho", "provider_specific_fields": {"a": [1]}, "thoughts": None},
            {"role": "user", "content": "hi"},
        ]
        body = {"messages": messages, "mood": 1, "stream_options": {"x": 1}, "logit_bias": {"5": 1}, "\r\nx": 1}

        lenient = await client.post("/v1/chat/completions", json=body)
        plain = await client.post("/v1/chat/completions", json={"messages": messages[:1]})

        assert lenient.status_code == 200
        named = lenient.headers["x-homing-ignored-fields"].split(", ")
        assert sorted(named) == [
            *("messages[1].provider_specific_fields", "messages[1].thoughts", "mood", "stream_options.x")
        ]
        assert "x-homing-ignored-fields" not in plain.headers
        assert backend.requests[0].sampling.logit_bias == {5: 1.0}
        assert "homing_fields_ignored_total 5.0" in front.metrics.render().decode()

    @pytest.mark.parametrize("field", ["lora_path", "ebnf", "temperature"])
    async def test_known_fields_are_refused_as_ever(self, client: httpx.AsyncClient, field: str):
        body = {"messages": [{"role": "user", "content": "hi"}], "mood": 1, field: "x"}

        response = await client.post("/v1/chat/completions", json=body)

        assert response.status_code == 400
        assert response.json()["error"]["param"] == field

    @pytest.mark.parametrize("field", ['"a`b": 1', '"x": ' + "[" * 5000 + "]" * 5000])
    async def test_those_that_cannot_be_removed_are_refused(self, client: httpx.AsyncClient, field: str):
        body = '{"messages": [{"role": "user", "content": "hi"}], ' + field + "}"

        assert (await client.post("/v1/chat/completions", content=body.encode())).status_code == 400

    async def test_their_number_is_limited(self, client: httpx.AsyncClient):
        body = {"messages": [{"role": "user", "content": "hi"}]} | {f"x{index}": 1 for index in range(33)}

        assert (await client.post("/v1/chat/completions", json=body)).status_code == 400

    @pytest.mark.parametrize(
        ("path", "body", "named"),
        [
            (
                "/v1/responses",
                {
                    "input": [
                        {"role": "user", "content": [{"type": "input_text", "text": "hi", "odd": 1}], "mood": 1},
                        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}", "x": 1},
                        {"type": "web_search_call", "anything": 1},
                    ],
                    "tools": [{"type": "function", "name": "f", "parameters": {}, "y": 1}, {"type": "z", "w": 1}],
                    "reasoning": {"effort": "low", "v": 1},
                    "include": ["reasoning.encrypted_content"],
                    "client_metadata": {},
                    "u": 1,
                },
                [
                    *("input[0].content[0].odd", "input[0].mood", "input[1].x", "reasoning.effort", "reasoning.v"),
                    *("tools[0].y", "tools[1]", "u"),
                ],
            ),
            *(
                (
                    path,
                    {
                        "max_tokens": 9,
                        "system": [{"type": "text", "text": "a", "mood": 1}],
                        "messages": [
                            {"role": "user", "content": [{"type": "text", "text": "hi", "odd": 1}], "x": 1},
                            {"role": "assistant", "content": [{"type": "server_tool_use", "any": 1}]},
                        ],
                        "tools": [{"name": "f", "input_schema": {}, "y": 1}, {"type": "web_search_1", "max_uses": 1}],
                        "context_management": {"edits": []},
                        "u": 1,
                    },
                    ["messages[0].content[0].odd", "messages[0].x", "system[0].mood", "tools[0].y", "tools[1]", "u"],
                )
                for path in ("/v1/messages", "/v1/messages/count_tokens")
            ),
        ],
    )
    async def test_agents_apis_name_them_too_also_inside_of_items(
        self, client: httpx.AsyncClient, front: Front, path: str, body, named
    ):
        lenient = await client.post(path, json=body)
        front.settings = msgspec.structs.replace(front.settings, strict_fields=True)
        strict = await client.post(path, json=body)

        assert lenient.status_code == 200, lenient.text
        assert sorted(lenient.headers["x-homing-ignored-fields"].split(", ")) == named
        assert strict.status_code == 400
        assert any(f"'{each}' is unknown" in strict.text for each in named)
