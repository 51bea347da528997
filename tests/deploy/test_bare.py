"""Really runs `deploy/ray/bare.yaml`: `ray up` over SSH to two hosts, a replica on each, requests, `ray down`."""

import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .files import DEPLOY, ROOT
from .hosts import ADDRESSES, Hosts, two_hosts, why_not

pytestmark = [pytest.mark.slow, pytest.mark.every_commit, pytest.mark.cluster, pytest.mark.timeout(600)]

RAY = [sys.executable, "-P", "-c", "from ray.scripts.scripts import main; main()"]
ASK = """
import sys, urllib.request
opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
body = sys.argv[2].encode() if len(sys.argv) > 2 else None
request = urllib.request.Request(sys.argv[1], body, {"content-type": "application/json", "authorization": "Bearer k"})
print(opener.open(request, timeout=60).read().decode())
"""
URL = f"http://{ADDRESSES[0]}:8000"


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    """Two hosts, and an operator with the output of `make wheel`, a token and bare.yaml."""
    if reason := why_not():
        pytest.skip(reason)
    with two_hosts() as running:
        desk = running.folder / "operator"
        build = ["-m", "build", "--wheel", "--no-isolation", "--outdir", str(desk / "dist"), str(ROOT)]
        subprocess.run([sys.executable, *build], check=True, capture_output=True)
        shutil.copy(ROOT / "constraints.txt", desk / "dist")
        (desk / "bare.yaml").write_text(filled_in(running.key))
        ray(running, "get-auth-token", "--generate")
        yield running


def filled_in(key: Path) -> str:
    """bare.yaml with only those values replaced that it tells its reader to change."""
    text = (DEPLOY / "ray" / "bare.yaml").read_text()
    for old, new in (
        ("192.0.2.10", ADDRESSES[0]),
        ("192.0.2.11", ADDRESSES[1]),
        ("~/.ssh/id_ed25519", str(key)),
    ):
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


def ray(hosts: Hosts, *words: str) -> str:
    """Run one of the operator's `ray` commands; return its output."""
    done = hosts.operator(*RAY, *words)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def on_head(hosts: Hosts, command: str) -> str:
    """Run a command on the head with `ray exec`, over SSH, as the page describes."""
    return ray(hosts, "exec", "bare.yaml", command)


def ask(hosts: Hosts, path: str, body: dict[str, Any] | None = None) -> Any:
    """Send an HTTP request from the switch, through the network between the hosts."""
    words = [URL + path, *([json.dumps(body)] if body else [])]
    done = hosts.operator(sys.executable, "-P", "-c", ASK, *words)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def nodes_up(hosts: Hosts) -> int:
    """Number of nodes in the cluster."""
    counts = re.findall(r"^\s*(\d+) local\.cluster\.node", on_head(hosts, "ray status"), re.MULTILINE)
    return sum(int(count) for count in counts)


def until_up(hosts: Hosts, nodes: int) -> None:
    """Wait for this number of nodes: `ray up` returns before the head has set up the others."""
    for _ in range(40):
        if nodes_up(hosts) == nodes:
            return
        time.sleep(2)
    raise AssertionError(f"never {nodes} nodes:\n{on_head(hosts, 'tail -n 40 /tmp/ray/session_latest/logs/monitor*')}")


def test_the_file_brings_up_a_cluster_that_serves_and_goes(hosts: Hosts) -> None:
    """The page's commands in sequence, from machines with only Python and an SSH server to a cluster and back."""
    ray(hosts, "up", "--yes", "--disable-usage-stats", "bare.yaml")
    until_up(hosts, 2)
    # A replica takes all logical CPUs of a host, so that each host has space for exactly one.
    cpus = "$(nproc)"
    on_head(hosts, f"homing serve --ray-address auto --host 0.0.0.0 --replicas 2 --cpus-per-rank {cpus} --detach")
    replicas = ask(hosts, "/cluster")["replicas"]
    body = {"prompt": "Once upon a time there was a fox. " * 40, "max_tokens": 4, "temperature": 0}
    first, second = (ask(hosts, "/v1/completions", body) for _ in range(2))
    status = on_head(hosts, "homing status")
    on_head(hosts, "homing stop")
    left = nodes_up(hosts)
    ray(hosts, "down", "--yes", "bare.yaml")

    assert {replica["node"] for replica in replicas} == set(ADDRESSES)
    assert [replica["feed"] for replica in replicas] == ["live", "live"]
    assert first["choices"] == second["choices"]
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] > 100
    assert "r0" in status
    assert left == 2
    assert gone(hosts)


def gone(hosts: Hosts) -> bool:
    """Whether Ray has stopped on both hosts; a worker notices on its own that its head is gone."""
    for _ in range(60):
        if not [line for line in hosts.processes() if "raylet" in line or "gcs_server" in line]:
            return True
        time.sleep(2)
    return False
