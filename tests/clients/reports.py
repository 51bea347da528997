"""What a tool's own report says of a run, in one shape, and what is wrong with it. Pure: parsed JSON in, values out.

Knows no process and no server.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Report = Mapping[str, Any]

#: Of lm-eval's scores. Both tasks are easy for any server that answers with the demo model's tokens and their chances;
#: as a chat, one story in ten does without a full stop.
LEAST_SCORE = 0.8


@dataclass(frozen=True, slots=True)
class Reading:
    """One run as its tool saw it; None: the tool does not tell."""

    requests: int
    failed: int
    output_tokens: int | None = None
    tokens_per_s: float | None = None
    cached_tokens: int | None = None
    score: float | None = None


@dataclass(frozen=True, slots=True)
class Expected:
    """What a run must show."""

    requests: int
    cached_tokens: bool = False  #: whether the tool must have seen tokens from a cache


def faults(reading: Reading, expected: Expected) -> list[str]:
    """Everything that a run lacks; empty: it is as it should be."""
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
    """aiperf's `profile_export_aiperf.json`; what it did not see is absent."""

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
    """lm-eval's results; it ends with an error when a request fails, and tells the lowest score of all tasks here."""
    scores = [value for task in report["results"].values() for name, value in task.items() if _is_score(name)]
    samples = sum(task["effective"] for task in report["n-samples"].values())
    return Reading(requests=samples, failed=0, score=min(scores))


def _is_score(name: str) -> bool:
    return name.startswith(("acc,", "exact_match,"))


def _sum(counts: Sequence[int | None]) -> int | None:
    told = [count for count in counts if count is not None]
    return sum(told) if told else None


Reader = Callable[[Report], Reading]
