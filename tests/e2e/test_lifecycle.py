"""Starting and stopping, in the foreground and in the background, without leaving anything behind."""

import json
import shutil
import signal
import socket
import subprocess
from pathlib import Path
from typing import Any

import psutil
import pytest

from homing.cluster.registry import wait_gone
from homing.replica.demo import demo_model_path

from .running import (
    HOMING,
    LONG_PROMPTS,
    PATIENCE_S,
    Serving,
    environment,
    homing,
    orphaned_folders,
    shared_memory,
    until,
)

pytestmark = pytest.mark.cluster


def test_ctrl_c_while_ray_starts_says_so_and_leaves_nothing(tmp_path: Path) -> None:
    """Ten silent seconds followed by exit code 0 would look like a command that ignores Ctrl-C."""
    before = orphaned_folders()
    command = [*HOMING, "serve", "--port", "0", "--replicas", "1"]
    with subprocess.Popen(
        command, env=environment(tmp_path), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        output = process.stdout
        assert output is not None
        until(lambda: True if "starting a local cluster" in output.readline() else None, "Ray starts")
        below = until(lambda: psutil.Process(process.pid).children(recursive=True) or None, "its first process")
        process.send_signal(signal.SIGINT)
        rest = output.read()
        code = process.wait(PATIENCE_S)

    assert code == 128 + signal.SIGINT
    assert rest == "stopping: Ray was still starting\n"
    assert wait_gone(below, 0) == []
    assert list(tmp_path.iterdir()) == []
    until(lambda: True if orphaned_folders() <= before else None, "no folder is left")  # others' clusters start, too


def test_without_events_the_router_knows_of_no_prefix_and_the_background_ends_by_stop(tmp_path: Path) -> None:
    """Proves that the router learns from events alone: without them it predicts no overlap anywhere."""
    try:  # stop the background cluster even if its start is interrupted
        started = homing(tmp_path, "serve", "--detach", "--port", "0", "--no-publish-events")
        assert started.returncode == 0, started.stdout + started.stderr
        note = json.loads((tmp_path / "default.json").read_text())
        running = Serving(tmp_path, note["url"], note["pid"])
        family, folder = running.family(), Path(note["run_dir"])
        assert folder.is_dir()
        assert "curl" in started.stdout
        unseen(running)
        astray(running)
        shown(tmp_path)
    finally:
        stopped = homing(tmp_path, "stop")

    assert stopped.returncode == 0, stopped.stderr
    assert wait_gone(family, 0) == []
    assert not folder.exists()
    assert shared_memory(family) == []
    assert {path.name for path in tmp_path.iterdir()} == {"default.log", "default.logs"}
    assert homing(tmp_path, "stop").returncode == 1
    assert "no cluster 'default' is running" in homing(tmp_path, "status").stderr


def unseen(running: Serving) -> None:
    """A replica reports cached tokens for the prompt, while the router, without events, predicts none.

    The replica that a lone request goes to is not asserted: without overlap it depends only on measured speeds.
    """
    body = {"prompt": "A long prompt that all of these requests share. " * 100, "max_tokens": 1, "temperature": 0}
    cached = [usage["prompt_tokens_details"]["cached_tokens"] for usage in (ask(running, body) for _ in range(6))]
    explained = running.post("/explain", body)

    assert max(cached) > 500
    assert {row["held_blocks"] for row in explained["replicas"]} == {0}
    assert {row["uncached_tokens"] for row in explained["replicas"]} == {explained["prompt_tokens"]}
    assert running.cluster()["counters"]["predicted_cached_tokens"] == 0


def astray(running: Serving) -> None:
    """Prompts do not return to the replica that cached them: they are spread by load and computed again.

    (tests/e2e/test_serving.py has the same test with events.)
    """
    first = [running.home(prompt) for prompt in LONG_PROMPTS]

    # Polled: while one replica appears slow, as on a busy machine, all prompts go to the other.
    until(lambda: running.homes_at_once(LONG_PROMPTS) != first or None, "prompts went to another replica")


def ask(running: Serving, body: dict[str, object]) -> dict[str, Any]:
    usage: dict[str, Any] = running.post("/v1/completions", body)["usage"]
    return usage


def shown(state: Path) -> None:
    """`homing status` works as a table and as JSON."""
    table = homing(state, "status").stdout
    data = json.loads(homing(state, "status", "--json").stdout)

    assert "r0" in table
    assert "r1" in table
    assert {replica["replica_id"] for replica in data["replicas"]} == {"r0", "r1"}


def test_a_taken_port_is_named_before_anything_is_started(tmp_path: Path) -> None:
    """The most frequent mistake must be reported within a second, not after a minute."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        refused = homing(tmp_path, "serve", "--port", str(port))

    assert refused.returncode == 2
    assert f"127.0.0.1:{port}" in refused.stderr
    assert "--port" in refused.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_name_that_runs_is_not_started_twice(cluster: Serving) -> None:
    """`homing stop` could not tell apart two clusters with one name."""
    refused = homing(cluster.state, "serve", "--port", "0")

    assert refused.returncode == 2
    assert "running already" in refused.stderr


def test_a_torn_model_is_named_before_anything_is_started(tmp_path: Path) -> None:
    """A truncated download must be reported within a second, not after a minute."""
    model = Path(shutil.copytree(demo_model_path(), tmp_path / "model"))
    (model / "model.safetensors").write_bytes(b"torn")

    refused = homing(tmp_path / "state", "serve", str(model), "--port", "0")

    assert refused.returncode == 2
    assert "model.safetensors is incomplete" in refused.stderr
    assert "ray" not in refused.stdout
    assert list((tmp_path / "state").iterdir()) == []


def test_a_replica_that_cannot_start_ends_the_command_with_its_own_words(tmp_path: Path) -> None:
    """Even a problem found only while loading is reported in one line, without Ray's traceback."""
    before = orphaned_folders()
    model = Path(shutil.copytree(demo_model_path(), tmp_path / "model"))
    config = json.loads((model / "config.json").read_text())
    dynamic = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    (model / "config.json").write_text(json.dumps(config | {"rope_parameters": dynamic}))

    failed = homing(tmp_path / "state", "serve", str(model), "--port", "0", "--replicas", "1")

    assert failed.returncode == 1
    assert "replica r0 could not start" in failed.stderr
    assert "Traceback" not in failed.stderr + failed.stdout
    assert "ray" not in failed.stderr.lower()
    until(lambda: True if orphaned_folders() <= before else None, "no folder is left")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("serve", "no/such-model", "--port", "0"), "no/such-model"),
        (("serve", "./nowhere", "--port", "0"), "folder ./nowhere does not exist"),
        (("serve", "--blok-size", "3"), "did you mean --block-size"),
        (("watch",), "no cluster"),
    ],
)
def test_a_mistake_costs_one_line(tmp_path: Path, words: tuple[str, ...], expected: str) -> None:
    """Errors take one line, and nothing is started."""
    failed = homing(tmp_path, *words)

    assert failed.returncode in (1, 2)
    assert expected in failed.stderr
    assert len(failed.stderr.strip().splitlines()) == 1
