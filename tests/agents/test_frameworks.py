"""Agent frameworks: their own tool loops, and every way in which they request an object.

Their packages are heavy and exclude each other: `make frameworks` runs this file once in each framework's environment.
Elsewhere, frameworks that are not installed are skipped.
"""

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from openai import AsyncOpenAI, OpenAI

from .scripted import NAME, Engine, call
from .tasks import ANSWER, FOX, LOOP, QUESTION, Fox, weather

pytestmark = [
    # Frameworks leave sockets open and use deprecated features.
    pytest.mark.filterwarnings("ignore"),
]
IDA = Fox(name="Ida", age=3)
#: Structured output requested as a function call.
CALLED = call("Fox", name="Ida", age=3)


@pytest.mark.parametrize("api", ["OpenAIResponsesModel", "OpenAIChatCompletionsModel"])
def test_openai_agents(engine: Engine, api: str) -> None:
    """Its runner, whole and streamed, a forced tool and typed output."""
    agents = pytest.importorskip("agents", reason="openai-agents is installed by make frameworks")
    agents.set_tracing_disabled(True)

    async def answers() -> list[Any]:
        async with AsyncOpenAI(base_url=f"{engine.url}/v1", api_key="k", max_retries=0) as client:
            given: dict[str, Any] = {"name": "a", "model": getattr(agents, api)(model=NAME, openai_client=client)}
            tools = [agents.function_tool(weather)]
            helper = agents.Agent(instructions="Help.", tools=tools, **given)
            engine.play(*LOOP)
            whole = await agents.Runner.run(helper, QUESTION)
            streamed = agents.Runner.run_streamed(helper, QUESTION)
            async for _ in streamed.stream_events():
                pass
            engine.play(call("weather", city="Ulm"), ANSWER)
            must = agents.ModelSettings(tool_choice="required")
            forced = await agents.Runner.run(agents.Agent(tools=tools, model_settings=must, **given), QUESTION)
            engine.play(call("weather", city="Ulm"), FOX)
            typed = await agents.Runner.run(agents.Agent(tools=tools, output_type=Fox, **given), "Who?")
            return [each.final_output for each in (whole, streamed, forced, typed)]

    assert asyncio.run(answers()) == [ANSWER, ANSWER, ANSWER, IDA]


@pytest.mark.parametrize("api", ["OpenAIChatModel", "OpenAIResponsesModel"])
def test_pydantic_ai(engine: Engine, api: str) -> None:
    """Its loop and its three kinds of typed output."""
    pydantic_ai = pytest.importorskip("pydantic_ai", reason="pydantic-ai is installed by make frameworks")
    models = pytest.importorskip("pydantic_ai.models.openai")
    provider = pytest.importorskip("pydantic_ai.providers.openai")
    model = getattr(models, api)(NAME, provider=provider.OpenAIProvider(base_url=f"{engine.url}/v1", api_key="k"))

    engine.play(*LOOP)
    assert pydantic_ai.Agent(model, tools=[weather]).run_sync(QUESTION).output == ANSWER
    for kind in ("NativeOutput", "PromptedOutput", "ToolOutput"):
        engine.play(call("final_result", name="Ida", age=3) if kind == "ToolOutput" else FOX)
        agent = pydantic_ai.Agent(model, output_type=getattr(pydantic_ai, kind)(Fox))
        assert agent.run_sync("Who?").output == IDA


@pytest.mark.parametrize(
    ("mode", "answer"),
    [
        ("TOOLS", CALLED),
        ("TOOLS_STRICT", CALLED),
        ("RESPONSES_TOOLS", CALLED),
        ("JSON", FOX),
        ("JSON_SCHEMA", FOX),
        ("MD_JSON", f"```json\n{FOX}\n```"),
    ],
)
def test_instructor(engine: Engine, mode: str, answer: str) -> None:
    """All of its modes for OpenAI's API."""
    instructor = pytest.importorskip("instructor", reason="instructor is installed by make frameworks")
    engine.play(answer)

    with OpenAI(base_url=f"{engine.url}/v1", api_key="k", max_retries=0) as client:
        found = instructor.from_openai(client, mode=instructor.Mode[mode]).chat.completions.create(
            model=NAME, response_model=Fox, messages=[{"role": "user", "content": "Who?"}], max_retries=0
        )

    assert found.model_dump() == IDA.model_dump()


@pytest.fixture
def llama_index(engine: Engine) -> Iterator[Callable[..., Any]]:
    module = pytest.importorskip("llama_index.llms.openai_like", reason="llama-index is installed by make frameworks")

    def make(**options: Any) -> Any:
        return module.OpenAILike(
            model=NAME,
            api_base=f"{engine.url}/v1",
            api_key="k",
            is_chat_model=True,
            is_function_calling_model=True,
            context_window=30_000,
            max_retries=0,
            **options,
        )

    return make


def test_llama_index(engine: Engine, llama_index: Callable[..., Any]) -> None:
    """Its agent, and typed output by schema and by function call."""
    workflow = pytest.importorskip("llama_index.core.agent.workflow")

    async def answer() -> str:
        return str(await workflow.FunctionAgent(tools=[weather], llm=llama_index()).run(QUESTION))

    engine.play(*LOOP)
    assert asyncio.run(answer()) == ANSWER
    engine.play(FOX)
    by_schema = llama_index(should_use_structured_outputs=True).as_structured_llm(Fox)
    assert by_schema.complete("Who?").raw == IDA
    engine.play(CALLED)
    assert llama_index().as_structured_llm(Fox).complete("Who?").raw == IDA
