"""The fields with which clients request token ids rather than text; names and formats are vLLM's."""

import json
from typing import Any

import httpx
import pytest

from homing.kvcache.hashing import token_array
from homing.replica.messages import PositionLogprobs, TokenLogprob
from homing.router.backend import GenerationRequest, TokenDelta
from homing.router.text.tokenizer import TextModel

from ..conftest import ANSWER
from ..fakes import FakeBackend

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
ASKED = {
    CHAT: {"messages": [{"role": "user", "content": "hi"}]},
    COMPLETIONS: {"prompt": "Tell me a story about a fox."},
}
PATHS = pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
END = 4  #: `<|im_end|>`


def stopped(ids: list[int]) -> Any:
    """A script whose answer ends with the stop token `END`."""

    def script(_request: GenerationRequest) -> list[TokenDelta]:
        *before, last = [*ids, END]
        deltas = [TokenDelta(token_ids=[each]) for each in before]
        return [*deltas, TokenDelta(token_ids=[last], finish_reason="stop", stop_token_id=last)]

    return script


def text_of(choice: dict[str, Any]) -> str:
    found: str = choice["message"]["content"] if "message" in choice else choice["text"]
    return found


async def ask(client: httpx.AsyncClient, path: str, **fields: object) -> dict[str, Any]:
    response = await client.post(path, json=ASKED[path] | fields)
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    return body


@PATHS
async def test_ids_are_those_of_the_replica(client, backend: FakeBackend, answer_ids: list[int], path: str):
    """The ids include the stop token, because trainers need the exact sequence."""
    backend.script = stopped(answer_ids)

    body = await ask(client, path, return_token_ids=True)

    choice = body["choices"][0]
    assert (text_of(choice), choice["token_ids"]) == (ANSWER, [*answer_ids, END])
    shown = body["prompt_token_ids"] if path == CHAT else choice["prompt_token_ids"]
    assert shown == list(token_array(backend.requests[0].token_ids))
    assert "logprobs" not in choice or choice["logprobs"] is None


@PATHS
async def test_streamed_ids_join_to_the_same(client, backend: FakeBackend, answer_ids: list[int], path: str):
    """The prompt's ids are sent once, in the first chunk."""
    backend.script = stopped(answer_ids)

    response = await client.post(path, json=ASKED[path] | {"return_token_ids": True, "stream": True})

    chunks = [json.loads(line[6:]) for line in response.text.split("\n\n") if line.startswith("data: {")]
    assert [each for chunk in chunks for each in chunk["choices"][0]["token_ids"]] == [*answer_ids, END]
    holders = chunks if path == CHAT else [chunk["choices"][0] for chunk in chunks]
    assert ["prompt_token_ids" in each for each in holders] == [True] + [False] * (len(holders) - 1)


@PATHS
async def test_special_tokens_and_stops_are_shown_on_request(client, backend, answer_ids: list[int], path: str):
    """By default neither is part of the text."""
    backend.script = stopped([*answer_ids[:3], 3, *answer_ids[3:]])

    plain = await ask(client, path)
    special = await ask(client, path, skip_special_tokens=False)
    both = await ask(client, path, skip_special_tokens=False, include_stop_str_in_output=True)

    assert text_of(plain["choices"][0]) == ANSWER
    shown = text_of(special["choices"][0])
    assert shown.replace("<|im_start|>", "") == ANSWER != shown
    assert text_of(both["choices"][0]) == shown + "<|im_end|>"


@PATHS
async def test_a_stop_string_is_shown_on_request(client: httpx.AsyncClient, backend: FakeBackend, path: str):
    """The text ends with the stop string."""
    body = await ask(client, path, stop=["met"], include_stop_str_in_output=True)

    assert text_of(body["choices"][0]) == ANSWER[: ANSWER.index("met") + 3]


@PATHS
async def test_logprobs_name_tokens_by_id(client, backend: FakeBackend, answer_ids: list[int], path: str):
    """Ids tell tokens with equal texts apart."""
    asked = {"logprobs": True, "top_logprobs": 2} if path == CHAT else {"logprobs": 2}

    body = await ask(client, path, return_tokens_as_token_ids=True, **asked)

    found = body["choices"][0]["logprobs"]
    names = [each["token"] for each in found["content"]] if path == CHAT else found["tokens"]
    assert names == [f"token_id:{each}" for each in answer_ids]


