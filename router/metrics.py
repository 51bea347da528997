"""The router's Prometheus metrics: plain numbers, rendered on request.

`FAMILIES` has the same metrics as the table in docs/metrics.md (a test compares them). Load reports carry the replicas'
totals. A rebuilt replica starts at zero under a new epoch, but the totals here continue.
"""

import asyncio
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from sys import maxsize
from typing import Any, NamedTuple, get_args

import msgspec
from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from ..events.wire.messages import LoadReport
from .backend import ClusterView, ModelView, ReplicaView, RouterCounters
from .flow.request_state import RequestState
from .flow.stalls import StallKind
from .tenants.rate_limits import RateLimiter

#: Why a client may be disconnected: it left too much unread, or read nothing, or had too many connections.
CUT_REASONS = ("unsent", "stalled", "connections")
#: Labelled values that are rendered without a pause, at 5 to 8 µs each.
RENDERED_AT_ONCE = 100
#: The lines of a metric's help and type, which precede only its first part.
_COMMENTS = re.compile(rb"^#.*\n", re.MULTILINE)
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

#: Bucket bounds in seconds; TTFT ranges from a cached prompt on an idle GPU to a long queue on a CPU.
TTFT_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.2, 2.5, 5, 10, 20, 40, 80, 160)
ITL_BUCKETS = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.4, 0.8, 2, 5)
DURATION_BUCKETS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000)

_KINDS: dict[str, Any] = {
    "counter": CounterMetricFamily,
    "gauge": GaugeMetricFamily,
    "histogram": HistogramMetricFamily,
}
_TENANT, _MODEL, _REPLICA = ("tenant",), ("model",), ("model", "replica")


class Family(NamedTuple):
    """One metric. `field`: name of the limiter, view or counter field with its values; empty: see `_parts`.

    Prometheus appends `_total` to counter names.
    """

    name: str
    kind: str  #: a key of `_KINDS`
    labels: tuple[str, ...]
    help: str
    field: str = ""


def _families(kind: str, labels: tuple[str, ...], *rows: tuple[str, str] | tuple[str, str, str]) -> list[Family]:
    return [Family(row[0], kind, labels, *row[1:]) for row in rows]


