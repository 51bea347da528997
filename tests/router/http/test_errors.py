"""Error responses have OpenAI's format, the right status and the name of the offending field."""

import json

import httpx
import openai
import pytest
from openai import AsyncOpenAI

from homing.replica.messages import PositionLogprobs
from homing.router.backend import TokenDelta
from homing.router.errors import DeadlineExceeded, NoReplica, QueueFull, RequestFailed, RouterError

from .conftest import ANSWER
from .fakes import FakeBackend, scored

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "hi"}]

DEEP = "[" * 5_000
DEEP_CALL = {"function": {"name": "f", "arguments": DEEP}}

BAD_CHATS = [
    ({"messages": []}, "messages"),
    ({}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": "x", "mood": 1}]}, "messages[0].mood"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 10**30}, "top_k"),
    ({"priority": 10**30}, "priority"),
    ({"priority": -(10**30)}, "priority"),
    ({"min_p": 1.5}, "min_p"),
    ({"n": 0}, "n"),
    ({"n": 9}, "n"),
    ({"n": 1.5}, "n"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_completion_tokens": -1}, "max_completion_tokens"),
    ({"max_completion_tokens": 4000}, "max_completion_tokens"),
    ({"max_tokens": 4000}, "max_tokens"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"min_tokens": 10, "max_tokens": 5}, "min_tokens"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"99999": 1}}, "logit_bias"),
    ({"logit_bias": {"1": 101}}, "logit_bias"),
    ({"stop_token_ids": [99999]}, "stop_token_ids"),
    ({"stop": ["a", 1]}, "stop[1]"),
    ({"seed": 2**64}, "seed"),
    ({"seed": -(2**63) - 1}, "seed"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "system", "content": None}]}, "messages[0].content"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"stop": "a" * 1025}, "stop"),
    ({"stop": ["a" * 1025]}, "stop[0]"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"response_format": {"type": "yaml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.schema"),
    ({"response_format": "json_object"}, "response_format"),
    ({"structured_outputs": {"json": {"not": {}}}}, "structured_outputs.json"),
    ({"structured_outputs": {"regex": "(?=a)b"}}, "structured_outputs.regex"),
    ({"guided_grammar": "start: missing"}, "guided_grammar"),
    ({"guided_choice": []}, "guided_choice"),
    ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"stream_options": {"include_usag": True}}, "stream_options.include_usag"),
    ({"temprature": 1}, "temprature"),
    ({"timeout": 0}, "timeout"),
    ({"seed": 1.5}, "seed"),
    ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs.tokenize"),
    ({"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs.self"),
    (
        {
            "tools": [
                {
                    "type": "function",
                    "function": {"name": "f", "parameters": json.loads('{"a":' * 900 + "1" + "}" * 900)},
                }
            ]
        },
        "messages",
    ),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": [{"type": "function", "function": {"parameters": {}}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": 5}}]}, "tools[0].function.parameters"),
    ({"messages": [{"role": "assistant", "tool_calls": [DEEP_CALL]}]}, "messages[0].tool_calls"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
]

BAD_COMPLETIONS = [
    ({}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": 3}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": ["a", 1]}, "prompt"),
    ({"prompt": [1, 99999]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [1] * 256}, "prompt"),
    ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
    ({"prompt": "a", "max_tokens": -1}, "max_tokens"),
    ({"prompt": "a", "logprobs": 21}, "logprobs"),
    ({"prompt": "a", "logprobs": True}, "logprobs"),
    ({"prompt": "a", "suffix": "b"}, "suffix"),
    ({"prompt": ["a"] * 9}, "n"),
    ({"prompt": "a", "echo": True, "logprobs": 1, "stream": True}, "echo"),
]


