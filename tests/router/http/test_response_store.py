"""Stored responses: continued by id in any router process, private to their tenant, and bounded."""

import sqlite3
from collections.abc import AsyncIterator, Iterator
from contextlib import closing
from pathlib import Path

import httpx
import msgspec
import pytest
from openai import AsyncOpenAI, NotFoundError
from openai.types.responses import Response

from homing.kvcache.hashing import token_array
from homing.router.config import RouterSettings
from homing.router.errors import ConversationTooLong
from homing.router.http.front import Front
from homing.router.http.response_store import MAX_CONVERSATION, ResponseStore, StoreBounds, StoredResponse
from homing.router.text.tokenizer import TextModel

from .conftest import ANSWER
from .fakes import FakeBackend

PATH = "/v1/responses"
BOUNDS = StoreBounds(responses=1000, bytes=1_000_000, age_s=60.0, conversation_bytes=100_000)


class Wall:
    """A wall clock that only advances when a test sets `now`."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def settings(tmp_path: Path) -> RouterSettings:
    return RouterSettings(default_max_tokens=64, response_store=str(tmp_path / "responses.db"))


@pytest.fixture
async def client(client: httpx.AsyncClient, front: Front) -> AsyncIterator[httpx.AsyncClient]:
    yield client
    assert front.responses is not None
    front.responses.close()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_conversation_goes_on_by_id(
    client: httpx.AsyncClient, backend: FakeBackend, text_model: TextModel, stream: bool
):
    """The prompt equals that of a client that resends the whole conversation; instructions are not carried over."""
    asked = {"model": "demo", "input": "Tell me a story.", "instructions": "Be brief.", "stream": stream}
    first = await client.post(PATH, json=asked)
    body = msgspec.json.decode(first.text.split("data: ")[-1].strip()) if stream else first.json()
    made = Response.model_validate(body["response"] if stream else body)

    second = await client.post(PATH, json={"input": "And then?", "previous_response_id": made.id})
    last = {"input": "Why?", "previous_response_id": second.json()["id"]}
    third = await client.post(PATH, json=last)
    explained = (await client.post("/explain", json=last)).json()
    whole = [
        {"role": "user", "content": "Tell me a story."},
        {"role": "assistant", "content": ANSWER},
        {"role": "user", "content": "And then?"},
        {"role": "assistant", "content": ANSWER},
        {"role": "user", "content": "Why?"},
    ]
    await client.post(PATH, json={"input": whole, "store": False})

    assert made.model_dump()["store"] is True
    assert second.json()["previous_response_id"] == made.id
    assert third.status_code == 200
    assert explained["prompt_tokens"] == len(token_array(backend.requests[2].token_ids)), explained
    assert backend.requests[2].token_ids == backend.requests[3].token_ids
    assert len(token_array(backend.requests[1].token_ids)) < len(token_array(backend.requests[2].token_ids))


async def test_openais_client_reads_lists_and_deletes(live, backend: FakeBackend):
    async with AsyncOpenAI(base_url=f"http://127.0.0.1:{live.port}/v1", api_key="k1", max_retries=0) as openai:
        made = await openai.responses.create(model="demo", input="Tell me a story.")
        read = await openai.responses.retrieve(made.id)
        items = await openai.responses.input_items.list(made.id)
        stranger = openai.with_options(api_key="k2")

        assert read == made
        assert [item.content[0].text async for item in items] == ["Tell me a story."]
        with pytest.raises(NotFoundError):
            await stranger.responses.retrieve(made.id)
        with pytest.raises(NotFoundError):
            await stranger.responses.delete(made.id)
        await openai.responses.delete(made.id)
        with pytest.raises(NotFoundError):
            await openai.responses.retrieve(made.id)


async def test_what_is_not_stored_cannot_be_continued(client: httpx.AsyncClient):
    """A response with `store: false` can be neither read nor continued."""
    made = (await client.post(PATH, json={"input": "a", "store": False})).json()
    found = await client.get(f"{PATH}/{made['id']}")
    refused = await client.post(PATH, json={"input": "b", "previous_response_id": made["id"]})

    assert made["store"] is False
    assert (found.status_code, found.json()["error"]["code"]) == (404, "response_not_found")
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "previous_response_not_found")


@pytest.fixture
def wall() -> Wall:
    return Wall()


@pytest.fixture
def store(tmp_path: Path, wall: Wall) -> Iterator[ResponseStore]:
    made = ResponseStore(str(tmp_path / "store.db"), BOUNDS, wall)
    yield made
    made.close()


def stored(previous: str | None = None, size: int = 10) -> StoredResponse:
    return StoredResponse([{"role": "user", "content": "x" * size}], b'{"output": []}', previous)


def test_the_oldest_go_first(tmp_path: Path, wall: Wall) -> None:
    """The oldest responses are deleted beyond the bounds on number and bytes, checked at every sixteenth write."""
    for number, (bounds, size) in enumerate([(BOUNDS._replace(responses=5), 10), (BOUNDS._replace(bytes=6000), 1000)]):
        store = ResponseStore(str(tmp_path / f"{number}.db"), bounds, wall)
        for index in range(33):
            wall.now += 1.0
            store.put(b"t", f"r{index}", stored(size=size))
        store.close()
        with closing(sqlite3.connect(tmp_path / f"{number}.db")) as file:
            kept = {name for (name,) in file.execute("SELECT id FROM responses")}

        assert kept == {"r28", "r29", "r30", "r31", "r32"}


async def test_what_is_too_old_is_gone(store: ResponseStore, wall: Wall) -> None:
    store.put(b"t", "r", stored())
    wall.now += 59.0
    assert await store.get(b"t", "r") is not None
    wall.now += 2.0
    assert await store.get(b"t", "r") is None


async def test_another_process_finds_it(store: ResponseStore, tmp_path: Path, wall: Wall) -> None:
    """A client's connections may reach any of several routers, and routers may restart."""
    other = ResponseStore(str(tmp_path / "store.db"), BOUNDS, wall)

    store.put(b"t", "a", stored()).result(5.0)
    other.put(b"t", "b", stored("a")).result(5.0)
    history = await store.history(b"t", "b")
    gone = await other.delete(b"t", "a"), await store.history(b"t", "b")
    other.close()

    assert history is not None
    assert len(history.items) == 2
    assert gone == (True, None)


