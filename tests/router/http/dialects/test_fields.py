"""Every field that a body's type knows, in every dialect: it changes the request, is refused, or is named as ignored.

The fields are read from the types, so that a new one is tested without being listed here.
"""

from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest

from homing.router.backend import GenerationRequest, TokenDelta
from homing.router.config import RouterSettings
from homing.router.http.dialects.chat import CHAT
from homing.router.http.dialects.completions import COMPLETION
from homing.router.http.dialects.messages import MESSAGES
from homing.router.http.dialects.responses import RESPONSES

from ..fakes import FakeBackend, scored

SCHEMA = {"type": "object", "properties": {"zz": {"type": "integer"}}, "required": ["zz"]}
USER = {"role": "user", "content": "Tell me a story."}
FUNCTION = {"name": "weather", "parameters": SCHEMA}
TOOL = {"type": "function", "function": FUNCTION}
#: Of each dialect: its path, its type, the smallest body, and a tool.
DIALECTS: dict[str, tuple[str, type, dict[str, Any], dict[str, Any]]] = {
    "chat": (
        "/v1/chat/completions",
        CHAT.decoder.type,
        {"messages": [USER]},
        TOOL,
    ),
    "completions": ("/v1/completions", COMPLETION.decoder.type, {"prompt": "Tell me a long story about a fox."}, {}),
    "responses": ("/v1/responses", RESPONSES.decoder.type, {"input": [USER]}, {"type": "function", **FUNCTION}),
    "messages": (
        "/v1/messages",
        MESSAGES.decoder.type,
        {"messages": [USER], "max_tokens": 64},
        {"name": "weather", "input_schema": SCHEMA},
    ),
}
#: Values that ask for something; fields that are not here get an object, which asks for whatever it may hold.
VALUES: dict[str, Any] = {
    "n": 2,
    "max_tokens": 7,
    "max_completion_tokens": 7,
    "max_output_tokens": 7,
    "min_tokens": 3,
    "best_of": 3,
    "temperature": 0.3,
    "top_p": 0.4,
    "top_k": 5,
    "min_p": 0.2,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "repetition_penalty": 1.5,
    "seed": 7,
    "stop": ["fox"],
    "stop_sequences": ["fox"],
    "stop_token_ids": [9],
    "ignore_eos": True,
    "logit_bias": {"9": 1.0},
    "allowed_token_ids": [9, 10],
    "bad_words": ["fox"],
    "skip_special_tokens": False,
    "include_stop_str_in_output": True,
    "return_token_ids": True,
    "prompt_logprobs": 1,
    "truncate_prompt_tokens": 3,
    "cache_salt": "s",
    "priority": 3,
    "timeout": 5.0,
    "cache_control": {"type": "ephemeral"},
    "prompt_cache_key": "k",
    "user": "u",
    "store": True,
    "guided_json": SCHEMA,
    "guided_regex": "[0-9]",
    "guided_choice": ["a"],
    "guided_grammar": 'start: "a"',
    "guided_whitespace_pattern": " ",
    "regex": "[0-9]",
    "ebnf": 'root ::= "a"',
    "json_schema": '{"type": "object"}',
    "no_stop_trim": True,
    "rid": "r",
    "request_id": "r",
    "top_logprobs": 2,
    "tool_choice": {"type": "none"},
    "parallel_tool_calls": False,
    "echo": True,
    "suffix": "x",
    "reasoning_effort": "high",
    "add_generation_prompt": False,
    "continue_final_message": True,
    "chat_template_kwargs": {"enable_thinking": False},
    "instructions": "Be brief.",
    "system": "Be brief.",
    "background": True,
    "previous_response_id": "r",
    "metadata": {"user_id": "u"},
    "truncation": "auto",
    "speed": "fast",
    "include": ["file_search_call.results"],
    "safety_identifier": "s",
    "service_tier": "flex",
    "logprobs": 2,
    "return_tokens_as_token_ids": True,
    "logprob_token_ids": [9],
    "truncation_side": "right",
    "stream_options": {"include_usage": True},
}
#: Fields with other values in one dialect, and fields that mean something only together with others.
SPECIAL: dict[tuple[str, str], dict[str, Any]] = {
    ("chat", "parallel_tool_calls"): {"tools": [TOOL], "tool_choice": "required"},
    ("responses", "tool_choice"): {"tools": [{"type": "function", **FUNCTION}], "tool_choice": "none"},
    ("messages", "tool_choice"): {"tools": [{"name": "weather"}], "tool_choice": {"type": "none"}},
    ("chat", "logprobs"): {"logprobs": True},
    ("chat", "top_logprobs"): {"logprobs": True, "top_logprobs": 2},
    ("chat", "echo"): {"messages": [USER, {"role": "assistant", "content": "A"}]},
    ("chat", "continue_final_message"): {"messages": [USER, {"role": "assistant", "content": "A"}]},
    ("completions", "return_tokens_as_token_ids"): {"logprobs": 1},
    ("chat", "return_tokens_as_token_ids"): {"logprobs": True},
    ("responses", "return_tokens_as_token_ids"): {"top_logprobs": 1},
    ("responses", "logprob_token_ids"): {"top_logprobs": 1},
    **{(each, "truncation_side"): {"truncate_prompt_tokens": 3} for each in DIALECTS},
    **{(each, "stream_options"): {"stream": True} for each in DIALECTS},
    **{(each, "guided_whitespace_pattern"): {"guided_json": SCHEMA} for each in DIALECTS},
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
#: Paths and values inside of formats and options: of every key that clients send in them.
DEPTHS: list[tuple[str, str, Any]] = [
    *((each, "response_format", FORMAT) for each in DIALECTS),
    *((each, "response_format", {"type": "json_object"}) for each in DIALECTS),
    *((each, "response_format", {"type": "json_object", "schema": SCHEMA}) for each in DIALECTS),
    *(
        (each, "response_format", {**FORMAT, "json_schema": {**FORMAT["json_schema"], key: value}})  # type: ignore[dict-item]
        for each in DIALECTS
        for key, value in (("strict", True), ("strict", False), ("description", "d"), ("unheard_of", 1))
    ),
    *((each, "response_format", {**FORMAT, "unheard_of": 1}) for each in DIALECTS),
    *(
        (each, "structured_outputs", {"json": SCHEMA, key: value})
        for each in DIALECTS
        for key, value in (
            ("whitespace_pattern", " "),
            ("disable_any_whitespace", True),
            ("disable_additional_properties", True),
            ("disable_fallback", True),
            ("_backend", "xgrammar"),
            ("_backend_was_auto", True),
            ("unheard_of", True),
        )
    ),
    *((each, "stream_options", {"include_obfuscation": True}) for each in DIALECTS),
    *(
        ("responses", "text", {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA, key: value}})
        for key, value in (("strict", True), ("strict", False), ("description", "d"), ("unheard_of", 1))
    ),
    ("responses", "text", {"format": {"type": "json_object", "schema": SCHEMA}}),
    *(("responses", "text", {key: "low"}) for key in ("verbosity", "unheard_of")),
    *(("responses", "reasoning", {key: "high"}) for key in ("effort", "summary", "generate_summary", "unheard_of")),
    *(
        ("messages", "thinking", {"type": "enabled", key: value})
        for key, value in (("budget_tokens", 9), ("display", "d"), ("unheard_of", 1))
    ),
    *(("messages", "output_config", {key: "high"}) for key in ("effort", "task_budget", "unheard_of")),
    *(
        ("messages", "output_config", {"format": {"type": kind, "schema": SCHEMA, **more}})
        for kind in ("json_schema", "json_object", "odd")
        for more in ({}, {"unheard_of": 1})
    ),
    ("messages", "output_format", {"type": "json_schema", "schema": SCHEMA}),
    *(
        (each, "tools", [{**DIALECTS[each][3], key: value}])
        for each in ("responses", "messages")
        for key, value in (("defer_loading", True), ("strict", True), ("unheard_of", 1))
    ),
    ("responses", "tools", [{"type": "custom", "name": "patch", "format": {"type": "grammar"}}]),
    ("responses", "tools", [{"type": "web_search"}]),
    ("messages", "tools", [{"type": "web_search_20250305", "name": "web_search"}]),
]
#: What has no effect because it is always done, or says nothing that could have one.
DONE_ANYWAY = {
    *((each, "model") for each in DIALECTS),
    *((each, "stream_options") for each in ("responses", "messages")),  # they always report usage
    ("chat", "include_reasoning"),  # of an answer with reasoning: test_chat.py
    *((each, name) for each in DIALECTS for name in ("rid", "request_id")),  # the request's name is not compared
    ("responses", "store"),  # the response says whether it is stored
}


