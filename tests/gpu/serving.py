"""Two replicas of the demo model behind the router, started as a user would, asked over HTTP."""

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
from typing import NamedTuple

START_S = 75
#: Of about a thousand tokens: what the cache spares must weigh more than how differently two replicas measured
#: themselves on a busy machine.
PROMPT = "A prompt that is long enough to fill some blocks, so that it can be found again. " * 50


class Found(NamedTuple):
    name: str
    value: float
    unit: str
    met: bool | None


class Answer(NamedTuple):
    replica: str
    cached_tokens: int


def two_replicas(cuda: bool) -> list[Found]:
    """Serve, ask, stop. Raises TimeoutError, which holds the end of the log, when it does not come up."""
    port = _free_port()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "homing.cluster.cli.main", "serve", "--port", str(port), "--state-dir", folder]
        command += ["--replicas", "2", "--num-kv-blocks", "2000"]
        command += ["--device", "cuda", "--gpus-per-rank", "0.5"] if cuda else ["--device", "cpu"]
        with (
            tempfile.TemporaryFile("w+") as log,
            # In the group of the stage, so that it ends with a stage that is out of time.
            subprocess.Popen(command, stdout=log, stderr=log, env=os.environ) as process,
        ):
            try:
                started = time.monotonic()
                _wait_until_ready(port, process)
                ready_s = time.monotonic() - started
                return [Found("ready after", ready_s, "s", None), *_ask(port)]
            except TimeoutError as error:
                log.seek(0)
                raise TimeoutError(f"{error}\n{log.read()[-3000:]}") from error
            finally:
                process.send_signal(signal.SIGINT)
                _end(process)


def _ask(port: int) -> list[Found]:
    first = _complete(port, PROMPT)
    again = _complete(port, PROMPT)
    seen = {_complete(port, f"{number} {number} {number} " * 30).replica for number in range(12)}
    home = again.replica == first.replica and again.cached_tokens > 0
    return [
        Found("a repeated prompt goes home", again.cached_tokens, "cached tokens", home),
        Found("replicas that answer", len(seen), "replicas", len(seen) == 2),
    ]


def _complete(port: int, prompt: str) -> Answer:
    body = json.dumps({"model": "demo", "prompt": prompt, "max_tokens": 8, "temperature": 0}).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", body, {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        return Answer(answer.headers["x-homing-replica"], int(answer.headers.get("x-homing-cached-tokens") or 0))


def _wait_until_ready(port: int, process: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=2):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    raise TimeoutError(f"not ready after {START_S} s (ended: {process.poll()})")


def _end(process: "subprocess.Popen[bytes]") -> None:
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
