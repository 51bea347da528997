"""`homing serve --ray-address`: it joins a Ray of two nodes that somebody else started, and leaves it running."""

import contextlib
import os
import re
import secrets
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from homing.cluster.registry import wait_gone

from .nodes import Nodes, below, two_nodes
from .running import LONG_PROMPTS, homing, serving, until

pytestmark = [pytest.mark.cluster, pytest.mark.slow]  # `.ci/run` names it


def actors(
    family: list[psutil.Process], titles: str = "Supervisor|Controller|RouterProcess|ReplicaRank"
) -> list[psutil.Process]:
    """Processes in which one of these classes of ours runs."""
    found = []
    for process in family:
        with contextlib.suppress(psutil.Error):
            if re.match(rf"ray::({titles})", " ".join(process.cmdline())):
                found.append(process)
    return found


def homes(nodes: Nodes, titles: str) -> set[int]:
    """On which of the nodes they run."""
    return {number for number, node in enumerate(nodes.processes) if actors(below(node), titles)}


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    """A head and a worker with room for one replica each."""
    with two_nodes() as found:
        yield found


@pytest.mark.timeout(600)
def test_a_joined_cluster_serves_on_both_nodes_and_leaves_them_as_they_were(
    nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice: killed, and ended.

    SIGKILL leaves no time to clean up: replicas and routers must not hold nodes of others for ever, nor the name.
    Then replicas find their nodes, requests and events cross between them by TCP, and the Ray of others is left alone.
    """
    for name, value in nodes.environment.items():
        monkeypatch.setenv(name, value)
    flags = "--ray-address", nodes.address, "--replicas", "2"

    with serving(tmp_path, *flags) as running:
        running.serving(2)
        before = actors([child for node in nodes.processes for child in below(node)])
        os.kill(running.pid, signal.SIGKILL)
        left = wait_gone(before, 60)
    stopped = homing(tmp_path, "stop")
    with serving(tmp_path, *flags) as running:
        running.serving(2)
        guarding, ranks = homes(nodes, "Supervisor|Controller|RouterProcess"), homes(nodes, "ReplicaRank")
        body = {"prompt": LONG_PROMPTS[0], "max_tokens": 4, "temperature": 0}
        first, second = (running.post("/v1/completions", body) for _ in range(2))
        answering = running.homes_at_once(LONG_PROMPTS)
        family = running.family()
        assert running.end() == 0

    assert len(before) >= 5  # two ranks, router, controller, supervisor
    assert left == []
    assert (stopped.returncode, "no cluster 'default' is running" in stopped.stderr) == (1, True)
    assert first["choices"] == second["choices"]
    assert second["usage"]["completion_tokens"] == 4
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] > 500
    assert set(answering) == {"r0", "r1"}
    assert len(ranks) == 2
    assert len(guarding) == 1, "the end of any of these nodes would end the cluster"
    assert wait_gone(family, 10) == []
    until(lambda: nodes.alive() == 2 or None, "both nodes are alive")


@pytest.mark.parametrize("token", [secrets.token_hex(16), None], ids=["wrong", "none"])
def test_nobody_joins_without_the_token(
    nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, token: str | None
) -> None:
    """The control: the token above is what let us in. One line says what is missing."""
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("HOME", str(tmp_path))
    if token is not None:
        (tmp_path / "token").write_text(token)
        monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "token"))

    refused = homing(tmp_path / "state", "serve", "--port", "0", "--ray-address", nodes.address)

    assert refused.returncode == 1
    assert f"cannot join the Ray cluster at {nodes.address}" in refused.stderr
    assert "token" in refused.stderr
    assert "Traceback" not in refused.stderr
