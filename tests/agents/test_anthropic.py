"""Anthropic's own client: messages, its stream helper, its tool loop and token counting."""

from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
from anthropic import Anthropic, beta_tool

from .scripted import NAME, Engine
from .tasks import ANSWER, CITIES, DESCRIPTION, FOX, LOOP, QUESTION, WEATHER, Fox, weather

TOOL: dict[str, Any] = {"name": "weather", "description": DESCRIPTION, "input_schema": WEATHER}


@pytest.fixture
def client(engine: Engine) -> Iterator[Anthropic]:
    with Anthropic(base_url=engine.url, api_key="k", max_retries=0, http_client=httpx2.Client(verify=False)) as one:
        yield one


def test_a_loop_of_tools_ends_with_the_answer(client: Anthropic, engine: Engine) -> None:
    """Created and streamed alternately; the helper's own blocks are sent back, including thinking and its signature."""
    engine.play(*LOOP)
    messages: list = [{"role": "user", "content": QUESTION}]
    asked: list[str] = []
    reused = 0
    for turn in range(len(LOOP)):
        given: dict[str, Any] = {"model": NAME, "max_tokens": 500, "messages": messages, "tools": [TOOL]}
        if turn % 2:
            message = client.messages.create(**given)
        else:
            with client.messages.stream(**given) as stream:
                message = stream.get_final_message()
        reused += message.usage.cache_read_input_tokens or 0
        messages.append({"role": "assistant", "content": message.content})
        calls = [block for block in message.content if block.type == "tool_use"]
        assert message.stop_reason == ("tool_use" if calls else "end_turn")
        if calls:
            asked += [block.input["city"] for block in calls]
            results = [{"type": "tool_result", "tool_use_id": each.id, "content": "7 degrees"} for each in calls]
            messages.append({"role": "user", "content": results})

    assert asked == list(CITIES)
    assert message.content[-1].text == ANSWER
    assert reused > 0
    assert all(later.startswith(earlier) for earlier, later in zip(engine.prompts, engine.prompts[1:], strict=False))


@pytest.mark.parametrize("arguments", ['{"city": }', '{"city": "Ulm", "city"}'])
def test_a_call_with_invalid_arguments_is_text_streamed_or_not(
    client: Anthropic, engine: Engine, arguments: str
) -> None:
    call = f'<tool_call>\n{{"name": "weather", "arguments": {arguments}}}\n</tool_call>'
    engine.play(call)
    given: dict[str, Any] = {"model": NAME, "max_tokens": 99, "messages": [{"role": "user", "content": QUESTION}]}

    whole = client.messages.create(tools=[TOOL], **given)
    with client.messages.stream(tools=[TOOL], **given) as it:
        streamed = it.get_final_message()

    for each in (whole, streamed):
        assert [(block.type, block.text) for block in each.content] == [("text", call)]
        assert each.stop_reason == "end_turn"


def test_the_tool_runner_runs_the_tools(client: Anthropic, engine: Engine) -> None:
    """The client's own loop, over a decorated function."""
    engine.play(*LOOP)
    messages: list = [{"role": "user", "content": QUESTION}]

    runner = client.beta.messages.tool_runner(
        model=NAME, max_tokens=500, messages=messages, tools=[beta_tool(weather)], betas=["made-up-2030-01-01"]
    )
    final = runner.until_done()

    assert final.content[-1].text == ANSWER
    assert "7 degrees in Bern" in engine.prompts[-1]


def test_an_object_of_a_schema_is_parsed(client: Anthropic, engine: Engine) -> None:
    """`output_format` becomes a schema that constrains the answer."""
    engine.play(FOX)

    parsed = client.messages.parse(
        model=NAME, max_tokens=100, messages=[{"role": "user", "content": "Who?"}], output_format=Fox
    )

    assert parsed.parsed_output == Fox(name="Ida", age=3)


def test_tokens_are_counted_as_they_are_billed(client: Anthropic, engine: Engine) -> None:
    """The count covers the whole prompt, including tools."""
    engine.play("Hello.")
    given: dict[str, Any] = {"model": NAME, "messages": [{"role": "user", "content": QUESTION}], "tools": [TOOL]}

    counted = client.messages.count_tokens(**given)
    used = client.messages.create(max_tokens=50, **given).usage

    parts = used.input_tokens, used.cache_read_input_tokens, used.cache_creation_input_tokens
    assert counted.input_tokens == sum(part or 0 for part in parts)
