"""Requests can be looked up afterwards: what became of them, and why they went where they did."""

import asyncio
import json
import sqlite3
from contextlib import closing
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import pytest

from homing.router.activity import Refusal, RequestRecord, Times
from homing.router.backend import TokenDelta
from homing.router.config import RouterSettings
from homing.router.errors import NoReplica, RequestFailed
from homing.router.http import history as history_module
from homing.router.http.app import OWN_AGENT
from homing.router.http.body_reader import BodyReader
from homing.router.http.endpoints.endpoint import Endpoint
from homing.router.http.endpoints.requests import ENDED_AT_ONCE
from homing.router.http.endpoints.table import ENDPOINTS, find
from homing.router.http.front import Front, Served
from homing.router.http.history import RECORDS_PER_SWEEP, RequestHistory, RequestQuery
from homing.router.http.protocol.exchange import GenerationSummary
from homing.router.http.request_records import RECORDS_PER_STEP, running
from homing.router.http.turns import Turns
from homing.router.strict_yaml import parse_yaml
from homing.router.tenants.api_keys import tenants_of

from .fakes import PAUSE, FakeBackend

KEYS = f"""
keys:
- {{key_sha256: {sha256(b"boss").hexdigest()}, tenant: ops, admin: true}}
- {{key_sha256: {sha256(b"small").hexdigest()}, tenant: team-a}}
tenants: {{team-a: {{requests_per_minute: 1}}}}
"""
BOSS, SMALL = {"authorization": "Bearer boss"}, {"authorization": "Bearer small"}


def record(
    name: str, at: float = 1.0, *, limit: str | None = None, ttft_s: float = 0.1, message: str = ""
) -> RequestRecord:
    error = None if limit is None else Refusal("rate_limit_exceeded", message, limit)
    state = "finished" if limit is None else "refused"
    return RequestRecord(
        id=name, at=at, method="POST", path="/", state=state, status=200, error=error, times=Times(), ttft_s=ttft_s
    )


async def get(client: httpx.AsyncClient, name: str, headers: dict[str, str] | None = None) -> Any:
    return (await client.get(f"/requests/{name}", headers=headers)).json()


async def test_a_request_is_found_by_its_id_with_its_decision(client: httpx.AsyncClient, backend: FakeBackend):
    """It names who sent it, where its time went, and the table of candidates as of the decision."""
    sent = {"x-request-id": "mine", "x-session-id": "s1"}
    await client.post("/v1/completions", json={"prompt": "Once", "n": 2}, headers=sent)

    found = msgspec.convert(await get(client, "mine"), RequestRecord)

    assert (found.state, found.status, found.model, found.session, found.path) == (
        *("finished", 200, "demo", "s1"),
        "/v1/completions",
    )
    assert found.prompt_tokens > 0 < found.output_tokens
    assert found.ttft_s is not None
    assert [choice.replica for choice in found.choices] == ["r0", "r1"]
    assert found.choices[0].decisions[0].why == "it is a fake"


async def test_a_running_request_is_found_too(client: httpx.AsyncClient, backend: FakeBackend, front: Front):
    """A stuck request is asked about before it ends."""
    backend.script = lambda _: [PAUSE]
    waiting = asyncio.create_task(client.post("/v1/completions", json={"prompt": "a"}, headers={"x-request-id": "x"}))
    while not front.open_exchanges:  # noqa: ASYNC110 - nothing tells that it has arrived
        await asyncio.sleep(0.001)

    found = await get(client, "x")
    listed = (await client.get("/requests")).json()["requests"]
    waiting.cancel()

    assert (found["state"], found["status"]) == ("running", None)
    assert found["choices"][0]["silent_s"] >= 0
    assert [each["id"] for each in listed] == ["x"]


async def test_what_only_asks_is_no_request_in_progress(client: httpx.AsyncClient):
    """`homing requests` asks with a POST, which would be in its own answer."""
    assert (await client.post("/requests", json={"state": "running"})).json()["requests"] == []


