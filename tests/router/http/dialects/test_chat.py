"""Chat completions, checked with OpenAI's own client and types."""

import json
from collections.abc import Callable
from typing import Any

import httpx
import msgspec
import openai
import pytest
from openai import AsyncOpenAI
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.chat.chat_completion import ChoiceLogprobs

from homing.kvcache.hashing import token_array
from homing.replica.messages import PositionLogprobs, TokenLogprob
from homing.router.backend import TokenDelta
from homing.router.config import RouterSettings
from homing.router.errors import ReplicaLost
from homing.router.http.dialects.chat import CHAT as DIALECT
from homing.router.http.dialects.logprobs import LOWEST_LOGPROB
from homing.router.http.front import Front
from homing.router.server import RouterServer
from homing.router.text.answer import TokenAt
from homing.router.text.encoder import TokenIds
from homing.router.text.encoder_threads import NO_SENDER
from homing.router.text.parsers.deltas import Reasoning, ToolCallArguments, ToolCallStart
from homing.router.text.template import TemplateInput
from homing.router.text.tokenizer import TextModel

from ..conftest import ANSWER, LoadedText
from ..fakes import FakeBackend, reply, scored

MESSAGES = [{"role": "user", "content": "Tell me a story about a fox."}]
CHAT = "/v1/chat/completions"


def events(response: httpx.Response) -> list[str]:
    """The data of each event."""
    return [block.removeprefix("data: ") for block in response.text.split("\n\n") if block]


async def test_an_answer_is_openais_to_the_letter(client: httpx.AsyncClient, backend: FakeBackend):
    """Validation is strict: a null where OpenAI's schema requires absence would break typed clients."""
    response = await client.post(CHAT, json={"model": "demo", "messages": MESSAGES})

    answer = ChatCompletion.model_validate_json(response.content, strict=True)
    assert answer.choices[0].message.content == ANSWER
    assert answer.choices[0].finish_reason == "stop"
    assert {"service_tier", "system_fingerprint"}.isdisjoint(response.json())
    assert set(response.json()["choices"][0]["message"]) == {"role", "content", "refusal"}


async def test_usage_and_headers_tell_where_the_answer_comes_from(client: httpx.AsyncClient, backend: FakeBackend):
    """Benchmarks read cached tokens from usage; people read the headers."""
    response = await client.post(CHAT, json={"messages": MESSAGES}, headers={"x-request-id": "bench-1"})

    usage = response.json()["usage"]
    assert usage["prompt_tokens"] == len(token_array(backend.requests[0].token_ids))
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 3}
    assert response.headers["x-request-id"] == "bench-1" == backend.requests[0].trace_id
    assert (response.headers["x-homing-replica"], response.headers["x-homing-cached-tokens"]) == ("r0", "3")


async def test_what_came_from_tiers_is_told_by_medium(client: httpx.AsyncClient, backend: FakeBackend):
    """Of several choices of a prompt, the first one's counts, as for cached tokens. Nothing is said without tiers."""
    backend.script = reply([1, 2], cached=48, loaded=(("CPU", 32), ("DISK", 16)))

    response = await client.post(CHAT, json={"messages": MESSAGES, "n": 2})
    streamed = {"messages": MESSAGES, "stream": True, "stream_options": {"include_usage": True}}
    chunks = events(await client.post(CHAT, json=streamed))

    details = {"cached_tokens": 48, "loaded_tokens": {"CPU": 32, "DISK": 16}}
    assert response.json()["usage"]["prompt_tokens_details"] == details
    assert response.headers["x-homing-loaded-tokens"] == "CPU=32, DISK=16"
    assert json.loads(chunks[-2])["usage"]["prompt_tokens_details"] == details


async def test_the_prompt_is_the_rendered_template(
    client: httpx.AsyncClient, backend: FakeBackend, text_model: TextModel
):
    """Texts and refusals are joined into one text; guidellm and vLLM's benchmark send content only as parts."""
    parts = [{"type": "text", "text": "Tell me a story "}, {"type": "refusal", "refusal": "about a fox."}]

    await client.post(CHAT, json={"messages": MESSAGES})
    await client.post(CHAT, json={"messages": [{"role": "user", "content": parts}]})

    wanted = list(text_model.encode_chat_now(TemplateInput(MESSAGES)))
    assert [token_array(request.token_ids).tolist() for request in backend.requests] == [wanted, wanted]


