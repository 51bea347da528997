"""`homing serve --ray-address`: joins an existing Ray cluster of two nodes and leaves it running."""

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

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.every_commit]


def actors(
    family: list[psutil.Process], titles: str = "Supervisor|Controller|RouterProcess|ReplicaRank"
) -> list[psutil.Process]:
    """The processes that run one of these actor classes of ours."""
    found = []
    for process in family:
        with contextlib.suppress(psutil.Error):
            if re.match(rf"ray::({titles})", " ".join(process.cmdline())):
                found.append(process)
    return found


def homes(nodes: Nodes, titles: str) -> set[int]:
    """Indexes of the nodes on which these actors run."""
    return {number for number, node in enumerate(nodes.processes) if actors(below(node), titles)}


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    """A head and a worker node with room for one replica each."""
    with two_nodes() as found:
        yield found


@pytest.mark.timeout(600)
def test_a_joined_cluster_serves_on_both_nodes_and_leaves_them_as_they_were(
    nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Join twice: the first run is killed with SIGKILL, the second exits on SIGTERM.

    SIGKILL leaves no time to clean up, yet the actors must exit and free the nodes and the cluster's name. The second
    run must use both nodes, with requests and events between them over TCP, and must leave Ray itself running.
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

    assert len(before) >= 5  # two ranks, a router, the controller and the supervisor
    assert left == []
    assert (stopped.returncode, "no cluster 'default' is running" in stopped.stderr) == (1, True)
    assert first["choices"] == second["choices"]
    assert second["usage"]["completion_tokens"] == 4
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] > 500
    assert set(answering) == {"r0", "r1"}
    assert len(ranks) == 2
    assert len(guarding) == 1, "on several nodes, the loss of any of them would stop the cluster"
    assert wait_gone(family, 10) == []
    until(lambda: nodes.alive() == 2 or None, "both nodes are alive")


@pytest.mark.parametrize("token", [secrets.token_hex(16), None], ids=["wrong", "none"])
def test_nobody_joins_without_the_token(
    nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, token: str | None
) -> None:
    """Shows that the token is what admits a cluster in the test above. The error is short and mentions the token."""
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