FAMILIES = (
    *_families("counter", ("endpoint", "status"), ("homing_http_requests", "HTTP requests answered.")),
    *_families(
        "histogram",
        ("endpoint",),
        ("homing_http_request_duration_seconds", "Seconds from a request's arrival to the end of its response."),
    ),
    *_families(
        "histogram",
        _MODEL,
        ("homing_time_to_first_token_seconds", "Seconds from a request's arrival to its first token, per choice."),
        ("homing_inter_token_latency_seconds", "Seconds between consecutive token deltas of a choice."),
    ),
    *_families(
        "histogram",
        ("model", "phase"),
        ("homing_request_phase_seconds", "Seconds that a request spent in each phase."),
    ),
    *_families(
        "counter",
        _MODEL,
        ("homing_prompt_tokens", "Prompt tokens of HTTP requests."),
        ("homing_completion_tokens", "Generated tokens of HTTP requests."),
        ("homing_routing_requests", "Sequences accepted for routing.", "requests"),
        ("homing_routing_failed", "Sequences that ended with an error.", "failed"),
        ("homing_routing_cancelled", "Sequences whose client left, or whose model was replaced.", "cancelled"),
        ("homing_routing_rejected", "Sequences refused: queue full or prompt too long.", "rejected"),
        ("homing_routing_held", "Sequences that had to wait in the router on arrival.", "held"),
        ("homing_routing_continuations", "Times a sequence continued on another replica.", "continued"),
        ("homing_routing_suspected", "Times a sequence was suspected because its replica died.", "suspected"),
        ("homing_routing_blamed", "Sequences ended because a second replica died with them.", "blamed"),
        ("homing_routing_duplicate_tokens", "Tokens delivered twice by replicas and dropped.", "duplicate_tokens"),
        ("homing_routing_malformed_frames", "Replies from replicas that could not be decoded.", "malformed_frames"),
        ("homing_events_malformed", "Event messages that could not be decoded.", "malformed_events"),
        ("homing_replicas_joined", "Replicas that joined.", "replicas_joined"),
        ("homing_replicas_lost", "Replicas that were lost; those that drained are not counted.", "replicas_lost"),
        ("homing_replicas_refused", "Replicas refused for a parity mismatch.", "replicas_refused"),
        (
            "homing_refused_connections",
            "Connections to replicas that failed because of their CURVE keys.",
            "refused_connections",
        ),
        ("homing_routing_predicted_cached_tokens", "Cached tokens predicted at dispatch.", "predicted_cached_tokens"),
        ("homing_routing_delivered_cached_tokens", "Cached tokens that replicas reported.", "delivered_cached_tokens"),
        (
            "homing_routing_predicted_loaded_tokens",
            "Predicted cached tokens to be loaded from tiers.",
            "predicted_loaded_tokens",
        ),
        (
            "homing_routing_delivered_loaded_tokens",
            "Cached tokens that replicas reported as loaded from tiers.",
            "delivered_loaded_tokens",
        ),
        (
            "homing_routing_overruled",
            "Decisions not followed because the policy chose no usable replica although there was one.",
            "overruled",
        ),
        (
            "homing_routing_regret_tokens",
            "Cached tokens that the best replica had and the chosen one did not, over all decisions.",
            "regret_tokens",
        ),
        (
            "homing_warm_up_requests",
            "Requests completed to fill the caches of new replicas.",
            "warm_up_requests",
        ),
        ("homing_warm_up_tokens", "Prompt tokens that replicas computed for warm-ups.", "warm_up_tokens"),
        ("homing_warm_ups_cut", "Warm-ups ended before they were complete.", "warm_ups_cut"),
    ),
    *_families(
        "counter",
        _TENANT,
        ("homing_tenant_requests", "Accepted requests of a tenant.", "requests"),
        ("homing_tenant_prompt_tokens", "Prompt tokens of a tenant's requests.", "prompt_tokens"),
        ("homing_tenant_completion_tokens", "Generated tokens of a tenant's requests.", "generated_tokens"),
    ),
    *_families(
        "counter", ("tenant", "limit"), ("homing_tenant_refusals", "Requests refused, by the limit they reached.")
    ),
    *_families("gauge", _TENANT, ("homing_tenant_running", "Unfinished requests of a tenant.", "running")),
    *_families(
        "counter",
        (),
        ("homing_client_disconnects", "Clients that left before their response ended."),
        ("homing_streams_broken", "Streams that ended in an error event."),
        ("homing_router_restarts", "Times that `homing route` started its router again after it was killed."),
        ("homing_fields_ignored", "Unknown fields in request bodies."),
        ("homing_billing_lines_dropped", "Claude Code system prompts whose changing first line was removed."),
    ),
    *_families(
        "counter",
        ("reason",),
        ("homing_clients_cut", "Clients disconnected because they did not read or had too many connections."),
    ),
    *_families(
        "gauge",
        _REPLICA,
        ("homing_requests_running", "Requests in a replica's batch.", "running"),
        ("homing_requests_waiting", "Requests queued at a replica.", "waiting"),
        ("homing_queued_prefill_tokens", "Uncached prompt tokens not yet computed.", "queued_prefill_tokens"),
        ("homing_kv_cache_usage_ratio", "Share of KV blocks in use by requests or pinned."),
        ("homing_pinned_blocks", "Blocks kept by pins."),
        ("homing_waiting_blocks", "Free blocks that a replica's waiting requests will take."),
        ("homing_index_blocks", "Blocks of a replica in the router's index.", "indexed_blocks"),
        ("homing_index_dropped_blocks", "Blocks that an engine announced beyond what it can hold.", "dropped_blocks"),
        ("homing_index_approximate", "1: no events; prompts sent there count as cached.", "approximate"),
    ),
    *_families(
        "gauge",
        _MODEL,
        ("homing_router_requests_held", "Requests held by the router.", "waiting"),
        ("homing_router_held_tokens", "KV tokens that the requests held by the router will take.", "waiting_tokens"),
        ("homing_router_requests_in_flight", "Requests sent to replicas and not ended yet.", "in_flight"),
        ("homing_replicas_serving", "Replicas of a model that accept requests.", "serving"),
    ),
    *_families(
        "gauge",
        (*_REPLICA, "state"),
        ("homing_replica_state", "1 for the current state of a replica."),
        (
            "homing_kv_blocks",
            "Blocks by state: free, cached (idle, may be evicted) or referenced (in use or pinned).",
        ),
    ),
    *_families(
        "gauge",
        (*_REPLICA, "tenant"),
        ("homing_tenant_blocks", "Blocks on a replica that a tenant's requests were the first to need."),
    ),
    *_families(
        "counter",
        _REPLICA,
        ("homing_prefix_cache_queries_tokens", "Prompt tokens looked up in prefix caches.", "query_tokens"),
        ("homing_prefix_cache_hits_tokens", "Prompt tokens found in prefix caches.", "hit_tokens"),
        (
            "homing_prefix_cache_partial_hits_tokens",
            "Hit tokens copied from a block whose later tokens differ.",
            "partial_hit_tokens",
        ),
        ("homing_prefix_cache_evicted_tokens", "Cached tokens evicted.", "evicted_tokens"),
        ("homing_prefix_cache_collisions", "Hits refused because the tokens differed.", "collisions"),
        ("homing_preemptions", "Running requests preempted for lack of blocks.", "preemptions"),
        ("homing_generated_tokens", "Tokens that replicas sampled.", "generated_tokens"),
        ("homing_prefilled_tokens", "Prompt tokens that replicas computed, warm-ups included.", "prefilled_tokens"),
        ("homing_pins_set", "Prefixes pinned, renewals included.", "pins_set"),
        ("homing_pins_refused", "Pins refused because they exceeded a budget.", "pins_refused"),
        ("homing_pins_expired", "Pins that reached their time limit.", "pins_expired"),
        ("homing_pins_broken", "Pins ended early because a request needed the blocks.", "pins_broken"),
        ("homing_tier_host_hit_tokens", "Hit tokens loaded from host memory.", "host_hit_tokens"),
        ("homing_tier_disk_hit_tokens", "Hit tokens loaded from disk.", "disk_hit_tokens"),
        ("homing_tier_demoted_tokens", "Evicted tokens kept in a tier.", "demoted_tokens"),
        ("homing_tier_promoted_tokens", "Tokens loaded from a tier.", "promoted_tokens"),
        ("homing_tier_evicted_tokens", "Tokens evicted from the last tier that held them.", "tier_evicted_tokens"),
        ("homing_events_gaps", "Gaps detected in event streams."),
    ),
    *_families(
        "counter",
        ("model", "result"),
        ("homing_predictions", "Predictions of cached tokens, by result."),
        ("homing_load_predictions", "Predictions of the blocks to load from each tier, by result."),
    ),
    *_families(
        "counter",
        (*_REPLICA, "kind"),
        ("homing_tier_failures", "Blocks that a tier could not keep or give back, by kind of failure."),
    ),
    *_families(
        "gauge", (*_REPLICA, "medium", "state"), ("homing_tier_blocks", "Blocks of a tier by state: free or used.")
    ),
    *_families(
        "counter", ("model", "kind"), ("homing_stalls", "Times that requests stood still although a replica was able.")
    ),
    *_families("counter", ("model", "outcome"), ("homing_routing_outcomes", "Sequences that ended, by outcome.")),
)


