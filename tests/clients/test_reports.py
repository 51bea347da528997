"""Checks of tools' reports: each fault of a run is named, and reports with fewer figures can be read, too."""

import json
from pathlib import Path

import pytest

from . import reports
from .reports import Expected, Reading, faults
from .runs import RUNS, TOOLS, TRACE_REQUESTS

HERE = Path(__file__).resolve().parent
GOOD = Reading(requests=20, failed=0, output_tokens=320, tokens_per_s=80.0, cached_tokens=64, score=1.0)


def test_a_run_as_expected_has_no_faults() -> None:
    """A good run must not make the script fail."""
    assert faults(GOOD, Expected(20, cached_tokens=True)) == []


@pytest.mark.parametrize(
    ("reading", "fault"),
    [
        (Reading(20, failed=2), "2 requests failed"),
        (Reading(19, failed=0), "19 requests instead of 20"),
        (Reading(20, failed=0, output_tokens=0), "no output tokens"),
        (Reading(20, failed=0, tokens_per_s=0.0), "no throughput"),
        (Reading(20, failed=0, score=0.5), "a score of 0.50"),
    ],
)
def test_what_a_run_lacks_is_named(reading: Reading, fault: str) -> None:
    """Tools exit with 0 even if requests failed."""
    assert faults(reading, Expected(20)) == [fault]


@pytest.mark.parametrize("cached", [None, 0])
def test_missing_cached_tokens_are_a_fault_only_where_the_tool_reads_them(cached: int | None) -> None:
    """`vllm bench serve` has no such figure."""
    reading = Reading(20, failed=0, cached_tokens=cached)

    assert faults(reading, Expected(20)) == []
    assert faults(reading, Expected(20, cached_tokens=True)) == ["no cached tokens"]


def test_aiperfs_absent_figures_count_as_none_seen() -> None:
    """aiperf omits figures without a value, such as the error count when there were no errors."""
    report = {"request_count": {"unit": "requests", "avg": 20.0}, "total_output_tokens": {"avg": 320.0}}

    reading = reports.aiperf(report)

    assert reading == Reading(20, failed=0, output_tokens=320, tokens_per_s=0.0, cached_tokens=None)


def test_lm_evals_lowest_score_counts() -> None:
    """A working task must not hide a failing one."""
    report = {
        "results": {"generate": {"exact_match,sentence": 0.9}, "choice": {"acc,none": 1.0, "acc_stderr,none": 0.0}},
        "n-samples": {"generate": {"effective": 10}, "choice": {"effective": 10}},
    }

    assert reports.lm_eval(report) == Reading(20, failed=0, score=0.9)


def test_every_run_names_a_tool_that_has_its_requirements() -> None:
    """Without pinned requirements the tool could change from one day to the next."""
    named = {path.stem for path in (HERE / "requirements").glob("*.txt")}

    assert {run.tool for run in RUNS} == set(TOOLS) == named


def test_a_turn_of_the_trace_begins_with_the_whole_blocks_of_the_turn_before() -> None:
    """Otherwise caches would have nothing to find, and the trace runs could not require cached tokens."""
    rows = [json.loads(line) for line in (HERE / "trace.jsonl").read_text().splitlines()]
    whole = [tuple(row["hash_ids"][:-1]) for row in rows]

    later_turns = [ids for ids in whole if len(ids) > 2]

    assert len(rows) == TRACE_REQUESTS
    assert all(ids[:-1] in whole for ids in later_turns)


def test_an_id_of_the_trace_stands_for_one_length() -> None:
    """A prompt's last block is shorter than 512 tokens, so no other block may have its id; aiperf rejects that."""
    rows = [json.loads(line) for line in (HERE / "trace.jsonl").read_text().splitlines()]
    whole = {block for row in rows for block in row["hash_ids"][:-1]}
    tails = [row["hash_ids"][-1] for row in rows]

    assert len(set(tails)) == len(tails)
    assert whole.isdisjoint(tails)
    assert all(512 * (len(row["hash_ids"]) - 1) < row["input_length"] <= 512 * len(row["hash_ids"]) for row in rows)