async def test_a_chat_without_a_limit_may_use_the_context(
    client: httpx.AsyncClient, backend: FakeBackend, front: Front
):
    """Other servers do the same; a completion, which models often do not end, gets 512 tokens."""
    front.settings = msgspec.structs.replace(front.settings, default_max_tokens=0)
    backend.limits = msgspec.structs.replace(backend.limits, max_model_len=4096)

    await client.post(CHAT, json={"messages": MESSAGES})
    await client.post("/v1/completions", json={"prompt": "a"})

    chat, completion = backend.requests
    assert chat.sampling.max_tokens == 4096 - len(token_array(chat.token_ids))
    assert completion.sampling.max_tokens == 512


async def test_streamed_chunks_join_to_the_whole_answer(openai_client: AsyncOpenAI, backend: FakeBackend):
    """Every event is a valid chunk; the role is sent once, and the finish reason comes last."""
    stream = await openai_client.chat.completions.create(model="demo", messages=MESSAGES, stream=True)
    chunks = [chunk async for chunk in stream]

    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk.model_dump(exclude_unset=True), strict=True)
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(delta.content or "" for delta in deltas) == ANSWER
    assert [delta.role for delta in deltas if delta.role] == ["assistant"]
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == ["stop"]
    assert len({chunk.id for chunk in chunks}) == 1