async def test_a_conversation_beyond_the_bound_is_named_as_too_long(tmp_path: Path, wall: Wall) -> None:
    """The error must not be "not found", because all of its responses are stored."""
    store = ResponseStore(str(tmp_path / "store.db"), BOUNDS._replace(responses=2000), wall)
    for index in range(MAX_CONVERSATION + 1):
        store.put(b"t", f"r{index}", stored(f"r{index - 1}" if index else None))

    history = await store.history(b"t", f"r{MAX_CONVERSATION - 1}")
    with pytest.raises(ConversationTooLong, match=str(MAX_CONVERSATION)):
        await store.history(b"t", f"r{MAX_CONVERSATION}")
    store.close()

    assert history is not None
    assert len(history.items) == MAX_CONVERSATION


async def test_a_conversation_with_too_many_bytes_is_not_loaded(store: ResponseStore) -> None:
    """Items that prompts leave out do not count against the context, so they could fill the router's memory."""
    store.put(b"t", "a", stored(size=60_000))
    store.put(b"t", "b", stored("a", size=30_000))
    store.put(b"t", "c", stored("b", size=30_000))

    assert await store.history(b"t", "b") is not None
    with pytest.raises(ConversationTooLong, match="100000 bytes"):
        await store.history(b"t", "c")


async def test_the_history_counts_as_part_of_the_body(client: httpx.AsyncClient, front: Front):
    """The size decides whether a prompt is rendered and encoded off the event loop, and what its memory costs."""
    left_out = [{"type": "mcp_list_tools", "id": str(index), "text": "x" * 10_000} for index in range(9)]
    made = (await client.post(PATH, json={"input": [*left_out, {"role": "user", "content": "a"}]})).json()
    headers = {"x-session-affinity": "s"}
    await client.post(PATH, json={"input": "b", "previous_response_id": made["id"]}, headers=headers)

    assert front.session_prompts.used_bytes > 90_000


async def test_a_file_that_cannot_be_used_fails_the_request_alone(tmp_path: Path, wall: Wall) -> None:
    """A failed write is only logged, so that the response is still sent; a failed read raises."""
    store = ResponseStore(str(tmp_path / "missing" / "store.db"), BOUNDS, wall)

    failed = store.put(b"t", "a", stored())
    with pytest.raises(Exception, match="store of responses failed"):
        await store.get(b"t", "a")
    assert failed.exception(1.0) is not None
    store.close()


def test_only_the_owner_can_read_the_files(tmp_path: Path, wall: Wall) -> None:
    """The files contain conversations."""
    store = ResponseStore(str(tmp_path / "store.db"), BOUNDS, wall)
    store.put(b"t", "a", stored()).result(5.0)

    assert {file.stat().st_mode & 0o777 for file in tmp_path.glob("store.db*")} == {0o600}
    store.close()
