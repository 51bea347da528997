"""A simulation with the rates of a live cluster's replicas, as a user asks for it."""

import json
from pathlib import Path

import pytest

from .running import Serving, homing

pytestmark = pytest.mark.cluster


def test_a_simulation_takes_its_rates_from_the_running_cluster(cluster: Serving, tmp_path: Path) -> None:
    """They have been measured by then, and nobody has to copy them by hand."""
    cluster.home("Some words to measure the rates by. " * 40)
    found = tmp_path / "found.json"
    words = ["--calibrate", cluster.url, "--requests", "40", "--policies", "expected-ttft", "--json", str(found)]

    told = homing(cluster.state, "simulate", *words)

    assert told.returncode == 0, told.stderr
    (result,) = json.loads(found.read_text())["results"]
    assert result["finished"] == 40
    assert result["ttft_mean_s"] > 0