async def test_a_restart_after_the_client_left_is_not_in_progress(
    client: httpx.AsyncClient, backend: FakeBackend, front: Front
):
    """Nothing would take it off the list again."""
    backend.script = lambda _: [PAUSE]
    waiting = asyncio.create_task(client.post("/v1/completions", json={"prompt": "a"}))
    while not (front.open_exchanges and backend.streams):  # noqa: ASYNC110 - nothing tells that it has arrived
        await asyncio.sleep(0.001)
    [exchange] = front.open_exchanges
    waiting.cancel()
    while not exchange.over:  # noqa: ASYNC110 - nothing tells that it has left
        await asyncio.sleep(0.001)

    again = asyncio.create_task(find(exchange.request).handler.run(front, exchange))
    await asyncio.sleep(0.01)
    again.cancel()

    assert not front.open_exchanges


async def test_no_client_can_hide_from_the_history(client: httpx.AsyncClient):
    """The access log leaves out homing's own commands, by a header that anybody may send."""
    sent = {"x-request-id": "hidden", "user-agent": OWN_AGENT}
    await client.post("/v1/completions", json={"prompt": "a"}, headers=sent)

    assert (await get(client, "hidden"))["state"] == "finished"


@pytest.mark.parametrize("stream", [False, True])
async def test_an_admin_ends_a_request(client: httpx.AsyncClient, backend: FakeBackend, front: Front, stream: bool):
    """Its replica is told, its client gets an error, and the record says so."""
    backend.script = lambda _: [TokenDelta(token_ids=[10], cached_tokens=0), PAUSE] if stream else [PAUSE]
    body = {"prompt": "a", "stream": stream}
    waiting = asyncio.create_task(client.post("/v1/completions", json=body, headers={"x-request-id": "x"}))
    while not (front.open_exchanges and backend.streams):  # noqa: ASYNC110 - nothing tells that it has arrived
        await asyncio.sleep(0.001)

    ended = await client.delete("/requests/x")
    response = await waiting

    assert ended.json()["state"] == "running"
    assert "ended_by_operator" in response.text
    assert backend.streams[0].cancelled.is_set()
    assert (await get(client, "x"))["error"]["code"] == "ended_by_operator"
    again = await client.delete("/requests/x")
    assert (again.status_code, again.json()["error"]["code"]) == (404, "request_not_found")
    assert "is not in progress: its state is 'failed'" in again.text
    assert "there is no request" in (await client.delete("/requests/y")).text


async def test_an_admin_ends_a_request_that_is_still_prepared(client: httpx.AsyncClient, front: Front):
    """One whose tokenizer hangs has no stream yet."""
    text, loading = front.texts, asyncio.Event()

    async def slow(_source: object) -> object:
        await loading.wait()
        return await text.get(_source)

    front.texts = SimpleNamespace(get=slow)
    waiting = asyncio.create_task(client.post("/v1/completions", json={"prompt": "a"}, headers={"x-request-id": "x"}))
    while not front.open_exchanges:  # noqa: ASYNC110 - nothing tells that it has arrived
        await asyncio.sleep(0.001)

    assert (await client.delete("/requests/x")).status_code == 200
    assert (await waiting).status_code == 410
    loading.set()
    await asyncio.sleep(0.01)
    front.texts = text


@pytest.mark.parametrize(
    "asked",
    [{"request_ids": ["x"]}, {"request_ids": ["no", "cmpl-x"]}, {"rid": "y"}, {"abort_all": True}],
)
async def test_a_caller_aborts_its_own_requests(client: httpx.AsyncClient, backend: FakeBackend, front: Front, asked):
    """By the id of the header, or by those in the body; the requests of others go on."""
    backend.script = lambda _: [PAUSE]
    path, body = "/v1/completions", {"prompt": "a", "rid": "y"}
    sent = [{"x-request-id": "x", "authorization": f"Bearer {key}"} for key in ("mine", "other")]
    waiting = [asyncio.create_task(client.post(path, json=body, headers=headers)) for headers in sent]
    while len(backend.streams) < 2:  # noqa: ASYNC110 - nothing tells that they have arrived
        await asyncio.sleep(0.001)

    answer = await client.post("/abort_requests", json=asked, headers={"authorization": "Bearer mine"})

    assert answer.status_code == 200
    assert (await waiting[0]).json()["error"]["code"] == "request_aborted"
    assert not waiting[1].done()
    await client.post("/abort_request", json={"abort_all": True}, headers={"authorization": "Bearer other"})
    assert (await waiting[1]).status_code == 410