class Histogram:
    """A histogram in a plain list, as the client library's locks cost 2 us per value."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    @property
    def counts(self) -> list[int]:
        """Number of observed values by bucket, and beyond the last."""
        return self._counts

    def sample(self) -> tuple[list[tuple[str, float]], float]:
        """The cumulative buckets in Prometheus' form, and the sum."""
        names = [*(str(float(bound)) for bound in self._bounds), "+Inf"]
        return list(zip(names, accumulate(self._counts), strict=True)), self._sum


class ModelMetrics:
    """Records one model's metrics; the `Observer` of the model's services."""

    def __init__(self) -> None:
        self.ttft = Histogram(TTFT_BUCKETS)
        self.itl = Histogram(ITL_BUCKETS)
        #: Argument: seconds from a request's arrival to a choice's first token.
        self.first_token = self.ttft.observe
        #: Argument: seconds between two token deltas of a choice.
        self.inter_token = self.itl.observe
        self.phases: dict[str, Histogram] = {}  #: by phase
        self.prompt_tokens = 0
        self.completion_tokens = 0
        self.outcomes = dict.fromkeys(("finished", "failed", "cancelled"), 0)
        # By replica:
        self.reports: dict[str, LoadReport] = {}  #: the last report
        self.earlier: dict[str, Counter[str]] = {}  #: totals of earlier epochs
        self.gaps: Counter[str] = Counter()

    def tokens(self, prompt: int, completion: int) -> None:
        """Count the tokens of an HTTP request at its end."""
        self.prompt_tokens += prompt
        self.completion_tokens += completion

    def phase(self, name: str, seconds: float) -> None:
        """Record the seconds that a request spent in a phase, at its end."""
        histogram = self.phases.get(name)
        if histogram is None:
            histogram = self.phases[name] = Histogram(TTFT_BUCKETS)
        histogram.observe(seconds)

    def request_finished(self, request: RequestState) -> None:
        assert request.outcome is not None, f"request {request.request_id} is not over"
        self.outcomes[request.outcome] += 1

    def load_reported(self, replica_id: str, report: LoadReport) -> None:
        """See `Observer`. Called very often, so rendering does most of the work. Reports arrive in order."""
        last = self.reports.get(replica_id)
        if last is not None and last.epoch != report.epoch:
            totals = msgspec.structs.asdict(last.counters)
            del totals["tier_failures"]  # by kind, not one total
            self.earlier.setdefault(replica_id, Counter()).update(totals)
        self.reports[replica_id] = report

    def events_gap(self, replica_id: str) -> None:
        self.gaps[replica_id] += 1


