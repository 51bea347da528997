"""OpenAI's own client: the helpers that build an answer from a stream, parse it and loop over tools."""

import json
from collections.abc import Iterator

import httpx
import pytest
from openai import OpenAI, pydantic_function_tool

from .scripted import NAME, Engine, call
from .tasks import ANSWER, CITIES, FOX, FUNCTION, LOOP, QUESTION, TOOL, Fox, weather


@pytest.fixture
def client(engine: Engine) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{engine.url}/v1", api_key="k", max_retries=0, http_client=httpx.Client(verify=False)) as one:
        yield one


def test_a_streamed_loop_of_tools_ends_with_the_answer(client: OpenAI, engine: Engine) -> None:
    """The helper's own message is sent back unchanged, and each prompt continues the previous one."""
    engine.play(*LOOP)
    messages: list = [{"role": "user", "content": QUESTION}]
    asked = []
    for turn in range(len(LOOP)):
        with client.chat.completions.stream(model=NAME, messages=messages, tools=[TOOL]) as stream:
            message = stream.get_final_completion().choices[0].message
        messages.append(message.model_dump(exclude_none=True, exclude={"parsed"}))
        if turn == len(LOOP) - 1:
            break
        [made] = message.tool_calls or []
        city = json.loads(made.function.arguments)["city"]
        asked.append(city)
        messages.append({"role": "tool", "tool_call_id": made.id, "content": weather(city)})

    assert asked == list(CITIES)
    assert message.content == ANSWER
    assert all(later.startswith(earlier) for earlier, later in zip(engine.prompts, engine.prompts[1:], strict=False))


def test_parse_makes_an_object_and_typed_arguments(client: OpenAI, engine: Engine) -> None:
    """`.parse` sends strict schemas."""
    engine.play(FOX)
    messages: list = [{"role": "user", "content": "Who?"}]
    fox = client.chat.completions.parse(model=NAME, messages=messages, response_format=Fox)
    engine.play(f'<tool_call>\n{{"name": "Fox", "arguments": {FOX}}}\n</tool_call>')
    tool = pydantic_function_tool(Fox)
    called = client.chat.completions.parse(model=NAME, messages=messages, tools=[tool], tool_choice="required")

    assert fox.choices[0].message.parsed == Fox(name="Ida", age=3)
    [made] = called.choices[0].message.tool_calls or []
    assert made.function.parsed_arguments == Fox(name="Ida", age=3)


def test_an_agent_with_a_schema_may_still_call_its_tools(client: OpenAI, engine: Engine) -> None:
    """The schema applies only to the answer. Chat completions and Responses, whole and streamed."""
    engine.play(call("weather", city="Ulm"), FOX)
    messages: list = [{"role": "user", "content": QUESTION}]
    given: dict = {"model": NAME, "messages": messages, "tools": [TOOL], "response_format": Fox}
    with client.chat.completions.stream(**given) as stream:
        called = stream.get_final_completion().choices[0].message
    [made] = called.tool_calls or []
    messages += [called.model_dump(exclude_none=True, exclude={"parsed"})]
    messages += [{"role": "tool", "tool_call_id": made.id, "content": "7 degrees"}]
    fox = client.chat.completions.parse(**{**given, "tools": [{**TOOL, "function": {**FUNCTION, "strict": True}}]})

    items: list = [{"role": "user", "content": QUESTION}]
    asked: dict = {"model": NAME, "input": items, "tools": [{"type": "function", **FUNCTION}], "text_format": Fox}
    with client.responses.stream(**asked) as events:
        events.until_done()
        items += [each.model_dump(exclude_none=True) for each in events.get_final_response().output]
    items.append({"type": "function_call_output", "call_id": items[-1]["call_id"], "output": "7 degrees"})

    assert json.loads(made.function.arguments) == {"city": "Ulm"}
    assert fox.choices[0].message.parsed == client.responses.parse(**asked).output_parsed == Fox(name="Ida", age=3)


def test_responses_loop_over_tools_created_and_streamed(client: OpenAI, engine: Engine) -> None:
    """The output items are sent back as received, including reasoning."""
    engine.play(*LOOP)
    items: list = [{"role": "user", "content": QUESTION}]
    asked = []
    for turn in range(len(LOOP)):
        given = {"model": NAME, "input": items, "tools": [{"type": "function", "strict": True, **FUNCTION}]}
        if turn % 2:
            with client.responses.stream(**given) as stream:
                stream.until_done()
                response = stream.get_final_response()
        else:
            response = client.responses.create(**given)
        items += [each.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for each in response.output]
        for made in response.output:
            if made.type == "function_call":
                asked.append(json.loads(made.arguments)["city"])
                items.append({"type": "function_call_output", "call_id": made.call_id, "output": weather(asked[-1])})

    assert asked == list(CITIES)
    assert response.output_text == ANSWER
    assert response.usage is not None
    assert response.usage.input_tokens_details.cached_tokens > 0
    assert all(later.startswith(earlier) for earlier, later in zip(engine.prompts, engine.prompts[1:], strict=False))


def test_responses_parse_an_object(client: OpenAI, engine: Engine) -> None:
    """Created, and from a stream."""
    engine.play(FOX)

    created = client.responses.parse(model=NAME, input="Who?", text_format=Fox)
    with client.responses.stream(model=NAME, input="Who?", text_format=Fox) as stream:
        stream.until_done()
        streamed = stream.get_final_response()

    assert created.output_parsed == streamed.output_parsed == Fox(name="Ida", age=3)