#: Features that are not supported yet: changes to the body, the field in the error, and words of its message.
NOT_YET = [
    ({"structural_tag": {"structures": []}}, "structural_tag", "structured output"),
    ({"tool_choice": "required"}, "tool_choice", "needs 'tools'"),
    ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice", "there is no tool 'f'"),
    ({"tool_choice": {"type": "web_search"}}, "tool_choice", "expected auto, none, required"),
    ({"functions": [{"name": "f"}]}, "functions", "calling functions"),
    ({"lora_request": {"lora_name": "a"}}, "lora_request", "LoRA"),
    ({"lora_path": "a"}, "lora_path", "LoRA"),
    ({"prediction": {"type": "content", "content": "x"}}, "prediction", "speculative decoding"),
    ({"speculative_config": {"num_speculative_tokens": 3}}, "speculative_config", "speculative decoding"),
    ({"modalities": ["text", "audio"]}, "modalities", "anything but text"),
    ({"audio": {"voice": "v", "format": "wav"}}, "audio", "anything but text"),
    ({"prompt_embeds": "AAAA"}, "prompt_embeds", "prompts as embeddings"),
    ({"web_search_options": {}}, "web_search_options", "searching the web"),
    ({"use_beam_search": True}, "use_beam_search", "beam search"),
]


def check_shape(response: httpx.Response) -> dict:
    """Assert that the response has OpenAI's error format, and return the error object."""
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return error


@pytest.mark.parametrize(("changes", "param", "what"), NOT_YET)
async def test_what_comes_later_is_refused_by_field_and_by_what_is_missing(client, backend, changes, param, what):
    """The message must not suggest a misspelling when the field is one that other servers support."""
    response = await client.post(CHAT, json={"messages": MESSAGES} | changes)

    error = check_shape(response)
    assert (response.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param)
    assert what in error["message"]
    assert backend.requests == []


HARMLESS = [
    {"modalities": ["text"]},
    {"function_call": "none"},
    {"functions": []},
    {"use_beam_search": False},
    {"prediction": None, "audio": None},
    {"top_logprobs": 0},
    {"stop": ""},
    {"stop": [""]},
    {"seed": 2**64 - 1},
    {"seed": 1.0, "n": 1.0, "logprob_token_ids": [9.0], "logprobs": True},
]


@pytest.mark.parametrize("changes", HARMLESS)
async def test_a_value_that_requests_nothing_is_accepted(client: httpx.AsyncClient, backend: FakeBackend, changes):
    """Clients send OpenAI's default values explicitly; the answer must be the same as without them."""
    response = await client.post(CHAT, json={"messages": MESSAGES} | changes)

    assert response.status_code == 200, response.text
    assert response.json()["choices"][0]["message"]["content"] == ANSWER


@pytest.mark.parametrize(
    ("bias", "words"),
    [
        ({"5": 1, "x": 1}, ["'x'", "integer"]),
        ({"5": 1, "-6": 101}, ["'-6'", "101", "100"]),
        ({"5": "a"}, ["'5'", "'a'"]),
        ({"5": 1, "99999": 1}, ["99999", "4095"]),
        ([5], ["object"]),
    ],
)
async def test_a_wrong_bias_is_told_by_key_and_value(client: httpx.AsyncClient, backend: FakeBackend, bias, words):
    """The map may have hundreds of entries, so the message must identify the wrong one."""
    response = await client.post(CHAT, json={"messages": MESSAGES, "logit_bias": bias})

    error = check_shape(response)
    assert (response.status_code, error["param"]) == (400, "logit_bias")
    assert [word for word in words if word not in error["message"]] == []


async def test_an_adapter_is_a_model_that_does_not_exist(client: httpx.AsyncClient, backend: FakeBackend):
    """vLLM and SGLang clients select adapters by model name; the base model's answer must not pass for one."""
    response = await client.post(CHAT, json={"messages": MESSAGES, "model": "demo:my-adapter"})

    error = check_shape(response)
    assert (response.status_code, error["param"], error["code"]) == (404, "model", "model_not_found")
    assert backend.requests == []


LATER = "moderations rerank score audio/transcriptions images/generations files batches"


@pytest.mark.parametrize("path", f"{LATER} load_lora_adapter unload_lora_adapter".split())
async def test_endpoints_that_come_later_are_not_found(client: httpx.AsyncClient, path):
    """The error has the format that clients parse, and its message names the path."""
    response = await client.post(f"/v1/{path}", json={"model": "demo", "input": "x"})

    assert response.status_code == 404
    assert f"/v1/{path}" in check_shape(response)["message"]


