"""Estimates an external engine's load and speed, in the form of our own replicas' load reports.

Pure: requests, times and texts in, reports out. An engine publishes only a few numbers in `/metrics`, which are read
periodically; the rest is derived from the requests sent to it and their answers. Requests without a first token are
counted by the router itself (router/routing/replica_load.py).
"""

import re
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from math import inf
from statistics import median

import msgspec

from ....events.load_report import PrefillSums, PrefillWork
from ....events.wire.messages import CacheCounters, LoadReport
from ....replica.messages import ReplicaDescription
from .request import ExternalRequest

_RUNNING = ("vllm:num_requests_running", "sglang:num_running_reqs")
_WAITING = ("vllm:num_requests_waiting", "sglang:num_queue_reqs")
_USAGE = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "sglang:token_usage")
_CONFIG = "vllm:cache_config_info"
_PAGES, _PAGE_SIZE = "sglang:num_pages", "sglang:page_size"

#: One pattern for each metric: an engine's thousand lines are searched each second. Bounded, as are the samples read,
#: because an engine could make the search take minutes.
_SAMPLES = {
    name: re.compile(rf"{name}(?:\{{([^}}\n]{{0,4096}})\}})? (\S{{1,64}})")
    for name in (*_RUNNING, *_WAITING, *_USAGE, _CONFIG, _PAGES, _PAGE_SIZE)
}
MAX_SAMPLES = 1024
#: Larger numbers of requests, blocks or tokens per block are none, nor are more ranks.
MAX_COUNT = 1 << 31
MAX_RANKS = 256
_LABEL = re.compile(r'(\w+)="([^"]*)"')

#: Block count assumed for an engine that does not report one; limits the index, not the engine.
UNKNOWN_BLOCKS = 1 << 20
#: Rates before the first observation; low enough that no engine is preferred for being unknown. Not measured.
UNKNOWN_PREFILL_TOKENS_PER_S = 2000.0
UNKNOWN_DECODE_STEP_S = 0.03
#: With fewer prompt tokens, the time to the first token measures only a step's fixed cost and the network. Not tuned.
MIN_PREFILL_TOKENS = 64
#: Prefill speed is the median over this many measurements, so that an engine that compiles something for seconds (seen
#: with vLLM 0.32: 4 s for the first request with logprobs) does not look slow for long. Not tuned.
PREFILL_OBSERVATIONS = 15
#: A measurement ends after this many prompts even if others wait, which are partly computed by then. Not tuned.
MAX_PROMPTS = 8
#: Lower bound of measured times: nothing that comes over a network is faster.
MIN_SECONDS = 1e-6
#: Decode speed is the median over this many gaps between tokens: some gaps contain another client's prefill and last
#: seconds. The first entries are guesses, so that a single such gap has little effect. Not tuned.
DECODE_OBSERVATIONS = 31
DECODE_GUESSES = 2


@dataclass(slots=True, frozen=True, kw_only=True)
class EngineMetrics:
    """Values from an engine's `/metrics`, summed over its data-parallel ranks. None: not reported."""

    running: int | None = None
    waiting: int | None = None
    kv_usage: float | None = None  #: share of KV memory in use, 0 to 1; that of the fullest rank
    num_blocks: int | None = None
    block_size: int | None = None


@dataclass(slots=True)
class EngineRates:
    """One engine's rates, learned from the arrival times of its tokens.

    They include network delay and the engine's own queue, as clients experience them. Our own replicas measure their
    steps themselves (replica/engine/throughput.py).
    """

    prefill_tokens_per_s: float = UNKNOWN_PREFILL_TOKENS_PER_S
    _seconds_per_token: deque[float] = field(default_factory=lambda: deque(maxlen=PREFILL_OBSERVATIONS))
    _steps_s: deque[float] = field(
        default_factory=lambda: deque([UNKNOWN_DECODE_STEP_S] * DECODE_GUESSES, maxlen=DECODE_OBSERVATIONS)
    )

    @property
    def decode_step_s(self) -> float:
        return median(self._steps_s)

    def observe_prefill(self, tokens: int, seconds: float) -> None:
        """Record that the first tokens of prompts with `tokens` uncached tokens took `seconds` to arrive."""
        if tokens < MIN_PREFILL_TOKENS or seconds <= 0:
            return
        self._seconds_per_token.append(max(seconds, MIN_SECONDS) / tokens)
        self.prefill_tokens_per_s = 1 / median(self._seconds_per_token)

    def observe_decode(self, tokens: int, seconds: float) -> None:
        """Record that `tokens` tokens of one request arrived `seconds` after the previous ones."""
        if tokens < 1 or seconds <= 0:
            return
        self._steps_s.append(max(seconds, MIN_SECONDS) / tokens)


