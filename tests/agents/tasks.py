"""The clients' tasks and the model's answers: a loop of tool calls, and objects of a schema."""

import json
from typing import Any

from pydantic import BaseModel

from .scripted import call

QUESTION = "How warm is it in Ulm, and what is twice that?"
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "description": "Where."}},
    "required": ["city"],
    "additionalProperties": False,
}
DESCRIPTION = "The temperature in a city."
FUNCTION: dict[str, Any] = {"name": "weather", "description": DESCRIPTION, "parameters": WEATHER}
TOOL: dict[str, Any] = {"type": "function", "function": FUNCTION}
CITIES = ("Ulm", "Graz", "Bern")
#: Three tool calls, the first with a thought and text before it, then an answer.
LOOP = (
    "<think>I need the weather.</think>Let me look." + call("weather", city="Ulm"),
    call("weather", city="Graz"),
    call("weather", city="Bern"),
    "It is 7 degrees in Ulm.",
)
ANSWER = LOOP[-1]


class Fox(BaseModel):
    """What structured output must be."""

    name: str
    age: int


FOX = json.dumps({"name": "Ida", "age": 3})


def weather(city: str) -> str:
    """The temperature in a city."""
    return f"7 degrees in {city}"
