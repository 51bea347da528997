"""Replicas are scaled, drained and updated, and their controller is killed, while requests stream."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest

from .running import LONG_PROMPTS, Serving, ends_with, homing, restarted, serving, until

pytestmark = pytest.mark.cluster

STORY = {"prompt": "A long story about a fox.", "max_tokens": 200, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], Serving]]:
    """A separate cluster, because these tests would disturb others."""
    with restarted(lambda: serving(tmp_path_factory.mktemp("state"), "--replicas", "1")) as start:
        yield start


@pytest.fixture
def running(own: Callable[[], Serving]) -> Serving:
    return own()


#: Pause between a client's streams, which take about as long. Without it, streams would take most of the CPU time that
#: the replicas need to start.
PAUSE_S = 0.2


class Traffic:
    """Two clients that repeat a stream until the block ends; `answers` collects their texts."""

    def __init__(self, running: Serving) -> None:
        self._running = running
        self._stop = threading.Event()
        self.answers: list[str] = []
        self._pool = ThreadPoolExecutor(2)

    def __enter__(self) -> "Traffic":
        self._work = [self._pool.submit(self._ask) for _ in range(2)]
        until(lambda: True if len(self.answers) >= 2 else None, "the first answers")
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for work in self._work:
            work.result()
        self._pool.shutdown()

    def _ask(self) -> None:
        with self._running.client() as client:
            while not self._stop.is_set():
                self.answers.append(self._running.streamed(client, STORY))
                time.sleep(PAUSE_S)


def control(running: Serving, *words: str) -> str:
    """Run one command, which must succeed, and return its output."""
    done = homing(running.state, *words)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_replacement_holds_the_hot_prompts_before_its_first_request(running: Serving) -> None:
    """Otherwise the first requests after a replacement would wait while their prompts are computed again."""
    control(running, "scale", "1")  # so that no other replica has the prompts
    (name,) = running.serving(1)
    before = running.cluster()["counters"]
    for _ in range(2):
        for prompt in LONG_PROMPTS[:3]:
            running.post("/v1/completions", {"prompt": prompt, "max_tokens": 1})

    control(running, "drain", name, "--replace")
    counters = running.cluster()["counters"]
    answers = [
        running.post("/v1/completions", {"prompt": f"{prompt} And?", "max_tokens": 1}) for prompt in LONG_PROMPTS[:3]
    ]

    cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers]
    assert counters["warm_up_requests"] >= 3
    assert counters["requests"] == before["requests"] + 6
    assert min(cached) > 500, cached
    assert name not in running.replicas()


def test_replicas_come_and_go_and_no_request_fails(running: Serving) -> None:
    """Update, scale up and drain, each until it is complete, under streams whose text must never change.

    With another block size, the replicas before and after the update have no block hashes in common.
    """
    control(running, "scale", "2")  # whatever earlier tests left
    with Traffic(running) as traffic:
        updated = control(running, "update", "--block-size", "32")
        same = control(running, "update", "--block-size", "32")
        up = control(running, "scale", "3")
        leaves = max(running.serving(3))
        drained = control(running, "drain", leaves)
        replicas = running.serving(2)

    assert updated.count("replica_drained") == 2
    assert "updated; serving: " in updated
    assert "nothing changes" in same
    assert "3 replicas; serving: r" in up
    assert "unique_tokens=" in drained
    assert leaves not in replicas
    assert len(set(traffic.answers)) == 1
    assert running.cluster()["counters"]["failed"] == 0


def test_a_cluster_that_is_scaled_to_none_refuses_at_once(running: Serving) -> None:
    """No replica will start, so clients must not wait for their timeout."""
    control(running, "scale", "0")

    def refused() -> httpx.Response | None:
        answer = httpx.post(f"{running.url}/v1/completions", json=STORY, timeout=60, trust_env=False)
        return answer if "scaled to zero replicas" in answer.text else None

    refusal = until(refused, "the routers know")
    control(running, "scale", "1")
    answer = running.post("/v1/completions", STORY)

    assert refusal.status_code == 503
    assert refusal.headers["retry-after"] == "30"
    assert answer["usage"]["completion_tokens"] == 200


def test_an_update_that_cannot_work_is_reported_and_changes_nothing(running: Serving, tmp_path: Path) -> None:
    """Detectable mistakes are reported before anything is started, and change nothing."""
    before = running.replicas()
    torn = homing(running.state, "update", str(tmp_path))
    fixed = homing(running.state, "update", "--port", "1")
    unknown = homing(running.state, "drain", "r99")

    assert (torn.returncode, fixed.returncode, unknown.returncode) == (2, 2, 2)
    assert "no config.json" in torn.stderr
    assert "port cannot change while the cluster runs" in fixed.stderr
    assert "no replica 'r99'" in unknown.stderr
    assert running.replicas().keys() == before.keys()


def test_a_killed_controller_interrupts_no_stream_and_comes_back(running: Serving) -> None:
    """Streams continue without the controller; once restarted, it can scale and rebuild a dead rank."""
    control(running, "scale", "1")  # whatever earlier tests left
    with Traffic(running) as traffic:
        (controller,) = [process for process in running.family() if "Controller" in process.name()]
        controller.kill()
        asked = len(traffic.answers)
        up = control(running, "scale", "2")
        until(lambda: True if len(traffic.answers) > asked + 2 else None, "requests are still answered")
        replicas = running.serving(2)
        lost, before = next(iter(replicas.items()))
        psutil.Process(before["pids"][0]).kill()
        until(lambda: True if running.replicas().get(lost, before)["epoch"] != before["epoch"] else None, "a new one")
        running.serving(2)

    assert "2 replicas; serving:" in up
    assert len(set(traffic.answers)) == 1
    assert running.process is not None
    assert running.process.poll() is None
    assert any("controller_restarted" in line for line in running.output)


def test_a_gcs_that_dies_ends_everything_at_once_with_the_reason(running: Serving) -> None:
    """The last test, because it ends the cluster."""
    ends_with(running, "gcs_server", "demo")
