"""Replicas that run an external engine, on a real Ray: a program that speaks as vLLM does stands in for it.

Its tokens follow from seed and position alone, so every answer is known wherever it was computed. The real vLLM is in
test_vllm.py.
"""

import contextlib
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from ..cluster.engine_program import engine_python
from .running import PATIENCE_S, Serving, homing, serving, until

pytestmark = pytest.mark.cluster

PROMPT = "One morning the fox went to the river and sat down. " * 20
#: Of a stream that lasts long enough to be interrupted.
LONG = {"prompt": PROMPT, "max_tokens": 300, "temperature": 0, "seed": 5, "ignore_eos": True}
SHORT = {**LONG, "max_tokens": 20}
ARGS = "--fake-token-s 0.005 --fake-child"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """Two replicas of the demo model on fake engines."""
    python = engine_python(tmp_path_factory.mktemp("env"))
    flags = ("--engine", "vllm", "--engine-python", str(python), "--engine-args", ARGS, "--replicas", "2")
    with serving(tmp_path_factory.mktemp("state"), *flags) as running:
        running.serving(2)
        yield running
        family = running.family()
    _, alive = psutil.wait_procs(family, timeout=PATIENCE_S)
    assert alive == []


def text_of(answer: dict[str, Any]) -> str:
    text: str = answer["choices"][0]["text"]
    return text


def engines(cluster: Serving) -> list[psutil.Process]:
    """The engines' own processes."""
    found = []
    for process in cluster.family():
        with contextlib.suppress(psutil.Error, IndexError):
            if Path(process.cmdline()[2]).name == "engine_program.py":
                found.append(process)
    return found


def zombies(cluster: Serving) -> list[psutil.Process]:
    found = []
    for process in cluster.family():
        with contextlib.suppress(psutil.Error):
            if process.status() == psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def continued(cluster: Serving) -> float:
    """Requests that another replica has continued, by the router's metrics."""
    text = cluster.http.get(f"{cluster.url}/metrics").text
    return sum(
        float(found) for found in re.findall(r"^homing_routing_continuations_total\S* (\S+)$", text, re.MULTILINE)
    )


class Load:
    """Two clients that ask for the same short answer again and again."""

    def __init__(self, cluster: Serving) -> None:
        self._cluster = cluster
        self._over = threading.Event()
        self.wrong: list[str] = []
        self.answers = 0

    def __enter__(self) -> "Load":
        self._expected = text_of(self._cluster.post("/v1/completions", SHORT))
        self._threads = [threading.Thread(target=self._ask) for _ in range(2)]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(PATIENCE_S)

    def _ask(self) -> None:
        while not self._over.is_set():
            try:
                text = text_of(self._cluster.post("/v1/completions", SHORT))
            except httpx.HTTPError as error:
                self.wrong.append(repr(error))
                continue
            self.answers += 1
            if text != self._expected:
                self.wrong.append(text)


def test_what_an_engine_has_cached_is_known_before_it_is_asked(cluster: Serving) -> None:
    """Its events arrive at the router over sockets of this machine, and its own word on the hit agrees."""
    first = cluster.post("/v1/completions", SHORT)["usage"]["prompt_tokens_details"]["cached_tokens"]

    def held() -> int | None:
        rows = cluster.post("/explain", SHORT)["replicas"]
        return max(row["held_blocks"] for row in rows) or None

    blocks = until(held, "the blocks are announced")
    again = cluster.post("/v1/completions", SHORT)["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert first == 0
    assert again == blocks * 32  # 16 was rounded up to what vLLM takes on a CPU


def test_a_stream_continues_when_its_engine_is_killed(cluster: Serving) -> None:
    """Nobody who reads it can tell. The replica comes back, and nothing is left of the engine."""
    expected = text_of(cluster.post("/v1/completions", LONG))
    before, known = continued(cluster), {process.pid for process in engines(cluster)}
    with cluster.client() as client:
        stream = client.completions.create(model="demo", prompt=PROMPT, stream=True, extra_body=LONG)
        pieces = [next(stream) for _ in range(20)]
        busy = next(name for name, each in cluster.replicas().items() if each["running"])
        (actor,) = cluster.replicas()[busy]["pids"]
        below = {process.pid for process in psutil.Process(actor).children(recursive=True)}
        (engine,) = [process for process in engines(cluster) if process.pid in below]
        engine.kill()
        text = "".join(piece.choices[0].text for piece in [*pieces, *stream] if piece.choices)

    assert text == expected
    assert continued(cluster) == before + 1
    until(lambda: {each.pid for each in engines(cluster)} - known or None, "another engine has started")
    cluster.serving(2)
    until(lambda: True if not zombies(cluster) else None, "no zombie is left")


def test_an_engine_ends_with_its_actor(cluster: Serving) -> None:
    """Killed as the kernel kills when memory runs out: the actor can clean up nothing."""
    name, replica = next(iter(cluster.replicas().items()))
    family = psutil.Process(replica["pids"][0]).children(recursive=True)

    psutil.Process(replica["pids"][0]).kill()

    until(lambda: True if not any(each.is_running() for each in family) else None, "its engine has ended")
    until(lambda: cluster.replicas().get(name, replica)["pids"] != replica["pids"] or None, "it is replaced")
    cluster.serving(2)
    until(lambda: True if not zombies(cluster) else None, "no zombie is left")


def test_an_update_and_a_scale_under_load_fail_and_change_no_answer(cluster: Serving) -> None:
    """All engines are replaced by ones with other arguments, one by one; then one more comes and goes."""
    before = {process.pid for process in engines(cluster)}
    with Load(cluster) as load:
        updated = homing(cluster.state, "update", "--engine-args", f"{ARGS} --fake-token-s 0.004")
        scaled = homing(cluster.state, "scale", "3")
        lowered = homing(cluster.state, "scale", "2")

    assert [done.stderr for done in (updated, scaled, lowered) if done.returncode] == []
    assert load.wrong == []
    assert load.answers > 0
    assert not before & {process.pid for process in engines(cluster)}
    assert len(engines(cluster)) == 2
    assert zombies(cluster) == []
    assert "the fake engine listens" in homing(cluster.state, "logs", "r0").stdout


def test_an_update_to_an_engine_that_ends_at_its_start_is_abandoned(cluster: Serving) -> None:
    """The old replicas still serve, and the engine's last words say why the new ones do not."""
    failed = homing(cluster.state, "update", "--engine-args", "--fake-fault exit")

    assert failed.returncode == 1
    assert "vllm has ended at its start: ValueError: no such attention" in failed.stderr
    cluster.serving(2)
