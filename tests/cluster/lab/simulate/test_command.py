"""`homing simulate`: its options, table, files and errors."""

import gzip
import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from homing.cluster.cli.main import run
from homing.cluster.errors import SettingsError

QUICK = ["simulate", "--requests", "60", "--replicas", "3", "--cache-blocks", "500"]


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
    """One row per policy, in the order given."""
    told = output(["simulate", str(trace), "--policies", "expected-ttft,rr,oracle", "--replicas", "2", "--load", "0.5"])

    rows = [line.split()[0] for line in told.splitlines()[3:]]
    assert rows == ["expected-ttft", "rr", "oracle"]
    assert "30 requests" in told


def test_the_results_can_be_read_by_programs(tmp_path: Path) -> None:
    """Equal runs give equal numbers, except for the run time."""
    found = []
    for name in ("a.json", "b.json"):
        output([*QUICK, "--policies", "expected-ttft,sglang", "--speed", "5", "--json", str(tmp_path / name)])
        results = json.loads((tmp_path / name).read_text())["results"]
        found.append([{k: v for k, v in row.items() if k not in ("cpu_s", "simulated_per_s")} for row in results])

    assert found[0] == found[1]
    assert [row["finished"] for row in found[0]] == [60, 60]


def test_a_higher_rate_draws_more_users_not_faster_ones(tmp_path: Path) -> None:
    """Pauses stay unchanged, so that turns of one conversation do not overlap and all predictions hold."""
    many = ["simulate", "--policies", "expected-ttft", "--replicas", "64", "--requests", "800", "--rate", "400"]
    output([*many, "--json", str(tmp_path / "found.json")])

    assert json.loads((tmp_path / "found.json").read_text())["results"][0]["exact_rate"] > 0.99


def test_a_page_is_drawn(tmp_path: Path) -> None:
    """The page is self-contained and loads nothing."""
    pytest.importorskip("matplotlib")

    output([*QUICK, "--policies", "expected-ttft,oracle", "--plot", str(tmp_path / "page.html")])

    page = (tmp_path / "page.html").read_text()
    assert "<svg" in page
    assert "src=" not in page


def test_a_scenario_with_a_fault_says_when_hits_were_back() -> None:
    """The recovery time is the cost of a fault. A scenario without one has no recovery to report."""
    told = output(["simulate", "--scenario", "burst", "--policies", "expected-ttft,llm-d"])

    assert told.startswith("burst: ")
    assert "recovery" not in told


def test_the_replicas_for_a_target_are_reported() -> None:
    """Users size their clusters with this number."""
    told = output([*QUICK, "--policies", "expected-ttft", "--speed", "20", "--ttft-target", "0.5"])

    assert "replicas for a mean TTFT of 0.5 s: expected-ttft " in told


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["simulate", "--policies", "fastest"], "unknown policy 'fastest'"),
        (["simulate", "--scenario", "doom"], "unknown scenario 'doom'"),
        (["simulate", "--scenario", "burst", "--replicas", "9", "--load", "0.5"], "not go with --replicas, --load"),
        (["simulate", "nowhere.jsonl"], "nowhere.jsonl cannot be read"),
        (["simulate", "--prefill-rate", "100"], "--decode-step-ms go together"),
        (["simulate", "--plot", "x.bmp"], "x.bmp"),
    ],
)
def test_mistakes_are_named(words: list[str], says: str) -> None:
    """Errors take one line and come before any long computation."""
    with pytest.raises(Exception, match=says) as caught:
        run(words, io.StringIO())

    assert caught.value.__class__.__module__ == SettingsError.__module__


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Requests as clients send them: three different conversations that share a system prompt."""
    path = tmp_path / "requests.jsonl"
    system = {"role": "system", "content": "You are helpful, and you know the house rules by heart. " * 20}
    lines = [
        {"timestamp": 1700000000 + n, "body": {"model": "m", "messages": [system, {"role": "user", "content": text}]}}
        for n, text in enumerate(["one " * 50, "two " * 50, "one " * 50, "two " * 50, "three " * 50])
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def test_a_log_of_requests_is_simulated_like_a_trace(log: Path, tmp_path: Path) -> None:
    """The same logs as for `homing analyze`: texts are tokenized and hashed, so shared prefixes are hit."""
    found = tmp_path / "found.json"

    told = output(["simulate", str(log), "--policies", "expected-ttft,rr", "--replicas", "2", "--json", str(found)])

    assert told.startswith("requests.jsonl: 5 requests")
    ours, in_turn = json.loads(found.read_text())["results"]
    assert ours["finished"] == in_turn["finished"] == 5
    assert ours["hit_rate"] > 0.5


def test_a_packed_trace_is_read_as_it_is(trace: Path, tmp_path: Path) -> None:
    """Compressed traces work as in `homing analyze`."""
    packed = tmp_path / "trace.jsonl.gz"
    packed.write_bytes(gzip.compress(trace.read_bytes()))

    assert "30 requests" in output(["simulate", str(packed), "--policies", "rr"])


def test_rates_are_taken_from_a_running_cluster(trace: Path) -> None:
    """The rates are the means over the cluster's replicas, from their load reports."""
    replicas = [{"prefill_tokens_per_s": rate, "decode_step_s": 0.02} for rate in (1000.0, 3000.0)]

    with answering({"/cluster": {"replicas": replicas}}) as url:
        measured = output(["simulate", str(trace), "--policies", "rr", "--calibrate", url])
    given = output(["simulate", str(trace), "--policies", "rr", "--prefill-rate", "2000", "--decode-step-ms", "20"])

    assert without_speed(measured) == without_speed(given)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["-"], "standard input"),
        (["--calibrate", "http://127.0.0.1:1", "--prefill-rate", "5"], "give one or the other"),
        (["--event-loss", "1.5"], "cannot be lost"),
    ],
)
def test_what_cannot_be_run_is_refused_with_a_remedy(words: list[str], complaint: str) -> None:
    """Refused before anything is read or computed."""
    with pytest.raises(SettingsError, match=complaint):
        output(["simulate", *words])


def test_losses_have_columns_of_their_own(trace: Path) -> None:
    """The columns appear only if messages can be lost."""
    told = output(["simulate", str(trace), "--policies", "expected-ttft", "--event-loss", "0.3"])

    header, row = told.splitlines()[2:4]
    assert header.split()[-2:] == ["lost", "resyncs"]
    assert int(row.split()[-2]) > 0


def without_speed(told: str) -> list[list[str]]:
    return [line.split()[:-1] for line in told.splitlines()]


@contextmanager
def answering(answers: dict[str, object]) -> Iterator[str]:
    """A server that answers each path with its document."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(answers[self.path]).encode())

        def log_message(self, format: str, *args: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def test_the_number_of_replicas_follows_demand_beside_fixed_numbers(trace: Path) -> None:
    """Uses production's autoscaler; its cost is reported as a number of replicas."""
    told = output([*QUICK, "--speed", "4", "--autoscale", "1:4", "--start-s", "5", "--ttft-target", "0.2"])

    assert "1:4 replicas" in told
    assert told.splitlines()[3].startswith("autoscale 1:4")
    with pytest.raises(SettingsError, match="MIN:MAX"):
        output([*QUICK, "--autoscale", "4:1"])
