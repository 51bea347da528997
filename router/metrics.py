"""Prometheus metrics of the router: one method for each thing to record, on a registry of their own.

Wraps what happens; no core imports it. Names are those of docs/metrics.md (a test holds the table). Replicas' totals
come with their load reports; a rebuilt replica starts at zero under a new epoch, and the counters here go on.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Gauge, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from ..events.messages import CacheCounters, LoadReport
from .backend import ClusterView, FinishedRequest, RouterCounters
from .meter import Meter

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

#: Seconds. From a cached prompt on a quiet GPU to a long queue on a CPU.
TTFT_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.2, 2.5, 5, 10, 20, 40, 80, 160)
ITL_BUCKETS = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.4, 0.8, 2, 5)
DURATION_BUCKETS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000)

#: Replica counters that `LoadReport.counters` carries: field, metric, help.
_CACHE_COUNTERS = (
    ("query_tokens", "homing_prefix_cache_queries_tokens", "Prompt tokens looked up in prefix caches."),
    ("hit_tokens", "homing_prefix_cache_hits_tokens", "Prompt tokens found there."),
    (
        "partial_hit_tokens",
        "homing_prefix_cache_partial_hits_tokens",
        "Of those found, tokens copied out of a block that then differs.",
    ),
    ("evicted_tokens", "homing_prefix_cache_evicted_tokens", "Cached tokens given up for room."),
    ("collisions", "homing_prefix_cache_collisions", "Hits refused because the tokens differed."),
    ("preemptions", "homing_preemptions", "Running requests put back for lack of blocks."),
    ("generated_tokens", "homing_generated_tokens", "Tokens that replicas sampled."),
    ("prefilled_tokens", "homing_prefilled_tokens", "Prompt tokens that replicas computed."),
    ("pins_set", "homing_pins_set", "Prefixes pinned, renewals included."),
    ("pins_refused", "homing_pins_refused", "Pins refused because they exceeded a budget."),
    ("pins_expired", "homing_pins_expired", "Pins whose time was over."),
    ("pins_broken", "homing_pins_broken", "Pins ended early, as a request found no room otherwise."),
)

#: Totals that the routing side keeps as plain numbers: field of `RouterCounters`, metric, help.
_ROUTER_COUNTERS = (
    ("requests", "homing_routing_requests", "Sequences accepted for routing."),
    ("failed", "homing_routing_failed", "Sequences that ended with an error."),
    ("cancelled", "homing_routing_cancelled", "Sequences cancelled by the front or the client."),
    ("rejected", "homing_routing_rejected", "Sequences refused: queue full, prompt too long, no replica."),
    ("held", "homing_routing_held", "Sequences that waited in the router at least once."),
    ("continued", "homing_routing_continuations", "Times a sequence went on at another replica."),
    ("duplicate_tokens", "homing_routing_duplicate_tokens", "Tokens delivered twice by replicas and dropped."),
    ("malformed_frames", "homing_routing_malformed_frames", "Replies of replicas that did not decode."),
    ("malformed_events", "homing_events_malformed", "Event messages that did not decode."),
    ("replicas_joined", "homing_replicas_joined", "Replicas let in."),
    ("replicas_lost", "homing_replicas_lost", "Replicas that went."),
    ("replicas_refused", "homing_replicas_refused", "Replicas refused for a difference in parity."),
    ("refused_connections", "homing_refused_connections", "Connections to replicas that failed for their CURVE keys."),
    ("predicted_cached_tokens", "homing_routing_predicted_cached_tokens", "Cached tokens predicted at dispatch."),
    ("delivered_cached_tokens", "homing_routing_delivered_cached_tokens", "Cached tokens that replicas reported."),
    ("regret_tokens", "homing_routing_regret_tokens", "Cached tokens of the best holder forgone, over decisions."),
)


#: Totals of each tenant in the keys file: field of `Meter`, metric, help.
_TENANT_COUNTERS = (
    ("requests", "homing_tenant_requests", "Requests of a tenant that were let in."),
    ("prompt_tokens", "homing_tenant_prompt_tokens", "Tokens of their prompts."),
    ("generated_tokens", "homing_tenant_completion_tokens", "Tokens generated for them."),
)


class Histogram:
    """Counts of values by bucket: a plain list, as the client library's own locks for 2 us at each value."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Count a value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def sample(self) -> tuple[list[tuple[str, float]], float]:
        """Buckets as Prometheus wants them (each with all below it), and the sum."""
        names = [*(str(float(bound)) for bound in self._bounds), "+Inf"]
        return list(zip(names, accumulate(self._counts), strict=True)), self._sum


