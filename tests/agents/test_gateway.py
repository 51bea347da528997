"""Requests like Claude Code's, field by field from Anthropic's "LLM gateway protocol" (code.claude.com).

test_programs.py runs Claude Code itself. The Anthropic client's types validate the answers.
"""

import itertools
import json
from typing import Any

import httpx
import pytest
from anthropic.types import Message, RawMessageStreamEvent
from pydantic import TypeAdapter

from .scripted import NAME, Engine
from .tasks import ANSWER, CITIES, DESCRIPTION, LOOP, QUESTION, WEATHER

EVENTS: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
KEEP = {"type": "ephemeral", "ttl": "1h"}
SESSION = "4f6c9b1e-0000-4000-8000-000000000001"
HEADERS = {
    "anthropic-version": "2023-06-01",
    "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14,context-management-2025-06-27,made-up-2030",
    "x-claude-code-session-id": SESSION,
    "x-claude-code-agent-id": "a1",
    "x-claude-code-parent-agent-id": "a0",
    "x-app": "cli",
}
TOOLS: list[dict[str, Any]] = [
    {"name": "weather", "description": DESCRIPTION, "input_schema": WEATHER, "eager_input_streaming": True},
    {"name": "later", "description": "-", "input_schema": {"type": "object"}, "defer_loading": True, "strict": False},
    {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
    {"name": "last", "input_schema": {"type": "object", "properties": {}}, "cache_control": KEEP},
]
FIRST: list[dict[str, Any]] = [
    {"type": "text", "text": "<system-reminder>Today is Monday.</system-reminder>"},
    {"type": "search_result", "source": "a.txt", "title": "A", "content": [{"type": "text", "text": "Ulm is a city."}]},
    {"type": "text", "text": QUESTION, "cache_control": KEEP},
]

#: What this model's template does not read, and what Anthropic's servers do besides generating.
IGNORED = {
    *("thinking", "thinking.display", "context_management", "output_config.effort"),
    *("tools[0].eager_input_streaming", "tools[1].defer_loading", "tools[2]"),
}


def body_of(messages: list[Any], number: int) -> dict[str, Any]:
    """A request; the first line of its system prompt differs between requests."""
    billing = f"x-anthropic-billing-header: cc_version=2.1.{number}; cc_entrypoint=cli; cch={number:05x};"
    return {
        "model": NAME,
        "max_tokens": 32_000,
        "stream": True,
        "temperature": 1,
        "system": [
            {"type": "text", "text": billing},
            {"type": "text", "text": "You are an agent. " * 50, "cache_control": {**KEEP, "scope": "global"}},
        ],
        "messages": messages,
        "tools": TOOLS,
        "thinking": {"type": "adaptive", "display": "summarized"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "medium"},
        "metadata": {"user_id": json.dumps({"device_id": "d", "session_id": SESSION})},
    }


def streamed(http: httpx.Client, body: dict[str, Any]) -> tuple[list[dict[str, Any]], httpx.Headers]:
    """The content blocks built from a stream's events, as the client sends them back, and the response headers."""
    response = http.post("/v1/messages?beta=true", json=body, headers=HEADERS)
    assert response.status_code == 200, response.text
    events = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: ")]
    found = [event for event in events if event["type"] != "ping"]
    blocks: list[dict[str, Any]] = []
    for event in found:
        EVENTS.validate_python(event)
        if event["type"] == "content_block_start":
            blocks.append(dict(event["content_block"]))
            assert event["index"] == len(blocks) - 1
        elif event["type"] == "content_block_delta":
            kind, field = {
                "text_delta": ("text", "text"),
                "thinking_delta": ("thinking", "thinking"),
                "signature_delta": ("signature", "signature"),
                "input_json_delta": ("partial_json", "json"),
            }[event["delta"]["type"]]
            blocks[-1][field] = blocks[-1].get(field, "") + event["delta"][kind]
    for block in blocks:
        if block["type"] == "tool_use":
            block["input"] = json.loads(block.pop("json"))
    assert [found[0]["type"], *(each["type"] for each in found[-2:])] == [
        "message_start",
        "message_delta",
        "message_stop",
    ]
    assert found[-2]["delta"]["stop_reason"] == ("tool_use" if blocks[-1]["type"] == "tool_use" else "end_turn")
    return blocks, response.headers


@pytest.fixture
def http(engine: Engine) -> Any:
    headers = {"authorization": "Bearer k"}
    with httpx.Client(base_url=engine.url, headers=headers, verify=False, timeout=60) as client:
        yield client


def test_a_session_of_claude_code(engine: Engine, http: httpx.Client) -> None:
    """Only what this model cannot do is ignored; prompts continue each other although the billing line changes."""
    engine.play(*LOOP)
    messages: list[Any] = [{"role": "user", "content": FIRST}]
    asked, cached = [], []
    marked: dict[str, Any] = {}  # only four places may be marked, so the mark moves to the last result
    for turn in range(len(LOOP)):
        blocks, headers = streamed(http, body_of(messages, turn))
        assert set(headers["x-homing-ignored-fields"].split(", ")) == IGNORED
        cached.append(int(headers["x-homing-cached-tokens"]))
        messages.append({"role": "assistant", "content": blocks})
        if turn == 0:
            assert [block["type"] for block in blocks] == ["thinking", "text", "tool_use"]
            blocks.insert(0, {"type": "redacted_thinking", "data": "x"})
        results = [
            {"type": "tool_result", "tool_use_id": each["id"], "content": [{"type": "text", "text": "7 degrees"}]}
            for each in blocks
            if each["type"] == "tool_use"
        ]
        asked += [each["input"]["city"] for each in blocks if each["type"] == "tool_use"]
        if results:
            marked.pop("cache_control", None)
            marked = results[-1]
            marked["cache_control"] = KEEP
            messages += [{"role": "user", "content": results}, {"role": "system", "content": "Be brief."}]

    assert asked == list(CITIES)
    assert blocks[-1]["text"] == ANSWER
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(engine.prompts))
    assert cached[0] < min(cached[1:])
    assert "billing" not in engine.prompts[0]


def test_claude_codes_other_requests(engine: Engine, http: httpx.Client) -> None:
    """Tokens are counted as they are billed, the server answers HEAD, and errors have Anthropic's types."""
    engine.play("Hello.")
    body = body_of([{"role": "user", "content": "What is beside?"}], 0)  # must not cache the session
    left_out = ("max_tokens", "stream", "temperature", "metadata", "context_management")
    counted = {key: value for key, value in body.items() if key not in left_out}

    count = http.post("/v1/messages/count_tokens?beta=true", json=counted, headers=HEADERS).json()["input_tokens"]
    answer = Message.model_validate(http.post("/v1/messages", json=body | {"stream": False}, headers=HEADERS).json())
    used = answer.usage
    wrong = http.post("/v1/messages?beta=true", json=body | {"model": "claude-opus-9"}, headers=HEADERS)

    assert count == used.input_tokens + (used.cache_read_input_tokens or 0) + (used.cache_creation_input_tokens or 0)
    assert http.head("/").status_code == 200
    assert [each["id"] for each in http.get("/v1/models?limit=1000").json()["data"]] == [NAME]
    assert (wrong.status_code, wrong.json()["error"]["type"]) == (404, "not_found_error")
