"""Reads a tool's own report of a run into a common form and finds faults in it. Pure: parsed JSON in, values out.

Independent of processes and servers.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Report = Mapping[str, Any]

#: Lowest accepted lm-eval score. Both tasks are easy for any server that returns the demo model's tokens and log
#: probabilities; as a chat, one story in ten has no full stop.
LEAST_SCORE = 0.8


@dataclass(frozen=True, slots=True)
class Reading:
    """One run as reported by its tool; None for figures that the tool does not report."""

    requests: int
    failed: int
    output_tokens: int | None = None
    tokens_per_s: float | None = None
    cached_tokens: int | None = None
    score: float | None = None


@dataclass(frozen=True, slots=True)
class Expected:
    """The requirements of a run."""

    requests: int
    cached_tokens: bool = False  #: whether the tool must report cached tokens


def faults(reading: Reading, expected: Expected) -> list[str]:
    """Everything that is wrong with a run; empty if it is as expected."""
    found = []
    if reading.failed:
        found.append(f"{reading.failed} requests failed")
    if reading.requests != expected.requests:
        found.append(f"{reading.requests} requests instead of {expected.requests}")
    if reading.output_tokens == 0:
        found.append("no output tokens")
    if reading.tokens_per_s is not None and not reading.tokens_per_s > 0:
        found.append("no throughput")
    if expected.cached_tokens and not reading.cached_tokens:
        found.append("no cached tokens")
    if reading.score is not None and reading.score < LEAST_SCORE:
        found.append(f"a score of {reading.score:.2f}")
    return found


def vllm(report: Report) -> Reading:
    """`vllm bench serve --save-result`."""
    return Reading(report["completed"], report["failed"], report["total_output_tokens"], report["output_throughput"])


def guidellm(report: Report) -> Reading:
    """`guidellm run --output kind=json`, of one benchmark."""
    (benchmark,) = report["benchmarks"]
    metrics, totals = benchmark["metrics"], benchmark["metrics"]["request_totals"]
    cached = [each["input_metrics"]["cached_tokens"] for each in benchmark["requests"]["successful"]]
    return Reading(
        requests=totals["successful"],
        failed=totals["errored"] + totals["incomplete"],
        output_tokens=int(metrics["output_token_count"]["successful"]["total_sum"]),
        tokens_per_s=metrics["output_tokens_per_second"]["successful"]["mean"],
        cached_tokens=_sum(cached),
    )


def aiperf(report: Report) -> Reading:
    """aiperf's `profile_export_aiperf.json`, which omits figures that it did not measure."""

    def told(name: str) -> float | None:
        value: float | None = report.get(name, {}).get("avg")
        return value

    cached = told("total_usage_prompt_cache_read_tokens")
    return Reading(
        requests=int(told("request_count") or 0),
        failed=int(told("error_request_count") or 0),
        output_tokens=int(told("total_output_tokens") or 0),
        tokens_per_s=told("output_token_throughput") or 0.0,
        cached_tokens=None if cached is None else int(cached),
    )


def lm_eval(report: Report) -> Reading:
    """lm-eval's results. It exits with an error when a request fails; the score is the lowest of all tasks."""
    scores = [value for task in report["results"].values() for name, value in task.items() if _is_score(name)]
    samples = sum(task["effective"] for task in report["n-samples"].values())
    return Reading(requests=samples, failed=0, score=min(scores))


def _is_score(name: str) -> bool:
    return name.startswith(("acc,", "exact_match,"))


def _sum(counts: Sequence[int | None]) -> int | None:
    told = [count for count in counts if count is not None]
    return sum(told) if told else None


Reader = Callable[[Report], Reading]
