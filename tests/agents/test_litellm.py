"""litellm, which many agents and gateways use: the messages that it builds must be accepted as input.

Its current versions need another `openai` package than the other clients: `make frameworks` installs it elsewhere.
"""

import asyncio
import importlib.metadata
import json
import logging
import re
import warnings
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from .scripted import NAME, Engine
from .tasks import ANSWER, CITIES, FOX, LOOP, QUESTION, TOOL, Fox, weather


@pytest.fixture
def litellm(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """litellm without downloading its price list, and without its own warnings.

    Its synchronous calls use the thread's event loop; without one they would create a loop and never close it.
    """
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    with warnings.catch_warnings(), closing(loop):
        warnings.simplefilter("ignore")
        module = pytest.importorskip("litellm", reason="litellm is installed by make frameworks")
        module.telemetry = False
        logging.getLogger("LiteLLM").setLevel(logging.ERROR)
        yield module
        asyncio.set_event_loop(None)


@pytest.mark.parametrize("provider", ["openai", "anthropic"])
def test_its_own_answers_are_taken_back(engine: Engine, litellm: Any, provider: str) -> None:
    """Four turns, three with tools, whole and streamed alternately; messages are sent back as litellm made them."""
    engine.play(*LOOP)
    given = {
        "model": f"{provider}/{NAME}",
        "api_base": f"{engine.url}/v1" if provider == "openai" else engine.url,
        "api_key": "k",
        "tools": [TOOL],
        "max_tokens": 500,
    }
    messages: list = [{"role": "user", "content": QUESTION}]
    asked = []
    for turn in range(len(LOOP)):
        if turn % 2:
            chunks = list(litellm.completion(messages=messages, stream=True, **given))
            message = litellm.stream_chunk_builder(chunks).choices[0].message
        else:
            message = litellm.completion(messages=messages, **given).choices[0].message
        messages.append(message)
        for made in message.tool_calls or ():
            asked.append(json.loads(made.function.arguments)["city"])
            messages.append({"role": "tool", "tool_call_id": made.id, "content": weather(asked[-1])})

    assert asked == list(CITIES)
    assert message.content == ANSWER


def test_a_schema_and_responses(engine: Engine, litellm: Any) -> None:
    """A pydantic class as the response format, and the Responses API."""
    given = {"model": f"openai/{NAME}", "api_base": f"{engine.url}/v1", "api_key": "k"}
    engine.play(FOX)

    answer = litellm.completion(messages=[{"role": "user", "content": "Who?"}], response_format=Fox, **given)
    response = litellm.responses(input="Who?", **given)

    assert Fox.model_validate_json(answer.choices[0].message.content) == Fox(name="Ida", age=3)
    assert response.output[0].content[0].text == FOX


def test_it_raises_its_own_error_for_a_refusal(engine: Engine, litellm: Any) -> None:
    """Status and message of a refusal must reach the caller."""
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        litellm.completion(
            model=f"openai/{NAME}",
            api_base=f"{engine.url}/v1",
            api_key="k",
            messages=[{"role": "user", "content": "Who?"}],
            temperature=9,
        )


def test_the_snippet_of_the_docs(engine: Engine, litellm: Any) -> None:
    """It runs as the page shows it, with this server's address and model, and the page names the version."""
    page = (Path(__file__).parents[2] / "docs" / "clients.md").read_text()
    (snippet,) = re.findall(r"```python\n(import litellm.*?)```", page, re.DOTALL)
    engine.play(ANSWER)
    shown: dict[str, Any] = {}

    exec(snippet.replace("http://127.0.0.1:8000", engine.url).replace("openai/demo", f"openai/{NAME}"), shown)

    assert shown["answer"].choices[0].message.content == ANSWER
    assert f"litellm  # {importlib.metadata.version('litellm')}\n" in snippet