async def test_many_requests_are_listed_and_aborted_in_turns(client: httpx.AsyncClient, backend, front: Front):
    """Thousands at once would hold up the event loop for a second, even if a query fits none of them."""
    backend.script = lambda _: [PAUSE]
    waiting = [asyncio.create_task(client.post("/v1/completions", json={"prompt": "a"})) for _ in range(20)]
    while len(backend.streams) < 20:  # noqa: ASYNC110 - nothing tells that they have arrived
        await asyncio.sleep(0.001)
    ended: list[int] = []

    class Noted(Turns):
        async def next(self, tenant: bytes) -> None:
            ended.append(sum(stream.cancelled.is_set() for stream in backend.streams))
            await super().next(tenant)

    front.body_reader = BodyReader(Noted())

    listing = running(front, RequestQuery(model="another"))
    steps = sum(1 for _ in listing)
    assert (await client.post("/abort_requests", json={"abort_all": True})).status_code == 200

    assert steps == 19 // RECORDS_PER_STEP
    assert ended == list(range(ENDED_AT_ONCE, 20, ENDED_AT_ONCE))
    assert {each.status_code for each in await asyncio.gather(*waiting)} == {410}


async def test_a_request_is_aborted_before_it_is_tokenized(
    client: httpx.AsyncClient, backend: FakeBackend, front: Front, monkeypatch: pytest.MonkeyPatch
):
    """Tokenizing waits for its tenant's turn: then, too, the body's names count."""
    real, entered, gate = front.served, asyncio.Event(), asyncio.Event()

    async def slow(model: str | None) -> Served:
        entered.set()
        await gate.wait()
        return await real(model)

    monkeypatch.setattr(front, "served", slow)
    waiting = asyncio.create_task(client.post("/v1/completions", json={"prompt": "a", "rid": "y"}))
    await entered.wait()

    await client.post("/abort_request", json={"rid": "y"})
    gate.set()

    assert (await waiting).json()["error"]["code"] == "request_aborted"
    assert not backend.requests


@pytest.mark.parametrize("name", ["rid", "request_id"])
async def test_a_request_s_name_is_fit_for_a_header(client: httpx.AsyncClient, name: str):
    """It is sent back as one."""
    answer = await client.post("/v1/completions", json={"prompt": "a", name: "y\n"})

    assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)


async def test_a_response_s_id_aborts_its_request(client: httpx.AsyncClient, backend: FakeBackend):
    """Clients of a stream know its id from its first chunk."""
    backend.script = lambda _: [TokenDelta(token_ids=[10], cached_tokens=0), PAUSE]
    async with client.stream("POST", "/v1/completions", json={"prompt": "a", "stream": True}) as stream:
        lines = stream.aiter_lines()
        first = json.loads((await anext(lines)).removeprefix("data: "))

        await client.post("/abort_requests", json={"request_ids": [first["id"]]})

        assert "request_aborted" in "".join([line async for line in lines])


async def test_blocks_are_shown_by_tenant(client: httpx.AsyncClient, backend: FakeBackend):
    """Which tenant fills the cache is a question of the first out-of-memory evening."""
    backend.owned = {"r0": {bytes([number]) * 16: number for number in range(1, 20)}}

    [shown] = (await client.get("/cluster")).json()["replicas"]

    assert next(iter(shown["tenant_blocks"].items())) == ("13131313", 19)
    assert shown["tenant_blocks"]["others"] == 1 + 2 + 3


@pytest.mark.parametrize("refusal", [NoReplica("none", retry_after_s=1.0), RequestFailed("broken")])
async def test_what_was_refused_is_told_from_what_failed(client: httpx.AsyncClient, backend: FakeBackend, refusal):
    """Nothing was sent to a replica, or something went wrong there."""
    if isinstance(refusal, NoReplica):
        backend.refusal = refusal
    else:
        backend.script = lambda _: [refusal]
    await client.post("/v1/completions", json={"prompt": "a", "model": "demo"}, headers={"x-request-id": "x"})

    found = await get(client, "x")

    assert found["state"] == ("refused" if isinstance(refusal, NoReplica) else "failed")
    assert found["error"]["code"] == refusal.code
    assert found["model"] == "demo"


