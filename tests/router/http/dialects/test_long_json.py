"""Long answers in steps: the same JSON as in one go, a little at a time, in turns with everything else."""

from itertools import chain
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from homing.replica.messages import ModelLimits
from homing.router.config import RouterSettings
from homing.router.http.body_reader import BodyReader
from homing.router.http.dialects.long_json import (
    STEP_CHARACTERS,
    STEP_VALUES,
    LongList,
    Steps,
    long_list,
    long_text,
    pieces_of,
    slices,
)
from homing.router.http.dialects.schema import exhaust
from homing.router.http.front import Front
from homing.router.http.protocol.exchange import Exchange
from homing.router.http.turns import Turns

from ...fakes import until
from ..fakes import FakeBackend

CHAT, COMPLETIONS, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
PROMPTS = [list(range(300 + each, 500 + each)) for each in range(8)]


class Table(msgspec.Struct):
    """Two lists, of which any may be long."""

    name: str
    one: Any
    two: Any


Lists = st.lists(st.lists(st.one_of(st.integers(-9, 9), st.text(max_size=3), st.none()), max_size=4), max_size=5)


@given(name=st.text(), one=Lists, two=Lists)
def test_a_list_in_parts_is_the_list(name: str, one: list[list[object]], two: list[list[object]]):
    """Whatever texts are around it, and however its elements are divided."""
    grown = [LongList(), LongList()]
    for made, parts in zip(grown, (one, two), strict=True):
        for part in parts:
            made.add(part)

    pieces = pieces_of([Table(name, *[each.ended() for each in grown])])

    assert b"".join(pieces) == msgspec.json.encode([Table(name, [*chain(*one)], [*chain(*two)])])


@pytest.mark.parametrize("text", ["", 'a"\\\n\u2028é🦊', "x🦊" * STEP_CHARACTERS])
def test_a_text_in_parts_is_the_text(text: str):
    """No character is divided."""
    items = [{"n": number} for number in range(3 * STEP_VALUES)]

    steps = document(text, items)
    pieces = exhaust(steps)

    assert b"".join(pieces) == msgspec.json.encode([text, items])


def document(text: str, items: list[object]) -> Steps[list[bytes]]:
    return pieces_of([(yield from long_text(text)), (yield from long_list(items, 1))])


@given(st.integers(0, 3 * STEP_VALUES), st.integers(0, 2 * STEP_VALUES))
def test_a_slice_holds_the_values_of_one_step(count: int, values_each: int):
    """An item with more values than a step has is a slice of its own."""
    parts = list(slices(range(count), values_each))

    assert [item for part in parts for item in part] == list(range(count))
    assert all(len(part) * values_each <= max(STEP_VALUES, values_each) for part in parts)


LONG = {
    "echo": (COMPLETIONS, {"prompt": PROMPTS, "echo": True, "logprobs": 20, "max_tokens": 2}),
    "prompt logprobs": (COMPLETIONS, {"prompt": PROMPTS, "prompt_logprobs": 20, "max_tokens": 1}),
    "prompt logprobs of a chat": (
        CHAT,
        {"messages": [{"role": "user", "content": "a b c " * 20}], "prompt_logprobs": 20},
    ),
    "logprobs of a chat": (
        CHAT,
        {"messages": [{"role": "user", "content": "hi"}], "n": 8, "logprobs": True, "top_logprobs": 20},
    ),
}


#: Those that score every token of each of `PROMPTS`.
ALL_PROMPTS = ("echo", "prompt logprobs")


class CountingReader(BodyReader):
    """Counts the turns that it gives."""

    def __init__(self) -> None:
        super().__init__(Turns())
        self.turns = 0

    async def turn(self, exchange: Exchange, tenant: bytes) -> None:
        self.turns += 1
        await super().turn(exchange, tenant)


