"""What an engine says of itself in `/metrics`, as far as it is of use here. Pure: text in, numbers out.

vLLM and SGLang name things differently; whatever is missing is None, and counted as nothing known.
"""

import re
from dataclasses import dataclass

_SAMPLE = re.compile(r"^(?P<name>[a-z_]+:[a-z_]+)(?:\{(?P<labels>[^}]*)\})? (?P<value>\S+)", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')

_RUNNING = frozenset({"vllm:num_requests_running", "sglang:num_running_reqs"})
_WAITING = frozenset({"vllm:num_requests_waiting", "sglang:num_queue_reqs"})
_USAGE = frozenset({"vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "sglang:token_usage"})
_CONFIG = frozenset({"vllm:cache_config_info"})


@dataclass(slots=True, frozen=True, kw_only=True)
class Numbers:
    """One look at an engine; sums over its data-parallel ranks, where it has several."""

    running: int | None = None
    waiting: int | None = None
    kv_usage: float | None = None  #: share of its KV memory that is in use, 0 to 1; of the fullest rank
    num_blocks: int | None = None
    block_size: int | None = None


def read_numbers(metrics: str) -> Numbers:
    """What is there, in Prometheus' text form. Values that are no numbers count as missing."""
    running: list[float] = []
    waiting: list[float] = []
    usage: list[float] = []
    labels: dict[str, str] = {}
    for sample in _SAMPLE.finditer(metrics):
        name = sample["name"]
        for names, values in ((_RUNNING, running), (_WAITING, waiting), (_USAGE, usage)):
            if name in names and (value := _number(sample["value"])) is not None:
                values.append(value)
        if name in _CONFIG:
            labels = dict(_LABEL.findall(sample["labels"] or ""))
    return Numbers(
        running=int(sum(running)) if running else None,
        waiting=int(sum(waiting)) if waiting else None,
        kv_usage=min(max(usage), 1.0) if usage else None,
        num_blocks=_count(labels.get("num_gpu_blocks", "")),
        block_size=_count(labels.get("block_size", "")),
    )


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0 <= value < float("inf") else None


def _count(text: str) -> int | None:
    return int(text) if text.isdecimal() and int(text) > 0 else None
