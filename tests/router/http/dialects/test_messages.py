"""The Messages API, checked with Anthropic's own client and types."""

import json
from collections.abc import AsyncIterator
from types import ModuleType
from typing import TYPE_CHECKING

import httpx
import httpx2
import pytest

from homing.kvcache.hashing import token_array
from homing.router.config import RouterSettings
from homing.router.errors import ReplicaLost
from homing.router.http.dialects.messages import MESSAGES, conversation
from homing.router.http.front import Front
from homing.router.text.tokenizer import TextModel

from ..conftest import ANSWER, Live
from ..fakes import FakeBackend, reply
from .blocks import CALL, SETTINGS, events, says

if TYPE_CHECKING:
    from anthropic import AsyncAnthropic

PATH = "/v1/messages"
ASKED = {"model": "demo", "max_tokens": 64, "messages": [{"role": "user", "content": "Tell me a story."}]}
TOOL = {"name": "weather", "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}}}
KEEP = {"type": "ephemeral"}
BILLING = "x-anthropic-billing-header: cc_version=2.1; cch=abc12;"


@pytest.fixture
def settings() -> RouterSettings:
    return SETTINGS


@pytest.fixture
def anthropic() -> ModuleType:
    """Import anthropic late: it takes a second, and every test process collects this file but one runs it."""
    import anthropic

    return anthropic


@pytest.fixture
async def claude(anthropic: ModuleType, live: Live) -> AsyncIterator["AsyncAnthropic"]:
    """Anthropic's own client, without retries."""
    http = httpx2.AsyncClient(verify=False)  # saves 20 ms of TLS setup
    address = f"http://127.0.0.1:{live.port}"
    async with anthropic.AsyncAnthropic(base_url=address, api_key="k1", max_retries=0, http_client=http) as client:
        yield client


async def test_a_message_is_anthropics(anthropic: ModuleType, client: httpx.AsyncClient, backend: FakeBackend):
    """The client's own types validate it; `input_tokens` excludes cached tokens."""
    response = await client.post(f"{PATH}?beta=true", json=ASKED, headers={"anthropic-beta": "unknown-2030-01-01"})

    parsed = anthropic.types.Message.model_validate_json(response.content)
    assert [block.text for block in parsed.content] == [ANSWER]
    assert (parsed.stop_reason, parsed.usage.cache_read_input_tokens) == ("end_turn", 3)
    assert parsed.usage.input_tokens + 3 == len(token_array(backend.requests[0].token_ids))


async def test_a_stream_has_all_events_in_order(client: httpx.AsyncClient):
    """Clients process the events with a state machine."""
    found = events(await client.post(PATH, json=ASKED | {"stream": True}))

    assert list(dict.fromkeys(each["type"] for each in found)) == [
        *("message_start", "ping", "content_block_start", "content_block_delta", "content_block_stop"),
        *("message_delta", "message_stop"),
    ]
    deltas = [each["delta"]["text"] for each in found if each["type"] == "content_block_delta"]
    assert "".join(deltas) == ANSWER
    assert found[0]["message"]["usage"]["cache_read_input_tokens"] == 3
    assert found[-2]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert found[-2]["usage"]["output_tokens"] >= len(deltas)


async def test_anthropics_client_streams_reasoning_and_calls(claude: "AsyncAnthropic", backend, text_model: TextModel):
    """The client's helper assembles the message from the events."""
    says(backend, text_model, CALL)

    async with claude.messages.stream(**ASKED, tools=[TOOL]) as stream:
        streamed = await stream.get_final_message()
    whole = await claude.messages.create(**ASKED, tools=[TOOL])

    for message in (streamed, whole):
        thought, said, call = message.content
        assert (thought.type, thought.thinking) == ("thinking", "It is\nraining?")
        assert thought.signature
        assert (said.type, said.text) == ("text", "Let me see.")
        assert (call.type, call.name, call.input) == ("tool_use", "weather", {"city": "Ulm"})
        assert message.stop_reason == "tool_use"


async def test_the_answer_continues_a_message_of_the_assistant(client, backend: FakeBackend, text_model: TextModel):
    """Callers prefill answers with `{`; a final assistant message that ends with a tool call is not a prefill."""
    call = [{"type": "tool_use", "id": "t1", "name": "weather", "input": {}}]
    for content in ("Once upon", call):
        messages = [*ASKED["messages"], {"role": "assistant", "content": content}]
        await client.post(PATH, json=ASKED | {"messages": messages})

    begun, called = [text_model.decode(token_array(request.token_ids)) for request in backend.requests]
    assert begun.endswith("assistant\nOnce upon")
    assert called.endswith("assistant\n")


async def test_a_stop_sequence_is_named(client: httpx.AsyncClient):
    """Clients cannot tell otherwise which of several stop sequences matched."""
    message = (await client.post(PATH, json=ASKED | {"stop_sequences": ["zebra", " an owl"]})).json()

    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", " an owl")
    assert message["content"][0]["text"] == ANSWER[: ANSWER.index(" an owl")]


async def test_errors_have_anthropics_envelope_and_words(anthropic: ModuleType, client: httpx.AsyncClient, claude):
    """The clients' retries and compaction depend on them."""
    long = [{"role": "user", "content": "fox " * 400}]

    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        await claude.messages.create(**ASKED | {"messages": long})
    with pytest.raises(anthropic.NotFoundError):
        await claude.messages.create(**ASKED | {"model": "other"})
    error = (await client.post(PATH, json={"messages": ASKED["messages"]})).json()
    assert (error["type"], error["error"]["type"]) == ("error", "invalid_request_error")
    assert "max_tokens" in error["error"]["message"]


async def test_a_stream_that_breaks_ends_with_an_error(anthropic: ModuleType, claude, backend: FakeBackend, answer_ids):
    """The client raises the error event as an exception."""
    whole = reply(answer_ids)
    backend.script = lambda request: [*list(whole(request))[:3], ReplicaLost("r0 is gone")]

    with pytest.raises(anthropic.APIStatusError, match="r0 is gone"):
        async with claude.messages.stream(**ASKED) as stream:
            await stream.get_final_message()


async def test_tokens_are_counted_as_the_request_has_them(claude: "AsyncAnthropic", backend: FakeBackend):
    """The count includes the tools and the system prompt."""
    asked = {"model": "demo", "messages": ASKED["messages"], "system": "You help.", "tools": [TOOL]}
    counted = await claude.messages.count_tokens(**asked)
    await claude.messages.create(**asked, max_tokens=5)

    assert counted.input_tokens == len(token_array(backend.requests[0].token_ids))


async def test_cache_control_pins_the_prompt_up_to_it(client, backend: FakeBackend, answer_ids, text_model: TextModel):
    """Tokens written to the cache are counted separately; a lifetime above the server's limit is lowered."""
    backend.script = reply(answer_ids, cached=3, pinned=16)
    system = [
        {
            "type": "text",
            "text": "You tell stories of animals.",
            "cache_control": KEEP | {"ttl": "1h", "scope": "global"},
        }
    ]

    usage = (await client.post(PATH, json=ASKED | {"system": system})).json()["usage"]

    [request] = backend.requests
    [pin] = request.pins
    assert pin.ttl_s == 3600.0
    kept = text_model.decode(token_array(request.token_ids)[: pin.num_tokens])
    assert "stories of animals" in kept
    assert "Tell me" not in kept
    assert (usage["cache_read_input_tokens"], usage["cache_creation_input_tokens"]) == (3, 13)
    assert sum(usage[name] for name in usage if name != "output_tokens") == len(token_array(request.token_ids))


@pytest.mark.parametrize("as_blocks", [False, True])
async def test_the_billing_line_is_dropped_and_counted(client, front: Front, backend, as_blocks: bool):
    """It differs in every request, so everything after it would miss the cache."""
    text = f"{BILLING}\nYou help."
    blocks = [{"type": "text", "text": BILLING}, {"type": "text", "text": "You help."}]
    for system in (blocks if as_blocks else text, "You help."):
        await client.post(PATH, json=ASKED | {"system": system})

    one, two = backend.requests
    assert one.token_ids == two.token_ids
    assert "homing_billing_lines_dropped_total 1.0" in front.metrics.render().decode()


async def test_sessions_and_keys_are_those_that_clients_send(client: httpx.AsyncClient, backend: FakeBackend):
    """Claude Code sends its session in a header, other clients a user id in the body; keys come in `x-api-key`."""
    await client.post(PATH, json=ASKED, headers={"x-claude-code-session-id": "s1", "x-api-key": "a"})
    await client.post(PATH, json=ASKED | {"metadata": {"user_id": "u1"}}, headers={"authorization": "Bearer a"})
    await client.post(PATH, json=ASKED | {"metadata": {"user_id": "u" * 1000}})

    one, two, long = backend.requests
    assert (one.session, two.session, len(long.session)) == ("s1", "u1", 64)
    assert one.tenant == two.tenant


def test_blocks_become_turns():
    """Tool results become separate messages; server tools and their output are left out."""
    body = MESSAGES.decoder.decode(
        json.dumps(
            {
                "max_tokens": 9,
                "system": [{"type": "text", "text": "One."}, {"type": "text", "text": "Two.", "cache_control": KEEP}],
                "messages": [
                    {"role": "user", "content": [{"type": "text", "text": "Weather?", "cache_control": KEEP}]},
                    {
                        "role": "assistant",
                        "content": [
                            {"type": "thinking", "thinking": "Hm.", "signature": "x"},
                            {"type": "redacted_thinking", "data": "x"},
                            {"type": "text", "text": "I look."},
                            {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Ulm"}},
                        ],
                    },
                    {
                        "role": "user",
                        "content": [
                            {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "rain"}]},
                            {"type": "text", "text": "And?"},
                        ],
                    },
                    {"role": "system", "content": "Be brief."},
                ],
                "tools": [TOOL | {"cache_control": KEEP}, {"type": "web_search_20250305", "name": "web_search"}],
                "thinking": {"type": "disabled"},
                "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
            }
        )
    )

    made = conversation(body, RouterSettings())

    rendered = made.template_input()
    assert rendered.messages == [
        {"role": "system", "content": "One.\nTwo."},
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "Hm.",
            "tool_calls": [
                {"id": "t1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Ulm"}}}
            ],
        },
        {"role": "tool", "content": "rain", "tool_call_id": "t1"},
        {"role": "user", "content": "And?\nBe brief."},
    ]
    assert [tool["function"]["name"] for tool in rendered.tools or ()] == ["weather"]
    assert rendered.template_arguments == {"enable_thinking": False}
    assert [(index, mark.end) for index, mark in made.marks()] == [(-1, None), (0, 9), (1, 8)]
    assert (made.tool_choice.mode, made.tool_choice.parallel) == ("required", False)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": []}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"tools": [{"input_schema": {}}]}, "tools[0].name"),
        ({"stop_sequences": ["a" * 1025]}, "stop_sequences[0]"),
        ({"tool_choice": {"type": "perhaps"}}, "tool_choice.type"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice"),
        ({"output_config": {"format": {"type": "json_schema", "schema": 5}}}, "output_config.format.schema"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
    ],
)
async def test_what_cannot_be_served_is_refused_by_field(client: httpx.AsyncClient, changes, words):
    """Only text content is supported."""
    response = await client.post(PATH, json=ASKED | changes)

    assert response.status_code == 400
    assert words in response.json()["error"]["message"]