async def test_the_usage_chunk_has_no_choices_and_comes_last(client: httpx.AsyncClient, backend: FakeBackend):
    """Clients read `choices[0]` unless the list is empty."""
    body = {"messages": MESSAGES, "stream": True, "stream_options": {"include_usage": True}}

    *chunks, last, done = events(await client.post(CHAT, json=body))

    assert done == "[DONE]"
    assert json.loads(last)["choices"] == []
    assert json.loads(last)["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}
    assert all(json.loads(chunk)["usage"] is None for chunk in chunks)


async def test_continuous_usage_counts_up(client: httpx.AsyncClient, backend: FakeBackend):
    """Benchmarks that request it read the number of tokens from each chunk."""
    body = {"messages": MESSAGES, "stream": True, "stream_options": {"continuous_usage_stats": True}}

    *chunks, _ = events(await client.post(CHAT, json=body))

    counts = [json.loads(chunk)["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[0] == 1


async def test_no_usage_means_no_continuous_usage(client: httpx.AsyncClient, backend: FakeBackend):
    """`include_usage: false` overrides `continuous_usage_stats`, as in vLLM."""
    options = {"include_usage": False, "continuous_usage_stats": True}

    *chunks, _ = events(await client.post(CHAT, json={"messages": MESSAGES, "stream": True, "stream_options": options}))

    assert not any("usage" in json.loads(chunk) for chunk in chunks)


async def test_choices_draw_with_seeds_that_follow_each_other(openai_client: AsyncOpenAI, backend: FakeBackend):
    """The n answers to one seed then differ, and each can be reproduced alone."""
    answer = await openai_client.chat.completions.create(model="demo", messages=MESSAGES, n=3, seed=41)

    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert {choice.message.content for choice in answer.choices} == {ANSWER}
    assert [request.sampling.seed for request in backend.requests] == [41, 42, 43]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(token_array(backend.requests[0].token_ids))


async def test_streamed_choices_are_told_apart(openai_client: AsyncOpenAI, backend: FakeBackend):
    """Chunks of several choices interleave, and each choice must be complete."""
    texts = ["", "", ""]
    stream = await openai_client.chat.completions.create(model="demo", messages=MESSAGES, n=3, stream=True)

    async for chunk in stream:
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""

    assert texts == [ANSWER] * 3


async def test_a_stop_string_ends_the_answer_and_the_stream(openai_client: AsyncOpenAI, backend: FakeBackend):
    """Later text is not sent, and the request is cancelled at the replica at once."""
    for stop in ("owl", ["zebra", " an owl"]):
        answer = await openai_client.chat.completions.create(model="demo", messages=MESSAGES, stop=stop)

        assert answer.choices[0].finish_reason == "stop"
        assert answer.choices[0].message.content == ANSWER[: ANSWER.index(stop if isinstance(stop, str) else stop[1])]


async def test_logprobs_cover_the_text(openai_client: AsyncOpenAI, backend: FakeBackend):
    """The joined bytes of all entries equal the answer, streamed or not."""
    asked = {"model": "demo", "messages": MESSAGES, "logprobs": True, "top_logprobs": 2}

    answer = await openai_client.chat.completions.create(**asked)
    chunks = [chunk async for chunk in await openai_client.chat.completions.create(**asked, stream=True)]

    ChatCompletion.model_validate(answer.model_dump(exclude_unset=True), strict=True)
    whole = answer.choices[0].logprobs.content
    assert bytes(byte for entry in whole for byte in entry.bytes).decode() == ANSWER
    assert {len(entry.top_logprobs) for entry in whole} == {2}
    assert [entry for chunk in chunks for entry in chunk.choices[0].logprobs.content] == whole


async def test_the_limit_of_tokens_is_told_as_length(openai_client: AsyncOpenAI, backend: FakeBackend):
    """OpenAI's helpers raise on `length`, so it must be right."""
    answer = await openai_client.chat.completions.create(model="demo", messages=MESSAGES, max_completion_tokens=2)

    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 2


async def test_the_default_limit_is_a_setting_and_shrinks_to_the_room(client, backend: FakeBackend):
    """Without it, a model that does not stop would generate up to its maximum length."""
    await client.post(CHAT, json={"messages": MESSAGES})
    await client.post(CHAT, json={"messages": [{"role": "user", "content": "fox " * 200}]})

    first, second = backend.requests
    assert first.sampling.max_tokens == 64
    assert second.sampling.max_tokens == 256 - len(token_array(second.token_ids)) < 64


async def test_parameters_reach_the_replica(client: httpx.AsyncClient, backend: FakeBackend):
    """Each parameter reaches its own field, and an explicit null counts as absent."""
    given = {"temperature": 0, "top_p": 0.5, "top_k": 7, "min_p": 0.1, "presence_penalty": 1, "frequency_penalty": -1}
    given |= {"repetition_penalty": 1.1, "min_tokens": 2, "stop_token_ids": [9], "ignore_eos": True, "seed": -1}
    body = given | {"messages": MESSAGES, "logit_bias": {"5": -100}, "n": None, "stop": None, "user": "u"}

    body |= {"response_format": {"type": "text"}}
    response = await client.post(CHAT, json=body | {"priority": 3, "reasoning_effort": "low", "service_tier": "auto"})

    assert response.status_code == 200
    sampling = backend.requests[0].sampling
    assert sampling.seed == 2**64 - 1
    assert (sampling.stop_token_ids, sampling.logit_bias, backend.requests[0].priority) == ((9,), {5: -100.0}, 3)
    simple = set(given) - {"seed", "stop_token_ids"}
    assert {name: getattr(sampling, name) for name in simple} == {name: given[name] for name in simple}


async def test_tenants_do_not_share_blocks(client: httpx.AsyncClient, backend: FakeBackend):
    """The salt derives from the API key, and `cache_salt` narrows it; anonymous callers share one salt."""
    for key, salt in ((None, None), ("a", None), ("a", None), ("b", None), ("a", "x")):
        headers = {"authorization": f"Bearer {key}"} if key else {}
        await client.post(CHAT, json={"messages": MESSAGES, "cache_salt": salt}, headers=headers)

    salts = [request.salt for request in backend.requests]
    assert salts[0] == b""
    assert salts[1] == salts[2]
    assert len(set(salts)) == 4


async def test_a_session_header_or_a_cache_key_reaches_the_router(client: httpx.AsyncClient, backend: FakeBackend):
    """The router uses it to keep the turns of a conversation on one replica."""
    for name in ("X-Session-Affinity", "X-Correlation-ID"):
        await client.post(CHAT, json={"messages": MESSAGES}, headers={name: "s1"})
    await client.post(CHAT, json={"messages": MESSAGES, "prompt_cache_key": "k1"})

    assert [request.session for request in backend.requests] == ["s1", "s1", "k1"]


async def test_a_stream_that_breaks_ends_in_an_error_event(client, backend: FakeBackend, answer_ids: list[int]):
    """A `[DONE]` after the error would make a partial answer look complete."""
    whole = reply(answer_ids)
    backend.script = lambda request: [*list(whole(request))[:3], ReplicaLost("r0 is gone")]

    response = await client.post(CHAT, json={"messages": MESSAGES, "stream": True})

    assert response.status_code == 200
    assert json.loads(events(response)[-1])["error"]["code"] == "replica_lost"
    assert "[DONE]" not in response.text


async def test_openais_client_raises_on_a_broken_stream(openai_client: AsyncOpenAI, backend, answer_ids):
    """The error event has the format that the client recognises."""
    whole = reply(answer_ids)
    backend.script = lambda request: [*list(whole(request))[:3], ReplicaLost("r0 is gone")]

    stream = await openai_client.chat.completions.create(model="demo", messages=MESSAGES, stream=True)

    with pytest.raises(openai.APIError, match="r0 is gone"):
        [chunk async for chunk in stream]


@pytest.mark.parametrize("choices", [1, 2])
@pytest.mark.parametrize("stream", [True, False])
async def test_a_request_that_breaks_before_its_first_token_is_an_http_error(client, backend, stream, choices):
    """The status has not been sent yet, so clients and proxies can see the error and retry."""
    backend.script = lambda request: [ReplicaLost("r0 is gone")]

    response = await client.post(CHAT, json={"messages": MESSAGES, "stream": stream, "n": choices})

    assert response.status_code == 502
    assert response.json()["error"]["message"] == "r0 is gone"


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ('{"a": 1}', '{"a": 1}'),
        (r'"{\"a\": 1}"', '{"a": 1}'),
        ("", "{}"),
        ("null", "{}"),
        ("[]", "{}"),
        ('""', "{}"),
        ("[1]", '{"arguments": [1]}'),
        ('{"a', r'{"arguments": "{\"a"}'),
    ],
)
async def test_tool_calls_of_earlier_turns_reach_the_template_as_objects(
    client, backend: FakeBackend, text_model: TextModel, arguments: str, shown: str
):
    """OpenAI sends arguments as a JSON string; templates expect an object.

    If a model wrote broken JSON, or the token limit cut it off, agents still send the call back and go on.
    """
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    turns = [*MESSAGES, {"role": "assistant", "content": None, "tool_calls": [call]}]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]

    response = await client.post(CHAT, json={"messages": turns, "tools": tools, "tool_choice": "auto"})

    assert response.status_code == 200
    assert f'"arguments": {shown}}}' in text_model.decode(token_array(backend.requests[0].token_ids))


