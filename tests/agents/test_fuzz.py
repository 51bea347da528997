"""Wrong values in every field of Responses and Messages: answered or rejected with a message, never a server error."""

import json
from collections.abc import Iterator
from typing import Any, get_type_hints

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from homing.router.http.dialects.messages import MessagesBody
from homing.router.http.dialects.responses import ResponsesBody

from .scripted import NAME, Engine, call
from .tasks import QUESTION, WEATHER

CASES = {
    "/v1/responses": (ResponsesBody, {"model": NAME, "input": QUESTION}),
    "/v1/messages": (
        MessagesBody,
        {"model": NAME, "max_tokens": 50, "messages": [{"role": "user", "content": QUESTION}]},
    ),
}
#: Valid nested fields, each to be damaged in one place.
ITEMS: list[Any] = [
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "x"}]},
    {"type": "function_call", "call_id": "c", "name": "weather", "arguments": '{"city": "Ulm"}', "namespace": "n"},
    {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "x"}]},
    {"type": "reasoning", "summary": [{"type": "summary_text", "text": "x"}], "content": None},
    {"type": "custom_tool_call", "call_id": "c", "name": "p", "input": "x"},
]
TURNS: list[Any] = [
    {"role": "user", "content": [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}]},
    {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "weather", "input": {"city": "Ulm"}}]},
    {
        "role": "user",
        "content": [{"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "x"}]}],
    },
    {"role": "assistant", "content": [{"type": "thinking", "thinking": "x", "signature": "s"}]},
]
NESTED: dict[str, list[tuple[str, Any]]] = {
    "/v1/responses": [
        ("input", ITEMS),
        ("tools", [{"type": "function", "name": "weather", "parameters": WEATHER, "strict": True}]),
        ("tools", [{"type": "namespace", "name": "n", "tools": [{"type": "custom", "name": "p"}]}]),
        ("text", {"format": {"type": "json_schema", "name": "fox", "schema": WEATHER, "strict": True}}),
        ("tool_choice", {"type": "function", "name": "weather"}),
        ("reasoning", {"effort": "low", "summary": "auto"}),
    ],
    "/v1/messages": [
        ("messages", TURNS),
        ("tools", [{"name": "weather", "input_schema": WEATHER, "cache_control": {"type": "ephemeral"}}]),
        ("system", [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral", "ttl": "5m"}}]),
        ("output_config", {"effort": "low", "format": {"type": "json_schema", "schema": WEATHER}}),
        ("tool_choice", {"type": "tool", "name": "weather"}),
        ("thinking", {"type": "enabled", "budget_tokens": 1024}),
    ],
}
SCALARS = st.sampled_from([None, True, -1, 0, 1.5, 2**64, 1e308, "", "x", "\ud83e\udd8a", "<tool_call>", "auto"])
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["type", "name", "x", ""]), inner, max_size=2)
    ),
    max_leaves=3,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of every value inside `value`."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, each in inner for place in places(each, (*path, key)))]


def changed(value: Any, path: tuple[Any, ...], by: Any) -> Any:
    """A copy of `value` with `by` at `path`."""
    if not path:
        return by
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = changed(copy[path[0]], path[1:], by)
    return copy


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    with httpx.Client(verify=False, timeout=60) as client:
        yield client


@st.composite
def wrong_bodies(draw: st.DrawFn, path: str) -> dict[str, Any]:
    """A request with one wrong value: either a whole field's, or one inside an otherwise valid field."""
    kind, body = CASES[path]
    if draw(st.booleans()):
        return body | {draw(st.sampled_from(sorted(get_type_hints(kind)))): draw(VALUES)}
    name, given = draw(st.sampled_from(NESTED[path]))
    return body | {name: changed(given, draw(st.sampled_from(places(given))), draw(VALUES))}


@pytest.mark.parametrize("path", CASES)
@settings(suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_wrong_values_are_answered_or_refused(
    engine: Engine, http: httpx.Client, path: str, data: st.DataObject
) -> None:
    """Includes values inside items, blocks, tools and schemas."""
    engine.play(*(call("weather", city="Ulm") for _ in range(4)), any_constraint=True)
    body = data.draw(wrong_bodies(path))

    response = http.post(f"{engine.url}{path}", content=json.dumps(body).encode())

    assert response.status_code == 200 or 400 <= response.status_code < 500, response.text
    if response.status_code >= 400:
        assert response.json()["error"]["message"]
