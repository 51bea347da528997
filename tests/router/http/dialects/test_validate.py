"""Each setting that affects generation, in each dialect."""

from typing import Any

import httpx
import msgspec
import pytest

from homing.kvcache.hashing import token_array
from homing.router.backend import GenerationRequest
from homing.router.config import RouterSettings
from homing.router.http.front import Front
from homing.router.text.tokenizer import SamplingDefaults, TextModel

from ..conftest import LoadedText, serving
from ..fakes import FakeBackend
from .blocks import CALL, says

USER = {"role": "user", "content": "Tell me a story."}
FUNCTION = {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
CHAT, COMPLETION, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
#: The smallest body of each dialect, and its form of a tool.
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [USER]},
    COMPLETION: {"prompt": "Tell me a story."},
    RESPONSES: {"input": [USER]},
    MESSAGES: {"messages": [USER], "max_tokens": 200},
}
TOOLS: dict[str, dict[str, Any]] = {
    CHAT: {"type": "function", "function": FUNCTION},
    RESPONSES: {"type": "function", **FUNCTION},
    MESSAGES: {"name": "weather", "input_schema": FUNCTION["parameters"]},
}


#: Settings that change what a request generates or how its answer is read. Each has a test here.
GENERATION = {
    "default_max_tokens",
    "generation_config",
    "request_timeout_s",
    "pin_max_ttl_s",
    "tool_call_parser",
    "reasoning_parser",
    "open_objects",
    "unknown_calls_as_text",
    "strict_fields",
    "max_choices",
    "drop_billing_line",
}
#: Settings of the server, the fleet, stores and limits, which know no dialect.
OTHERS = set(
    """
    host port served_model_name model_aliases policy backend engines events replay backend_model backend_key_file
    engine_chat backend_max_requests api_keys_file api_key max_body_bytes embedding_pooling response_store
    response_store_bytes response_store_age_s request_history request_history_bytes chat_template
    token_cache_bytes max_waiting_requests replica_silence_s retries warm_up_share access_log
    otlp_endpoint allowed_hosts cors_origins tls_cert_file tls_key_file read_timeout_s max_answer_values
    """.split()
)


async def request_under(
    settings: RouterSettings, backend: FakeBackend, text_model: TextModel, path: str, **fields: Any
) -> tuple[GenerationRequest, httpx.Response]:
    """What the backend gets for the dialect's smallest body, and the response."""
    from homing.router.metrics import RouterMetrics

    front = Front(settings, backend, RouterMetrics(), texts=LoadedText(text_model), monotonic=lambda: 1000.0)
    async with serving(front) as client:
        response = await client.post(path, json={**BODIES[path], **fields})
    assert response.status_code == 200, response.text
    return backend.requests[-1], response


@pytest.mark.parametrize("path", BODIES)
async def test_an_output_limit_that_the_client_did_not_set_is_the_settings(
    backend: FakeBackend, text_model: TextModel, path: str
):
    """Without a limit a model may run to the end of its context. Only Messages requires one from the client."""
    asked, _ = await request_under(RouterSettings(default_max_tokens=9), backend, text_model, path)
    unset, _ = await request_under(RouterSettings(), backend, text_model, path)

    room = 256 - len(token_array(unset.token_ids))
    assert asked.sampling.max_tokens == (200 if path == MESSAGES else 9)
    assert unset.sampling.max_tokens == (200 if path == MESSAGES else room)


@pytest.mark.parametrize("path", BODIES)
async def test_sampling_that_the_client_did_not_set_is_the_models(
    backend: FakeBackend, text_model: TextModel, path: str, monkeypatch: pytest.MonkeyPatch
):
    """Authors of a model say in its folder how to sample from it."""
    defaults = SamplingDefaults(temperature=0.5, top_p=0.25, top_k=7, min_p=0.125, repetition_penalty=1.5)
    monkeypatch.setattr(text_model, "sampling_defaults", defaults)

    with_them, _ = await request_under(RouterSettings(), backend, text_model, path)
    without, _ = await request_under(RouterSettings(generation_config=False), backend, text_model, path)

    for request, wanted in ((with_them, defaults), (without, SamplingDefaults())):
        for name, value in msgspec.structs.asdict(wanted).items():
            assert getattr(request.sampling, name) == value


