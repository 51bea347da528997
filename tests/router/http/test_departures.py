"""Departures of prompts from known ones: exact to the token in a session or between two bodies, else to the block."""

from array import array

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from homing.kvcache.hashing import token_bytes
from homing.router.http.departures import (
    ENTRY_BYTES,
    MAX_MISSING,
    SessionPrompts,
    common_tokens,
    place_between,
    place_in,
)
from homing.router.http.front import Front
from homing.router.text.conversation import Conversation, Message, function_tool

from .fakes import FakeBackend, reply

CHAT = "/v1/chat/completions"
HEADER = "x-homing-departure"
SYSTEM = {"role": "system", "content": "You tell stories about foxes and owls."}
ASKED = [SYSTEM, {"role": "user", "content": "Tell me about a fox who met an owl in a very dark wood."}]
TOLD = {"role": "assistant", "content": "Once there was a fox."}
LONGER = [*ASKED, TOLD, {"role": "user", "content": "And then?"}]
EMPTY = Conversation(messages=())


def changed(index: int, content: str) -> list[dict[str, str]]:
    return [{**each, "content": content} if place == index else each for place, each in enumerate(LONGER)]


async def departure(client: httpx.AsyncClient, messages: object, session: str = "s", **fields: object) -> str | None:
    headers = {"x-session-affinity": session}
    response = await client.post(CHAT, json={"messages": messages, **fields}, headers=headers)
    assert response.status_code == 200, response.text
    found: str | None = response.headers.get(HEADER)
    return found


async def test_a_session_that_only_grows_has_no_departure(client: httpx.AsyncClient):
    """Its earlier prompts are prefixes of the new one; other sessions and requests without a session have no effect."""
    assert await departure(client, ASKED) is None
    assert await departure(client, changed(0, "Be brief."), session="other") is None
    assert await departure(client, LONGER) is None
    assert HEADER not in (await client.post(CHAT, json={"messages": ASKED})).headers


@pytest.mark.parametrize(
    ("messages", "fields", "at", "text"),
    [
        (changed(0, "You tell stories about cats."), {}, "system", "cats"),
        (changed(1, "Tell me about a cat."), {}, "messages[1]", "cat"),
    ],
)
async def test_a_header_names_the_first_token_that_differs(
    client: httpx.AsyncClient, text_model, backend: FakeBackend, messages, fields, at: str, text: str
):
    await departure(client, LONGER)
    found = await departure(client, messages, **fields)

    assert found is not None
    named = dict(each.split("=", 1) for each in found.split(";"))
    one, other = [array("I", request.token_ids) for request in backend.requests]
    token = int(named["token"])
    assert (one[:token], one[token] != other[token]) == (other[:token], True)
    assert named["at"] == at
    assert text in named["text"]
    assert await departure(client, messages, **fields) is None


@pytest.mark.parametrize(
    ("known", "stands"),
    [(32, "exact=no;at=messages[1]"), (16, "exact=no;at=system"), (0, None), (10_000, None)],
)
async def test_a_new_session_departs_from_what_replicas_hold(
    client: httpx.AsyncClient, backend: FakeBackend, answer_ids: list[int], known: int, stands: str | None
):
    """The place is exact to a block. A prompt of which no block or every block is held has no departure."""
    backend.script, backend.known = reply(answer_ids), known

    found = await departure(client, LONGER)

    assert (found is None) == (stands is None)
    assert found is None or found.startswith(f"token={known};{stands};text=")
    assert "instead-of" not in (found or ""), "another session's text must not be disclosed"


async def test_the_longer_of_both_known_prefixes_counts(
    client: httpx.AsyncClient, backend: FakeBackend, answer_ids: list[int]
):
    """First a replica holds a longer prefix than the session's last prompt; in the second case it is the reverse."""
    other = changed(0, "Be brief.")
    await departure(client, other)
    backend.script, backend.known = reply(answer_ids), 32
    by_block = await departure(client, LONGER)
    await departure(client, LONGER, session="another")
    backend.known = 16
    by_token = await departure(client, changed(1, "Tell me about a cat."), session="another")

    assert by_block is not None
    assert by_block.startswith("token=32;exact=no;at=messages[1];")
    assert by_token is not None
    assert "exact=no" not in by_token
    assert "at=messages[1]" in by_token
    assert "instead-of=" in by_token


