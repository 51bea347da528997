"""Compaction of a conversation, checked with OpenAI's own types."""

import base64
from typing import Any

import httpx
import pytest
from openai.types.responses import ResponseCompactionItem, ResponseUsage
from openai.types.responses.compacted_response import CompactedResponse

from homing.kvcache.hashing import token_array
from homing.router.config import RouterSettings
from homing.router.text.tokenizer import TextModel

from ..conftest import ANSWER
from ..fakes import FakeBackend
from .blocks import SETTINGS, says

PATH = "/v1/responses/compact"
TOOL = {"type": "function", "name": "weather", "parameters": {"type": "object"}}
TALK: list[dict[str, Any]] = [
    {"role": "user", "content": "Is it warm?"},
    {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
    {"role": "assistant", "content": "Yes."},
    {"role": "user", "content": "And tomorrow?"},
]


@pytest.fixture
def settings() -> RouterSettings:
    return SETTINGS


def prompt(backend: FakeBackend, text: TextModel) -> str:
    """The text of the last prompt."""
    return text.decode(list(token_array(backend.requests[-1].token_ids)))


async def test_a_compacted_conversation_goes_on(client: httpx.AsyncClient, backend: FakeBackend, text_model: TextModel):
    """The user's messages stay as they were; the summary takes the place of all others."""
    made = await client.post(PATH, json={"model": "demo", "input": TALK, "tools": [TOOL]})
    parsed = CompactedResponse.construct(**made.json())
    asked = prompt(backend, text_model)
    output = made.json()["output"]
    again = [*output, {"role": "user", "content": "Thanks."}]
    await client.post("/v1/responses", json={"model": "demo", "input": again, "tools": [TOOL]})
    went_on = prompt(backend, text_model)

    assert "sunny" in asked
    assert "Summarize this conversation" in asked
    assert isinstance(parsed.output[-1], ResponseCompactionItem)
    assert [item["type"] for item in output] == ["message", "message", "compaction"]
    assert [item["content"][0]["text"] for item in output[:-1]] == ["Is it warm?", "And tomorrow?"]
    assert parsed.object == "response.compaction"
    assert ResponseUsage.model_validate(made.json()["usage"]).input_tokens_details.cached_tokens == 3
    assert ANSWER.strip() in went_on
    assert "sunny" not in went_on
    assert "Summarize this conversation" not in went_on
    assert went_on.index("And tomorrow?") < went_on.index(ANSWER.strip()) < went_on.index("Thanks.")


async def test_the_prompt_extends_the_conversation_s(
    client: httpx.AsyncClient, backend: FakeBackend, text_model: TextModel
):
    """A long conversation is compacted when it is long: what was computed for it must be found in the cache."""
    await client.post("/v1/responses", json={"model": "demo", "input": TALK, "tools": [TOOL]})
    before = prompt(backend, text_model)
    await client.post(PATH, json={"model": "demo", "input": TALK, "tools": [TOOL]})

    assert prompt(backend, text_model).startswith(before[: before.index("And tomorrow?")])


@pytest.mark.parametrize("content", ["gAAAAB", "homing1.?", "homing1.//8=", None])
async def test_what_another_server_compacted_is_a_note(
    client: httpx.AsyncClient, backend: FakeBackend, text_model: TextModel, content: str | None
):
    """An error would end the session for good, because the item is sent with every later turn."""
    items = [{"type": "compaction", "encrypted_content": content}, {"role": "user", "content": "Go on."}]
    response = await client.post("/v1/responses", json={"model": "demo", "input": items})

    assert response.status_code == 200
    assert response.headers["x-homing-ignored-fields"] == "input[0]"
    assert "compacted elsewhere" in prompt(backend, text_model)


async def test_an_empty_summary_is_an_error(client: httpx.AsyncClient, backend: FakeBackend, text_model: TextModel):
    """A client would replace the whole conversation by it."""
    says(backend, text_model, " \n")
    response = await client.post(PATH, json={"model": "demo", "input": TALK})

    assert (response.status_code, response.json()["error"]["code"]) == (500, "request_failed")


@pytest.mark.parametrize("body", [{}, {"input": []}])
async def test_there_must_be_a_conversation(client: httpx.AsyncClient, body: dict[str, Any]):
    """The message that asks for the summary is not one."""
    response = await client.post(PATH, json=body)

    assert (response.status_code, response.json()["error"]["param"]) == (400, "input")


async def test_what_has_no_effect_is_named(client: httpx.AsyncClient):
    """As in all dialects."""
    body = {"input": "hi", "image": {"context_compression": "enabled"}, "service_tier": "flex", "zz": 1}
    response = await client.post(PATH, json=body)

    assert set(response.headers["x-homing-ignored-fields"].split(", ")) == {"image", "service_tier", "zz"}


async def test_the_summary_is_readable(client: httpx.AsyncClient):
    """It is the caller's own conversation; the documentation says that it is not encrypted."""
    content = (await client.post(PATH, json={"input": "hi"})).json()["output"][-1]["encrypted_content"]

    assert base64.b64decode(content.removeprefix("homing1.")).decode() == ANSWER.strip()
