"""`homing simulate` with rates measured by a live cluster's replicas."""

import json
from pathlib import Path

import pytest

from .running import Serving, homing

pytestmark = pytest.mark.cluster


def test_a_simulation_takes_its_rates_from_the_running_cluster(cluster: Serving, tmp_path: Path) -> None:
    """The replicas' measured rates are read from the cluster, so users need not copy them."""
    cluster.home("Some words to measure the rates by. " * 40)
    found = tmp_path / "found.json"
    words = ["--calibrate", cluster.url, "--requests", "40", "--policies", "expected-ttft", "--json", str(found)]

    told = homing(cluster.state, "simulate", *words)

    assert told.returncode == 0, told.stderr
    (result,) = json.loads(found.read_text())["results"]
    assert result["finished"] == 40
    assert result["ttft_mean_s"] > 0
