"""vLLM's endpoints of token ids: what one server renders, another generates as if it had got the request itself."""

import json
from typing import Any

import httpx
import msgspec
import pytest

from homing.kvcache.hashing import token_array
from homing.router.backend import GenerationRequest, TokenDelta
from homing.router.text.tokenizer import TextModel

from ..conftest import ANSWER
from ..fakes import PAUSE, FakeBackend, reply

GENERATE = "/inference/v1/generate"
USER = {"role": "user", "content": "Tell me a story."}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
SAMPLED = {"temperature": 0.5, "top_p": 0.9, "top_k": 4, "frequency_penalty": 1.1, "seed": 7, "stop": ["zz"], "n": 2}


def chunks(response: httpx.Response) -> list[dict[str, Any]]:
    *events, done = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert done == "[DONE]"
    return [json.loads(each) for each in events]


def alike(request: GenerationRequest, *, seeded: bool) -> GenerationRequest:
    """A request without what differs each time."""
    sampling = request.sampling if seeded else msgspec.structs.replace(request.sampling, seed=0)
    return msgspec.structs.replace(request, trace_id="", deadline=None, tokens_per_delta=1, sampling=sampling)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [USER], "max_tokens": 9, **SAMPLED}),
        ("/v1/chat/completions", {"messages": [USER], "guided_json": SCHEMA, "temperature": 1}),
        ("/v1/completions", {"prompt": "Tell me", "max_tokens": 9, "bad_words": ["fox"], "cache_salt": "s", **SAMPLED}),
        ("/v1/completions", {"prompt": [5, 6], "guided_choice": ["a", "b"], "ignore_eos": True, "priority": 2}),
        ("/v1/completions", {"prompt": [5, 6], "regex": "[0-9]+", "include_stop_str_in_output": True}),
        ("/v1/messages", {"messages": [USER], "max_tokens": 9, "temperature": 0.5, "stop_sequences": ["zz"]}),
        ("/v1/responses", {"input": "Tell me", "max_output_tokens": 9, "logit_bias": {"9": 1.5}, "seed": 1}),
    ],
)
async def test_a_rendered_prompt_is_generated_as_it_would_have_been(client, backend: FakeBackend, path: str, body):
    """Splitting a request in two changes nothing of what a replica gets."""
    await client.post(path, json=body)
    direct = list(backend.requests)
    backend.streams.clear()

    rendered = (await client.post(f"{path}/render", json=body)).json()
    answer = await client.post(GENERATE, json=rendered[0] if isinstance(rendered, list) else rendered)

    assert answer.status_code == 200, answer.text
    assert isinstance(rendered, list) == (path == "/v1/completions")
    assert [alike(each, seeded="seed" in body) for each in backend.requests] == [
        alike(each, seeded="seed" in body) for each in direct
    ]


async def test_several_prompts_are_rendered_without_generating(client: httpx.AsyncClient, backend: FakeBackend):
    rendered = (await client.post("/v1/completions/render", json={"prompt": ["a b", "c"], "rid": "x"})).json()

    assert [len(each["token_ids"]) > 0 for each in rendered] == [True, True]
    assert [each["request_id"] for each in rendered] == ["cmpl-x-0", "cmpl-x-1"]
    assert not backend.requests


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("mode", ["tokens", "text"])
async def test_token_ids_are_answered(client, backend: FakeBackend, text_model: TextModel, stream: bool, mode: str):
    body = {"token_ids": [5, 6], "sampling_params": {"logprobs": 0}, "stream": stream, "output_mode": mode}

    response = await client.post(GENERATE, json=body, headers={"x-request-id": "42"})

    parts = chunks(response) if stream else [response.json()]
    found = [each["choices"][0] for each in parts]
    ids = [one for each in found for one in each["token_ids"]]
    assert text_model.decode(ids) == ANSWER
    assert all(each["token_ids"] for each in found)
    assert {each["request_id"] for each in parts} == {"generate-tokens-42"}
    assert found[-1]["finish_reason"] == "stop"
    scores = [one for each in found for one in each["logprobs"]["content"]]
    assert [each["token_id"] for each in scores] == ids
    assert [len(each["top_logprobs"]) for each in scores] == [1] * len(ids)
    assert "".join(each.get("text", "") for each in found) == (ANSWER if mode == "text" else "")
    assert list(token_array(backend.requests[0].token_ids)) == [5, 6]
    assert backend.requests[0].sampling.max_tokens == 64  # `default_max_tokens`, not what completions have


async def test_all_choices_and_prompt_logprobs_are_returned(client: httpx.AsyncClient, backend: FakeBackend):
    backend.script = reply([10, 11])
    sampling = {"n": 3, "prompt_logprobs": 1, "detokenize": False}

    answer = (await client.post(GENERATE, json={"token_ids": [5, 6], "sampling_params": sampling})).json()

    assert [(each["index"], each["token_ids"]) for each in answer["choices"]] == [(at, [10, 11]) for at in range(3)]
    assert [bool(each) for each in answer["prompt_logprobs"]] == [False, True]


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": [5, 99_999]}, "token_ids"),
        ({"token_ids": [5] * 300}, "token_ids"),
        ({"sampling_params": {"detokenize": False, "stop": ["a"]}}, "sampling_params.detokenize"),
        ({"sampling_params": {"detokenize": False}, "output_mode": "text"}, "sampling_params.detokenize"),
        ({"sampling_params": {"unheard_of": 1}}, "sampling_params.unheard_of"),
        ({"sampling_params": {"stop_token_ids": [99_999]}}, "sampling_params.stop_token_ids"),
        ({"sampling_params": {"max_tokens": 0, "echo": True}}, "sampling_params.max_tokens"),
        ({"request_id": "a\n"}, "request_id"),
    ],
)
async def test_what_is_wrong_is_named(client: httpx.AsyncClient, changes: dict[str, Any], param: str):
    response = await client.post(GENERATE, json={"token_ids": [5], **changes})

    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    assert f"'{param}'" in response.json()["error"]["message"] or param == "token_ids"


@pytest.mark.parametrize("field", [{"stream": True}, {"rid": "other"}, {"echo": True}, {"cache_salt": "s"}])
async def test_sampling_does_not_hold_the_fields_of_a_body(client: httpx.AsyncClient, field: dict[str, Any]):
    """They would silently mean nothing, or name the request."""
    response = await client.post(GENERATE, json={"token_ids": [5], "sampling_params": field, "request_id": "mine"})

    assert response.headers["x-homing-ignored-fields"] == f"sampling_params.{next(iter(field))}"
    assert response.headers["x-request-id"] == "mine"
    assert response.json()["request_id"] == "generate-tokens-mine"


async def test_an_aborted_stream_says_so(client: httpx.AsyncClient, backend: FakeBackend):
    """Its reader has what was generated until then."""
    backend.script = lambda _: [TokenDelta(token_ids=[10], cached_tokens=0), PAUSE]
    found = []
    async with client.stream("POST", GENERATE, json={"token_ids": [5], "stream": True, "request_id": "r"}) as stream:
        async for line in stream.aiter_lines():
            if line.startswith("data: {"):
                found.append(json.loads(line.removeprefix("data: "))["choices"][0])
                await client.post("/inference/v1/abort_requests", json={"request_ids": ["generate-tokens-r"]})

    assert [(each["token_ids"], each["finish_reason"]) for each in found] == [([10], None), ([], "abort")]