@PATHS
async def test_prompt_logprobs_cover_the_prompt(client, backend: FakeBackend, text_model: TextModel, path: str):
    """There is one entry per token, null for the first; each includes the prompt's own token."""
    body = await ask(client, path, prompt_logprobs=1)

    ids = list(token_array(backend.requests[0].token_ids))
    found = (body if path == CHAT else body["choices"][0])["prompt_logprobs"]
    assert backend.requests[0].sampling.prompt_logprobs == 1
    assert (found[0], len(found)) == (None, len(ids))
    for token_id, entry in zip(ids[1:], found[1:], strict=True):
        name = text_model.piece(token_id).decode(errors="replace")
        assert entry[str(token_id)] == {"logprob": -0.25, "rank": 1, "decoded_token": name}


@PATHS
@pytest.mark.parametrize("side", ["left", "right", None])
async def test_a_prompt_is_truncated_at_one_side(client, backend: FakeBackend, path: str, side: str | None):
    """By default the beginning is removed; a prompt that is short enough stays unchanged."""
    await ask(client, path)
    await ask(client, path, truncate_prompt_tokens=3, truncation_side=side)
    await ask(client, path, truncate_prompt_tokens=200)

    whole, cut, short = (list(token_array(each.token_ids)) for each in backend.requests)
    assert cut == (whole[:3] if side == "right" else whole[-3:])
    assert short == whole


async def test_a_prompt_beyond_the_context_is_truncated_to_it(client: httpx.AsyncClient, backend: FakeBackend):
    """-1 truncates to the context minus one token, so that one can be generated."""
    body = await client.post(COMPLETIONS, json={"prompt": list(range(5, 305)), "truncate_prompt_tokens": -1})

    assert body.json()["usage"]["completion_tokens"] == 1
    assert list(token_array(backend.requests[0].token_ids)) == list(range(50, 305))


@PATHS
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 257}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 2, "cache_control": {"type": "ephemeral"}}, "truncate_prompt_tokens"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [5, 99999]}, "allowed_token_ids"),
        ({"logprob_token_ids": [5]}, "logprob_token_ids"),
        ({"bad_words": [""]}, "bad_words[0]"),
    ],
)
async def test_what_cannot_be_is_refused(client, backend: FakeBackend, path: str, fields: dict[str, Any], param: str):
    """The error names the field."""
    response = await client.post(path, json=ASKED[path] | fields)

    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    assert backend.requests == []


async def test_restrictions_reach_the_replica_as_ids(client: httpx.AsyncClient, backend: FakeBackend, text_model):
    """Each bad word is sent in two spellings: at the beginning of a text and after a space."""
    await ask(client, COMPLETIONS, allowed_token_ids=[9, 5], bad_words=["fox"], logprobs=1, logprob_token_ids=[7, 8])

    sampling = backend.requests[0].sampling
    assert (sampling.allowed_token_ids, sampling.logprob_token_ids) == ((9, 5), (7, 8))
    assert {text_model.decode(word) for word in sampling.bad_words} == {"fox", " fox"}


@PATHS
async def test_all_ids_that_were_asked_for_are_scored(client: httpx.AsyncClient, backend, answer_ids, path: str):
    """The number of requested alternatives does not limit them."""
    top = [TokenLogprob(each, -1.0 - each) for each in (5, 6, 7)]
    scored = PositionLogprobs(TokenLogprob(answer_ids[0], -0.5), top)
    backend.script = lambda _: [TokenDelta(token_ids=answer_ids[:1], logprobs=[scored], finish_reason="length")]
    asked = {"logprobs": True} if path == CHAT else {"logprobs": 0}

    body = await ask(client, path, logprob_token_ids=[5, 6, 7], return_tokens_as_token_ids=True, **asked)

    found = body["choices"][0]["logprobs"]
    names = found["content"][0]["top_logprobs"] if path == CHAT else found["top_logprobs"][0]
    shown = [each["token"] for each in names] if path == CHAT else list(names)
    assert shown[:3] == ["token_id:5", "token_id:6", "token_id:7"]


async def test_special_tokens_can_be_put_around_a_chat(client: httpx.AsyncClient):
    """As in vLLM, not by default: the template writes its own."""
    plain, added = [
        (await client.post("/tokenize", json={**BODIES_OF_CHATS, "add_special_tokens": add})).json()["tokens"]
        for add in (False, True)
    ]

    assert added == [1, *plain]


#: The body of a chat.
BODIES_OF_CHATS = {"messages": [{"role": "user", "content": "hi"}]}