@pytest.mark.parametrize("path", BODIES)
async def test_a_request_ends_in_time(backend: FakeBackend, text_model: TextModel, path: str):
    """The setting bounds what the client asks for."""
    for given, wanted in (({}, 5.0), ({"timeout": 90.0}, 5.0), ({"timeout": 2.0}, 2.0)):
        request, _ = await request_under(RouterSettings(request_timeout_s=5.0), backend, text_model, path, **given)
        assert request.deadline == 1000.0 + wanted


@pytest.mark.parametrize("path", BODIES)
async def test_a_pin_lasts_as_the_settings_say(backend: FakeBackend, text_model: TextModel, path: str):
    """Where the client names no time it is five minutes, or the longest that is allowed."""
    for longest, wanted in ((9.0, 9.0), (3600.0, 300.0)):
        settings = RouterSettings(pin_max_ttl_s=longest)
        request, _ = await request_under(settings, backend, text_model, path, cache_control={"type": "ephemeral"})
        assert [pin.ttl_s for pin in request.pins] == [wanted]


@pytest.mark.parametrize("path", TOOLS)
async def test_parsers_apply_to_every_chat(backend: FakeBackend, text_model: TextModel, path: str):
    """With parsers, the markers are gone; without, they are text."""
    says(backend, text_model, CALL)
    for name, shown in (("hermes", False), ("none", True)):
        reasoning = "think" if name == "hermes" else "none"
        settings = RouterSettings(tool_call_parser=name, reasoning_parser=reasoning)
        _, response = await request_under(settings, backend, text_model, path, tools=[TOOLS[path]])
        assert ("<think>" in response.text) == ("<tool_call>" in response.text) == shown


@pytest.mark.parametrize("path", TOOLS)
@pytest.mark.parametrize("open_objects", [False, True])
async def test_objects_are_closed_in_guided_calls(
    backend: FakeBackend, text_model: TextModel, path: str, open_objects: bool
):
    """Agents call `f(**arguments)`: a key that the schema does not declare makes that fail."""
    settings = RouterSettings(tool_call_parser="hermes", open_objects=open_objects)
    choice: Any = {"type": "any"} if path == MESSAGES else "required"

    request, _ = await request_under(settings, backend, text_model, path, tools=[TOOLS[path]], tool_choice=choice)

    assert request.constraint is not None
    inner = '"properties":{"city":{"type":"string"}}'
    assert (f'{inner},"additionalProperties":false' in request.constraint.source) == (not open_objects)


def test_every_setting_is_known_here():
    """A new one either gets a test in every dialect, or is none that a dialect could forget."""
    assert set(RouterSettings.__struct_fields__) == GENERATION | OTHERS


@pytest.mark.parametrize("path", TOOLS)
@pytest.mark.parametrize("open_objects", [False, True])
async def test_objects_are_closed_in_strict_formats(
    backend: FakeBackend, text_model: TextModel, path: str, open_objects: bool
):
    """Whatever the dialect calls its format."""
    schema = FUNCTION["parameters"]
    given: dict[str, Any] = {"name": "x", "strict": True, "schema": schema}
    form: dict[str, Any] = {
        CHAT: {"response_format": {"type": "json_schema", "json_schema": given}},
        RESPONSES: {"text": {"format": {"type": "json_schema", **given}}},
        MESSAGES: {"output_config": {"format": {"type": "json_schema", "schema": schema}}},
    }[path]

    request, _ = await request_under(RouterSettings(open_objects=open_objects), backend, text_model, path, **form)

    assert request.constraint is not None
    assert ('"additionalProperties":false' in request.constraint.source) == (not open_objects)


