"""The compliance cases of Open Responses (openresponses.org), and random request bodies for Responses and Messages.

For every body, the response is valid by the types of the API's own client, or it is an error with a message.
"""

import importlib
import json
from functools import cache
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as run_settings
from hypothesis import strategies as st
from openai.types.responses import Response
from pydantic import TypeAdapter

from homing.router.config import RouterSettings
from homing.router.text.tokenizer import TextModel

from ..fakes import FakeBackend
from .blocks import CALL, SETTINGS, events, says

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
#: Fields that the specification's `ResponseResource` always has, even if they are null.
FIELDS = set(
    "id object created_at completed_at status incomplete_details model previous_response_id instructions output error "
    "tools tool_choice truncation parallel_tool_calls text top_p presence_penalty frequency_penalty top_logprobs "
    "temperature reasoning usage max_output_tokens max_tool_calls store background service_tier metadata "
    "safety_identifier prompt_cache_key".split()
)
TOOL_FIELDS = {"type", "name", "description", "parameters", "strict"}
WEATHER = {"type": "function", "name": "weather", "parameters": {"type": "object", "properties": {}}}


@cache
def types_of(module: str, name: str) -> TypeAdapter[Any]:
    """Build the types late: they take seconds, and every test process collects this file but one runs it."""
    return TypeAdapter(getattr(importlib.import_module(module), name))


@pytest.fixture
def settings() -> RouterSettings:
    return SETTINGS


def said(text: str, role: str = "user") -> dict[str, Any]:
    return {"type": "message", "role": role, "content": text}


def check_response(body: dict[str, Any], status: str = "completed") -> None:
    """Assert that all fields are present with the right types, and that the output is not empty."""
    Response.model_validate(body)
    assert set(body) >= FIELDS
    assert (body["object"], body["status"], body["error"]) == ("response", status, None)
    assert body["output"]
    assert all(set(tool) >= TOOL_FIELDS for tool in body["tools"] if tool["type"] == "function")
    usage = body["usage"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]


