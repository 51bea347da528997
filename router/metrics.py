"""Prometheus metrics of the router: one method for each thing to record, on a registry of their own.

Wraps what happens; no core imports it. Names are those of docs/metrics.md (a test holds the table). Replicas' totals
come with their load reports; a rebuilt replica starts at zero under a new epoch, and the counters here go on.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from ..events.wire.messages import CacheCounters, LoadReport
from .backend import ClusterView, FinishedRequest, ReplicaView, RouterCounters
from .tenants.rate_limits import Meter

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
    ("prefilled_tokens", "homing_prefilled_tokens", "Prompt tokens that replicas computed, for warm-ups, too."),
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
    ("warm_up_requests", "homing_warm_up_requests", "Requests of the router's own that filled new replicas' caches."),
    ("warm_up_tokens", "homing_warm_up_tokens", "Prompt tokens that replicas computed for them."),
    ("warm_ups_cut", "homing_warm_ups_cut", "Warm-ups ended before they were through."),
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


class ModelMetrics:
    """What happens with one model: the front records into it, and it is the `Observer` of the model's services."""

    __slots__ = ("_replicas", "completion_tokens", "inter_token", "itl", "name", "outcomes", "prompt_tokens", "ttft")

    def __init__(self, name: str, replicas: "ReplicaMetrics") -> None:
        self.name = name
        self.ttft = Histogram(TTFT_BUCKETS)
        self.itl = Histogram(ITL_BUCKETS)
        #: a token delta came so many seconds after the one before
        self.inter_token = self.itl.observe
        self.prompt_tokens = 0
        self.completion_tokens = 0
        #: sequences over
        self.outcomes = dict.fromkeys(("finished", "failed", "cancelled"), 0)
        self._replicas = replicas

    def first_token(self, seconds: float) -> None:
        """A choice's first token came so long after the request."""
        self.ttft.observe(seconds)

    def tokens(self, prompt: int, completion: int) -> None:
        """An HTTP request is over; it had so many tokens."""
        self.prompt_tokens += prompt
        self.completion_tokens += completion

    def request_finished(self, record: FinishedRequest) -> None:
        """A sequence is over (`Observer`)."""
        self.outcomes[record.outcome] += 1

    def load_reported(self, replica_id: str, report: LoadReport) -> None:
        """A replica told its load and totals; reports of an epoch must come in order (`Observer`)."""
        self._replicas.load_reported((self.name, replica_id), report)

    def events_gap(self, replica_id: str) -> None:
        """A hole in a replica's event stream was noticed; it is being repaired (`Observer`)."""
        self._replicas.events_gap((self.name, replica_id))


class HttpNumbers(Collector):
    """What the front counts for each request and each token, as plain numbers; shown when somebody asks."""

    def __init__(self) -> None:
        self.requests: dict[tuple[str, int], int] = {}
        self.durations: dict[str, Histogram] = {}
        self.models: dict[str, ModelMetrics] = {}

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
        yield from self._of_models()

    def _of_models(self) -> Iterator[Metric]:
        ttft = HistogramMetricFamily(
            "homing_time_to_first_token_seconds",
            "From the arrival of a request to its first token, per choice.",
            labels=["model"],
        )
        itl = HistogramMetricFamily(
            "homing_inter_token_latency_seconds",
            "Between one token delta of a choice and the next.",
            labels=["model"],
        )
        prompt = CounterMetricFamily("homing_prompt_tokens", "Prompt tokens of HTTP requests.", labels=["model"])
        completion = CounterMetricFamily("homing_completion_tokens", "Tokens generated for them.", labels=["model"])
        outcomes = CounterMetricFamily(
            "homing_routing_outcomes", "Sequences over, by outcome.", labels=["model", "outcome"]
        )
        for name, model in self.models.items():
            ttft.add_metric([name], *model.ttft.sample())
            itl.add_metric([name], *model.itl.sample())
            prompt.add_metric([name], model.prompt_tokens)
            completion.add_metric([name], model.completion_tokens)
            for outcome, count in model.outcomes.items():
                outcomes.add_metric([name, outcome], count)
        yield from (ttft, itl, prompt, completion, outcomes)


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


#: Model and replica, whose labels they are.
ReplicaKey = tuple[str, str]


