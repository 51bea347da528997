"""How an answer with calls ends, in each dialect that has calls, streamed or not."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from homing.router.backend import GenerationRequest, TokenDelta
from homing.router.config import RouterSettings
from homing.router.text.parsers.deltas import ToolCallArguments, ToolCallStart
from homing.router.text.tokenizer import TextModel

from ..fakes import FakeBackend
from .blocks import events, says

SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}}
USER = {"role": "user", "content": "Go"}
CALL = '<tool_call>\n{"name": "remove", "arguments": {"path": "one two three"}}\n</tool_call>'
DIALECTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": [USER],
        "tools": [{"type": "function", "function": {"name": "remove", "parameters": SCHEMA}}],
    },
    "/v1/responses": {"input": "Go", "tools": [{"type": "function", "name": "remove", "parameters": SCHEMA}]},
    "/v1/messages": {"messages": [USER], "max_tokens": 90, "tools": [{"name": "remove", "input_schema": SCHEMA}]},
}


@pytest.fixture
def settings() -> RouterSettings:
    return RouterSettings(tool_call_parser="hermes")


def parsed_by_an_engine(arguments: str, ending: str) -> Any:
    def script(request: GenerationRequest) -> Iterator[TokenDelta]:
        yield TokenDelta(token_ids=[], text="", deltas=[ToolCallStart(0, "c1", "remove")], cached_tokens=0)
        yield TokenDelta(token_ids=[], text="", text_tokens=3, deltas=[ToolCallArguments(0, arguments)])
        yield TokenDelta(token_ids=[], text="", deltas=[], finish_reason=ending)  # type: ignore[arg-type]

    return script


async def ending(client: httpx.AsyncClient, path: str, *, stream: bool, **fields: Any) -> tuple[str, bool]:
    """The reason for the end in the dialect's words, and whether it shows a complete call."""
    response = await client.post(path, json={**DIALECTS[path], "stream": stream, **fields})
    assert response.status_code == 200, response.text
    if path == "/v1/chat/completions":
        if not stream:
            choice = response.json()["choices"][0]
            return choice["finish_reason"], choice["finish_reason"] == "tool_calls"
        chunks = [json.loads(each.removeprefix("data: ")) for each in response.text.split("\n\n")[:-2]]
        reason = chunks[-1]["choices"][0]["finish_reason"]
        return reason, reason == "tool_calls"
    if path == "/v1/responses":
        body = events(response)[-1]["response"] if stream else response.json()
        calls = [each["status"] == "completed" for each in body["output"] if each["type"] == "function_call"]
        return body["status"], bool(calls) and all(calls)
    if stream:
        [delta] = [each["delta"] for each in events(response) if each["type"] == "message_delta"]
        return delta["stop_reason"], delta["stop_reason"] == "tool_use"
    body = response.json()
    return body["stop_reason"], any(each["type"] == "tool_use" for each in body["content"])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "whole", "stopped", "limited"),
    [
        ("/v1/chat/completions", "tool_calls", "stop", "length"),
        ("/v1/responses", "completed", "completed", "incomplete"),
        ("/v1/messages", "tool_use", "stop_sequence", "max_tokens"),
    ],
)
async def test_only_a_complete_call_ends_an_answer_as_a_call(
    client, backend: FakeBackend, text_model: TextModel, path: str, stream: bool, whole: str, stopped: str, limited: str
):
    """An agent would run what is there of a call that a stop string cut in half: `remove {}`."""
    says(backend, text_model, CALL)
    stops = {"stop_sequences" if path == "/v1/messages" else "stop": ["two"]}
    limit = {"max_output_tokens" if path == "/v1/responses" else "max_tokens": 20}

    assert await ending(client, path, stream=stream) == (whole, True)
    assert await ending(client, path, stream=stream, **stops) == (stopped, False)
    assert await ending(client, path, stream=stream, **limit) == (limited, False)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "whole", "cut"),
    [
        ("/v1/chat/completions", "tool_calls", "stop"),
        ("/v1/responses", "completed", "incomplete"),
        ("/v1/messages", "tool_use", "end_turn"),
    ],
)
async def test_so_does_one_that_an_engine_has_parsed(
    client, backend: FakeBackend, path: str, stream: bool, whole: str, cut: str
):
    """Engines end an answer with "tool_calls" as soon as a call begins; some send no arguments where there are none."""
    for arguments, wanted in (('{"path": "a"}', (whole, True)), ("", (whole, True)), ('{"path": "on', (cut, False))):
        backend.script = parsed_by_an_engine(arguments, "stop")
        assert await ending(client, path, stream=stream) == wanted


async def test_a_call_that_is_written_for_long_leaves_no_stream_silent(client, front, backend, text_model: TextModel):
    """A call is sent when it is complete; proxies end a stream that has had no byte for a minute."""
    says(backend, text_model, CALL)
    seconds = iter(range(0, 10_000, 3))
    front.monotonic = lambda: float(next(seconds))

    response = await client.post("/v1/chat/completions", json={**DIALECTS["/v1/chat/completions"], "stream": True})

    assert response.text.count(": a tool call") >= 2
    [*chunks, done] = [each for each in response.text.split("\n\n")[:-1] if not each.startswith(":")]
    assert done == "data: [DONE]"
    assert json.loads(chunks[-1].removeprefix("data: "))["choices"][0]["finish_reason"] == "tool_calls"