@dataclass(slots=True)
class _Prefills:
    """One measurement over consecutive prompts, during which the engine always had some of ours to prefill.

    Prompts cannot be timed separately: one that waits behind another, or shares its steps, arrived when part of the
    other was already computed.
    """

    since: float
    prompts: int = 0
    tokens: int = 0  #: uncached tokens of these prompts


#: Engines that publish their load do so while they work: after this time in seconds, the metrics are newer.
FRESH_S = 2.0


class ExternalLoad:
    """Tracks the load of one engine."""

    def __init__(self, description: ReplicaDescription) -> None:
        self.description = description
        self.rates = EngineRates()
        self._prefilling: _Prefills | None = None  #: None: discarded, as a request ended before its first token
        #: The measurements, reported like a replica's steps: the router fits all its engines' together. One engine's
        #: alone are few, so routing would react to every moment in which the engine shares its machine.
        self._measured = PrefillSums()
        self._metrics = EngineMetrics()
        self._other_requests = 0  #: requests of the engine's other clients
        self._used: dict[int, int] = {}  #: our requests' blocks that the last reported KV usage includes
        self._freed = 0  #: of these, blocks that were freed since, or that the router counts itself
        self._waiting: dict[int, ExternalRequest] = {}
        self._running: dict[int, ExternalRequest] = {}
        self._ended: dict[int, ExternalRequest] = {}  #: requests that ended since the last metrics query was sent
        self._last_token_at = 0.0
        self._started_at = -inf  #: when a request's first token last arrived
        self._published_at = -inf  #: when the engine last published its load by itself
        self._reports = 0
        self._counters = CacheCounters()

    def begin(self, metrics: EngineMetrics) -> None:
        """Start over with an engine that has just joined and runs none of our requests."""
        self._waiting.clear()
        self._running.clear()
        self._ended.clear()
        self.update(metrics)
        self.description = msgspec.structs.replace(
            self.description,
            num_blocks=metrics.num_blocks or UNKNOWN_BLOCKS,
            prefill_tokens_per_s=self.rates.prefill_tokens_per_s,
            decode_step_s=self.rates.decode_step_s,
        )

    def query_started(self) -> None:
        """Note that metrics are being queried: the answer may still count requests that end before it arrives."""
        self._ended.clear()

    def update(self, metrics: EngineMetrics) -> None:
        self._metrics = metrics
        reported = (metrics.running or 0) + (metrics.waiting or 0)
        self._other_requests = max(0, reported - len(self._waiting) - len(self._running) - len(self._ended))
        begun = islice(self._waiting.values(), max(0, (metrics.running or 0) - len(self._running) - len(self._ended)))
        counted_twice = {each.request_id: self._blocks(each) for each in begun}
        self._freed = sum(counted_twice.values()) + sum(map(self._blocks, self._ended.values()))
        self._used = {each.request_id: self._blocks(each) for each in self._running.values()} | counted_twice

    def published(self, running: int, waiting: int, kv_usage: float | None, now: float) -> None:
        """Note the load that the engine has published by itself, which is newer than that in its metrics."""
        self._published_at = now
        self.update(replace(self._metrics, running=running, waiting=waiting, kv_usage=kv_usage))
        self._ended.clear()

    def is_published(self, now: float) -> bool:
        """Whether the engine has published its load just now, so that its metrics need not be asked for."""
        return now - self._published_at < FRESH_S

    def sent(self, request: ExternalRequest) -> None:
        if not self._waiting:
            self._prefilling = _Prefills(request.sent_at)
        self._waiting[request.request_id] = request

    def tokens_arrived(self, request: ExternalRequest, now: float) -> bool:
        """Record that tokens of the request arrived. Returns whether they are its first."""
        before, request.last_token_at = request.last_token_at, now
        self._last_token_at = now
        if request.request_id in self._running:
            if not self._waiting and self._started_at <= before:  # else a prefill was part of these steps
                self.rates.observe_decode(1, now - before)
            return False
        self._started_at = now
        self._waiting.pop(request.request_id, None)
        self._measure(request, now)
        self._running[request.request_id] = request
        self._freed -= self._used.get(request.request_id, 0)
        return True

    def _measure(self, started: ExternalRequest, now: float) -> None:
        if (done := self._prefilling) is not None:
            done.prompts += 1
            done.tokens += started.uncached_tokens
            if self._waiting and done.prompts < MAX_PROMPTS:
                return
            self.rates.observe_prefill(done.tokens, now - done.since)
            self._measured.observe(PrefillWork(done.prompts, done.tokens, 0.0, 0.0), now - done.since)
        self._prefilling = _Prefills(now)

    def ended(self, request: ExternalRequest) -> None:
        """Record that the request has left the engine. Idempotent."""
        if self._waiting.pop(request.request_id, None) is not None:
            self._prefilling = None
        if self._running.pop(request.request_id, None) is not None:
            self._ended[request.request_id] = request
            self._freed += self._used.pop(request.request_id, 0)
            self._count(request)

    @property
    def idle(self) -> bool:
        """Whether the engine had nothing to do when it was last queried, and was sent nothing since."""
        return not (self._waiting or self._running or self._other_requests or self._ended or self._used)

    def silent_s(self, now: float) -> float:
        return now - self._last_token_at

    def report(self, now: float, *, cached_blocks: int) -> LoadReport:
        self._reports += 1
        total = self.description.num_blocks
        # Usage is up to a second old: without what ended since, a small cache would look full and be avoided.
        free = min(total, total - round(total * (self._metrics.kv_usage or 0.0)) + self._freed)
        return LoadReport(
            epoch=self.description.epoch,
            step=self._reports,
            ts=now,
            running=len(self._running) + self._other_requests,
            waiting=0,
            queued_prefill_tokens=0,
            decode_context_tokens=sum(request.context_tokens for request in self._running.values()),
            free_blocks=free,
            cached_free_blocks=max(0, min(free, cached_blocks - (total - free))),
            total_blocks=total,
            prefill_tokens_per_s=self.rates.prefill_tokens_per_s,
            decode_step_s=self.rates.decode_step_s,
            counters=self._counters,
            prefill_sums=self._measured.values,
        )

    def _blocks(self, request: ExternalRequest) -> int:
        return -(-request.context_tokens // self.description.parity.block_size)

    def _count(self, request: ExternalRequest) -> None:
        asked, hit = len(request.generate.token_ids) // 4, request.cached_tokens or 0
        before, counts = self._counters, not request.generate.counted
        self._counters = msgspec.structs.replace(
            before,
            query_tokens=before.query_tokens + asked * counts,
            hit_tokens=before.hit_tokens + hit * counts,
            generated_tokens=before.generated_tokens + request.generated,
            prefilled_tokens=before.prefilled_tokens + asked - hit,
        )


def metric_ranks(metrics: str) -> tuple[int, ...]:
    """The data-parallel ranks in the labels of vLLM's metrics."""
    found = {labels.get("engine", "") for name in _RUNNING for labels, _ in _samples(metrics, name)}
    ranks = sorted(int(rank) for rank in found if rank.isdecimal() and len(rank) < len(str(MAX_RANKS)) + 1)
    return tuple(rank for rank in ranks if rank < MAX_RANKS)


def read_metrics(metrics: str, rank: int | None = None) -> EngineMetrics:
    """Parse Prometheus text with vLLM's or SGLang's metric names. Values that are not numbers count as missing.

    `rank`: only this data-parallel rank; None: all ranks together.
    """

    family = "vllm:" if "vllm:" in metrics else "sglang:"

    def values(*names: str) -> list[float]:
        found = [sample for name in names if name.startswith(family) for sample in _samples(metrics, name)]
        numbers = [_number(text) for labels, text in found if _is_of(labels, rank)]
        return [number for number in numbers if number is not None]

    configs = _samples(metrics, _CONFIG) if family == "vllm:" else ()
    config = next((labels for labels, _ in configs if _is_of(labels, rank)), {})
    running, waiting, usage = values(*_RUNNING), values(*_WAITING), values(*_USAGE)
    return EngineMetrics(
        running=int(sum(running)) if running else None,
        waiting=int(sum(waiting)) if waiting else None,
        kv_usage=min(max(usage), 1.0) if usage else None,
        num_blocks=_count(config.get("num_gpu_blocks", "")) or int(sum(values(_PAGES))) or None,
        block_size=_count(config.get("block_size", "")) or int(max(values(_PAGE_SIZE), default=0)) or None,
    )


def _samples(metrics: str, name: str) -> Iterator[tuple[dict[str, str], str]]:
    """Labels and value of each sample of one metric."""
    for start in islice(_lines(metrics, name), MAX_SAMPLES):
        if found := _SAMPLES[name].match(metrics, start):
            yield dict(_LABEL.findall(found[1] or "")), found[2]


def _lines(text: str, beginning: str) -> Iterator[int]:
    """Where the lines start that begin with these words."""
    if text.startswith(beginning):
        yield 0
    at = text.find(f"\n{beginning}")
    while at >= 0:
        yield at + 1
        at = text.find(f"\n{beginning}", at + 1)


def _is_of(labels: Mapping[str, str], rank: int | None) -> bool:
    """Whether a sample is of this data-parallel rank; None, or a sample without a rank, is of all."""
    return rank is None or labels.get("engine", labels.get("dp_rank", str(rank))) == str(rank)


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0 <= value <= MAX_COUNT else None


def _count(text: str) -> int | None:
    return int(text) if text.isdecimal() and len(text) < len(str(MAX_COUNT)) and int(text) > 0 else None