class HttpNumbers(Collector):
    """What the front counts for each request and each token, as plain numbers; shown when somebody asks."""

    def __init__(self) -> None:
        self.requests: dict[tuple[str, int], int] = {}
        self.durations: dict[str, Histogram] = {}
        self.ttft = Histogram(TTFT_BUCKETS)
        self.itl = Histogram(ITL_BUCKETS)
        self.prompt_tokens = 0
        self.completion_tokens = 0
        #: sequences over
        self.outcomes = dict.fromkeys(("finished", "failed", "cancelled"), 0)

    def describe(self) -> Sequence[Metric]:
        """See prometheus_client: the names are those of `collect`."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """See prometheus_client."""
        requests = CounterMetricFamily("homing_http_requests", "HTTP requests answered.", labels=["endpoint", "status"])
        for (endpoint, status), count in self.requests.items():
            requests.add_metric([endpoint, str(status)], count)
        yield requests
        durations = HistogramMetricFamily(
            "homing_http_request_duration_seconds",
            "From the request's head to the end of the answer.",
            labels=["endpoint"],
        )
        for endpoint, histogram in self.durations.items():
            durations.add_metric([endpoint], *histogram.sample())
        yield durations
        yield _histogram(
            "homing_time_to_first_token_seconds",
            "From the arrival of a request to its first token, per choice.",
            self.ttft,
        )
        yield _histogram(
            "homing_inter_token_latency_seconds", "Between one token delta of a choice and the next.", self.itl
        )
        yield CounterMetricFamily("homing_prompt_tokens", "Prompt tokens of HTTP requests.", value=self.prompt_tokens)
        yield CounterMetricFamily(
            "homing_completion_tokens", "Tokens generated for them.", value=self.completion_tokens
        )
        outcomes = CounterMetricFamily("homing_routing_outcomes", "Sequences over, by outcome.", labels=["outcome"])
        for outcome, count in self.outcomes.items():
            outcomes.add_metric([outcome], count)
        yield outcomes


class TenantNumbers(Collector):
    """What the meters of the tenants in the keys file have counted; strangers cannot add labels."""

    def __init__(self) -> None:
        self.meters: Sequence[Meter] = ()

    def describe(self) -> Sequence[Metric]:
        """See prometheus_client: the names are those of `collect`."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """See prometheus_client."""
        for field, name, text in _TENANT_COUNTERS:
            counter = CounterMetricFamily(name, text, labels=["tenant"])
            for meter in self.meters:
                counter.add_metric([meter.tenant], getattr(meter, field))
            yield counter
        refusals = CounterMetricFamily(
            "homing_tenant_refusals", "Requests refused, by the limit that they met.", labels=["tenant", "limit"]
        )
        running = GaugeMetricFamily("homing_tenant_running", "Requests that are not over.", labels=["tenant"])
        for meter in self.meters:
            running.add_metric([meter.tenant], meter.running)
            for limit, count in meter.refusals.items():
                refusals.add_metric([meter.tenant, limit], count)
        yield refusals
        yield running


def _histogram(name: str, text: str, histogram: Histogram) -> HistogramMetricFamily:
    family = HistogramMetricFamily(name, text)
    family.add_metric([], *histogram.sample())
    return family


class RouterMetrics:
    """All metrics of one router process. Methods may be called from one thread; rendering from any."""

    def __init__(self) -> None:
        # A `_created` gauge beside every counter doubles the page, and nobody asks for it.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self._http_metrics()
        self._replica_metrics()
        registry = self.registry
        self._router_totals = {field: Counter(name, text, registry=registry) for field, name, text in _ROUTER_COUNTERS}
        predictions = Counter(
            "homing_predictions", "Predictions of cached tokens, by how they came out.", ["result"], registry=registry
        )
        for result in ("exact", "low", "high"):
            self._router_totals[f"predictions_{result}"] = predictions.labels(result)
        self._router_seen = RouterCounters()
        self._told: dict[str, LoadReport] = {}  #: the last report of each replica that is in the metrics
        self._untold: dict[str, LoadReport] = {}  #: a later one: reports come with every step, readers seldom
        self._known: set[str] = set()

    def _http_metrics(self) -> None:
        registry = self.registry
        self._numbers = HttpNumbers()
        registry.register(self._numbers)
        self._tenants = TenantNumbers()
        registry.register(self._tenants)
        #: a token delta came so many seconds after the one before
        self.inter_token = self._numbers.itl.observe
        self._gone = Counter(
            "homing_client_disconnects", "Clients that left before their answer ended.", registry=registry
        )
        self._cut = Counter(
            "homing_clients_cut",
            "Clients cut off because they did not read their answer.",
            ["reason"],
            registry=registry,
        )
        self._broken = Counter("homing_streams_broken", "Streams that ended in an error event.", registry=registry)

    def _replica_metrics(self) -> None:
        registry, replica = self.registry, ["replica"]
        self._running = Gauge("homing_requests_running", "Requests in a replica's batch.", replica, registry=registry)
        self._waiting = Gauge("homing_requests_waiting", "Requests queued at a replica.", replica, registry=registry)
        self._held = Gauge("homing_router_requests_held", "Requests held by the router.", registry=registry)
        self._in_flight = Gauge(
            "homing_router_requests_in_flight", "Requests sent to replicas and not over.", registry=registry
        )
        self._queued = Gauge(
            "homing_queued_prefill_tokens", "Uncached prompt tokens not yet computed.", replica, registry=registry
        )
        self._usage = Gauge(
            "homing_kv_cache_usage_ratio",
            "Share of KV blocks in use by requests or pinned.",
            replica,
            registry=registry,
        )
        self._state = Gauge(
            "homing_replica_state", "1 for the state a replica is in.", ["replica", "state"], registry=registry
        )
        self._pinned = Gauge("homing_pinned_blocks", "Blocks kept by pins.", replica, registry=registry)
        self._indexed = Gauge(
            "homing_index_blocks", "Blocks of a replica in the router's index.", replica, registry=registry
        )
        self._cache_totals = {
            field: Counter(name, text, replica, registry=registry) for field, name, text in _CACHE_COUNTERS
        }
        self._gaps = Counter("homing_events_gaps", "Holes noticed in event streams.", replica, registry=registry)

    # HTTP front

    def watch_tenants(self, meters: Sequence[Meter]) -> None:
        """Show what these count."""
        self._tenants.meters = meters

    def http_request(self, endpoint: str, status: int, duration_s: float) -> None:
        """An HTTP request was answered (or its client left: status 499)."""
        numbers, key = self._numbers, (endpoint, status)
        numbers.requests[key] = numbers.requests.get(key, 0) + 1
        histogram = numbers.durations.get(endpoint)
        if histogram is None:
            histogram = numbers.durations[endpoint] = Histogram(DURATION_BUCKETS)
        histogram.observe(duration_s)

    def first_token(self, seconds: float) -> None:
        """A choice's first token came so long after the request."""
        self._numbers.ttft.observe(seconds)

    def tokens(self, prompt: int, completion: int) -> None:
        """An HTTP request is over; it had so many tokens."""
        self._numbers.prompt_tokens += prompt
        self._numbers.completion_tokens += completion

    def client_cut(self, reason: str) -> None:
        """The server cut a client off that did not read."""
        self._cut.labels(reason).inc()

    def client_gone(self) -> None:
        """A client left before its answer ended."""
        self._gone.inc()

    def stream_broken(self) -> None:
        """A stream ended in an error event."""
        self._broken.inc()

    # Routing side

    def request_finished(self, record: FinishedRequest) -> None:
        """A sequence is over (`Observer`)."""
        self._numbers.outcomes[record.outcome] += 1

    def load_reported(self, replica_id: str, report: LoadReport) -> None:
        """A replica told its load and totals; reports of an epoch must come in order."""
        before = self._untold.get(replica_id)
        if before is not None and before.epoch != report.epoch:
            self._tell(replica_id)
        self._untold[replica_id] = report

    def _tell(self, replica_id: str) -> None:
        report = self._untold.pop(replica_id)
        before = self._told.get(replica_id)
        same_start = before is not None and before.epoch == report.epoch
        old = before.counters if before and same_start else CacheCounters()
        self._told[replica_id] = report
        for field, counter in self._cache_totals.items():
            counter.labels(replica_id).inc(max(0, getattr(report.counters, field) - getattr(old, field)))
        self._running.labels(replica_id).set(report.running)
        self._waiting.labels(replica_id).set(report.waiting)
        self._queued.labels(replica_id).set(report.queued_prefill_tokens)
        self._pinned.labels(replica_id).set(report.pinned_blocks)
        self._usage.labels(replica_id).set(1 - report.free_blocks / max(report.total_blocks, 1))

    def _tell_all(self) -> None:
        for replica_id in list(self._untold):
            self._tell(replica_id)

    def events_gap(self, replica_id: str) -> None:
        """A hole in a replica's event stream was noticed; it is being repaired."""
        self._gaps.labels(replica_id).inc()

    def observe_cluster(self, view: ClusterView) -> None:
        """Bring gauges and the routing side's totals up to date; called before each rendering."""
        self._tell_all()
        self._held.set(view.waiting)
        self._in_flight.set(view.in_flight)
        self._state.clear()
        for replica in view.replicas:
            self._running.labels(replica.replica_id).set(replica.running)
            self._waiting.labels(replica.replica_id).set(replica.waiting)
            self._queued.labels(replica.replica_id).set(replica.queued_prefill_tokens)
            self._indexed.labels(replica.replica_id).set(replica.indexed_blocks)
            self._state.labels(replica.replica_id, replica.state).set(1)
        self._forget_gauges({replica.replica_id for replica in view.replicas})
        for field, counter in self._router_totals.items():
            counter.inc(max(0, getattr(view.counters, field) - getattr(self._router_seen, field)))
            setattr(self._router_seen, field, getattr(view.counters, field))

    def _forget_gauges(self, present: set[str]) -> None:
        """A replica that went has no load; its totals stay."""
        for replica_id in self._known - present:
            for gauge in (self._running, self._waiting, self._queued, self._usage, self._pinned, self._indexed):
                gauge.remove(replica_id)
        self._known = present

    def render(self) -> bytes:
        """Everything in Prometheus' text format."""
        self._tell_all()
        return generate_latest(self.registry)