async def test_tools_are_given_to_the_template(front: Front, text_model: TextModel):
    """The template may use or ignore tools; `tool_choice: none` hides them."""
    given: list[TemplateInput] = []

    class Recording(TextModel):
        def __init__(self) -> None:
            self.__dict__.update(text_model.__dict__)

        async def encode_chat(self, conversation: Callable[[], TemplateInput], **options: Any) -> TokenIds:
            given.append(made := conversation())
            return await super().encode_chat(made, **options)

    tools = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
    served = msgspec.structs.replace(await front.served(None), text=Recording())
    for choice in ("auto", "none"):
        body = json.dumps({"messages": MESSAGES, "tools": tools, "tool_choice": choice})
        await DIALECT.job(front, served, DIALECT.decoder.decode(body), NO_SENDER)

    assert [each.tools for each in given] == [tools, None]


async def test_logprobs_are_openais(front: Front):
    """Validation is strict; JSON has no infinite numbers, and partial characters keep their bytes."""
    served = await front.served(None)
    fox = next(each for each in range(served.limits.vocab_size) if served.text.piece(each) == b" fox")
    half = next(each for each in range(served.limits.vocab_size) if served.text.piece(each) == b"\xf0")
    position = PositionLogprobs(TokenLogprob(half, -3.0), [TokenLogprob(fox, -0.1), TokenLogprob(0, float("-inf"))])
    body = DIALECT.decoder.decode(json.dumps({"messages": MESSAGES, "logprobs": True, "top_logprobs": 2}))
    shape = DIALECT.builder(served, body, "id", 0).logprobs([TokenAt(half, 0, position)])

    parsed = ChoiceLogprobs.model_validate(msgspec.json.decode(msgspec.json.encode(shape)), strict=True)
    assert parsed.content is not None
    assert parsed.content[0].bytes == [0xF0]
    assert [top.logprob for top in parsed.content[0].top_logprobs] == [-0.1, LOWEST_LOGPROB]


