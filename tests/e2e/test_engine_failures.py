"""Failures of a real engine behind `homing route`, on a CPU: afterwards the index is exact, or the engine is not used.

    HOMING_TEST_VLLM=vllm/bin/vllm pytest tests/e2e/test_engine_failures.py

test_real_engines.py explains how to make this environment and has the hung engine; the same cases with fakes are in
tests/router/replicas/external/test_failures.py. The engine is started six times, each time in half a minute.
"""

import json
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from shutil import copytree

import psutil
import pytest
from tokenizers import Tokenizer

from homing.replica.demo import demo_model_path
from homing.router.replicas.external.probe import CANARY

from .running import Serving, serving, until
from .test_real_engines import BLOCK_SIZE, OWN, PROMPT, VLLM, answers, free_port, vllm
from .test_real_replicas import largest

pytestmark = [pytest.mark.compat, pytest.mark.slow, pytest.mark.timeout(1800)]
START_S = 600.0


class Relay:
    """Forwards connections to a port of this machine; `cut` ends it as if the port behind it had died."""

    def __init__(self, target: int, port: int) -> None:
        self._target, self.port = target, port
        self._server: socket.socket | None = None
        self._open: list[socket.socket] = []
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        self._server = socket.create_server(("127.0.0.1", self.port))
        self._run(self._accept, self._server)

    def cut(self) -> None:
        if self._server is not None:
            self._server.shutdown(socket.SHUT_RDWR)  # wakes `accept`
        for each in self._open:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        self._open.clear()
        self._threads.clear()

    def _run(self, work: Callable[..., None], *words: socket.socket) -> None:
        thread = threading.Thread(target=work, args=words, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self, server: socket.socket) -> None:
        with server, suppress(OSError):
            while True:
                self._run(self._connect, server.accept()[0])

    def _connect(self, near: socket.socket) -> None:
        with near, suppress(OSError), socket.create_connection(("127.0.0.1", self._target)) as far:
            self._open += [near, far]
            back = threading.Thread(target=self._forward, args=(far, near), daemon=True)
            back.start()
            self._forward(near, far)
            back.join()

    @staticmethod
    def _forward(source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                target.sendall(data)
        for each in (source, target):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)


class Engine:
    """A vLLM that keeps its addresses when it is started again, with its event sockets behind relays."""

    def __init__(self, log: Path) -> None:
        self.port = free_port()
        events, replay = free_port(), free_port()
        self.relays = [Relay(events, free_port()), Relay(replay, free_port())]
        config = f'"publisher": "zmq", "endpoint": "tcp://*:{events}", "replay_endpoint": "tcp://*:{replay}"'
        self._command, self._log = vllm(self.port, config), log
        self._process: subprocess.Popen[bytes] | None = None
        for relay in self.relays:
            relay.start()

    def start(self, *more: str) -> None:
        """Start it with further flags, and return when it answers."""
        with self._log.open("wb") as out:
            self._process = subprocess.Popen(
                [*self._command, *more], env=os.environ | OWN, stdout=out, stderr=out, start_new_session=True
            )
        process = self._process
        until(
            lambda: process.poll() is not None or answers(f"http://127.0.0.1:{self.port}"),
            "the engine answers",
            START_S,
        )
        assert process.poll() is None, self._log.read_text()[-2000:]

    def kill(self, choose: Callable[[psutil.Process], psutil.Process] | None = None) -> None:
        """Kill one of its processes, or all, and return when none is left."""
        if self._process is None:
            return
        family = [server := psutil.Process(self._process.pid), *server.children(recursive=True)]
        if choose is not None:
            choose(server).kill()
            until(lambda: self._process is None or self._process.poll() is not None or None, "the engine ends")
        for each in family:
            with suppress(psutil.Error):
                each.send_signal(signal.SIGKILL)
        self._process.wait()
        self._process = None
        psutil.wait_procs(family, timeout=60)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    if not VLLM:
        pytest.skip("HOMING_TEST_VLLM names no program")
    with ExitStack() as stack:
        engine = Engine(tmp_path_factory.mktemp("engine") / "log")
        stack.callback(lambda: [relay.cut() for relay in engine.relays])
        stack.callback(engine.kill)
        engine.start()
        yield engine