class TestTenants:
    @pytest.fixture
    def settings(self, tmp_path: Path) -> RouterSettings:
        (tmp_path / "keys.yaml").write_text(KEYS)
        return RouterSettings(default_max_tokens=64, api_keys_file=str(tmp_path / "keys.yaml"))

    async def test_a_refusal_names_tenant_model_and_limit(self, client: httpx.AsyncClient, front: Front):
        """Even if the tenant is refused before its body is read, or its key is unknown."""
        body = {"prompt": "a", "model": "demo", "max_tokens": 1}
        for name in ("first", "second"):
            await client.post("/v1/completions", json=body, headers=SMALL | {"x-request-id": name})
        unknown = {"authorization": "Bearer nobody", "x-request-id": "third"}
        await client.post("/v1/completions", json=body, headers=unknown)

        limited, stranger = [await get(client, name, BOSS) for name in ("second", "third")]

        assert (limited["tenant"], limited["model"]) == ("team-a", "demo")
        assert limited["error"]["limit"] == "requests_per_minute"
        assert stranger["tenant"] == f"unknown:{sha256(b'nobody').hexdigest()[:8]}"
        assert stranger["error"]["code"] == "invalid_api_key"
        asked = {"state": "refused", "limit": "requests_per_minute"}
        listed = (await client.post("/requests", json=asked, headers=BOSS)).json()["requests"]
        assert [each["id"] for each in listed] == ["second"]
        counted = {("team-a", "requests_per_minute"): 1, ("unknown", "invalid_api_key"): 1}
        assert front.metrics.refusals == counted

    @pytest.mark.parametrize("row", [row for row in ENDPOINTS if row.handler.access == "admin"])
    async def test_who_may_not_look_is_no_refusal_of_a_tenant(
        self, client: httpx.AsyncClient, front: Front, row: Endpoint
    ):
        """The live page asks without a key until it is given one; commands may have one that is not an admin's."""
        for headers in ({}, SMALL):
            path = row.path.replace("{id}", "x")
            response = await client.request(row.method, path, headers=headers, json=None if row.method == "GET" else {})
            assert response.status_code in (401, 403)

        listed = (await client.post("/requests", json={"state": "refused"}, headers=BOSS)).json()["requests"]
        assert listed == []
        assert not front.metrics.refusals

    @pytest.mark.parametrize("method", ["GET", "POST"])
    async def test_only_admins_look_back(self, client: httpx.AsyncClient, method: str):
        """The records show all tenants' ids and names."""
        paths = ["/requests", "/requests/x"] if method == "GET" else ["/requests"]
        for path in paths:
            response = await client.request(method, path, headers=SMALL, json={} if method == "POST" else None)
            assert response.status_code == 403

    async def test_named_tenants_have_metrics_of_their_blocks(self, client: httpx.AsyncClient, backend: FakeBackend):
        """Unnamed callers must not add labels."""
        digest = next(each.digest for each in tenants_of(parse_yaml(KEYS.encode())).named() if each.name == "team-a")
        backend.owned = {"r0": {digest: 5, b"x" * 16: 2, b"y" * 16: 1}}

        text = (await client.get("/metrics")).text

        assert 'homing_tenant_blocks{model="demo",replica="r0",tenant="team-a"} 5.0' in text
        assert 'homing_tenant_blocks{model="demo",replica="r0",tenant="others"} 3.0' in text

    async def test_an_unknown_id_is_not_found(self, client: httpx.AsyncClient):
        """It may have been pushed out, or have gone to another router."""
        response = await client.get("/requests/a/b", headers=BOSS)

        assert (response.status_code, response.json()["error"]["code"]) == (404, "request_not_found")


async def test_with_a_file_a_restart_forgets_nothing(tmp_path: Path):
    """The question why comes after the restart that someone tried first."""
    path = str(tmp_path / "requests.db")
    before = RequestHistory(path, 1_000_000)
    before.put(record("a"))
    before.close()

    after = RequestHistory(path, 1_000_000)

    assert (await after.find("a")) == record("a")
    after.close()
    assert (tmp_path / "requests.db").stat().st_mode & 0o077 == 0


async def test_the_newest_of_equal_ids_is_found():
    """Clients choose ids, and may repeat them."""
    history = RequestHistory("", 1_000_000)
    history.put(record("a", at=1.0))
    history.put(record("a", at=2.0))

    found = await history.find("a")

    assert found is not None
    assert found.at == 2.0
    history.close()


