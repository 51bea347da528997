"""Replicas that run an external engine on a real Ray: a fake program with vLLM's API takes the engine's place.

Its tokens depend only on seed and position, so every answer is known no matter where it was computed.
test_real_replicas.py uses real engines.
"""

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from ..cluster.engine_program import engine_python
from .engines import (
    BLOCK_SIZE,
    LONG,
    Load,
    cached_tokens,
    continued,
    engines,
    held_blocks,
    text_of,
    text_with_a_kill,
    zombies,
)
from .running import PATIENCE_S, Serving, homing, serving, until

pytestmark = pytest.mark.cluster

PROGRAM = "engine_program.py"


@pytest.fixture(scope="module")
def gate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Path of a file; while it exists, answers pause before their second token."""
    return tmp_path_factory.mktemp("gate") / "closed"


@pytest.fixture(scope="module")
def args(gate: Path) -> str:
    return f"--fake-gate {gate} --fake-child"


@pytest.fixture(scope="module")
def cluster(args: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """Two replicas of the demo model on fake engines."""
    python = engine_python(tmp_path_factory.mktemp("env"))
    flags = ("--engine", "vllm", "--engine-python", str(python), "--engine-args", args, "--replicas", "2")
    with serving(tmp_path_factory.mktemp("state"), *flags) as running:
        running.serving(2)
        yield running
        family = running.family()
    _, alive = psutil.wait_procs(family, timeout=PATIENCE_S)
    assert alive == []


def test_what_an_engine_has_cached_is_known_before_it_is_asked(cluster: Serving) -> None:
    """The router learns the engine's blocks from its events, and the engine's own count of cached tokens agrees."""
    cached_tokens(cluster)

    def agreed() -> bool | None:
        """Polled, because the blocks of one prompt may be announced in several messages."""
        held = held_blocks(cluster)
        return cached_tokens(cluster) == held * BLOCK_SIZE or None

    until(agreed, "the router knows all that the engine has cached")


def test_a_stream_continues_when_its_engine_is_killed(cluster: Serving, gate: Path) -> None:
    """The client cannot tell. The replica is rebuilt, and no process of the killed engine remains."""
    expected = text_of(cluster.post("/v1/completions", LONG))
    before, known = continued(cluster), engines(cluster, PROGRAM).keys()

    gate.touch()
    try:
        text = text_with_a_kill(cluster, PROGRAM, after=1, then=gate.unlink)
    finally:
        gate.unlink(missing_ok=True)

    assert text == expected
    assert continued(cluster) == before + 1
    until(lambda: engines(cluster, PROGRAM).keys() - known or None, "another engine has started")
    cluster.serving(2)
    until(lambda: True if not zombies(cluster) else None, "no zombie is left")


def test_an_engine_ends_with_its_actor(cluster: Serving) -> None:
    """An actor that gets SIGKILL, as when memory runs out, cannot clean up; its engine must exit all the same."""
    name, replica = next(iter(cluster.replicas().items()))
    family = psutil.Process(replica["pids"][0]).children(recursive=True)

    psutil.Process(replica["pids"][0]).kill()

    until(lambda: True if not any(each.is_running() for each in family) else None, "its engine has exited")
    until(lambda: cluster.replicas().get(name, replica)["pids"] != replica["pids"] or None, "it is replaced")
    cluster.serving(2)
    until(lambda: True if not zombies(cluster) else None, "no zombie is left")


def test_an_update_and_a_scale_under_load_fail_and_change_no_answer(cluster: Serving, args: str) -> None:
    """All engines are replaced one by one by engines with other arguments; then a third replica is added and drained.

    New replicas are warmed up before they get requests, and leaving ones are drained. An engine that finds no GPU says
    so while the old ones keep serving.
    """
    before = engines(cluster, PROGRAM).keys()
    with Load(cluster) as load:
        homing(cluster.state, "update", "--gpus-per-rank", "1", "--no-wait")
        until(lambda: [each for each in cluster.cluster()["absent"] if "1 GPU" in each["reason"]] or None, "no GPU")
        words = ("--gpus-per-rank", "0", "--device", "cpu", "--engine-args", f"{args} --fake-token-s 0.001")
        updated = homing(cluster.state, "update", *words)
        known = cluster.serving(2).keys()
        scaled = homing(cluster.state, "scale", "3")
        (added,) = cluster.serving(3).keys() - known
        drained = homing(cluster.state, "drain", added)

    assert [done.stderr for done in (updated, scaled, drained) if done.returncode] == []
    assert updated.stdout.count("replica_warmed") == updated.stdout.count("replica_drained") == 2
    assert f"replica_warmed replica={added}" in scaled.stdout
    assert f"replica_drained replica={added}" in drained.stdout
    assert cluster.cluster()["counters"]["warm_up_requests"] > 0
    assert cluster.cluster()["counters"]["failed"] == 0
    assert load.wrong == []
    assert load.answers > 0
    until(lambda: None if before & engines(cluster, PROGRAM).keys() else True, "the old engines have exited")
    until(lambda: True if len(engines(cluster, PROGRAM)) == 2 else None, "two engines are left")
    until(lambda: True if not zombies(cluster) else None, "no zombie is left")
    (name, *_) = cluster.serving(2)
    assert "the fake engine listens" in homing(cluster.state, "logs", name).stdout


def test_an_update_to_an_engine_that_ends_at_its_start_is_abandoned(cluster: Serving) -> None:
    """The old replicas keep serving, and the engine's last output is in the error."""
    failed = homing(cluster.state, "update", "--engine-args", "--fake-fault exit")

    assert failed.returncode == 1
    assert "vllm exited during startup: ValueError: no such attention" in failed.stderr
    cluster.serving(2)