@pytest.fixture(scope="module")
def cluster(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """`homing route` in front of the engine."""
    events, replay = (f"tcp://127.0.0.1:{relay.port}" for relay in engine.relays)
    flags = ["--engine-url", f"http://127.0.0.1:{engine.port}", "--events", events, "--replay", replay]
    flags += ["--tokenizer", str(demo_model_path()), "--block-size", str(BLOCK_SIZE)]
    with serving(tmp_path_factory.mktemp("state"), *flags, command="route") as running:
        running.serving(1)
        yield running


BODY = {"prompt": PROMPT, "max_tokens": 2, "temperature": 0}


def credited(cluster: Serving) -> int:
    """Cached tokens of the prompt that the router counts on."""
    (row,) = cluster.post("/explain", BODY)["replicas"]
    return int(cluster.post("/explain", BODY)["prompt_tokens"]) - int(row["uncached_tokens"])


def delivered(cluster: Serving) -> int:
    """Cached tokens of the prompt, as the engine reports them."""
    return int(cluster.post("/v1/completions", BODY)["usage"]["prompt_tokens_details"]["cached_tokens"])


def check_exact(cluster: Serving) -> None:
    """The router counts on what the engine then delivers, and on something."""
    delivered(cluster)
    until(lambda: credited(cluster) or None, "the prompt's events are indexed")
    assert credited(cluster) == delivered(cluster) > 0


def test_a_dead_event_port_takes_the_credit_and_not_the_engine(cluster: Serving, engine: Engine) -> None:
    """It still answers over HTTP. When its events can be followed again, what it still holds counts again."""
    check_exact(cluster)

    for relay in engine.relays:
        relay.cut()
    until(lambda: True if cluster.replicas()["b0"]["feed"] == "stale" else None, "its feed is stale")
    without, state = credited(cluster), cluster.replicas()["b0"]["state"]
    delivered(cluster)
    for relay in engine.relays:
        relay.start()
    cluster.serving(1)

    assert (without, state) == (0, "serving")
    check_exact(cluster)


@pytest.mark.parametrize("victim", [None, largest])
def test_an_engine_killed_and_started_again_holds_only_what_it_stores_anew(
    cluster: Serving, engine: Engine, victim: Callable[[psutil.Process], psutil.Process] | None
) -> None:
    """All its processes are killed, or the largest one, as the kernel does when memory runs out."""
    check_exact(cluster)

    engine.kill(victim)
    engine.start()
    cluster.serving(1)

    assert (credited(cluster), delivered(cluster)) == (0, 0)
    check_exact(cluster)


def other_tokenizer(folder: Path) -> Path:
    """The demo model's tokenizer, with the ids of two tokens of the canary prompt exchanged."""
    copytree(demo_model_path(), folder)
    path = folder / "tokenizer.json"
    one, other = Tokenizer.from_file(str(path)).encode(CANARY, add_special_tokens=False).tokens[:2]
    content = json.loads(path.read_text(encoding="utf-8"))
    words = content["model"]["vocab"]
    words[one], words[other] = words[other], words[one]
    path.write_text(json.dumps(content), encoding="utf-8")
    return folder


@pytest.mark.parametrize("field", ["model", "tokenizer"])
def test_an_engine_that_comes_back_as_another_is_refused(
    cluster: Serving, engine: Engine, field: str, tmp_path: Path
) -> None:
    """Nothing is sent to it and none of its blocks count, until it comes back as before."""
    check_exact(cluster)
    flags = {"model": ["--served-model-name", "other"], "tokenizer": ["--tokenizer", str(tmp_path / "other")]}
    other_tokenizer(tmp_path / "other")

    engine.kill()
    engine.start(*flags[field])
    (refused,) = until(lambda: cluster.cluster()["refused"] or None, "it is refused")
    serving_now = [each["state"] for each in cluster.replicas().values()].count("serving")
    engine.kill()
    engine.start()
    cluster.serving(1)

    assert (refused["field"], serving_now) == (field, 0)
    assert credited(cluster) == 0
    check_exact(cluster)
