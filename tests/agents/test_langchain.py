"""LangChain's models: tools and every method of structured output."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Literal

import httpx
import pytest
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI

from .scripted import NAME, Engine, call
from .tasks import ANSWER, CITIES, FOX, LOOP, QUESTION, Fox, weather

Make = Callable[..., ChatOpenAI]


@pytest.fixture
def model(engine: Engine) -> Iterator[Make]:
    """Makes chat models that share an HTTP client closed here, because LangChain would leave its own open."""
    with httpx.Client(verify=False) as http:
        yield partial(ChatOpenAI, base_url=f"{engine.url}/v1", api_key="k", model=NAME, max_retries=0, http_client=http)


@pytest.mark.parametrize("responses", [False, True])
def test_bound_tools_are_called_until_the_answer(engine: Engine, model: Make, responses: bool) -> None:
    """Over chat completions and over Responses, invoked and streamed alternately."""
    engine.play(*LOOP)
    bound = model(use_responses_api=responses).bind_tools([weather])
    messages: list = [HumanMessage(QUESTION)]
    asked = []
    for turn in range(len(LOOP)):
        if turn % 2:
            chunks = list(bound.stream(messages))
            message: Any = sum(chunks[1:], chunks[0])
        else:
            message = bound.invoke(messages)
        messages.append(message)
        for made in message.tool_calls:
            asked.append(made["args"]["city"])
            messages.append(ToolMessage(weather(asked[-1]), tool_call_id=made["id"]))

    assert asked == list(CITIES)
    assert message.text == ANSWER


@pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
def test_structured_output(
    engine: Engine, model: Make, method: Literal["json_schema", "function_calling", "json_mode"]
) -> None:
    """Each method uses a different request."""
    engine.play(call("Fox", name="Ida", age=3) if method == "function_calling" else FOX)

    found = model().with_structured_output(Fox, method=method).invoke("Who? Answer as JSON.")

    assert found == Fox(name="Ida", age=3)


def test_a_tool_can_be_forced(engine: Engine, model: Make) -> None:
    """LangChain's `any` is `required` on the wire."""
    engine.play(call("weather", city="Ulm"))

    for choice in ("any", "weather"):
        message = model().bind_tools([weather], tool_choice=choice).invoke(QUESTION)
        assert [made["name"] for made in message.tool_calls] == ["weather"]