@pytest.mark.parametrize("path", TOOLS)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_of_an_unknown_tool_is_what_the_setting_says(
    backend: FakeBackend, text_model: TextModel, path: str, stream: bool
):
    """A call, which the agent can refuse by name, or text."""
    says(backend, text_model, '<tool_call>\n{"name": "dance", "arguments": {"a": 1}}\n</tool_call>')
    for as_text in (False, True):
        settings = RouterSettings(tool_call_parser="hermes", unknown_calls_as_text=as_text)
        fields: dict[str, Any] = {"tools": [TOOLS[path]], "stream": stream}
        _, response = await request_under(settings, backend, text_model, path, **fields)
        assert ("<tool_call>" in response.text) == as_text


@pytest.mark.parametrize("path", TOOLS)
@pytest.mark.parametrize("stream", [False, True])
async def test_only_the_first_call_comes_back_where_calls_may_not_be_parallel(
    backend: FakeBackend, text_model: TextModel, path: str, stream: bool
):
    """Each dialect has a field for that."""
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "%s"}}\n</tool_call>'
    says(backend, text_model, f"{call % 'Ulm'}\n{call % 'Bonn'}")
    one: dict[str, Any] = {"parallel_tool_calls": False}
    if path == MESSAGES:
        one = {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}
    for fields, both in (({}, True), (one, False)):
        settings = RouterSettings(tool_call_parser="hermes")
        sent = {"tools": [TOOLS[path]], "stream": stream, **fields}
        _, response = await request_under(settings, backend, text_model, path, **sent)
        assert "Ulm" in response.text
        assert ("Bonn" in response.text) == both


@pytest.mark.parametrize("path", BODIES)
async def test_stop_strings_and_tokens_end_every_answer(backend: FakeBackend, text_model: TextModel, path: str):
    """Messages calls them stop_sequences."""
    says(backend, text_model, "one two three")
    stops = {"stop_sequences" if path == MESSAGES else "stop": ["two"]}

    request, response = await request_under(RouterSettings(), backend, text_model, path, **stops, stop_token_ids=[5])

    assert "one" in response.text
    assert "three" not in response.text
    assert 5 in request.sampling.stop_token_ids


@pytest.mark.parametrize("path", BODIES)
async def test_unknown_fields_are_ignored_by_name_or_refused(backend: FakeBackend, text_model: TextModel, path: str):
    """In every dialect, at the top and inside of a message."""
    _, response = await request_under(RouterSettings(), backend, text_model, path, dance=1)
    assert "dance" in response.headers["x-homing-ignored-fields"]

    with pytest.raises(AssertionError, match="dance"):
        await request_under(RouterSettings(strict_fields=True), backend, text_model, path, dance=1)


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
async def test_choices_have_a_limit(backend: FakeBackend, text_model: TextModel, path: str):
    """The other dialects have one choice."""
    with pytest.raises(AssertionError, match="'n'"):
        await request_under(RouterSettings(max_choices=2), backend, text_model, path, n=3)


@pytest.mark.parametrize("path", TOOLS)
async def test_the_line_that_changes_with_each_request_is_dropped(
    backend: FakeBackend, text_model: TextModel, path: str
):
    """Only Claude Code writes it, and it speaks Messages."""
    line = "x-anthropic-billing-header: cc_version=1; cch=abc;\n"
    system = line + "You are helpful."
    head: dict[str, Any] = {
        CHAT: {"messages": [{"role": "system", "content": system}, USER]},
        RESPONSES: {"instructions": system},
        MESSAGES: {"system": system},
    }[path]

    lengths = []
    for drop in (True, False):
        settings = RouterSettings(drop_billing_line=drop)
        request, _ = await request_under(settings, backend, text_model, path, **head)
        lengths.append(len(token_array(request.token_ids)))

    assert (lengths[0] < lengths[1]) == (path == MESSAGES)
