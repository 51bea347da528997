"""Scaling to zero and back, as clients see it: requests that arrive while there is no replica are held, then answered.

The replicas run an external engine, whose processes must start and stop with them; the controller treats all alike.
"""

import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from ..cluster.engine_program import engine_python
from .engines import engines
from .running import Serving, leaves_nothing, restarted, serving, until

pytestmark = pytest.mark.cluster

STORY = {"prompt": "A long story about a fox.", "max_tokens": 40, "temperature": 0, "seed": 5, "ignore_eos": True}


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], Serving]]:
    """A cluster that may scale to zero replicas, which would break any other test that shared it."""
    python = engine_python(tmp_path_factory.mktemp("env"))
    flags = ["--engine", "vllm", "--engine-python", str(python)]
    flags += ["--replicas", "1", "--autoscale", "0:2", "--scale-down-after-s", "3"]
    with restarted(lambda: serving(tmp_path_factory.mktemp("state"), *flags)) as start:
        yield start


@pytest.fixture
def resting(own: Callable[[], Serving]) -> Serving:
    return own()


def streamed(running: Serving) -> str:
    """The text of the same request, streamed."""
    with running.client() as client:
        return running.streamed(client, STORY)


def test_held_requests_start_the_replica_that_answers_them(resting: Serving) -> None:
    """The first request after a rest waits for a replica to start, unaware of it; two held requests are no overload."""
    text = resting.post("/v1/completions", STORY)["choices"][0]["text"]
    until(lambda: None if resting.replicas() else True, "the cluster has no replica")
    until(lambda: None if engines(resting, "engine_program.py") else True, "its engine has exited")
    ready = httpx.get(f"{resting.url}/ready", trust_env=False).status_code

    with ThreadPoolExecutor(2) as pool:
        plain, stream = pool.submit(resting.post, "/v1/completions", STORY), pool.submit(streamed, resting)
        until(lambda: resting.cluster()["waiting"] == 2 or None, "both are held")
        answers = {plain.result()["choices"][0]["text"], stream.result()}

    assert ready == 503
    assert answers == {text}
    assert resting.cluster()["counters"]["failed"] == 0
    assert any("autoscaled model=demo held=" in line for line in resting.output)


def test_ctrl_c_ends_all_of_it(resting: Serving) -> None:
    """The last test, because it ends the cluster."""
    family, folder = resting.family(), Path(resting.note()["run_dir"])
    assert resting.process is not None
    resting.process.send_signal(signal.SIGINT)

    assert resting.process.wait(60) == 0
    leaves_nothing(resting.state, family, folder)
    assert "Traceback" not in "".join(resting.output)