class ReplicaMetrics:
    """What replicas report of themselves, and what the router knows of each."""

    def __init__(self, registry: CollectorRegistry) -> None:
        labels = ["model", "replica"]
        self._running = Gauge("homing_requests_running", "Requests in a replica's batch.", labels, registry=registry)
        self._waiting = Gauge("homing_requests_waiting", "Requests queued at a replica.", labels, registry=registry)
        self._queued = Gauge(
            "homing_queued_prefill_tokens", "Uncached prompt tokens not yet computed.", labels, registry=registry
        )
        self._usage = Gauge(
            "homing_kv_cache_usage_ratio",
            "Share of KV blocks in use by requests or pinned.",
            labels,
            registry=registry,
        )
        self._state = Gauge(
            "homing_replica_state", "1 for the state a replica is in.", [*labels, "state"], registry=registry
        )
        self._pinned = Gauge("homing_pinned_blocks", "Blocks kept by pins.", labels, registry=registry)
        self._indexed = Gauge(
            "homing_index_blocks", "Blocks of a replica in the router's index.", labels, registry=registry
        )
        self.totals = {field: Counter(name, text, labels, registry=registry) for field, name, text in _CACHE_COUNTERS}
        self._gaps = Counter("homing_events_gaps", "Holes noticed in event streams.", labels, registry=registry)
        self._told: dict[ReplicaKey, LoadReport] = {}  #: the last report of each replica that is in the metrics
        self._untold: dict[ReplicaKey, LoadReport] = {}  #: a later one: reports come with every step, readers seldom
        self._known: set[ReplicaKey] = set()

    def load_reported(self, replica: ReplicaKey, report: LoadReport) -> None:
        """See `ModelMetrics`."""
        before = self._untold.get(replica)
        if before is not None and before.epoch != report.epoch:
            self._tell(replica)
        self._untold[replica] = report

    def events_gap(self, replica: ReplicaKey) -> None:
        """See `ModelMetrics`."""
        self._gaps.labels(*replica).inc()

    def observe(self, views: Sequence[ReplicaView]) -> None:
        """Bring the gauges up to date."""
        self.tell_all()
        self._state.clear()
        present: set[ReplicaKey] = set()
        for view in views:
            replica = (view.model, view.replica_id)
            present.add(replica)
            self._running.labels(*replica).set(view.running)
            self._waiting.labels(*replica).set(view.waiting)
            self._queued.labels(*replica).set(view.queued_prefill_tokens)
            self._indexed.labels(*replica).set(view.indexed_blocks)
            self._state.labels(*replica, view.state).set(1)
        self._forget_gauges(present)

    def tell_all(self) -> None:
        """Show what was reported."""
        for replica in list(self._untold):
            self._tell(replica)

    def _tell(self, replica: ReplicaKey) -> None:
        report = self._untold.pop(replica)
        before = self._told.get(replica)
        same_start = before is not None and before.epoch == report.epoch
        old = before.counters if before and same_start else CacheCounters()
        self._told[replica] = report
        for field, counter in self.totals.items():
            counter.labels(*replica).inc(max(0, getattr(report.counters, field) - getattr(old, field)))
        self._running.labels(*replica).set(report.running)
        self._waiting.labels(*replica).set(report.waiting)
        self._queued.labels(*replica).set(report.queued_prefill_tokens)
        self._pinned.labels(*replica).set(report.pinned_blocks)
        self._usage.labels(*replica).set(1 - report.free_blocks / max(report.total_blocks, 1))

    def _forget_gauges(self, present: set[ReplicaKey]) -> None:
        """A replica that went has no load; its totals stay."""
        for replica in self._known - present:
            for gauge in (self._running, self._waiting, self._queued, self._usage, self._pinned, self._indexed):
                gauge.remove(*replica)
        self._known = present


class RouterMetrics:
    """All metrics of one router process. Methods may be called from one thread; rendering from any."""

    def __init__(self) -> None:
        # A `_created` gauge beside every counter doubles the page, and nobody asks for it.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self._http_metrics()
        self.replicas = ReplicaMetrics(self.registry)
        self._routing_metrics()

    def _http_metrics(self) -> None:
        registry = self.registry
        self._numbers = HttpNumbers()
        registry.register(self._numbers)
        self._tenants = TenantNumbers()
        registry.register(self._tenants)
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

    def _routing_metrics(self) -> None:
        registry, model = self.registry, ["model"]
        self._held = Gauge("homing_router_requests_held", "Requests held by the router.", model, registry=registry)
        self._in_flight = Gauge(
            "homing_router_requests_in_flight", "Requests sent to replicas and not over.", model, registry=registry
        )
        self._serving = Gauge(
            "homing_replicas_serving", "Replicas of a model that take requests.", model, registry=registry
        )
        self.totals = {field: Counter(name, text, model, registry=registry) for field, name, text in _ROUTER_COUNTERS}
        self._predictions = Counter(
            "homing_predictions",
            "Predictions of cached tokens, by how they came out.",
            ["model", "result"],
            registry=registry,
        )
        self._seen: dict[str, RouterCounters] = {}  #: by model
        self._shown: set[str] = set()  #: models with gauges

    # HTTP front

    def of(self, model: str) -> ModelMetrics:
        """Where what happens with this model is recorded."""
        found = self._numbers.models.get(model)
        if found is None:
            found = self._numbers.models[model] = ModelMetrics(model, self.replicas)
        return found

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

    def observe_cluster(self, view: ClusterView) -> None:
        """Bring gauges and the routing side's totals up to date; called before each rendering."""
        self.replicas.observe(view.replicas)
        for gone in self._shown - {model.name for model in view.models}:
            for gauge in (self._held, self._in_flight, self._serving):
                gauge.remove(gone)
        self._shown = {model.name for model in view.models}
        for model in view.models:
            self._held.labels(model.name).set(model.waiting)
            self._in_flight.labels(model.name).set(model.in_flight)
            self._serving.labels(model.name).set(model.serving)
            self._add(model.name, model.counters)

    def _add(self, model: str, counters: RouterCounters) -> None:
        """What came to the totals of this model since they were last looked at."""
        seen = self._seen.get(model, RouterCounters())
        self._seen[model] = msgspec.structs.replace(counters)
        for field, counter in self.totals.items():
            counter.labels(model).inc(max(0, getattr(counters, field) - getattr(seen, field)))
        for result in ("exact", "low", "high"):
            field = f"predictions_{result}"
            self._predictions.labels(model, result).inc(max(0, getattr(counters, field) - getattr(seen, field)))

    def render(self) -> bytes:
        """Everything in Prometheus' text format."""
        self.replicas.tell_all()
        return generate_latest(self.registry)