async def test_a_timeout_is_the_requests_deadline(client: httpx.AsyncClient, backend: FakeBackend, front: Front):
    """It counts from the request's arrival and cannot exceed the limit in the settings."""
    limit_s = front.settings.request_timeout_s
    for timeout_s in (limit_s / 2, None, 2 * limit_s):
        await client.post(CHAT, json={"messages": MESSAGES, "timeout": timeout_s})

    short, usual, long = (request.deadline or 0.0 for request in backend.requests)
    assert short < usual - limit_s / 4
    assert usual <= long < usual + limit_s / 4


async def test_a_body_may_begin_with_a_byte_order_mark(client: httpx.AsyncClient):
    """Windows tools write one before UTF-8; the JSON after it is validated as usual."""
    bodies = [b'{"messages": [{"role": "user", "content": "hi"}]}', b'{"messages": []}', b"{", b""]
    answers = [await client.post(CHAT, content=b"\xef\xbb\xbf" + body) for body in bodies]

    assert [answer.status_code for answer in answers] == [200, 400, 400, 400]
    assert answers[1].json()["error"]["param"] == "messages"


CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"}}\n</tool_call>'
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


@pytest.fixture
def reads_calls(settings: RouterSettings) -> RouterSettings:
    return msgspec.structs.replace(settings, tool_call_parser="hermes", reasoning_parser="think")


@pytest.fixture
async def agent(reads_calls: RouterSettings, backend: FakeBackend, text_model: TextModel):
    """OpenAI's client, connected to a server whose model calls tools."""
    server = RouterServer(reads_calls, backend, texts=LoadedText(text_model), grace_s=1.0)
    port = await server.start("127.0.0.1", 0)
    address, http = f"http://127.0.0.1:{port}/v1", httpx.AsyncClient(verify=False)
    async with AsyncOpenAI(base_url=address, api_key="k1", max_retries=0, http_client=http) as client:
        yield client
    await server.stop()


async def test_calls_and_reasoning_are_fields_of_the_message(agent: AsyncOpenAI, backend, text_model: TextModel):
    """This holds streamed or not. Clients concatenate chunks, so a call's id, type and name are only in its first."""
    says = f"<think>It rains.</think>\n\nLet me see.\n{CALL}"
    backend.script = reply(list(text_model.encode_now([says], special_tokens=False)[0]))
    asked = {"model": "demo", "messages": MESSAGES, "tools": [WEATHER]}

    whole = await agent.chat.completions.create(**asked)
    chunks = [chunk async for chunk in await agent.chat.completions.create(**asked, stream=True)]

    [choice] = whole.choices
    ChatCompletion.model_validate(whole.model_dump(exclude_unset=True), strict=True)
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Let me see.")
    assert choice.message.reasoning_content == choice.message.reasoning == "It rains."
    [call] = choice.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Ulm"})
    deltas = [chunk.choices[0].delta for chunk in chunks]
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk.model_dump(exclude_unset=True), strict=True)
    assert "".join(delta.content or "" for delta in deltas) == "Let me see."
    for name in ("reasoning_content", "reasoning"):
        assert "".join(getattr(delta, name, None) or "" for delta in deltas) == "It rains."
    first, *others = [delta.tool_calls[0] for delta in deltas if delta.tool_calls]
    assert (first.index, first.type, first.function.name) == (0, "function", "weather")
    assert first.id
    assert json.loads("".join(each.function.arguments for each in [first, *others])) == {"city": "Ulm"}
    assert all(set(each.model_dump(exclude_unset=True)) == {"index", "function"} for each in others)
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "tool_calls"


async def test_an_answer_of_calls_alone_has_no_content(agent: AsyncOpenAI, backend, text_model: TextModel):
    """OpenAI then sends null as the content."""
    backend.script = reply(list(text_model.encode_now([CALL], special_tokens=False)[0]))

    answer = await agent.chat.completions.create(model="demo", messages=MESSAGES, tools=[WEATHER])

    assert answer.choices[0].message.content is None
    assert answer.choices[0].message.tool_calls is not None