async def test_explain_names_where_the_prompt_leaves_what_a_replica_holds(client: httpx.AsyncClient):
    """A replica's blocks give the place to the block; the session's last prompt gives the exact token."""
    body = {"messages": LONGER}
    headers = {"x-session-affinity": "s"}
    by_blocks = (await client.post("/explain", json=body)).json()["departure"]
    await departure(client, LONGER)
    changed_body = {"messages": changed(1, "Tell me about a cat.")}
    by_tokens = (await client.post("/explain", json=changed_body, headers=headers)).json()["departure"]

    assert (by_blocks["token"], by_blocks["exact"], by_blocks["instead_of"]) == (0, False, None)
    assert (by_tokens["at"], by_tokens["exact"]) == ("messages[1]", True)
    assert "fox" in by_tokens["instead_of"]


async def test_two_bodies_are_compared(client: httpx.AsyncClient):
    one, other = {"messages": LONGER}, {"messages": changed(3, "And how did it end?")}
    raw, longer = {"prompt": "Tell me a story"}, {"prompt": "Tell me a story now"}

    async def diff(a: object, b: object) -> httpx.Response:
        return await client.post("/explain/diff", json={"a": a, "b": b})

    changes, same, more = [(await diff(*pair)).json() for pair in ((one, other), (one, one), (raw, longer))]

    assert changes["departure"]["token"] == changes["common_tokens"]
    assert changes["departure"]["at"] == "messages[3]"
    assert same["departure"] is None
    assert same["tokens"] == [same["common_tokens"]] * 2
    assert more["departure"] is None
    assert more["common_tokens"] == more["tokens"][0]
    assert (await diff(one, {"prompt": 5})).status_code == 400


def test_the_place_is_the_first_part_that_differs() -> None:
    """Two conversations are compared by part; for a single one, the parts' positions in the rendered text decide."""
    system, user = Message("system", "Be kind."), Message("user", "Hello there.")
    tool = function_tool("weather", None, None)
    plain, tools = Conversation(messages=[system, user]), Conversation(messages=[system, user], tools=[tool])
    rendered = 'BEGIN Be kind. TOOLS {"name": "weather"} USER Hello there. ASSISTANT'

    assert place_between(plain, tools) == "tools"
    assert place_between(plain, Conversation(messages=[user])) == "messages[0]"
    assert place_between(plain, Conversation(messages=[system, user, user])) == "messages[2]"
    assert place_between(plain, plain) == "template"
    assert [place_in(tools, rendered, rendered.index(word)) for word in ("BEGIN", "kind", "weather", "there")] == [
        *("template", "system", "tools", "messages[1]")
    ]


def test_the_place_is_not_searched_for_without_end() -> None:
    """If a template changes every message, each search reads the whole prompt: 8,000 messages took 0.6 s."""
    changed, kept = Message("user", " Hello "), Message("user", "Bye.")

    for missing, place in ((MAX_MISSING - 1, f"messages[{MAX_MISSING - 1}]"), (MAX_MISSING, "template")):
        assert (
            place_in(Conversation(messages=[*[changed] * missing, kept]), "Hello" * missing + "Bye.", 10_000) == place
        )


@given(st.lists(st.integers(0, 3), max_size=20), st.lists(st.integers(0, 3), max_size=20))
def test_the_common_beginning_is_found(one: list[int], other: list[int]) -> None:
    """`common_tokens` must equal a plain loop over both prompts."""
    pairs = enumerate(zip(one, other, strict=False))
    expected = next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))

    assert common_tokens(token_bytes(one), token_bytes(other)) == expected


def test_the_memory_for_prompts_is_bounded() -> None:
    """The least recently used session is forgotten first."""
    prompts, ids = SessionPrompts(capacity_bytes=4 * ENTRY_BYTES), token_bytes(list(range(30)))

    for name in "abcab":
        prompts.put((b"", name, None), (ids, EMPTY), 50)
    prompts.put((b"", "d", None), (ids, EMPTY), 50)
    kept = [name for name in "abcd" if prompts.get((b"", name, None)) is not None]
    prompts.put((b"", "e", None), (token_bytes([1] * 1000), EMPTY), 50)

    assert kept == ["a", "b", "d"]
    assert len(prompts) == 0
    assert prompts.used_bytes == 0


async def test_the_memory_for_prompts_includes_what_the_template_leaves_out(client: httpx.AsyncClient, front: Front):
    """Or clients could fill the router's memory with fields that templates ignore, under a new session each time."""
    for index in range(8):
        await departure(client, ASKED, f"s{index}", chat_template_kwargs={"unused": "x" * 50_000})

    assert front.session_prompts.used_bytes >= 8 * 50_000