@pytest.mark.parametrize("what", LONG)
async def test_a_long_answer_is_built_in_turns(client, front: Front, backend: FakeBackend, what: str):
    """Each step encodes a bounded number of values, and what waits for the event loop goes between two of them."""
    path, body = LONG[what]
    reader = front.body_reader = CountingReader()

    answer = (await client.post(path, json=body)).json()

    assert reader.turns >= max(2, len(answer["choices"]) * 200 * 21 // STEP_VALUES * (what in ALL_PROMPTS))
    for choice in answer["choices"]:
        logprobs = choice.get("logprobs") or {}
        columns = [logprobs["content"]] if "content" in logprobs else list(logprobs.values())
        assert len({len(column) for column in columns}) <= 1


@pytest.mark.parametrize("what", ["echo", "logprobs of a chat"])
async def test_a_client_that_leaves_ends_the_building_of_its_answer(client, front, backend: FakeBackend, what: str):
    """Nobody waits for the rest."""
    path, body = LONG[what]
    with pytest.raises(httpx.TimeoutException):
        await client.post(path, json=body, timeout=httpx.Timeout(5, read=1e-9))

    await until(lambda: not front.open_exchanges)


@pytest.fixture
def settings(settings: RouterSettings) -> RouterSettings:
    return msgspec.structs.replace(settings, max_answer_values=1 << 20)


FEW = RouterSettings(max_answer_values=1024, strict_fields=True)
TOO_LARGE = {
    "logprobs": (COMPLETIONS, {"prompt": "a", "logprobs": 20, "n": 8, "max_tokens": 7}),
    "logprobs of listed tokens": (
        COMPLETIONS,
        {"prompt": "a", "logprobs": 1, "logprob_token_ids": list(range(100)), "max_tokens": 20},
    ),
    "echo": (COMPLETIONS, {"prompt": [list(range(300, 500))] * 6, "echo": True, "max_tokens": 1}),
    "echo with logprobs": (COMPLETIONS, {"prompt": PROMPTS[:1], "echo": True, "logprobs": 5, "max_tokens": 1}),
    "prompt_logprobs": (COMPLETIONS, {"prompt": PROMPTS[:1], "prompt_logprobs": 5}),
    "return_token_ids": (COMPLETIONS, {"prompt": PROMPTS[:6], "return_token_ids": True, "stream": True}),
    "a chat's logprobs": (
        CHAT,
        {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": 20, "max_tokens": 50},
    ),
    "a chat's prompt_logprobs": (
        CHAT,
        {"messages": [{"role": "user", "content": "a b " * 50}], "prompt_logprobs": 20},
    ),
}
PARAMS = {"logprobs of listed tokens": "logprobs", "echo with logprobs": "logprobs", "a chat's logprobs": "logprobs"}


@pytest.mark.parametrize("what", TOO_LARGE)
@pytest.mark.parametrize("settings", [FEW], ids=["few"])
async def test_an_answer_with_too_many_values_is_refused_before_anything_runs(client, backend: FakeBackend, what: str):
    """The error names the field and both numbers."""
    path, body = TOO_LARGE[what]

    refused = await client.post(path, json=body)
    less = await client.post(path, json={**body, "prompt": "a"} if path == COMPLETIONS else {**body, "max_tokens": 1})

    error = refused.json()["error"]
    assert (refused.status_code, error["param"]) == (400, PARAMS.get(what, what.removeprefix("a chat's ")))
    assert "the maximum is 1,024" in error["message"]
    assert len(backend.requests) == (0 if less.status_code == 400 else body.get("n", 1))


@pytest.mark.parametrize("settings", [FEW], ids=["few"])
async def test_an_output_limit_that_nobody_set_is_what_the_answer_may_hold(client, backend: FakeBackend):
    """Clients that set no limit are not refused; the tokens of a stream are not held, so they do not count."""
    asked = {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": 20, "n": 2}

    assert (await client.post(CHAT, json=asked)).status_code == 200
    assert (await client.post(CHAT, json=asked | {"stream": True})).status_code == 200

    whole, _, streamed, _ = [each.sampling.max_tokens for each in backend.requests]
    assert whole == 1024 // (21 * 2)
    assert streamed > whole


@pytest.mark.parametrize(("form", "most"), [("float", 2), ("base64", 8)])
@pytest.mark.parametrize("settings", [FEW], ids=["few"])
async def test_vectors_have_the_same_bound(client, front, limits: ModelLimits, form: str, most: int):
    """Numbers as text take four times the bytes of Base64."""
    front.backend.limits = msgspec.structs.replace(limits, embedding_size=2048)
    for count, status in ((most, None), (most + 1, 400)):
        body = {"input": [[5]] * count, "encoding_format": form}
        answer = await client.post(EMBEDDINGS, json=body)
        assert (answer.status_code == 400) == (status == 400), answer.text