@pytest.mark.parametrize(
    "items",
    [
        [said("Say hello in three words.")],
        [said("You are a pirate.", "system"), said("Say hello.")],
        [said("My name is Ada."), said("Hello Ada.", "assistant"), said("What is my name?")],
    ],
    ids=["basic text", "system prompt", "several turns"],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_texts_are_answered(client: httpx.AsyncClient, items: list[dict[str, Any]], stream: bool):
    response = await client.post(RESPONSES, json={"model": "demo", "input": items, "stream": stream})

    body = events(response)[-1]["response"] if stream else response.json()
    check_response(body)
    assert body["output"][0]["type"] == "message"
    assert body["output"][0]["content"][0]["type"] == "output_text"


async def test_a_stream_is_events_in_order(client: httpx.AsyncClient):
    """Events are numbered from 0, text comes in deltas, and the last event holds the complete response."""
    response = await client.post(RESPONSES, json={"model": "demo", "input": "Count to five.", "stream": True})

    found = events(response)
    for each in found:
        types_of("openai.types.responses", "ResponseStreamEvent").validate_python(each)
    kinds = [each["type"] for each in found]
    assert [each["sequence_number"] for each in found] == list(range(len(found)))
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    text = "".join(each["delta"] for each in found if each["type"] == "response.output_text.delta")
    assert text == found[-1]["response"]["output"][0]["content"][0]["text"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_tool_is_called(client: httpx.AsyncClient, backend: FakeBackend, text_model: TextModel, stream: bool):
    """The call names one of the request's tools, and its arguments are JSON."""
    says(backend, text_model, CALL)
    asked = {"model": "demo", "input": [said("How is the weather in Ulm?")], "tools": [WEATHER], "stream": stream}

    response = await client.post(RESPONSES, json=asked)

    body = events(response)[-1]["response"] if stream else response.json()
    check_response(body)
    [call] = [item for item in body["output"] if item["type"] == "function_call"]
    assert call["name"] == "weather"
    assert json.loads(call["arguments"]) == {"city": "Ulm"}


async def test_an_image_is_named_as_ignored(client: httpx.AsyncClient):
    """This is the only compliance case that needs a multimodal model; a note takes the image's place."""
    parts = [{"type": "input_text", "text": "What is this?"}, {"type": "input_image", "image_url": "data:image/png,"}]
    response = await client.post(RESPONSES, json={"model": "demo", "input": [{"role": "user", "content": parts}]})

    assert response.status_code == 200
    assert response.headers["x-homing-ignored-fields"] == "input[0].content[1]"


# Random bodies

WORDS = st.text(max_size=8)
JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=6,
)


def spoilt(kind: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Values that are mostly of `kind`."""
    return st.integers(0, 14).flatmap(lambda draw: kind if draw else JUNK)


def thing(required: dict[str, Any], **optional: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(
        {
            name: spoilt(value if isinstance(value, st.SearchStrategy) else st.just(value))
            for name, value in required.items()
        },
        optional={name: spoilt(value) for name, value in optional.items()},
    )


def listed(*kinds: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return spoilt(st.lists(st.one_of(*kinds), max_size=4))


PART = thing({"type": st.sampled_from(["input_text", "output_text", "text", "refusal", "input_image"]), "text": WORDS})
ITEM = st.one_of(
    thing({"role": st.sampled_from(["user", "assistant", "system", "developer"]), "content": WORDS | listed(PART)}),
    thing({"type": "function_call", "call_id": WORDS, "name": WORDS, "arguments": st.sampled_from(["{}", "", "{"])}),
    thing({"type": "custom_tool_call", "call_id": WORDS, "name": WORDS, "input": WORDS}),
    thing({"type": "function_call_output", "call_id": WORDS, "output": WORDS | listed(PART)}),
    thing({"type": "reasoning", "summary": listed(PART)}, content=listed(PART)),
)
PLAIN = {"type": "object", "properties": {"a": {"type": "string"}}}
SCHEMAS = st.sampled_from([{}, {"type": "object"}, PLAIN, {"$ref": "#"}])
FUNCTION = thing({"type": "function", "name": WORDS, "parameters": SCHEMAS}, strict=st.booleans(), description=WORDS)
TOOL = st.one_of(
    FUNCTION,
    thing({"type": "custom", "name": WORDS}),
    thing({"type": "namespace", "name": WORDS, "tools": st.lists(FUNCTION, max_size=2)}),
    thing({"type": "web_search"}),
)
FORMAT = thing({"type": st.sampled_from(["text", "json_object", "json_schema"])}, schema=SCHEMAS, name=WORDS)
RESPONSE = thing(
    {"input": WORDS | listed(ITEM)},
    stream=st.booleans(),
    instructions=WORDS,
    tools=listed(TOOL),
    tool_choice=st.sampled_from(["auto", "none", "required"]) | thing({"type": "function", "name": WORDS}),
    text=thing({"format": FORMAT}),
    reasoning=thing({"effort": st.sampled_from(["none", "low"])}),
    max_output_tokens=st.integers(0, 20),
    metadata=st.dictionaries(WORDS, WORDS, max_size=2),
    parallel_tool_calls=st.booleans(),
)
BLOCK = st.one_of(
    thing({"type": "text", "text": WORDS}, cache_control=thing({"type": "ephemeral"})),
    thing({"type": "tool_use", "id": WORDS, "name": WORDS, "input": st.just({})}),
    thing({"type": "tool_result", "tool_use_id": WORDS}, content=WORDS),
    thing({"type": "thinking", "thinking": WORDS}),
    thing({"type": "search_result", "content": st.just([]), "title": WORDS}),
)
TURN = thing({"role": st.sampled_from(["user", "assistant", "system"]), "content": WORDS | listed(BLOCK)})
MESSAGE = thing(
    {"messages": listed(TURN), "max_tokens": st.integers(0, 20)},
    stream=st.booleans(),
    system=WORDS | listed(BLOCK),
    tools=listed(thing({"name": WORDS, "input_schema": SCHEMAS}), thing({"type": "web_search_1", "name": WORDS})),
    tool_choice=thing({"type": st.sampled_from(["auto", "any", "none", "tool"])}, name=WORDS),
    thinking=thing({"type": st.sampled_from(["enabled", "disabled", "adaptive"])}),
    output_config=thing({}, format=FORMAT, effort=WORDS),
    stop_sequences=st.lists(WORDS, max_size=2),
)
EXAMPLES = 120
quick = run_settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)


def check_error(response: httpx.Response, kinds: set[str]) -> None:
    assert 400 <= response.status_code < 500, response.text
    assert response.json()["error"]["type"] in kinds
    assert response.json()["error"]["message"]


@quick
@given(body=RESPONSE)
async def test_any_body_of_a_response_is_answered_in_openais_types(client: httpx.AsyncClient, body: dict[str, Any]):
    response = await client.post(RESPONSES, json=body)

    if response.status_code != 200:
        check_error(response, {"invalid_request_error"})
    elif response.headers["content-type"].startswith("text/event-stream"):
        found = events(response)
        for each in found:
            types_of("openai.types.responses", "ResponseStreamEvent").validate_python(each)
        assert found[-1]["type"] in ("response.completed", "response.incomplete")
    else:
        check_response(response.json(), response.json()["status"])


@quick
@given(body=MESSAGE)
async def test_any_body_of_a_message_is_answered_in_anthropics_types(client: httpx.AsyncClient, body: dict[str, Any]):
    response = await client.post(MESSAGES, json=body)

    if response.status_code != 200:
        assert response.json()["type"] == "error"
        check_error(response, {"invalid_request_error"})
    elif response.headers["content-type"].startswith("text/event-stream"):
        found = [each for each in events(response) if each["type"] != "ping"]
        for each in found:
            types_of("anthropic.types", "RawMessageStreamEvent").validate_python(each)
        assert found[-1]["type"] == "message_stop"
    else:
        types_of("anthropic.types", "Message").validate_python(response.json())
