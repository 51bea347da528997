"""Completions: prompts in every form, echo and logprobs."""

import json
from hashlib import sha256

import httpx
import msgspec
import pytest
from openai import AsyncOpenAI
from openai.types import Completion
from openai.types.completion_choice import Logprobs

from homing.kvcache.hashing import token_array
from homing.replica.messages import PositionLogprobs, TokenLogprob
from homing.router.backend import GenerationRequest, TokenDelta
from homing.router.http.dialects.completions import COMPLETION, unique_name
from homing.router.http.front import Front
from homing.router.text.answer import TokenAt
from homing.router.text.tokenizer import TextModel

from ..conftest import ANSWER
from ..fakes import FakeBackend

COMPLETIONS = "/v1/completions"
PROMPT = "Tell me a story about a fox."


@pytest.fixture
def prompt_ids(text_model: TextModel) -> list[int]:
    """The token ids of `PROMPT`, with the leading special token."""
    return list(text_model.encode_now([PROMPT], special_tokens=True)[0])


async def test_an_answer_is_openais_to_the_letter(client: httpx.AsyncClient, backend: FakeBackend):
    """Validation is strict, with and without logprobs."""
    for logprobs in (None, 0, 3):
        response = await client.post(COMPLETIONS, json={"model": "demo", "prompt": PROMPT, "logprobs": logprobs})

        answer = Completion.model_validate_json(response.content, strict=True)
        assert answer.choices[0].text == ANSWER
        assert (answer.choices[0].logprobs is None) == (logprobs is None)


async def test_prompts_come_as_texts_and_as_ids(client: httpx.AsyncClient, backend: FakeBackend, prompt_ids):
    """A request may have one prompt or several, and all forms of a prompt give the same token ids."""
    for prompt, count in ((PROMPT, 1), ([PROMPT, PROMPT], 2), (prompt_ids, 1), ([prompt_ids, prompt_ids], 2)):
        response = await client.post(COMPLETIONS, json={"prompt": prompt})

        assert [choice["index"] for choice in response.json()["choices"]] == list(range(count))
        assert response.json()["usage"]["prompt_tokens"] == count * len(prompt_ids)
    assert {request.token_ids for request in backend.requests} == {backend.requests[0].token_ids}
    assert token_array(backend.requests[0].token_ids).tolist() == prompt_ids


async def test_choices_of_several_prompts_are_numbered_prompt_by_prompt(client, backend: FakeBackend):
    """Clients split the list into groups of n; a prompt's tokens count once for all of its choices."""
    response = await client.post(COMPLETIONS, json={"prompt": ["a", "bb"], "n": 2, "seed": 5})

    prompts = [request.token_ids for request in backend.requests]
    assert prompts[0] == prompts[1] != prompts[2] == prompts[3]
    assert [request.sampling.seed for request in backend.requests] == [5, 6, 5, 6]
    assert response.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 6


async def test_streamed_chunks_join_to_the_whole_answer(openai_client: AsyncOpenAI, backend: FakeBackend):
    """With `echo`, the first chunk contains the prompt."""
    for echo in (False, True):
        stream = await openai_client.completions.create(model="demo", prompt=PROMPT, stream=True, echo=echo)
        chunks = [chunk async for chunk in stream]

        assert "".join(chunk.choices[0].text for chunk in chunks) == PROMPT * echo + ANSWER
        assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "stop"


async def test_streamed_chunks_are_openais(client: httpx.AsyncClient, backend: FakeBackend):
    """The only deviation from OpenAI's type is a null finish reason, which OpenAI sends too."""
    response = await client.post(COMPLETIONS, json={"prompt": PROMPT, "stream": True, "logprobs": 1})

    *chunks, done = [block.removeprefix("data: ") for block in response.text.split("\n\n") if block]
    assert done == "[DONE]"
    for chunk in map(json.loads, chunks):
        chunk["choices"][0]["finish_reason"] = chunk["choices"][0]["finish_reason"] or "stop"
        Completion.model_validate(chunk, strict=True)


@pytest.mark.parametrize("max_tokens", [0, 1])
async def test_echo_scores_the_prompt(
    client: httpx.AsyncClient, backend: FakeBackend, text_model, prompt_ids, max_tokens
):
    """lm-eval reads a logprob for each prompt token but the first, and the greatest alternative at each."""
    asked = {"prompt": [prompt_ids], "echo": True, "logprobs": 1, "max_tokens": max_tokens, "temperature": 0}

    response = await client.post(COMPLETIONS, json=asked)

    choice = response.json()["choices"][0]
    logprobs = choice["logprobs"]
    assert choice["finish_reason"] == "length"
    assert choice["text"].startswith(text_model.decode(prompt_ids))
    assert len({len(column) for column in logprobs.values()}) == 1
    assert len(logprobs["tokens"]) == len(prompt_ids) + max_tokens
    assert logprobs["token_logprobs"][0] is None
    assert all(max(top.values()) == -0.25 for top in logprobs["top_logprobs"][1:])
    assert response.json()["usage"]["completion_tokens"] == max_tokens
    for token, offset in list(zip(logprobs["tokens"], logprobs["text_offset"], strict=True))[1:]:
        assert choice["text"][offset:].startswith(token)


