"""Tenants over HTTP with a real replica's cache: what is pinned, shared, and emptied by a reset. Without Ray."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

import homing
from homing.kvcache.config import KvCacheSettings
from homing.router.config import RouterSettings
from homing.router.metrics import RouterMetrics
from homing.router.replicas.service import RouterService
from homing.router.server import RouterServer
from homing.router.text.tokenizer import TextModel

from ..replica.clients import PATIENCE_S, SEED, served
from ..router.http.conftest import LoadedText

DEMO = Path(homing.__file__).parent / "replica" / "demo" / "model"
BLOCK_TOKENS = 16
#: Small enough to be filled by a few prompts; one tenant may pin half of it.
CACHE = {"block_size": BLOCK_TOKENS, "num_kv_blocks": 21, "pin_tenant_share": 0.5, "hash_algorithm": "sha256"}
KEYS = [("ann", "lab"), ("bob", "lab"), ("eve", None), ("root", None)]


@pytest.fixture(scope="module")
def text_model() -> Iterator[TextModel]:
    """The demo model's tokenizer and template, loaded once."""
    model = TextModel.load(DEMO, cache_bytes=100_000)
    yield model
    model.close()


@asynccontextmanager
async def stack(
    folder: Path, text_model: TextModel, cache: dict[str, Any], max_model_len: int
) -> AsyncIterator[httpx.AsyncClient]:
    """A router with four tenants and one replica of the demo model; block hashes are sha256."""
    keys = folder / "keys.yaml"
    keys.write_text(yaml.safe_dump({"keys": [key_entry(name, group) for name, group in KEYS]}))
    settings = RouterSettings(api_keys_file=str(keys))
    sockets = folder / "s"
    sockets.mkdir()
    with served(DEMO, sockets, kvcache=cache, settings={"max_model_len": max_model_len}) as replica:
        metrics, kvcache = RouterMetrics(), KvCacheSettings(**cache)
        service = RouterService(settings, kvcache, router_id="router", model_dir=DEMO, observer=metrics.of("demo"))
        server = RouterServer(settings, service, metrics=metrics, texts=LoadedText(text_model))
        port = await server.start("127.0.0.1", 0)
        service.apply_membership([replica.description], SEED)
        await until(service, feed="live", state="serving")
        async with httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=PATIENCE_S
        ) as client:
            yield client
        await server.stop()
        service.close()


@pytest.fixture
async def http(tmp_path: Path, text_model: TextModel) -> AsyncIterator[httpx.AsyncClient]:
    """The stack with a pool that a few prompts fill."""
    async with stack(tmp_path, text_model, CACHE, 256) as client:
        yield client


def key_entry(name: str, group: str | None) -> dict[str, Any]:
    digest = sha256(name.encode()).hexdigest()
    return {"key_sha256": digest, "tenant": name, "admin": name == "root"} | ({"group": group} if group else {})


async def until(service: RouterService, **fields: object) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not all(getattr(service.view().replicas[0], name) == value for name, value in fields.items()):  # noqa: ASYNC110 - polled over HTTP, too
            await asyncio.sleep(0.02)


async def ask(http: httpx.AsyncClient, key: str, prompt: str, **fields: Any) -> httpx.Response:
    body = {"prompt": prompt, "max_tokens": 2, "temperature": 0} | fields
    answer = await http.post("/v1/completions", json=body, headers={"authorization": f"Bearer {key}"})
    return answer.raise_for_status()


def cached(answer: httpx.Response) -> int:
    return int(answer.headers["x-homing-cached-tokens"])


def long(name: str) -> str:
    """A prompt of about 110 tokens: 6 of the 20 usable blocks."""
    return f"{name} " + "went into the forest and met a friend. " * 11


async def test_a_pinned_prompt_survives_a_scan_that_takes_its_unpinned_twin(http: httpx.AsyncClient):
    """End to end: `cache_control` keeps a prompt on a replica whose pool is then filled by one-off prompts."""
    keep = {"type": "ephemeral", "ttl": "5m"}
    pinned = await ask(http, "ann", long("A fox"), cache_control=keep)
    twin = await ask(http, "ann", long("An owl"))
    for number in range(3):
        await ask(http, "eve", long(f"Bear {number}"))
    again = [await ask(http, "ann", long(name)) for name in ("A fox", "An owl")]

    assert int(pinned.headers["x-homing-pinned-tokens"]) > 60
    assert "x-homing-pinned-tokens" not in twin.headers
    assert [cached(answer) > 60 for answer in again] == [True, False]
    assert [text(answer) for answer in again] == [text(pinned), text(twin)]


def text(answer: httpx.Response) -> str:
    return str(answer.json()["choices"][0]["text"])


