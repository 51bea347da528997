"""`homing simulate` from its words to its table, files and mistakes."""

import io
import json
from pathlib import Path

import pytest

from homing.cluster.cli import run
from homing.cluster.errors import SettingsError

QUICK = ["simulate", "--requests", "150", "--replicas", "3", "--cache-blocks", "500"]


def output(words: list[str]) -> str:
    out = io.StringIO()
    assert run(words, out) == 0
    return out.getvalue()


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 1000 * n, "input_length": 2000, "output_length": 10, "hash_ids": [n % 3, 3 + n % 3, 6 + n, 99]}
        for n in range(30)
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def test_policies_stand_side_by_side(trace: Path) -> None:
    """One row each, in the order asked for."""
    told = output(["simulate", str(trace), "--policies", "expected-ttft,rr,oracle", "--load", "0.5"])

    rows = [line.split()[0] for line in told.splitlines()[3:]]
    assert rows == ["expected-ttft", "rr", "oracle"]
    assert "30 requests" in told


def test_the_results_can_be_read_by_programs(tmp_path: Path) -> None:
    """And equal runs give equal numbers, but for the time they took."""
    found = []
    for name in ("a.json", "b.json"):
        output([*QUICK, "--policies", "expected-ttft,sglang", "--speed", "5", "--json", str(tmp_path / name)])
        results = json.loads((tmp_path / name).read_text())["results"]
        found.append([{k: v for k, v in row.items() if k not in ("wall_s", "simulated_per_s")} for row in results])

    assert found[0] == found[1]
    assert [row["finished"] for row in found[0]] == [150, 150]


def test_a_page_is_drawn(tmp_path: Path) -> None:
    """Self-contained: nothing is fetched."""
    pytest.importorskip("matplotlib")

    output([*QUICK, "--policies", "expected-ttft,oracle", "--plot", str(tmp_path / "page.html")])

    page = (tmp_path / "page.html").read_text()
    assert "<svg" in page
    assert "src=" not in page


def test_a_scenario_with_a_fault_says_when_hits_were_back() -> None:
    """That is what a restart costs."""
    told = output(["simulate", "--scenario", "burst", "--policies", "expected-ttft,llm-d"])

    assert told.startswith("burst: ")
    assert "recovery" not in told


def test_the_replicas_for_a_target_are_told() -> None:
    """What a cluster should be ordered with."""
    told = output([*QUICK, "--policies", "expected-ttft", "--speed", "20", "--ttft-target", "0.5"])

    assert "replicas for a mean TTFT of 0.5 s: expected-ttft " in told


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["simulate", "--policies", "fastest"], "no policy 'fastest'"),
        (["simulate", "--scenario", "doom"], "no scenario 'doom'"),
        (["simulate", "nowhere.jsonl"], "nowhere.jsonl cannot be read"),
        (["simulate", "--prefill-rate", "100"], "--decode-step-ms go together"),
        (["simulate", "--plot", "x.bmp"], "x.bmp"),
    ],
)
def test_mistakes_are_named(words: list[str], says: str) -> None:
    """One line, before hours of work."""
    with pytest.raises(Exception, match=says) as caught:
        run(words, io.StringIO())

    assert caught.value.__class__.__module__ == SettingsError.__module__
