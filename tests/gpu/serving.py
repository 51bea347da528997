"""Replicas of the demo model behind the router, started as a user would and queried over HTTP."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import NamedTuple

START_S = 75
#: Longer, because a machine without a GPU may have other work.
CPU_START_S = 300
#: About a thousand tokens: the prefill that the cache saves must outweigh the difference between the speeds that two
#: replicas measured on a busy machine.
PROMPT = "A prompt that is long enough to fill some blocks, so that it can be found again. " * 50


class Found(NamedTuple):
    name: str
    value: float
    unit: str
    met: bool | None


class Answer(NamedTuple):
    replica: str
    cached_tokens: int
    text: str


def two_replicas(cuda: bool) -> list[Found]:
    """Both replicas answer, and a repeated prompt goes to the one that has it cached."""
    started = time.monotonic()
    with _served(cuda, 2, *(["--gpus-per-rank", "0.5"] if cuda else [])) as port:
        return [Found("ready after", time.monotonic() - started, "s", None), *_ask(port)]


def two_ranks(cuda: bool) -> list[Found]:
    """Two ranks give the same answers as one, in float32, where rounding changes no token."""
    texts = []
    for ranks in (1, 2):
        with _served(cuda, 1, "--tensor-parallel-size", str(ranks), "--dtype", "float32") as port:
            texts.append([_complete(port, f"{PROMPT} {number}", 32).text for number in range(4)])
    same = sum(one == other for one, other in zip(*texts, strict=True))
    return [Found("two ranks answer as one", same, f"of {len(texts[0])} answers", same == len(texts[0]))]


@contextmanager
def _served(cuda: bool, replicas: int, *flags: str) -> Iterator[int]:
    """Serve the demo model; yields the port. Raises TimeoutError with the end of the log if it does not start."""
    port = _free_port()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "homing.cluster.cli.main", "serve", "--port", str(port), "--state-dir", folder]
        command += ["--replicas", str(replicas), "--device", "cuda" if cuda else "cpu", "--num-kv-blocks", "2000"]
        with (
            tempfile.TemporaryFile("w+") as log,
            # In the stage's process group, so that it is stopped with a stage that runs out of time.
            subprocess.Popen([*command, *flags], stdout=log, stderr=log, env=os.environ) as process,
        ):
            try:
                _wait_for_replicas(port, replicas, process, START_S if cuda else CPU_START_S)
                yield port
            except TimeoutError as error:
                log.seek(0)
                raise TimeoutError(f"{error}\n{log.read()[-3000:]}") from error
            finally:
                process.send_signal(signal.SIGINT)
                _end(process)


def _ask(port: int) -> list[Found]:
    first = _complete(port, PROMPT)
    again = _complete(port, PROMPT)
    # At once: one by one, an idle replica that measured the higher speed could answer all of them.
    with ThreadPoolExecutor(12) as pool:
        answers = pool.map(lambda number: _complete(port, f"{number} {number} {number} " * 30), range(12))
        seen = {answer.replica for answer in answers}
    home = again.replica == first.replica and again.cached_tokens > 0
    return [
        Found("a repeated prompt goes home", again.cached_tokens, "cached tokens", home),
        Found("replicas that answer", len(seen), "replicas", len(seen) == 2),
    ]


def _complete(port: int, prompt: str, max_tokens: int = 8) -> Answer:
    body = json.dumps({"model": "demo", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", body, {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        cached = int(answer.headers.get("x-homing-cached-tokens") or 0)
        return Answer(answer.headers["x-homing-replica"], cached, json.load(answer)["choices"][0]["text"])


def _wait_for_replicas(port: int, replicas: int, process: "subprocess.Popen[bytes]", start_s: float) -> None:
    """Wait until this many replicas serve: /ready returns 200 from the first on, which then answers everything."""
    deadline = time.monotonic() + start_s
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=2) as answer:
                if json.load(answer)["replicas"] == replicas:
                    return
        except (urllib.error.URLError, OSError):
            pass  # not listening yet, or 503
        time.sleep(0.5)
    raise TimeoutError(f"no {replicas} replicas after {start_s} s (exit status: {process.poll()})")


def _end(process: "subprocess.Popen[bytes]") -> None:
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