async def test_the_history_is_bounded_and_refusals_push_out_no_others(tmp_path: Path):
    """A client that is refused a thousand times a second must not hide why others were slow."""
    path, most = str(tmp_path / "requests.db"), 200_000
    history = RequestHistory(path, most)
    history.put(record("kept"))
    for number in range(4 * RECORDS_PER_SWEEP):
        noise = sha256(str(number).encode()).hexdigest()
        history.put(record(f"r{number}", float(number), limit="max_running", message=noise))

    assert (await history.find("kept")) is not None
    assert (await history.find("r0")) is None
    assert (await history.find(f"r{4 * RECORDS_PER_SWEEP - 1}")) is not None
    history.close()
    with closing(sqlite3.connect(path)) as file:
        assert file.execute("SELECT sum(bytes) FROM requests").fetchone()[0] <= most


async def test_requests_are_found_by_what_they_have_in_common():
    """Who was refused, by which limit, and which were slowest."""
    history = RequestHistory("", 1_000_000)
    history.put(record("fast", ttft_s=0.1))
    history.put(record("slow", ttft_s=9.0))
    history.put(record("refused", limit="max_running"))

    async def ids(**query: Any) -> list[str]:
        return [each.id for each in await history.search(RequestQuery(**query))]

    assert await ids() == ["refused", "slow", "fast"]
    assert await ids(limit="max_running") == ["refused"]
    assert await ids(slowest=True, state="finished", most=1) == ["slow"]
    assert await ids(tenant="nobody") == []
    history.close()


async def test_a_file_that_cannot_be_written_costs_no_request(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """The log says once that the history is lost."""
    history = RequestHistory(str(tmp_path), 1_000_000)
    history.put(record("a"))
    history._flush()
    history.put(record("b"))
    history.close()

    assert [each.message.split()[0] for each in caplog.records].count("request_history_lost") == 1


@pytest.mark.parametrize(
    ("fields", "spent"),
    [
        ({}, {}),
        ({"queue_s": 1.0}, {"queue_s": 1.0, "prefill_s": 9.0}),
        ({"queue_s": 1.0, "ttft_s": 3.0}, {"queue_s": 1.0, "prefill_s": 2.0, "decode_s": 7.0}),
        (
            {"queue_s": 1.0, "ttft_s": 3.0, "waited_s": 0.5},
            {"queue_s": 1.0, "wait_s": 0.5, "prefill_s": 1.5, "decode_s": 7.0},
        ),
        # A replica's clock and a second choice may tell more than there is.
        (
            {"queue_s": 5.0, "ttft_s": 3.0, "waited_s": 9.0},
            {"queue_s": 3.0, "wait_s": 0.0, "prefill_s": 0.0, "decode_s": 7.0},
        ),
    ],
)
def test_the_phases_are_disjoint_and_add_up(fields: dict[str, float], spent: dict[str, float]):
    """Otherwise the slowest phase of a slow answer could not be named."""
    summary = GenerationSummary("", "r0", 1, 0, 0, 1, **{"ttft_s": None} | fields)

    assert summary.phases(10.0) == spent
    assert not spent or sum(spent.values()) == 10.0


async def test_the_phases_of_answers_are_metrics(client: httpx.AsyncClient, backend: FakeBackend):
    """Whether a high percentile comes from the queue, the replica or the network must be visible without the log."""
    await client.post("/v1/completions", json={"prompt": "a"})

    text = (await client.get("/metrics")).text

    for phase in ("receive", "queue", "prefill", "decode", "blocked"):
        assert f'homing_request_phase_seconds_count{{model="demo",phase="{phase}"}} 1.0' in text


async def test_a_failed_write_loses_its_own_records_only(monkeypatch):
    """A full disk or a locked file ends sooner or later."""
    history, row = RequestHistory("", 1_000_000), history_module._row

    def fail(record: RequestRecord):
        raise sqlite3.OperationalError("disk full")

    monkeypatch.setattr(history_module, "_row", fail)
    history.put(record("lost"))
    assert await history.find("lost") is None
    monkeypatch.setattr(history_module, "_row", row)
    history.put(record("kept"))

    assert await history.find("kept") is not None
    history.close()