async def test_a_required_call_constrains_the_answer(agent: AsyncOpenAI, backend: FakeBackend, text_model: TextModel):
    """A call may be required of a named tool or of any; naming an unknown tool is the caller's error."""
    backend.script = reply(list(text_model.encode_now([CALL], special_tokens=False)[0]))
    named = {"type": "function", "function": {"name": "weather"}}
    for choice in ("required", named, "auto"):
        await agent.chat.completions.create(model="demo", messages=MESSAGES, tools=[WEATHER], tool_choice=choice)

    kinds = [request.constraint and request.constraint.kind for request in backend.requests]
    assert kinds == ["structural_tag", "structural_tag", None]
    with pytest.raises(openai.BadRequestError, match="no tool 'other'"):
        await agent.chat.completions.create(
            model="demo",
            messages=MESSAGES,
            tools=[WEATHER],
            tool_choice={"type": "function", "function": {"name": "other"}},
        )


async def test_only_allowed_tools_are_called(agent: AsyncOpenAI, backend: FakeBackend, text_model: TextModel):
    """The prompt lists all tools regardless, so that it stays cached when the allowed ones change."""
    backend.script = reply(list(text_model.encode_now([CALL], special_tokens=False)[0]))
    clock = {"type": "function", "function": {"name": "clock"}}
    given = {"model": "demo", "messages": MESSAGES, "tools": [WEATHER, clock]}

    def only(name: str, mode: str) -> dict:
        allowed = {"mode": mode, "tools": [{"type": "function", "function": {"name": name}}]}
        return {"type": "allowed_tools", "allowed_tools": allowed}

    choices = (only("weather", "auto"), only("clock", "auto"), only("clock", "required"))
    answers = [await agent.chat.completions.create(**given, tool_choice=choice) for choice in choices]

    assert [bool(answer.choices[0].message.tool_calls) for answer in answers] == [True, False, False]
    assert len({request.token_ids for request in backend.requests}) == 1
    sources = [request.constraint.source for request in backend.requests]
    assert ["clock" in source for source in sources] == [False, True, True]
    assert ["weather" in source for source in sources] == [True, False, False]
    for wrong in (only("other", "auto"), {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [5]}}):
        with pytest.raises(openai.BadRequestError, match="'tool_choice'"):
            await agent.chat.completions.create(**given, tool_choice=wrong)


async def test_tools_that_cannot_be_guided_are_no_reason_to_refuse_a_schema(agent: AsyncOpenAI, backend: FakeBackend):
    """Agents bring dozens of tools whose schemas may be unsupported; without `strict`, calls need not be guided."""
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}
    given = {"model": "demo", "messages": MESSAGES, "response_format": schema}
    ahead = {"type": "object", "properties": {"a": {"type": "string", "pattern": "(?=a)a"}}}
    unknown = {"type": "object", "properties": {"a": {"$ref": "#/$defs/none"}}}

    def tool(parameters: dict, **more: bool) -> dict:
        return {"type": "function", "function": {"name": "f", "parameters": parameters, **more}}

    for parameters in (ahead, unknown):
        await agent.chat.completions.create(**given, tools=[tool(parameters)])
        with pytest.raises(openai.BadRequestError, match="'tools'"):
            await agent.chat.completions.create(**given, tools=[tool(parameters, strict=True)])
    refused = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"not": {}}}}
    with pytest.raises(openai.BadRequestError, match=r"'response_format\.json_schema\.schema'"):
        await agent.chat.completions.create(**given | {"response_format": refused}, tools=[tool(ahead)])

    assert [request.constraint.kind for request in backend.requests] == ["structural_tag", "structural_tag"]


