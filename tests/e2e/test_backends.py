"""`homing serve --backend` and `homing route` as a user runs them: one process, without Ray, routing to engines."""

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest
from tokenizers import Tokenizer

from homing.cluster.registry import is_alive
from homing.replica.demo import demo_model_path

from ..router.replicas.external.fakes import FakeEngine, answer, backend_flags, demo_engine, engines_in_a_thread
from .running import Serving, homing, serving, until

pytestmark = pytest.mark.cluster

PROMPT = "A prompt of several blocks that one of the two engines will hold. " * 8


@pytest.fixture(scope="module")
def engines() -> Iterator[tuple[FakeEngine, FakeEngine, asyncio.AbstractEventLoop]]:
    """Two fake engines that behave like vLLM."""
    pair = demo_engine(), demo_engine()
    with engines_in_a_thread(*pair) as loop:
        yield (*pair, loop)


@pytest.fixture(scope="module")
def cluster(engines, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """`homing serve --backend` in front of both engines."""
    with serving(tmp_path_factory.mktemp("state"), *backend_flags(*engines[:2])) as running:
        yield running


def test_a_prompt_goes_home_and_its_text_is_the_engines(cluster: Serving, engines) -> None:
    """Later requests with the same prefix go to the engine whose events announced it."""
    cluster.serving(2)
    home = cluster.home(PROMPT)
    until(lambda: cluster.replicas()[home]["indexed_blocks"] or None, "its blocks are indexed")

    homes = {cluster.home(f"{PROMPT} {number}") for number in range(4)}
    with cluster.client() as client:
        answered = client.completions.with_raw_response.create(model="demo", prompt=PROMPT, max_tokens=8, seed=5)
    said = answered.parse().choices[0].text
    engine = engines[int(answered.headers["x-homing-replica"][1:])]  # another tenant, so either may answer
    tokenizer = Tokenizer.from_file(str(demo_model_path() / "tokenizer.json"))

    assert homes == {home}
    assert said == tokenizer.decode(answer(engine.bodies[-1]["prompt"], 5, 8))


def test_a_killed_engine_is_survived_in_mid_stream(cluster: Serving, engines) -> None:
    """The client's stream continues from the next token, and the engine can rejoin later."""
    pair, loop = engines[:2], engines[2]
    for engine in pair:
        loop.call_soon_threadsafe(engine.behaves.gate.clear)
    cluster.serving(2)

    with ThreadPoolExecutor(1) as pool:
        body = {"model": "demo", "prompt": "Another prompt", "max_tokens": 6, "seed": 3}
        asked = [len(engine.bodies) for engine in pair]
        answering = pool.submit(cluster.post, "/v1/completions", body)
        place = until(
            lambda: next((n for n, engine in enumerate(pair) if len(engine.bodies) > asked[n]), None), "it is sent"
        )
        asyncio.run_coroutine_threadsafe(pair[place].stop(), loop).result(30)
        for engine in pair:
            loop.call_soon_threadsafe(engine.behaves.gate.set)
        usage = answering.result(60)["usage"]
    asyncio.run_coroutine_threadsafe(pair[place].start(), loop).result(30)

    assert usage["completion_tokens"] == 6
    cluster.serving(2)


def test_status_and_explain_show_foreign_replicas(cluster: Serving) -> None:
    """The commands work the same with external engines as with our replicas."""
    cluster.serving(2)

    page = homing(cluster.state, "status")
    table = json.loads(homing(cluster.state, "explain", "--json", "Hello").stdout)

    assert page.returncode == 0, page.stderr
    assert "b0" in page.stdout
    assert {row["replica_id"] for row in table["replicas"]} == {"b0", "b1"}
    assert "homing_" in httpx.get(f"{cluster.url}/metrics", trust_env=False).text


def test_no_ray_is_started(cluster: Serving) -> None:
    """A worker is enough, which shares its parent's memory: there is nothing to place."""
    parent = psutil.Process(cluster.pid)

    assert [process.cmdline() for process in parent.children(recursive=True)] == [parent.cmdline()]


def test_an_engine_of_another_model_ends_the_command_with_its_reason(engines, tmp_path: Path) -> None:
    """An engine that does not match must stop the command: serving would mean a hit rate of zero."""
    done = homing(tmp_path, "serve", "--port", "0", "--block-size", "32", *backend_flags(engines[0]))

    assert done.returncode == 1
    assert "block_size is 16, the router's is 32; start homing with --block-size 16" in done.stderr


def test_engines_are_found_by_their_urls_and_listed_while_it_runs(engines, tmp_path: Path) -> None:
    """`homing route` needs only URLs; its list of engines follows its file and the admin API."""
    one, other, loop = engines
    listed = tmp_path / "engines.yaml"
    listed.write_text(f"- {one.url}\n")
    loop.call_soon_threadsafe(setattr, one.behaves, "tells_sockets", True)

    with serving(tmp_path, "--engines", str(listed), command="route") as running:
        running.serving(1)
        assert running.post("/engines", {"url": other.url})["trouble"] == ""
        until(lambda: running.replicas().get("b1", {}).get("feed") == "approximate" or None, "it is routed to")
        found = {each["name"]: each for each in running.http.get(f"{running.url}/engines").json()["engines"]}
        chat = running.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3})
        assert chat["choices"][0]["message"]["reasoning_content"] == "hm", "the engine's own reasoning parser applies"
        assert running.http.post(f"{running.url}/engines", json={"url": "ftp://x"}).status_code == 400
        listed.write_text("")
        until(lambda: list(running.replicas()) == ["b1"] or None, "the file's engine has left")
        gone = running.http.request("DELETE", f"{running.url}/engines", json={"url": other.url})

    loop.call_soon_threadsafe(setattr, one.behaves, "tells_sockets", False)
    assert gone.json()["name"] == "b1"
    assert found["b0"]["missing"] == []
    assert f"vllm 0.33.0 · model demo (8192 tokens) · blocks of 16 · events {one.endpoints.events}" in "".join(
        running.output
    )
    assert "--kv-events-config" in found["b1"]["missing"][0]


