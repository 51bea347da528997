"""Tokenizing on behalf of one tenant must neither delay other tenants nor reveal their prompts."""

import asyncio
from collections.abc import AsyncIterator
from hashlib import sha256

import httpx
import pytest

from homing.router.config import RouterSettings
from homing.router.http.front import Front
from homing.router.metrics import RouterMetrics
from homing.router.tenants.api_keys import tenants_of
from homing.router.text.encoder import ExactEncoder
from homing.router.text.tokenizer import TextModel

from ..text.conftest import RecordingEncoder, recording_model, slow_parts
from .conftest import LoadedText, serving
from .fakes import FakeBackend

MEGABYTE = 1_000_000
LIMITS = {"brief": {"max_prompt_tokens": 1000}, "slow": {"tokens_per_minute": 1000}, "one": {}, "two": {}}
LONG = " fox" * (ExactEncoder.short_characters // 4 + 1)


def front_of(model: TextModel, backend: FakeBackend) -> Front:
    """A front with one API key per tenant; the key is the tenant's name."""
    keys = [{"key_sha256": sha256(name.encode()).hexdigest(), "tenant": name} for name in LIMITS]
    settings = RouterSettings(max_body_bytes=20 * MEGABYTE, max_choices=8)
    tenants = tenants_of({"keys": keys, "tenants": LIMITS})
    return Front(settings, backend, RouterMetrics(), texts=LoadedText(model), tenants=tenants)


@pytest.fixture(params=["fastokens", "tokenizers"])
async def client(
    request: pytest.FixtureRequest, backend: FakeBackend, text_model: TextModel
) -> AsyncIterator[httpx.AsyncClient]:
    """A client per encoder; the slow one has no lower bound on tokens from characters."""
    model = text_model if request.param == "fastokens" else TextModel(slow_parts(), cache_bytes=MEGABYTE)
    async with serving(front_of(model, backend)) as http:
        http.timeout = 120
        yield http
    if model is not text_model:
        await asyncio.to_thread(model.close)


@pytest.fixture
async def recorded(backend: FakeBackend) -> AsyncIterator[tuple[httpx.AsyncClient, RecordingEncoder]]:
    """A client, and the encoder behind it, which records the texts it encodes."""
    model, encoder = recording_model(cache_bytes=MEGABYTE)
    async with serving(front_of(model, backend)) as http:
        http.timeout = 120
        yield http, encoder
    encoder.go_on.set()
    await asyncio.to_thread(model.close)


async def post(client: httpx.AsyncClient, key: str, path: str, **body: object) -> httpx.Response:
    return await client.post(path, json=body, headers={"authorization": f"Bearer {key}"})


def chat(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


async def test_a_prompt_that_cannot_be_within_its_tenants_limits_is_not_encoded(recorded):
    """Regression: a tenant limited to 1,000 tokens kept both threads busy for 30 s before each refusal."""
    client, encoder = recorded
    digits = "7" * (8 * MEGABYTE)

    asked = [post(client, "brief", path, prompt=digits) for path in ("/v1/completions", "/tokenize")]
    asked += [post(client, "brief", path, messages=chat(digits)) for path in ("/v1/chat/completions", "/tokenize")]
    answers = await asyncio.gather(*asked)

    assert {answer.status_code for answer in answers} == {400}
    # The model's context is shorter than the tenant's prompt limit.
    codes = [answer.json()["error"]["code"] for answer in answers]
    assert codes == ["context_length_exceeded", "prompt_over_limit", "context_length_exceeded", "prompt_over_limit"]
    assert not any(digits in text for text in encoder.texts)


async def test_a_rate_that_is_used_up_refuses_long_texts_before_they_are_encoded(recorded):
    """Otherwise a tenant over its limit could still cause unlimited work in the router."""
    client, encoder = recorded
    await post(client, "slow", "/tokenize", prompt="the quick brown fox " * 40)

    refused = await post(client, "slow", "/tokenize", prompt=LONG)

    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    assert LONG not in encoder.texts


async def test_a_huge_text_does_not_delay_another_tenants_small_one(recorded):
    """The small request is answered while the huge one is still being encoded."""
    client, encoder = recorded
    huge = asyncio.create_task(post(client, "one", "/tokenize", prompt=RecordingEncoder.HOLD + LONG))
    assert await asyncio.to_thread(encoder.holding.wait, 60)

    small = await post(client, "two", "/v1/messages/count_tokens", messages=chat("the quick brown fox " * 75))
    waiting = not huge.done()
    encoder.go_on.set()

    assert (small.status_code, waiting, (await huge).status_code) == (200, True, 200)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages/count_tokens"])
async def test_sixteen_megabytes_of_blanks_get_an_answer(client: httpx.AsyncClient, path: str):
    """Regression: there was no answer after two minutes."""
    blanks = " " * (16 * MEGABYTE)
    body = {"prompt": blanks} if path == "/v1/completions" else {"messages": chat(blanks)}

    answer = await post(client, "one", path, **body)

    assert answer.status_code in (200, 400)


async def test_what_a_client_sent_that_has_left_is_not_encoded(recorded):
    """Its client disconnects while the text waits behind another long one, so encoding it would be useless."""
    client, encoder = recorded
    held = asyncio.create_task(post(client, "one", "/tokenize", prompt=RecordingEncoder.HOLD + LONG))
    assert await asyncio.to_thread(encoder.holding.wait, 60)
    with pytest.raises(httpx.ReadTimeout):
        await client.post(
            "/tokenize",
            json={"prompt": "left" + LONG},
            timeout=httpx.Timeout(60, read=0.2),
            headers={"x-api-key": "two"},
        )
    encoder.go_on.set()
    after = await post(client, "two", "/tokenize", prompt="after" + LONG)

    assert (await held).status_code == after.status_code == 200
    assert "after" + LONG in encoder.texts
    assert "left" + LONG not in encoder.texts


async def test_tenants_do_not_share_cached_ids(recorded):
    """Regression: in 12 of 12 cases, the time /tokenize takes revealed whether another tenant had sent a text."""
    client, encoder = recorded

    async def encoded(key: str, path: str) -> bool:
        before = len(encoder.texts)
        fields = {"max_tokens": 4} if "/v1/" in path and "count" not in path else {}
        answer = await post(client, key, path, messages=chat("the quick brown fox"), **fields)
        assert answer.status_code == 200
        return any("quick brown" in text for text in encoder.texts[before:])

    for path in ("/tokenize", "/v1/messages/count_tokens", "/v1/chat/completions", "/explain", "/v1/messages"):
        assert await encoded("one", path) == (path == "/tokenize")
    assert await encoded("two", "/tokenize")
    assert not await encoded("two", "/tokenize")
