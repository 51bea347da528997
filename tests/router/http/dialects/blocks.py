"""Helpers for the Responses and Messages tests: an answer with reasoning and a tool call, and a stream parser."""

import json
from typing import Any

import httpx

from homing.router.config import RouterSettings
from homing.router.text.tokenizer import TextModel

from ..fakes import FakeBackend, reply

SETTINGS = RouterSettings(tool_call_parser="hermes", reasoning_parser="think")
CALL = (
    "<think>It is\nraining?</think>\n\nLet me see.\n"
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"}}\n</tool_call>'
)


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """Return the data of each event, and assert that the event's name equals its type."""
    found = []
    for block in filter(None, response.text.split("\n\n")):
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def says(backend: FakeBackend, text_model: TextModel, text: str) -> None:
    backend.script = reply(list(text_model.encode_now([text], special_tokens=False)[0]), cached=3)