@pytest.mark.parametrize("as_text", [True, False])
async def test_echo_shows_special_tokens_in_text_and_tokens_alike(client, backend: FakeBackend, text_model, as_text):
    """lm-eval checks that the text at each token's offset starts with the token."""
    prompt = "<|im_start|>" + PROMPT
    ids = list(text_model.encode_now([prompt], special_tokens=False)[0])
    asked = {"prompt": prompt if as_text else ids, "echo": True, "logprobs": 1, "max_tokens": 1}

    choice = (await client.post(COMPLETIONS, json=asked)).json()["choices"][0]

    logprobs = choice["logprobs"]
    assert choice["text"].startswith(prompt)
    pairs = list(zip(logprobs["tokens"], logprobs["text_offset"], strict=True))[-len(ids) - 1 :]
    assert [token for token, offset in pairs if not choice["text"][offset:].startswith(token)] == []


async def test_echo_alone_gives_prompt_and_answer(client: httpx.AsyncClient, backend: FakeBackend, prompt_ids):
    """A prompt of ids is decoded for this; special tokens among the ids are shown by name."""
    for prompt, shown in ((PROMPT, PROMPT), (prompt_ids, "<|begin|>" + PROMPT)):
        response = await client.post(COMPLETIONS, json={"prompt": prompt, "echo": True})

        assert response.json()["choices"][0]["text"] == shown + ANSWER


async def test_best_of_one_is_what_happens_anyway(client: httpx.AsyncClient, backend: FakeBackend):
    """Some benchmark clients always send `best_of: 1`."""
    assert (await client.post(COMPLETIONS, json={"prompt": "x", "best_of": 1})).status_code == 200
    assert backend.requests[0].sampling.logprobs is None


async def test_best_of_gives_the_likeliest_answers_and_counts_all(client, backend, text_model, answer_ids: list[int]):
    """Answers are ranked per prompt by mean logprob; usage counts all generated tokens, including discarded ones."""
    chances = iter([-3.0, -1.0, -2.0, -1.0, -2.0, -3.0])

    def script(request: GenerationRequest) -> list[TokenDelta]:
        chance, length = next(chances), request.sampling.seed  # a sum would favour the short ones
        scores = [PositionLogprobs(TokenLogprob(answer_ids[at], chance), []) for at in range(length)]
        return [TokenDelta(token_ids=answer_ids[:length], logprobs=scores, finish_reason="length", cached_tokens=0)]

    backend.script = script
    asked = {"prompt": ["a", "b"], "n": 2, "best_of": 3, "seed": 2}
    answer = (await client.post(COMPLETIONS, json=asked)).json()

    texts = [text_model.decode(answer_ids[:length]) for length in (2, 3, 4)]
    chosen = [(choice["index"], choice["text"], choice["logprobs"]) for choice in answer["choices"]]
    assert [text for _, text, _ in chosen] == [texts[1], texts[2], texts[0], texts[1]]
    assert [(index, logprobs) for index, _, logprobs in chosen] == [(0, None), (1, None), (2, None), (3, None)]
    assert answer["usage"]["completion_tokens"] == 2 * (2 + 3 + 4)
    assert {request.sampling.logprobs for request in backend.requests} == {0}


@pytest.mark.parametrize(
    "fields",
    [{"n": 3, "best_of": 2}, {"best_of": 2, "stream": True}, {"best_of": 9}, {"best_of": 5, "prompt": ["a", "b"]}],
)
async def test_a_best_of_that_cannot_be_is_refused_by_name(client, backend: FakeBackend, fields: dict[str, object]):
    """`best_of` may not be less than `n`, streamed, or above the limit of choices."""
    response = await client.post(COMPLETIONS, json={"prompt": "x"} | fields)

    assert (response.status_code, response.json()["error"]["param"]) == (400, "best_of")
    assert not backend.requests


async def test_logprobs_are_openais(front: Front):
    """The sampled token is always among the alternatives, because evaluation tools take their maximum."""
    served = await front.served(None)
    fox = next(each for each in range(served.limits.vocab_size) if served.text.piece(each) == b" fox")
    half = next(each for each in range(served.limits.vocab_size) if served.text.piece(each) == b"\xf0")
    position = PositionLogprobs(TokenLogprob(half, -3.0), [TokenLogprob(fox, -0.1), TokenLogprob(0, float("-inf"))])
    body = COMPLETION.decoder.decode(json.dumps({"prompt": PROMPT, "logprobs": 1}))
    shape = COMPLETION.builder(served, body, "id", 0).logprobs([TokenAt(half, 7, position)])

    parsed = Logprobs.model_validate(json.loads(msgspec.json.encode(shape)), strict=True)
    assert parsed.text_offset == [7]
    assert parsed.top_logprobs == [{" fox": -0.1, "bytes:\\xf0": -3.0}]


def test_parts_of_characters_keep_different_names():
    """If each were a replacement character, they would merge into one key."""
    assert unique_name(b"\xf0") != unique_name(b"\xf1")


async def test_a_cache_key_reaches_the_router(client: httpx.AsyncClient, backend: FakeBackend):
    """Requests with the same key stay on one replica if prefixes do not decide. Only texts are keys."""
    for key in ("k1", "", 7, "k" * 65):
        await client.post(COMPLETIONS, json={"prompt": PROMPT, "prompt_cache_key": key})

    assert [request.session for request in backend.requests] == ["k1", None, None, sha256(b"k" * 65).hexdigest()]