@pytest.mark.parametrize(("changes", "param"), BAD_CHATS)
async def test_a_bad_chat_is_refused_by_the_name_of_its_field(client: httpx.AsyncClient, backend, changes, param):
    """Ignoring a field silently is worse than refusing it; no invalid request may reach a replica."""
    base = {} if changes == {} else {"messages": MESSAGES}

    response = await client.post(CHAT, json=base | changes)

    error = check_shape(response)
    assert (response.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param)
    assert backend.requests == []


@pytest.mark.parametrize(("body", "param"), BAD_COMPLETIONS)
async def test_a_bad_completion_is_refused_by_the_name_of_its_field(client: httpx.AsyncClient, backend, body, param):
    """Same as for chats."""
    response = await client.post(COMPLETIONS, json=body)

    error = check_shape(response)
    assert (response.status_code, error["param"]) == (400, param)
    assert backend.requests == []


@pytest.mark.parametrize("body", [b"{", b"", b'{"messages": [}', b'{"prompt": "\xff"}', DEEP.encode()])
async def test_broken_json_is_told_as_such(client: httpx.AsyncClient, backend: FakeBackend, body: bytes):
    """Broken JSON must be reported neither as a missing field nor as a server error."""
    for path in (CHAT, COMPLETIONS, "/tokenize", "/explain"):
        response = await client.post(path, content=body)

        assert (response.status_code, check_shape(response)["code"]) == (400, "invalid_json")


@pytest.mark.parametrize("start", [b"", b"\xef\xbb\xbf"], ids=["plain", "byte order mark"])
@pytest.mark.parametrize("before", [b"", b'"messages": 5, '], ids=["first", "after an invalid field"])
async def test_the_first_byte_that_is_not_utf_8_is_named(client: httpx.AsyncClient, start: bytes, before: bytes):
    """Its offset in the body, not in some string, is what the client's author can look up."""
    head = start + b"{" + before + b'"prompt": "caf'

    error = check_shape(await client.post(COMPLETIONS, content=head + b'\xe9"}'))

    assert f"byte {len(head)} is not UTF-8: invalid continuation byte" in error["message"]


async def test_a_body_that_is_no_object_is_refused(client: httpx.AsyncClient, backend: FakeBackend):
    """A body that is not an object has no field to name, so `param` is null."""
    response = await client.post(CHAT, content=b"[1]")

    assert (response.status_code, check_shape(response)["param"]) == (400, None)


async def test_openais_client_raises_its_own_errors(openai_client: AsyncOpenAI, backend: FakeBackend):
    """The exceptions carry `param`, which applications act on."""
    with pytest.raises(openai.BadRequestError) as bad:
        await openai_client.chat.completions.create(model="demo", messages=MESSAGES, temperature=9)
    with pytest.raises(openai.NotFoundError) as missing:
        await openai_client.chat.completions.create(model="gpt-4", messages=MESSAGES)

    assert bad.value.param == "temperature"
    assert (missing.value.param, missing.value.code) == ("model", "model_not_found")


@pytest.mark.parametrize(("path", "param"), [(CHAT, "messages"), (COMPLETIONS, "prompt")])
async def test_a_prompt_that_is_too_long_is_named(client: httpx.AsyncClient, backend: FakeBackend, path, param):
    """Clients shorten their conversation when they see this error code."""
    text = "fox " * 400
    body = {"prompt": text} if param == "prompt" else {"messages": [{"role": "user", "content": text}]}

    error = check_shape(await client.post(path, json=body))

    assert (error["code"], error["param"]) == ("context_length_exceeded", param)


async def test_a_body_over_the_limit_is_413(client: httpx.AsyncClient, backend: FakeBackend):
    """The limit applies to bodies with a content length and to chunked ones."""

    async def parts():
        for _ in range(70):
            yield b" " * 1024

    for content in (b" " * 70_000, parts()):
        response = await client.post(CHAT, content=content)

        assert (response.status_code, check_shape(response)["code"]) == (413, "body_too_large")


