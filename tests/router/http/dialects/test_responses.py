"""The Responses API, checked with OpenAI's own client and types."""

import json

import httpx
import msgspec
import pytest
from openai import AsyncOpenAI
from openai.types.responses import Response, ResponseTextDeltaEvent

from homing.kvcache.hashing import token_array
from homing.router.backend import TokenDelta
from homing.router.config import RouterSettings
from homing.router.errors import InvalidRequest, ReplicaLost
from homing.router.http.dialects.answer_values import affordable_tokens
from homing.router.http.dialects.responses import RESPONSES, conversation
from homing.router.http.protocol.connection import WRITTEN_BYTES, HttpConnection
from homing.router.text.tokenizer import TextModel

from ..conftest import ANSWER
from ..fakes import FakeBackend, reply
from .blocks import CALL, SETTINGS, events, says

PATH = "/v1/responses"
TOOL = {"type": "function", "name": "weather", "parameters": {"type": "object"}, "strict": None}
CUSTOM = {"type": "custom", "name": "apply_patch", "description": "Changes files."}
SPACE = {"type": "namespace", "name": "crm", "description": "", "tools": [TOOL | {"name": "lookup"}]}


@pytest.fixture
def settings() -> RouterSettings:
    return SETTINGS


async def test_a_response_is_openais(client: httpx.AsyncClient, backend: FakeBackend):
    """The client's own types validate it."""
    response = await client.post(PATH, json={"model": "demo", "input": "Tell me a story.", "metadata": {"a": "b"}})

    parsed = Response.model_validate_json(response.content)
    assert parsed.output_text == ANSWER
    assert parsed.status == "completed"
    assert parsed.usage is not None
    assert parsed.usage.input_tokens == len(token_array(backend.requests[0].token_ids))
    assert parsed.usage.input_tokens_details.cached_tokens == 3
    assert response.json()["store"] is False


async def test_a_stream_has_all_events_in_order_and_numbered(client: httpx.AsyncClient, backend: FakeBackend):
    """Codex processes the events with a state machine."""
    response = await client.post(PATH, json={"input": "Tell me a story.", "stream": True})
    whole = await client.post(PATH, json={"input": "Tell me a story."})

    found = events(response)
    kinds = [each["type"].removeprefix("response.") for each in found]
    assert [each["sequence_number"] for each in found] == list(range(len(found)))
    assert list(dict.fromkeys(kinds)) == [
        *("created", "in_progress", "output_item.added", "content_part.added", "output_text.delta"),
        *("output_text.done", "content_part.done", "output_item.done", "completed"),
    ]
    assert "".join(each["delta"] for each in found if "delta" in each) == ANSWER
    last = found[-1]["response"]
    assert [item["content"] for item in last["output"]] == [item["content"] for item in whole.json()["output"]]
    assert last["usage"] == whole.json()["usage"]


async def test_openais_client_streams_it(openai_client: AsyncOpenAI, backend: FakeBackend):
    """The client's helper assembles the response from the events."""
    async with openai_client.responses.stream(model="demo", input="Tell me a story.") as stream:
        async for _ in stream:
            pass
        final = await stream.get_final_response()

    assert final.output_text == ANSWER


