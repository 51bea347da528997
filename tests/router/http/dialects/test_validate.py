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
    """`pin_ttl_s` applies where the client names no time."""
    settings = RouterSettings(pin_ttl_s=7.0, pin_max_ttl_s=9.0)

    request, _ = await request_under(settings, backend, text_model, path, cache_control={"type": "ephemeral"})

    assert [pin.ttl_s for pin in request.pins] == [7.0]


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