async def test_unknown_paths_and_methods_have_the_shape_too(client: httpx.AsyncClient, backend: FakeBackend):
    """Clients parse all errors in the same way."""
    missing, wrong = await client.get("/v2/models"), await client.get(CHAT)

    assert (missing.status_code, check_shape(missing)["code"]) == (404, "not_found")
    assert (wrong.status_code, check_shape(wrong)["code"]) == (405, "method_not_allowed")
    assert wrong.headers["allow"] == "POST"


@pytest.mark.parametrize(
    ("refusal", "status", "retry_after"),
    [
        (QueueFull(9), 429, "1"),
        (NoReplica("none", retry_after_s=7), 503, "7"),
        (NoReplica("none"), 503, None),
        (DeadlineExceeded("late"), 504, None),
        (RequestFailed("replica a refused the request: the model's logits are NaN"), 500, None),
    ],
)
async def test_refusals_of_the_backend_keep_their_status(client, backend: FakeBackend, refusal, status, retry_after):
    """The response also carries the backend's message and, where it is known, `retry-after`."""
    backend.refusal = refusal

    response = await client.post(CHAT, json={"messages": MESSAGES})

    assert check_shape(response)["message"] == refusal.message
    assert (response.status_code, response.headers.get("retry-after")) == (status, retry_after)


async def test_a_refusal_of_one_choice_cancels_the_others(client, backend: FakeBackend):
    """Streams opened before the refusal must be cancelled; the `backend` fixture checks that."""
    generate = backend.generate

    def refuse_the_second(request):
        if backend.requests:
            raise QueueFull(1)
        return generate(request)

    backend.generate = refuse_the_second
    response = await client.post(CHAT, json={"messages": MESSAGES, "n": 3})

    assert response.status_code == 429
    assert len(backend.requests) == 1


async def test_a_crash_is_told_without_its_inside(client, backend: FakeBackend):
    """The traceback goes to the log, and the client gets a 500 in OpenAI's format."""

    def crash(request):
        raise ZeroDivisionError("secret")

    backend.script = crash
    response = await client.post(CHAT, json={"messages": MESSAGES})

    assert response.status_code == 500
    assert "secret" not in response.text
    check_shape(response)


@pytest.mark.parametrize("reason", ["abort", "error"])
async def test_an_answer_that_a_replica_gave_up_is_an_error(client, backend: FakeBackend, reason, answer_ids):
    """OpenAI has no such finish reason, and a partial answer must not pass for a complete one."""
    from .fakes import reply

    backend.script = reply(answer_ids[:1], finish=reason)

    response = await client.post(CHAT, json={"messages": MESSAGES})

    assert response.status_code == RouterError.http_status


@pytest.mark.parametrize(
    "bad", [{"logprobs": [PositionLogprobs(None, [])]}, {"cached_tokens": "many"}], ids=["in a chunk", "at the end"]
)
async def test_a_stream_that_crashes_ends_in_an_error_event(client, backend: FakeBackend, bad):
    """On invalid replica output, the client must neither wait for more nor take a partial answer for a complete one."""
    good = TokenDelta(token_ids=[5], logprobs=[scored(5, 0)], cached_tokens=0)
    last = TokenDelta(**{"token_ids": [6], "logprobs": [scored(6, 0)], "finish_reason": "stop", **bad})
    backend.script = lambda _: [good, last]

    response = await client.post(COMPLETIONS, json={"prompt": "a", "stream": True, "logprobs": 0})

    events = response.text.strip().split("\n\n")
    assert json.loads(events[0].removeprefix("data: "))["choices"]
    assert json.loads(events[-1].removeprefix("data: "))["error"]["message"].startswith("internal error")


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"content-type": "application/json; charset=utf-8"}, 200),
        ({"content-type": "text/plain"}, 415),
        ({"content-type": "application/x-www-form-urlencoded", "origin": "http://elsewhere.example"}, 415),
        ({"origin": "http://elsewhere.example"}, 415),
        ({}, 200),
    ],
)
async def test_what_a_browser_sends_unasked_is_refused(client, headers, status):
    """Any web page may post text or an empty body without a preflight, but not JSON."""
    response = await client.post("/tokenize", content=b'{"prompt": "a"}', headers=headers)

    assert response.status_code == status
    if status != 200:
        assert check_shape(response)["code"] == "unsupported_media_type"