@pytest.mark.parametrize("stream", [False, True])
async def test_what_an_engine_told_apart_is_shown_as_it_is(
    client: httpx.AsyncClient, backend: FakeBackend, stream: bool
):
    """The engine gets the chat's fields as the client sent them, unless the caller wants token ids."""
    backend.chats = "all"
    calls = [ToolCallStart(0, "c", "f"), ToolCallArguments(0, "{}")]
    told = [("", [Reasoning("hm")]), ("Hi <think>", ()), ("", calls), ("", ())]
    backend.script = lambda _: [
        TokenDelta(token_ids=[], text=text, text_tokens=1, deltas=deltas, finish_reason="stop" if last else None)
        for (text, deltas), last in zip(told, [False, False, False, True], strict=True)
    ]
    body = {"messages": MESSAGES, "tools": [WEATHER], "stop": "x", "max_tokens": 9, "stream": stream}

    shown = await client.post(CHAT, json=body)
    backend.script = lambda _: [TokenDelta(token_ids=[5], finish_reason="stop")]
    await client.post(CHAT, json=body | {"return_token_ids": True})

    sent = json.loads(backend.requests[0].chat)
    assert sent == {name: value for name, value in body.items() if name != "stream"}
    assert backend.requests[1].chat == b""
    if stream:
        deltas = [json.loads(each)["choices"][0] for each in events(shown)[:-1]]
        assert [text for each in deltas if (text := each["delta"].get("reasoning_content"))] == ["hm"]
        assert deltas[-1]["finish_reason"] == "tool_calls"
        return
    choice = shown.json()["choices"][0]
    assert (choice["message"]["reasoning_content"], choice["message"]["content"]) == ("hm", "Hi <think>")
    assert [(each["id"], each["function"]["name"]) for each in choice["message"]["tool_calls"]] == [("c", "f")]
    assert (choice["finish_reason"], shown.json()["usage"]["completion_tokens"]) == ("tool_calls", 4)


@pytest.mark.parametrize(
    ("fields", "parsed"),
    [
        ({}, False),
        ({"stop": "x", "temperature": 0.5, "seed": 3, "n": 2}, False),
        ({"messages": [{"role": "system", "content": "Be brief."}, *MESSAGES]}, False),
        ({"tools": [WEATHER]}, True),
        ({"tool_choice": "none"}, True),
        ({"response_format": {"type": "json_object"}}, True),
        ({"reasoning_effort": "low"}, True),
        ({"chat_template_kwargs": {"enable_thinking": False}}, True),
        ({"skip_special_tokens": False}, True),
        ({"stop": "x", "min_tokens": 2}, False),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]}, True),
        ({"messages": [{"role": "developer", "content": "Be brief."}, *MESSAGES]}, True),
        ({"messages": [*MESSAGES, {"role": "tool", "content": "4", "tool_call_id": "c"}]}, True),
    ],
)
async def test_an_engine_gets_chats_whose_answers_it_may_parse(
    client: httpx.AsyncClient, backend: FakeBackend, fields: dict, parsed: bool
):
    """Text of equal tokens is the same whoever renders the prompt, so plain chats go as token ids."""
    backend.chats = "parsed"

    assert (await client.post(CHAT, json={"messages": MESSAGES} | fields)).status_code == 200

    assert [bool(request.chat) for request in backend.requests] == [parsed] * fields.get("n", 1)


@pytest.mark.parametrize(
    ("template", "setting", "chats"),
    [
        ("{{ messages }}", "auto", [False]),
        ("{{ '<|START_THINKING|>' }}", "auto", [True]),
        ("{{ '<|channel|>analysis<|message|>' }}", "auto", [True]),
        ("", "none", [True]),
    ],
)
async def test_an_engine_gets_all_chats_of_a_model_that_may_reason(
    client: httpx.AsyncClient,
    backend: FakeBackend,
    front: Front,
    settings: RouterSettings,
    text_model: TextModel,
    monkeypatch: pytest.MonkeyPatch,
    template: str,
    setting: str,
    chats: list[bool],
):
    """Its parser may find reasoning in any answer, in formats that we do not know."""
    backend.chats = "parsed"
    front.settings = msgspec.structs.replace(settings, reasoning_parser=setting)
    monkeypatch.setattr(TextModel, "templates", template)

    assert (await client.post(CHAT, json={"messages": MESSAGES})).status_code == 200

    assert [bool(request.chat) for request in backend.requests] == chats