@pytest.fixture
def settings() -> RouterSettings:
    return RouterSettings(max_choices=8, tool_call_parser="hermes", reasoning_parser="think")


def answer(request: GenerationRequest) -> Iterator[TokenDelta]:
    """Two tokens, then a special one, then the one that ends the answer."""
    asked = request.sampling.logprobs
    logprobs = None if asked is None else [scored(each, asked) for each in (900, 901, 1, 950)]
    yield TokenDelta(
        token_ids=[900, 901, 1, 950], logprobs=logprobs, finish_reason="stop", stop_token_id=950, cached_tokens=0
    )


def cases(dialect: str) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """The name of each field, a body's fields with it, and those among them that it needs besides."""
    _, kind, smallest, tool = DIALECTS[dialect]
    for name in kind.__struct_fields__:
        given = [tool] if name == "tools" else VALUES.get(name, {"asks": "something"})
        if name in smallest or name == "stream" or (dialect, name) in DONE_ANYWAY:
            continue
        more = SPECIAL.get((dialect, name), {})
        yield name, {name: given, **more}, more
    for each, name, given in DEPTHS:
        if each == dialect:
            yield name, {name: given}, {}


async def outcome(client: httpx.AsyncClient, backend: FakeBackend, path: str, body: dict[str, Any]) -> tuple[Any, str]:
    """Everything that a request led to, without its ids and times, and the fields named as ignored."""
    backend.streams.clear()
    response = await client.post(path, json={"seed": 1, **body})
    ignored = response.headers.get("x-homing-ignored-fields", "")
    if response.status_code >= 400:
        assert response.status_code == 400, response.text
        return response.text, ignored
    requests = [
        msgspec.structs.replace(each, trace_id="", deadline=round(each.deadline or 0, -1)) for each in backend.requests
    ]
    kept = response.text if body.get("stream") else ""
    answer = {} if body.get("stream") else response.json()
    for name in ("id", "created", "created_at", "completed_at"):
        answer.pop(name, None)
    for item in (*answer.get("output", ()), *answer.get("content", ())):
        item.pop("id", None)
    return (requests, answer, kept.count("usage")), ignored


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_a_field_that_asks_for_something_is_not_dropped_in_silence(
    client: httpx.AsyncClient, backend: FakeBackend, dialect: str
):
    """A caller who asks for JSON in a field that only another dialect reads would get prose, and no word about it."""
    path, _, smallest, _ = DIALECTS[dialect]
    backend.script = answer
    silent = []

    for name, fields, more in cases(dialect):
        without = {**smallest, **more, name: None} if name in more else {**smallest, **more}
        plain, _ = await outcome(client, backend, path, without)
        asked, ignored = await outcome(client, backend, path, {**smallest, **fields})
        if asked == plain and name not in ignored:
            silent.append(fields)

    assert not silent