@pytest.mark.parametrize("stream", [False, True])
async def test_reasoning_text_and_calls_are_items(client, backend: FakeBackend, text_model: TextModel, stream: bool):
    """Items have the order in which the model wrote them, streamed or not."""
    says(backend, text_model, CALL)

    response = await client.post(PATH, json={"input": "Weather?", "tools": [TOOL], "stream": stream})

    found = events(response)[-1]["response"] if stream else response.json()
    thought, said, call = found["output"]
    assert (thought["type"], thought["content"][0]["text"]) == ("reasoning", "It is\nraining?")
    assert (said["type"], said["content"][0]["text"]) == ("message", "Let me see.")
    assert (call["type"], call["name"], json.loads(call["arguments"])) == ("function_call", "weather", {"city": "Ulm"})
    Response.model_validate(found)
    assert found["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
    assert found["completed_at"] >= found["created_at"]


async def test_a_prompt_is_counted_as_it_will_be(client, backend):
    """Instructions and tools included; nothing is generated."""
    body = {"input": "Tell me a story.", "instructions": "Be brief.", "tools": [TOOL]}

    counted = (await client.post(f"{PATH}/input_tokens", json=body)).json()
    assert not backend.requests

    asked = (await client.post(PATH, json=body)).json()
    assert counted == {"object": "response.input_tokens", "input_tokens": asked["usage"]["input_tokens"]}


async def test_reasoning_tokens_do_not_depend_on_how_many_tokens_arrive_at_once(client, backend, text_model: TextModel):
    """A delta of many tokens, as guided answers have, may hold the reasoning and what follows."""
    ids = list(text_model.encode_now([CALL], special_tokens=False)[0])
    counts = []
    for size in (1, 7, len(ids)):
        pieces = [ids[at : at + size] for at in range(0, len(ids), size)]
        deltas = [TokenDelta(token_ids=piece, cached_tokens=None if at else 0) for at, piece in enumerate(pieces)]
        deltas[-1] = msgspec.structs.replace(deltas[-1], finish_reason="stop")
        backend.script = lambda _, deltas=deltas: deltas
        found = (await client.post(PATH, json={"input": "Weather?", "tools": [TOOL]})).json()
        counts.append(found["usage"]["output_tokens_details"]["reasoning_tokens"])

    assert 0 < min(counts) <= max(counts) <= min(counts) + 7


async def test_deltas_of_a_call_join_to_its_arguments(client, backend: FakeBackend, text_model: TextModel):
    """Clients show the arguments while they arrive."""
    says(backend, text_model, CALL)

    found = events(await client.post(PATH, json={"input": "Weather?", "tools": [TOOL], "stream": True}))

    deltas = [each["delta"] for each in found if each["type"] == "response.function_call_arguments.delta"]
    [done] = [each for each in found if each["type"] == "response.function_call_arguments.done"]
    assert "".join(deltas) == done["arguments"]
    assert done["name"] == "weather"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_custom_tool_gets_its_text_and_a_namespace_its_tools(client, backend, text_model, stream: bool):
    """For these tool types of Codex, the model sees plain functions and the client gets back its own types."""
    patch = {"name": "apply_patch", "arguments": {"input": "*** Begin\nx"}}
    lookup = {"name": "crm__lookup", "arguments": {"id": 3}}
    says(backend, text_model, "".join(f"<tool_call>\n{json.dumps(each)}\n</tool_call>\n" for each in (patch, lookup)))

    body = {"input": "Go", "tools": [CUSTOM, SPACE, {"type": "web_search"}], "stream": stream}
    response = await client.post(PATH, json=body)

    found = events(response)[-1]["response"] if stream else response.json()
    one, two = found["output"]
    assert (one["type"], one["name"], one["input"]) == ("custom_tool_call", "apply_patch", "*** Begin\nx")
    assert (two["type"], two["namespace"], two["name"]) == ("function_call", "crm", "lookup")


def test_items_become_turns_behind_one_system_message():
    """Chat templates have no developer role, and consecutive assistant items form one turn."""
    body = RESPONSES.decoder.decode(
        json.dumps(
            {
                "instructions": "You help.",
                "input": [
                    {"role": "developer", "content": "Be brief."},
                    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
                    {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
                    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
                    {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "Ulm"}'},
                    {"type": "function_call_output", "call_id": "c1", "output": "rain"},
                    {"type": "web_search_call", "id": "ws_1", "status": "completed"},
                ],
                "prompt_cache_key": "session-1",
                "tool_choice": {"type": "function", "name": "weather"},
                "tools": [TOOL],
            }
        )
    )

    made = conversation(body)

    system, user, assistant, tool = made.template_input().messages
    assert system == {"role": "system", "content": "You help.\n\nBe brief."}
    assert user == {"role": "user", "content": "Weather?"}
    assert assistant["tool_calls"][0]["function"] == {"name": "weather", "arguments": {"city": "Ulm"}}
    assert (assistant["content"], assistant["reasoning_content"]) == ("I look.", "Hm.")
    assert tool == {"role": "tool", "content": "rain", "tool_call_id": "c1"}
    assert (made.session, made.tool_choice.mode, made.tool_choice.name) == ("session-1", "required", "weather")


def test_allowed_tools_are_those_that_may_be_called():
    """OpenAI's server-side tools in the list have no effect."""

    def callable_names(*tools: dict) -> list[str]:
        choice = {"type": "allowed_tools", "mode": "auto", "tools": tools}
        body = {"input": "Go", "tools": [TOOL, CUSTOM], "tool_choice": choice}
        return [tool.name for tool in conversation(RESPONSES.decoder.decode(json.dumps(body))).callable_tools()]

    custom, search = {"type": "custom", "name": "apply_patch"}, {"type": "web_search"}
    assert callable_names(custom, search) == ["apply_patch"]
    assert callable_names(search) == []


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0]"),
        ({"input": []}, "input"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input[0].call_id"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tool_choice": "perhaps"}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}, "tool_choice"),
        ({"reasoning": {"effort": ""}}, "reasoning.effort"),
        ({"text": {"format": {"type": "yaml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "schema": {"not": {}}}}}, "text.format.schema"),
        ({"chat_template_kwargs": {"add_generation_prompt": False}}, "chat_template_kwargs.add_generation_prompt"),
    ],
)
async def test_what_cannot_be_served_is_refused_by_field(client: httpx.AsyncClient, changes, param):
    """Without a response store nothing is stored, and only text content is supported."""
    response = await client.post(PATH, json={"input": "hi"} | changes)

    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


async def test_the_answer_may_fill_the_context(client: httpx.AsyncClient, backend: FakeBackend):
    """Codex sets no limit, and the other endpoints' default would truncate its answers."""
    await client.post(PATH, json={"input": "hi"})
    await client.post(PATH, json={"input": "hi", "max_output_tokens": 100_000})

    for request in backend.requests:
        assert request.sampling.max_tokens == 256 - len(token_array(request.token_ids))


async def test_an_answer_at_the_limit_is_incomplete(client: httpx.AsyncClient):
    """The last item is marked as incomplete too."""
    body = {"input": "hi", "max_output_tokens": 2}
    whole = (await client.post(PATH, json=body)).json()
    last = events(await client.post(PATH, json=body | {"stream": True}))[-1]

    assert last["type"] == "response.incomplete"
    for found in (whole, last["response"]):
        assert (found["status"], found["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
        assert found["output"][-1]["status"] == "incomplete"


async def test_a_stream_that_breaks_ends_as_failed(client, backend: FakeBackend, answer_ids: list[int]):
    """The failed response contains the text generated so far."""
    whole = reply(answer_ids)
    backend.script = lambda request: [*list(whole(request))[:3], ReplicaLost("r0 is gone")]

    last = events(await client.post(PATH, json={"input": "hi", "stream": True}))[-1]

    assert last["type"] == "response.failed"
    assert last["response"]["error"] == {"code": "replica_lost", "message": "r0 is gone"}


async def test_a_guided_answer_may_reason_before_unless_that_is_turned_off(
    client: httpx.AsyncClient, backend: FakeBackend, text_model: TextModel
):
    """The constraint names the tokens that delimit reasoning."""
    wanted = {"text": {"format": {"type": "json_object"}}}
    thinking = [tuple(ids) for ids in text_model.encode_now(["<think>", "</think>"], special_tokens=False)]

    await client.post(PATH, json={"model": "demo", "input": "a", **wanted})
    await client.post(PATH, json={"model": "demo", "input": "a", **wanted, "reasoning": {"effort": "none"}})

    first, second = [request.constraint for request in backend.requests]
    assert [first.opener, first.after] == thinking
    assert (second.opener, second.after) == ((), ())


def items_of(response: httpx.Response, *, stream: bool) -> list[dict]:
    return (events(response)[-1]["response"] if stream else response.json())["output"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "asked",
    [{"top_logprobs": 2}, {"include": ["message.output_text.logprobs"]}, {"top_logprobs": 1, "logprob_token_ids": [9]}],
)
async def test_each_token_of_the_text_has_its_logprobs(client, backend: FakeBackend, text_model, stream, asked):
    """Reasoning and calls are no part of `output_text`, and neither are their tokens."""
    says(backend, text_model, CALL)

    response = await client.post(PATH, json={"input": "Weather?", "tools": [TOOL], "stream": stream, **asked})

    [part] = next(each for each in items_of(response, stream=stream) if each["type"] == "message")["content"]
    assert "".join([each["token"] for each in part["logprobs"]]).strip() == part["text"].strip() == "Let me see."
    assert {len(each["top_logprobs"]) for each in part["logprobs"]} == {asked.get("top_logprobs", 0)}
    if stream:
        deltas = [each for each in events(response) if each["type"] == "response.output_text.delta"]
        assert [one for each in deltas for one in each["logprobs"]] == part["logprobs"]
        for each in deltas:
            ResponseTextDeltaEvent.model_validate(each)
    else:
        assert Response.model_validate_json(response.content).top_logprobs == asked.get("top_logprobs", 0)


async def test_the_last_events_of_a_long_answer_are_written_in_portions(client, backend: FakeBackend, monkeypatch):
    """They repeat all logprobs four times: 120 MB in the worst case, which would hold up the event loop for 200 ms."""
    backend.script = reply([9] * 400)
    written: list[int] = []
    write = HttpConnection._write
    monkeypatch.setattr(HttpConnection, "_write", lambda self, data: [written.append(len(data)), write(self, data)])

    body = {"input": "Tell.", "stream": True, "top_logprobs": 20}
    found = events(await client.post(PATH, json=body))

    scores = [one for each in found if each["type"].endswith("text.delta") for one in each["logprobs"]]
    assert len(scores) > 200  # as many as the context allows
    assert [each["sequence_number"] for each in found] == list(range(len(found)))
    assert [each["type"].removeprefix("response.") for each in found[-4:]] == [
        *("output_text.done", "content_part.done", "output_item.done", "incomplete"),
    ]
    done, part, item, response = found[-4:]
    assert done["logprobs"] == part["part"]["logprobs"] == item["item"]["content"][0]["logprobs"] == scores
    assert response["response"]["output"][0]["content"][0]["logprobs"] == scores
    assert sum(written) > 3 * WRITTEN_BYTES
    assert max(written) <= 2 * WRITTEN_BYTES


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_of_an_answer_are_bounded(stream: bool):
    """The last event of a stream repeats the whole answer, so that the router holds it as it does one in a body."""
    body = msgspec.convert({"input": "a", "top_logprobs": 20, "stream": stream}, RESPONSES.decoder.type)

    with pytest.raises(InvalidRequest, match="include"):
        affordable_tokens(body, [5], 1, 200, 1024, logprobs=20, prompt_logprobs=None, set_by_client=True)


async def test_only_what_runs_in_the_background_can_be_cancelled(client: httpx.AsyncClient):
    """Clients tell an unknown response from one that has ended."""
    response = await client.post(f"{PATH}/resp_1/cancel")

    assert response.status_code == 404
    assert response.json()["error"]["code"] == "response_not_found"