def test_it_ends_on_a_signal(engines, tmp_path: Path) -> None:
    """SIGTERM exits with code 0 and leaves no state file behind."""
    with serving(tmp_path, *backend_flags(engines[0])) as running:
        assert running.end() == 0

    assert not list(tmp_path.glob("*.json"))


def serve_both(running: Serving) -> bool | None:
    return [each["state"] for each in running.replicas().values()] == ["serving", "serving"] or None


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
def test_a_lost_worker_is_replaced_and_knows_the_added_engines(engines, tmp_path: Path, number: signal.Signals) -> None:
    """The parent keeps the port and the list of engines. A client that connects meanwhile waits instead of failing."""
    one, other, _ = engines
    body = {"model": "demo", "prompt": PROMPT, "max_tokens": 4, "seed": 5}

    with serving(tmp_path, "--engine-url", one.url, command="route") as running:
        running.post("/engines", {"url": other.url})
        until(lambda: serve_both(running), "both serve")
        before = running.post("/v1/completions", body)["choices"]
        worker = psutil.Process(running.pid).children()[0]
        os.kill(worker.pid, number)
        until(lambda: not is_alive(worker) or None, "it is gone")
        with httpx.Client(trust_env=False, timeout=60) as client:
            after = client.post(f"{running.url}/v1/completions", json=body).raise_for_status().json()["choices"]
            metrics = client.get(f"{running.url}/metrics").text
        until(lambda: serve_both(running), "both serve again")
        code = running.end()

    assert after == before
    assert "homing_router_restarts_total 1.0" in metrics
    assert code == 0
    assert not list(tmp_path.glob("*.json"))