async def test_more_than_the_budget_is_refused_reported_and_counted(http: httpx.AsyncClient):
    """The request runs, and its header says that nothing is pinned: ann exceeds her own budget, eve the total one."""
    keep = {"type": "ephemeral"}
    told = [
        (await ask(http, key, long(name), cache_control=keep)).headers["x-homing-pinned-tokens"]
        for key, name in (("ann", "A fox"), ("ann", "An owl"), ("eve", "An owl"))
    ]
    async with asyncio.timeout(PATIENCE_S):  # totals come with the next load report
        while 'homing_pins_refused_total{model="demo",replica="r0"} 2.0' not in (await http.get("/metrics")).text:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    blocks = (await http.get("/cluster")).json()["replicas"][0]["pinned_blocks"]

    assert [int(tokens) > 0 for tokens in told] == [True, False, False]
    assert blocks == int(told[0]) // 16


async def test_a_group_shares_its_cached_blocks_and_nobody_else_does(http: httpx.AsyncClient):
    """The groups come from the file of API keys; this covers the whole stack down to the cache."""
    await ask(http, "ann", long("A fox"))
    hits = {key: cached(await ask(http, key, long("A fox"))) for key in ("bob", "eve")}

    assert hits["bob"] > 60
    assert hits["eve"] == 0


async def held(http: httpx.AsyncClient, key: str, prompt: str) -> int:
    """Blocks of the prompt that /explain reports as held or expected."""
    answer = await http.post("/explain", json={"prompt": prompt}, headers={"authorization": f"Bearer {key}"})
    (row,) = answer.raise_for_status().json()["replicas"]
    return int(row["held_blocks"] + row["expected_blocks"])


async def test_no_other_page_tells_what_a_tenant_asked(http: httpx.AsyncClient):
    """`/explain` answers only about the caller's own blocks, and public pages contain no text, tokens or hashes."""
    secret = long("A fox")
    await ask(http, "ann", secret)
    async with asyncio.timeout(PATIENCE_S):
        while not await held(http, "ann", secret):  # noqa: ASYNC110 - the index learns it from events
            await asyncio.sleep(0.02)
    answers = {key: await held(http, key, secret) for key in ("bob", "eve")}
    pages = [(await http.get(path)).text for path in ("/cluster", "/metrics", "/health", "/ready", "/v1/models")]
    tokens = (await http.post("/tokenize", json={"prompt": secret}, headers={"authorization": "Bearer ann"})).json()

    assert answers["bob"] >= 6
    assert answers["eve"] == 0
    assert [page for page in pages if "forest" in page or str(tokens["tokens"][:8])[1:-1] in page] == []


async def test_a_reset_empties_the_cache_pins_included(http: httpx.AsyncClient):
    """An admin can empty the cache with one request, as a benchmark does before its run."""
    await ask(http, "ann", long("A fox"), cache_control={"type": "ephemeral"})
    done = await http.post("/reset_prefix_cache", headers={"authorization": "Bearer root"})
    again = await ask(http, "ann", long("A fox"))

    assert (done.status_code, done.json()["replicas"]) == (200, ["r0"])
    assert cached(again) == 0


#: Requests of each kind whose times are compared.
ROUNDS = 8


async def test_a_tenant_cannot_tell_by_time_or_work_what_another_one_has_cached(
    tmp_path: Path, text_model: TextModel
) -> None:
    """Guessing another tenant's prompt must take as long as any new prompt. Times are compared by rank and taken in
    turns, so that machine load affects all alike. That a tenant's own hits are detected shows that the test works."""
    cache = CACHE | {"num_kv_blocks": 2048}
    times: dict[str, list[float]] = {"guessed": [], "new": [], "own": []}
    async with stack(tmp_path, text_model, cache, 2048) as http:
        for number in range(ROUNDS):
            secret, other = (f"The secret of number {place + number}. " * 80 for place in (100, 200))  # same length
            await timed(http, "ann", secret)
            guesses = [("guessed", "eve", secret), ("new", "eve", other)]
            for kind, key, prompt in [*(guesses if number % 2 else reversed(guesses)), ("own", "ann", secret)]:
                seconds, tokens = await timed(http, key, prompt)
                times[kind].append(seconds)
                # A caller's own prompts share a beginning, so less than a block may be copied between them.
                assert (tokens >= BLOCK_TOKENS) == (kind == "own"), f"{kind}: {tokens} tokens were cached"

    assert 0.05 < share_faster(times["guessed"], times["new"]) < 0.95, times
    assert share_faster(times["own"], times["new"]) > 0.6, times


async def timed(http: httpx.AsyncClient, key: str, prompt: str) -> tuple[float, int]:
    """Seconds that one token took, and the number of cached prompt tokens."""
    began = time.perf_counter()
    answer = await ask(http, key, prompt, max_tokens=1)
    return time.perf_counter() - began, cached(answer)


def share_faster(some: Sequence[float], others: Sequence[float]) -> float:
    """The share of all pairs in which the first is faster: a half when the two are indistinguishable."""
    return sum(one < other for one in some for other in others) / (len(some) * len(others))