async def test_reasoning_can_be_left_out(agent: AsyncOpenAI, backend, text_model: TextModel):
    says = f"<think>It rains.</think>\n\nLet me see.\n{CALL}"
    backend.script = reply(list(text_model.encode_now([says], special_tokens=False)[0]))
    asked = {"model": "demo", "messages": MESSAGES, "tools": [WEATHER], "extra_body": {"include_reasoning": False}}

    whole = await agent.chat.completions.create(**asked)
    deltas = [chunk.choices[0].delta async for chunk in await agent.chat.completions.create(**asked, stream=True)]

    assert whole.choices[0].message.content == "".join(delta.content or "" for delta in deltas) == "Let me see."
    for message in (whole.choices[0].message, *deltas):
        assert not {"reasoning", "reasoning_content"} & set(message.model_dump(exclude_unset=True))
    assert whole.choices[0].message.tool_calls
    assert whole.usage.completion_tokens_details.reasoning_tokens > 0


async def test_reasoning_comes_back_by_either_name(client: httpx.AsyncClient, backend: FakeBackend):
    for name in ("reasoning", "reasoning_content"):
        thought = {"role": "assistant", "content": "a", name: "It rains."}
        call = {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "function": {"name": "f"}}]}
        await client.post(CHAT, json={"messages": [*MESSAGES, thought | call, {"role": "tool", "content": "1"}]})

    assert len({each.token_ids for each in backend.requests}) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_may_begin_with_the_message_that_it_continues(client, stream: bool):
    """vLLM's `echo`: nothing is repeated after a message of the user."""
    said = [*MESSAGES, {"role": "assistant", "content": "Well, "}]
    body = {"echo": True, "stream": stream}

    continued = await client.post(CHAT, json={"messages": said, "continue_final_message": True, **body})
    plain = await client.post(CHAT, json={"messages": MESSAGES, **body})

    def text(response: httpx.Response) -> str:
        if not stream:
            return response.json()["choices"][0]["message"]["content"]
        return "".join(json.loads(each)["choices"][0]["delta"].get("content", "") for each in events(response)[:-1])

    assert text(continued) == f"Well, {ANSWER}"
    assert text(plain) == ANSWER


async def test_a_prompt_that_was_rendered_before_is_not_rendered_again(client: httpx.AsyncClient, backend: FakeBackend):
    """Routers that split prefill and decode send the ids that the prefill returned."""
    given = {"kv_transfer_params": {"prompt_token_ids": [5, 6, 7]}, "return_token_ids": True}
    wrong = [{"prompt_token_ids": ids} for ids in ("x", [[5]], [99_999], [5] * 300)]

    answer = (await client.post(CHAT, json={"messages": MESSAGES, **given})).json()
    refused = [await client.post(CHAT, json={"messages": MESSAGES, "kv_transfer_params": each}) for each in wrong]

    await client.post(CHAT, json={"messages": MESSAGES, **given, "truncate_prompt_tokens": 2})

    assert answer["prompt_token_ids"] == list(token_array(backend.requests[0].token_ids)) == [5, 6, 7]
    assert list(token_array(backend.requests[1].token_ids)) == [6, 7]
    assert answer["choices"][0]["message"]["content"] == ANSWER
    assert [each.status_code for each in refused] == [400] * 4


@pytest.mark.parametrize("path", ["/v1/completions", CHAT])
@pytest.mark.parametrize("stream", [False, True])
async def test_token_ids_and_logprobs_have_the_same_tokens(client, backend: FakeBackend, path: str, stream: bool):
    """Also the token that ended the answer: training on answers needs a logprob for each id."""
    backend.script = lambda _: [
        TokenDelta(token_ids=[900, 901], logprobs=[scored(900, 1), scored(901, 1)], cached_tokens=0),
        TokenDelta(token_ids=[902, 4], logprobs=[scored(902, 1), scored(4, 1)], finish_reason="stop", stop_token_id=4),
    ]
    asked = {"return_token_ids": True, "return_tokens_as_token_ids": True, "stream": stream}
    body = {"messages": MESSAGES, "logprobs": True} if path == CHAT else {"prompt": "a", "logprobs": 0}

    response = await client.post(path, json={**body, **asked})

    parts = [json.loads(each) for each in events(response)[:-1]] if stream else [response.json()]
    choices = [each["choices"][0] for each in parts]
    names = [each["logprobs"] for each in choices if each["logprobs"]]
    tokens = [[one["token"] for one in each["content"]] if path == CHAT else each["tokens"] for each in names]
    assert [one for each in tokens for one in each] == [f"token_id:{one}" for one in (900, 901, 902, 4)]
    assert [one for each in choices for one in each.get("token_ids", ())] == [900, 901, 902, 4]