#: A metric's label values, in the order of its label names.
Labels = tuple[str, ...]
#: The samples of several metrics, by the metric's name.
Samples = dict[str, Mapping[Labels, float | Histogram]]


class RouterMetrics(Collector):
    """All metrics of one router process. `render` may be called from any thread, other methods from a single one."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(self)
        self._process = ProcessCollector(registry=self.registry)
        self._requests: Counter[tuple[str, int]] = Counter()  #: HTTP requests by endpoint and status
        self._durations: dict[str, Histogram] = {}
        self._models: dict[str, ModelMetrics] = {}
        self._limiters: Sequence[RateLimiter] = ()
        self.refusals: Counter[tuple[str, str]] = Counter()  #: refused requests by tenant and limit, or error
        self.streams_broken = 0  #: streams that ended in an error event
        self.restarts = 0  #: workers of `homing route` that were killed before this one
        self._disconnects = self._billing_lines = self._fields_ignored = 0
        self._cut: Counter[Labels] = Counter({(reason,): 0 for reason in CUT_REASONS})
        self._view: ClusterView | None = None
        self._seen: dict[str, RouterCounters] = {}  #: by model, as of the last view
        self._totals: dict[str, Counter[str]] = {}  #: by model: the fields of `RouterCounters`

    def of(self, model: str) -> ModelMetrics:
        """The recorder for this model, created if there is none."""
        found = self._models.get(model)
        if found is None:
            found = self._models[model] = ModelMetrics()
        return found

    def watch_tenants(self, limiters: Sequence[RateLimiter]) -> None:
        """Export these limiters: only those of the keys file's tenants, so that unknown callers cannot add labels."""
        self._limiters = limiters

    def http_request(self, endpoint: str, status: int, duration_s: float) -> None:
        """Count an HTTP request at its end; status 499 means that its client left."""
        self._requests[endpoint, status] += 1
        histogram = self._durations.get(endpoint)
        if histogram is None:
            histogram = self._durations[endpoint] = Histogram(DURATION_BUCKETS)
        histogram.observe(duration_s)

    def responses(self) -> Counter[int]:
        """Requests of clients to APIs of models that have ended, by status; no polls for metrics, health and views."""
        found: Counter[int] = Counter()
        for (endpoint, status), count in self._requests.items():
            if endpoint.startswith(("/v1/", "/inference/v1/generate")) and not endpoint.startswith("/v1/models"):
                found[status] += count
        return found

    def refused(self, tenant: str, limit: str) -> None:
        """Count a request that was refused. `tenant`: named in the keys file, or `others`."""
        self.refusals[tenant, limit] += 1

    def first_tokens(self) -> list[int]:
        """Number of first tokens of all models by bucket of `TTFT_BUCKETS`, and beyond."""
        return [sum(counts) for counts in zip(*(each.ttft.counts for each in self._models.values()), strict=True)]

    def client_cut(self, reason: str) -> None:
        """Count a client that the server disconnected."""
        self._cut[reason,] += 1

    def client_gone(self) -> None:
        """Count a client that left before its response ended."""
        self._disconnects += 1

    def fields_ignored(self, count: int) -> None:
        self._fields_ignored += count

    def billing_line_dropped(self) -> None:
        self._billing_lines += 1

    def stream_broken(self) -> None:
        """Count a stream that ended in an error event."""
        self.streams_broken += 1

    def observe_cluster(self, view: ClusterView) -> None:
        """Update gauges and totals from the routing side; call before each rendering."""
        self._view = view
        for model in view.models:
            seen = msgspec.structs.asdict(self._seen.get(model.name, RouterCounters()))
            totals = self._totals.setdefault(model.name, Counter())
            for field, value in msgspec.structs.asdict(model.counters).items():
                totals[field] += max(0, value - seen[field])  # a model that is removed and added again restarts at 0
            self._seen[model.name] = msgspec.structs.replace(model.counters)

    def collect(self) -> Iterator[Metric]:
        """All metrics in the order of `FAMILIES`; see `prometheus_client.registry.Collector`."""
        return (metric for metric, _ in self._parts(maxsize))

    def _parts(self, most: int) -> Iterator[tuple[Metric, bool]]:
        """The metrics in parts of up to `most` labelled values, and whether each part is its metric's first.

        Totals are those of all models and replicas ever seen, gauges those of the current view.
        """
        all_models, replicas = (self._view.models, self._view.replicas) if self._view is not None else ((), ())
        routed: dict[Labels, ModelView] = {(each.name,): each for each in all_models}
        views: dict[Labels, ReplicaView] = {(each.model, each.replica_id): each for each in replicas}
        made = {**self._request_samples(), **self._replica_samples(views)}
        for family in FAMILIES:
            found = self._copied(family, routed, views) if family.field else made[family.name]
            samples = list(found.items())
            for start in range(0, max(1, len(samples)), most):
                metric = _KINDS[family.kind](family.name, family.help, labels=family.labels)
                for labels, value in samples[start : start + most]:
                    metric.add_metric(labels, *(value.sample() if isinstance(value, Histogram) else (value,)))
                yield metric, not start

    def _request_samples(self) -> Samples:
        models = self._models.items()
        return {
            "homing_http_requests": {(path, str(status)): count for (path, status), count in self._requests.items()},
            "homing_http_request_duration_seconds": {(path,): each for path, each in self._durations.items()},
            "homing_time_to_first_token_seconds": {(name,): model.ttft for name, model in models},
            "homing_inter_token_latency_seconds": {(name,): model.itl for name, model in models},
            "homing_request_phase_seconds": {
                (name, phase): each for name, model in models for phase, each in model.phases.items()
            },
            "homing_prompt_tokens": {(name,): model.prompt_tokens for name, model in models},
            "homing_completion_tokens": {(name,): model.completion_tokens for name, model in models},
            "homing_routing_outcomes": {
                (name, outcome): count for name, model in models for outcome, count in model.outcomes.items()
            },
            "homing_client_disconnects": {(): self._disconnects},
            "homing_clients_cut": self._cut,
            "homing_streams_broken": {(): self.streams_broken},
            "homing_router_restarts": {(): self.restarts},
            "homing_fields_ignored": {(): self._fields_ignored},
            "homing_billing_lines_dropped": {(): self._billing_lines},
            "homing_tenant_refusals": {
                (each.tenant, limit): count for each in self._limiters for limit, count in each.refusals.items()
            },
            "homing_predictions": {
                (name, result): totals[f"predictions_{result}"]
                for name, totals in self._totals.items()
                for result in ("exact", "low", "high")
            },
            "homing_load_predictions": {
                (name, result): totals[f"loads_{result}"]
                for name, totals in self._totals.items()
                for result in ("exact", "wrong")
            },
            "homing_stalls": {
                (name, kind): totals[f"stalls_{kind}"]
                for name, totals in self._totals.items()
                for kind in get_args(StallKind)
            },
        }

    def _replica_samples(self, views: Mapping[Labels, ReplicaView]) -> Samples:
        present = {
            (name, replica): report
            for name, model in self._models.items()
            for replica, report in model.reports.items()
            if (name, replica) in views
        }
        return {
            "homing_kv_cache_usage_ratio": {
                key: 1 - report.free_blocks / max(report.total_blocks, 1) for key, report in present.items()
            },
            "homing_kv_blocks": {
                (*key, state): count
                for key, report in present.items()
                for state, count in (
                    ("free", report.free_blocks - report.cached_free_blocks),
                    ("cached", report.cached_free_blocks),
                    ("referenced", report.total_blocks - report.free_blocks),
                )
            },
            "homing_tier_blocks": {
                (*key, tier.medium, state): count
                for key, report in present.items()
                for tier in report.tiers
                for state, count in (("free", tier.total_blocks - tier.used_blocks), ("used", tier.used_blocks))
            },
            "homing_tier_failures": {
                (*key, kind): count
                for key, report in present.items()
                for kind, count in report.counters.tier_failures.items()
            },
            "homing_waiting_blocks": {
                key: each.waiting_blocks for key, each in views.items() if each.waiting_blocks is not None
            },
            "homing_tenant_blocks": self._tenant_blocks(views),
            "homing_pinned_blocks": {key: report.pinned_blocks for key, report in present.items()},
            "homing_replica_state": {(*key, each.state): 1 for key, each in views.items()},
            # From 0 on: `rate` and `increase` do not see what a series begins with.
            "homing_events_gaps": dict.fromkeys(views, 0)
            | {(name, replica): count for name, model in self._models.items() for replica, count in model.gaps.items()},
        }

    def _tenant_blocks(self, views: Mapping[Labels, ReplicaView]) -> Mapping[Labels, float]:
        """By tenant of the keys file; the others together, so that unknown callers cannot add labels."""
        named, samples = {each.tenant for each in self._limiters}, Counter[Labels]()
        for key, view in views.items() if named else ():
            for tenant, blocks in view.tenant_blocks.items():
                samples[*key, tenant if tenant in named else "others"] += blocks
        return samples

    def _copied(
        self, family: Family, routed: Mapping[Labels, ModelView], views: Mapping[Labels, ReplicaView]
    ) -> Mapping[Labels, float]:
        """The samples of a metric with a `field`."""
        field = family.field
        if family.labels == _TENANT:
            return {(each.tenant,): getattr(each, field) for each in self._limiters}
        if family.kind == "gauge":
            shown_by: Mapping[Labels, ModelView | ReplicaView] = routed if family.labels == _MODEL else views
            return {key: getattr(each, field) for key, each in shown_by.items()}
        if family.labels == _MODEL:
            return {(model,): totals[field] for model, totals in self._totals.items()}
        return {
            (model, replica): getattr(report.counters, field) + about.earlier.get(replica, Counter())[field]
            for model, about in self._models.items()
            for replica, report in about.reports.items()
        }

    def render(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self.registry)

    async def render_in_slices(self) -> bytes:
        """The same without delaying streams in large clusters: other work is done between two parts of the text."""
        parts: list[bytes] = []
        lines = 0  # since the last pause: one after each metric would take seconds on a busy loop
        for metric, first in self._parts(RENDERED_AT_ONCE):
            text = generate_latest(_Only(metric))
            parts.append(text if first else _COMMENTS.sub(b"", text))
            lines += text.count(b"\n")
            if lines >= RENDERED_AT_ONCE:
                lines = 0
                await asyncio.sleep(0)
        return b"".join([*parts, generate_latest(self._process)])


class _Only(Collector):
    """One metric."""

    def __init__(self, metric: Metric) -> None:
        self._metric = metric

    def collect(self) -> Iterator[Metric]:
        yield self._metric
