"""What the tests of Responses and Messages share: an answer with reasoning and a call, and the events of a stream."""

import json
from typing import Any

import httpx

from homing.router.config import RouterSettings
from homing.router.text.tokenizer import TextModel

from ..fakes import FakeBackend, reply

SETTINGS = RouterSettings(default_max_tokens=64, tool_call_parser="hermes", reasoning_parser="think")
CALL = (
    "<think>It is\nraining?</think>\n\nLet me see.\n"
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"}}\n</tool_call>'
)


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """The data of each event, whose name must be its type."""
    found = []
    for block in filter(None, response.text.split("\n\n")):
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def says(backend: FakeBackend, text_model: TextModel, text: str) -> None:
    backend.script = reply(list(text_model.encode_now([text], special_tokens=False)[0]), cached=3)
