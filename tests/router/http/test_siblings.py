"""Several router processes behind one port: each finds, lists and ends the requests of all."""

import asyncio
import socket
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import pytest

from homing.replica.messages import ModelLimits
from homing.router.activity import RequestRecord, Times
from homing.router.backend import TokenDelta
from homing.router.config import RouterSettings
from homing.router.http.endpoints.requests import answer_sibling
from homing.router.http.front import Front
from homing.router.http.history import RequestQuery
from homing.router.http.siblings import FindRequest, Siblings
from homing.router.metrics import RouterMetrics
from homing.router.strict_yaml import parse_yaml
from homing.router.tenants.api_keys import tenants_of
from homing.router.text.tokenizer import TextModel

from .conftest import LoadedText, serving
from .fakes import PAUSE, FakeBackend, reply

KEYS = "keys:\n" + "".join(
    f"- {{key_sha256: {sha256(name.encode()).hexdigest()}, tenant: {name}, admin: {admin}}}\n"
    for name, admin in (("boss", "true"), ("ann", "false"), ("bob", "false"))
)
TIMEOUT_S = 0.2


def key(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {name}"}


@dataclass
class Process:
    """One of two router processes."""

    front: Front
    backend: FakeBackend
    client: httpx.AsyncClient

    def begin(self, name: str, tenant: str = "ann") -> "asyncio.Task[httpx.Response]":
        """Send a request that its replica never finishes."""
        headers = {**key(tenant), "x-request-id": name}
        return asyncio.create_task(self.client.post("/v1/completions", json={"prompt": "a"}, headers=headers))

    async def until_running(self, number: int) -> None:
        while len(self.backend.streams) < number:  # noqa: ASYNC110 - nothing tells that they have arrived
            await asyncio.sleep(0.001)


@pytest.fixture
def folder() -> Iterator[Path]:
    """A short path: that of a socket has at most 107 bytes."""
    with tempfile.TemporaryDirectory() as parent:
        yield Path(parent) / "routers"


@asynccontextmanager
async def process(folder: Path, seat: int, limits: ModelLimits, text: TextModel) -> AsyncIterator[Process]:
    backend = FakeBackend(limits, reply([10]))
    backend.script = lambda _: [TokenDelta(token_ids=[10], cached_tokens=0), PAUSE]
    front = Front(
        RouterSettings(max_choices=8, default_max_tokens=64),
        backend,
        RouterMetrics(),
        texts=LoadedText(text),
        tenants=tenants_of(parse_yaml(KEYS.encode())),
    )
    front.siblings = Siblings(folder, seat=seat, seats=3, timeout_s=TIMEOUT_S)
    await front.siblings.start(partial(answer_sibling, front))
    async with serving(front) as client:
        yield Process(front, backend, client)
    await front.siblings.close()


@asynccontextmanager
async def served_by(path: Path, sent: bytes | None = None) -> AsyncIterator[None]:
    """A socket that answers every question with `sent`; None: that never answers."""
    open_writers = []

    def serve(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        open_writers.append(writer)
        if sent is not None:
            writer.write(sent)
            writer.close()

    server = await asyncio.start_unix_server(serve, path)
    yield
    server.close()
    for writer in open_writers:
        writer.close()
        await writer.wait_closed()


async def answer_nothing(_question: object) -> list[RequestRecord]:
    return []


@pytest.fixture
async def pair(folder: Path, limits: ModelLimits, text_model: TextModel) -> AsyncIterator[tuple[Process, Process]]:
    """Seats 0 and 1 of three; seat 2 does not run."""
    async with process(folder, 0, limits, text_model) as one, process(folder, 1, limits, text_model) as other:
        yield one, other


async def error_of(waiting: "asyncio.Task[httpx.Response]") -> Any:
    return (await waiting).json()["error"]["code"]


async def test_any_process_lists_finds_and_ends_the_requests_of_all(pair: tuple[Process, Process]):
    """The kernel chooses the process of each connection, so an admin cannot choose it."""
    one, other = pair
    waiting = [other.begin("x")]
    await other.until_running(1)
    waiting.append(one.begin("y"))
    await one.until_running(1)

    for each in pair:
        listed = (await each.client.get("/requests", headers=key("boss"))).json()["requests"]
        assert [record["id"] for record in listed] == ["x", "y"]
    found = (await one.client.get("/requests/x", headers=key("boss"))).json()
    ended = [await a.client.delete(f"/requests/{name}", headers=key("boss")) for a, name in ((one, "x"), (other, "y"))]

    assert (found["id"], found["state"]) == ("x", "running")
    assert [response.status_code for response in ended] == [200, 200]
    assert [await error_of(each) for each in waiting] == ["ended_by_operator"] * 2
    past = (await one.client.post("/requests", json={"state": "failed"}, headers=key("boss"))).json()["requests"]
    assert {record["id"] for record in past} == {"x", "y"}
    again = await one.client.delete("/requests/x", headers=key("boss"))
    assert again.status_code == 404
    assert "its state is 'failed'" in again.text
    assert (await one.client.get("/requests/z", headers=key("boss"))).status_code == 404


@pytest.mark.parametrize("asked", [{"request_ids": ["cmpl-x"]}, {"rid": "x"}, {"abort_all": True}])
async def test_a_caller_aborts_its_own_requests_in_any_process(pair: tuple[Process, Process], asked: dict[str, Any]):
    """Requests of another tenant go on, even under the same id."""
    one, other = pair
    mine, theirs = other.begin("x"), other.begin("x", "bob")
    await other.until_running(2)

    answer = await one.client.post("/abort_requests", json=asked, headers=key("ann"))

    assert (answer.status_code, await error_of(mine)) == (200, "request_aborted")
    assert not theirs.done()
    await one.client.post("/abort_requests", json=asked, headers=key("bob"))
    assert await error_of(theirs) == "request_aborted"


async def test_a_process_that_hangs_is_named_and_not_waited_for(pair: tuple[Process, Process], folder: Path):
    """A stopped process still accepts connections. Whether a request is unknown cannot be said without it."""
    one, _ = pair
    waiting = one.begin("y")
    await one.until_running(1)

    async with served_by(folder / "2"):
        listed = await one.client.get("/requests", headers=key("boss"))
        known = await one.client.get("/requests/y", headers=key("boss"))
        unknown = [await one.client.request(method, "/requests/z", headers=key("boss")) for method in ("GET", "DELETE")]
        aborted = await one.client.post("/abort_requests", json={"abort_all": True}, headers=key("ann"))

    assert listed.headers["x-homing-silent-routers"] == "2"
    assert [record["id"] for record in listed.json()["requests"]] == ["y"]
    assert known.json()["id"] == "y"
    for response in (*unknown, aborted):
        assert (response.status_code, response.json()["error"]["code"]) == (503, "router_silent")
    assert await error_of(waiting) == "request_aborted"


async def test_the_socket_of_a_killed_process_costs_nothing(pair: tuple[Process, Process], folder: Path):
    """Its requests ended with it; the next process in its seat replaces the socket."""
    one, _ = pair
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(folder / "2"))

    listed = await one.client.get("/requests", headers=key("boss"))
    again = Siblings(folder, seat=2, seats=3)
    record = RequestRecord(id="z", at=1.0, method="POST", path="/", state="finished", status=200, times=Times())

    async def answer(_question: object) -> list[RequestRecord]:
        return [record]

    await again.start(answer)

    assert "x-homing-silent-routers" not in listed.headers
    assert (await one.client.get("/requests/z", headers=key("boss"))).json()["state"] == "finished"
    await again.close()


async def test_what_another_process_sends_is_checked(folder: Path):
    """A broken answer is none."""
    asker = Siblings(folder, seat=0, seats=2, timeout_s=TIMEOUT_S)

    async with served_by(folder / "1", b"?"):
        answers = await asker.ask(FindRequest("x"))

    assert answers.silent == [1]


def test_only_the_user_s_own_folder_is_used(folder: Path):
    """Whoever can write there could answer for a router, and whoever can enter could end requests."""
    folder.mkdir(mode=0o755)
    folder.chmod(0o755)

    with pytest.raises(PermissionError, match="only this user"):
        Siblings(folder, seat=0, seats=2)


async def test_the_last_process_removes_the_folder(folder: Path):
    """A cluster leaves nothing behind."""
    both = [Siblings(folder, seat=seat, seats=2) for seat in range(2)]
    for each in both:
        await each.start(answer_nothing)
    modes = [path.stat().st_mode & 0o077 for path in (folder, folder / "0", folder / "1")]
    for each in both:
        await each.close()

    assert modes == [0, 0, 0]
    assert list(folder.parent.iterdir()) == []


def test_lists_of_several_routers_are_merged_in_the_order_of_the_query():
    """Routers that share a history each return all of it."""

    def record(name: str, at: float, ttft_s: float) -> RequestRecord:
        return RequestRecord(
            id=name, at=at, method="POST", path="/", state="finished", status=200, times=Times(), ttft_s=ttft_s
        )

    found = [record("a", 1.0, 5.0), record("b", 2.0, 1.0), record("a", 1.0, 5.0), record("c", 3.0, 3.0)]

    def ids(query: RequestQuery) -> str:
        return "".join(each.id for each in query.merge(found))

    assert ids(RequestQuery()) == "cba"
    assert ids(RequestQuery(most=2)) == "cb"
    assert ids(RequestQuery(state="running")) == "abc"
    assert ids(RequestQuery(slowest=True)) == "acb"
