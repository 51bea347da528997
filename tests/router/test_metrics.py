"""Metrics: totals survive replica restarts, and docs/metrics.md matches the code."""

import asyncio
import re
from pathlib import Path

import msgspec

from homing.events.wire.messages import CacheCounters, LoadReport
from homing.router.backend import ClusterView, ModelView, ReplicaView, RouterCounters
from homing.router.metrics import FAMILIES, RENDERED_AT_ONCE, RouterMetrics

from .http.fakes import replica_view

LABELS = (("model",), ("model", "replica"))
DOCS = Path(__file__).parents[2] / "docs" / "metrics.md"


def report(epoch: int, hits: int) -> LoadReport:
    return LoadReport(
        epoch=epoch,
        step=1,
        ts=0.0,
        running=2,
        waiting=0,
        queued_prefill_tokens=0,
        decode_context_tokens=0,
        free_blocks=25,
        cached_free_blocks=0,
        total_blocks=100,
        prefill_tokens_per_s=1.0,
        decode_step_s=1.0,
        counters=CacheCounters(hit_tokens=hits),
    )


def view(*replicas: str, regret: int = 0) -> ClusterView:
    rows = [replica_view(replica_id, "serving") for replica_id in replicas]
    counters = RouterCounters(regret_tokens=regret)
    model = ModelView(name="demo", max_model_len=None, serving=1, waiting=4, in_flight=0, counters=counters)
    return ClusterView(
        router_id="x",
        policy="p",
        waiting=4,
        in_flight=0,
        models=[model],
        replicas=rows,
        refused=[],
        counters=counters,
    )


def test_replica_totals_go_on_after_a_rebuild():
    """A rebuilt replica counts from zero under a new epoch, but a falling counter would read as a huge rate."""
    metrics = RouterMetrics()

    for epoch, hits in ((1, 10), (1, 15), (2, 3), (2, 3)):
        metrics.of("demo").load_reported("r0", report(epoch, hits))
    metrics.observe_cluster(view("r0"))

    assert (
        metrics.registry.get_sample_value("homing_prefix_cache_hits_tokens_total", {"model": "demo", "replica": "r0"})
        == 18
    )
    assert metrics.registry.get_sample_value("homing_kv_cache_usage_ratio", {"model": "demo", "replica": "r0"}) == 0.75


def test_the_states_of_blocks_add_up_and_the_process_is_measured_too():
    """A pool full of idle blocks is no reason to add machines."""
    metrics = RouterMetrics()
    metrics.of("demo").load_reported("r0", msgspec.structs.replace(report(1, 0), cached_free_blocks=20))
    metrics.observe_cluster(view("r0"))

    def blocks(state: str) -> float | None:
        labels = {"model": "demo", "replica": "r0", "state": state}
        return metrics.registry.get_sample_value("homing_kv_blocks", labels)

    assert [blocks(state) for state in ("free", "cached", "referenced")] == [5, 20, 75]
    assert (metrics.registry.get_sample_value("process_resident_memory_bytes") or 0) > 0


def test_an_idle_replicas_pool_is_not_in_use():
    """The view's block count includes the null block, which is never usable; a report counts only usable blocks."""
    metrics = RouterMetrics()

    metrics.of("demo").load_reported("r0", msgspec.structs.replace(report(1, 0), free_blocks=100))
    metrics.observe_cluster(view("r0"))

    assert metrics.registry.get_sample_value("homing_kv_cache_usage_ratio", {"model": "demo", "replica": "r0"}) == 0


def test_the_routing_sides_totals_are_taken_over():
    """Routing keeps its totals as plain numbers; reading them twice must not count anything twice."""
    metrics = RouterMetrics()

    for regret in (5, 5, 8):
        metrics.observe_cluster(view("r0", regret=regret))

    assert metrics.registry.get_sample_value("homing_routing_regret_tokens_total", {"model": "demo"}) == 8
    assert metrics.registry.get_sample_value("homing_router_requests_held", {"model": "demo"}) == 4


def test_models_are_counted_apart():
    """Models have separate replicas, latencies and tokens; a mean over two models describes neither."""
    metrics = RouterMetrics()

    for name, hits in (("fox", 3), ("owl", 5)):
        model = metrics.of(name)
        model.load_reported("r0", report(1, hits))
        model.first_token(0.1)
        model.tokens(10, hits)
    metrics.render()

    value = metrics.registry.get_sample_value
    for name, hits in (("fox", 3), ("owl", 5)):
        assert value("homing_prefix_cache_hits_tokens_total", {"model": name, "replica": "r0"}) == hits
        assert value("homing_completion_tokens_total", {"model": name}) == hits
        assert value("homing_time_to_first_token_seconds_count", {"model": name}) == 1


def test_predictions_are_counted_by_how_they_came_out():
    """The share of exact predictions shows whether routing decisions rest on facts."""
    metrics = RouterMetrics()
    seen = view("r0")
    (model,) = seen.models
    counters = RouterCounters(predictions_exact=99, predictions_high=1)
    seen.models[:] = [msgspec.structs.replace(model, counters=counters)]

    metrics.observe_cluster(seen)

    value = metrics.registry.get_sample_value
    counted = [
        value("homing_predictions_total", {"model": "demo", "result": result}) for result in ("exact", "low", "high")
    ]
    assert counted == [99, 0, 1]


def test_a_replica_that_went_has_no_load():
    """Otherwise its last gauges would stay on dashboards forever. Its totals are history and remain."""
    metrics = RouterMetrics()
    metrics.observe_cluster(view("r0", "r1"))
    metrics.of("demo").load_reported("r1", report(1, 7))

    metrics.observe_cluster(view("r0"))

    value = metrics.registry.get_sample_value
    assert value("homing_requests_running", {"model": "demo", "replica": "r1"}) is None
    assert value("homing_replica_state", {"model": "demo", "replica": "r1", "state": "serving"}) is None
    assert value("homing_requests_running", {"model": "demo", "replica": "r0"}) == 2
    assert value("homing_prefix_cache_hits_tokens_total", {"model": "demo", "replica": "r1"}) == 7


def test_a_model_that_was_taken_away_has_no_gauges():
    """Otherwise the alert on a model without replicas would never end."""
    metrics = RouterMetrics()
    seen = view("r0")
    metrics.observe_cluster(seen)

    metrics.observe_cluster(msgspec.structs.replace(seen, models=[]))

    value = metrics.registry.get_sample_value
    assert value("homing_replicas_serving", {"model": "demo"}) is None
    assert value("homing_router_requests_held", {"model": "demo"}) is None
    assert value("homing_routing_requests_total", {"model": "demo"}) is not None
    metrics.observe_cluster(seen)
    assert value("homing_replicas_serving", {"model": "demo"}) is not None


def test_every_copied_value_has_a_field_to_come_from():
    """A renamed field must not silence its metric."""
    sources = (RouterCounters, CacheCounters, ModelView, ReplicaView)
    fields = {kind: {each.name for each in msgspec.structs.fields(kind)} for kind in sources}
    copied = {
        (kind, labels): {each.field for each in FAMILIES if each.field and (each.kind, each.labels) == (kind, labels)}
        for kind in ("counter", "gauge")
        for labels in LABELS
    }

    assert copied["counter", ("model",)] <= fields[RouterCounters]
    assert copied["counter", ("model", "replica")] == fields[CacheCounters] - {"tier_failures"}
    assert copied["gauge", ("model",)] <= fields[ModelView]
    assert copied["gauge", ("model", "replica")] <= fields[ReplicaView]


def test_the_documented_table_is_the_real_one():
    """Dashboards are written from this page: it lists each metric with its type and labels."""
    rows = re.findall(r"^\|([^|]*)\| (\w+) \|([^|]*homing_[^|]*)\|$", DOCS.read_text(), re.MULTILINE)
    ticked = re.compile(r"`(\w+)`")

    documented = {
        name: (kind, tuple(ticked.findall(labels))) for labels, kind, text in rows for name in ticked.findall(text)
    }
    assert documented == {
        f"{each.name}_total" if each.kind == "counter" else each.name: (each.kind, each.labels) for each in FAMILIES
    }


def test_the_table_is_what_is_exported():
    """Each metric is exported with the name, type, help text and labels that it declares."""
    metrics = RouterMetrics()
    metrics.of("demo").load_reported("r0", report(1, 3))
    metrics.observe_cluster(view("r0"))
    exported = {family.name: family for family in metrics.collect()}

    assert list(exported) == [each.name for each in FAMILIES]
    for each in FAMILIES:
        family = exported[each.name]
        assert (family.type, family.documentation) == (each.kind, each.help)
        assert all(set(sample.labels) - {"le"} == set(each.labels) for sample in family.samples)


async def test_the_text_in_slices_is_the_same_and_no_slice_grows_with_the_cluster() -> None:
    """Streams must not wait while a large cluster's metrics are written."""
    metrics, names = RouterMetrics(), [f"r{number}" for number in range(3 * RENDERED_AT_ONCE)]
    for name in names:
        metrics.of("demo").load_reported(name, report(epoch=1, hits=5))
    metrics.observe_cluster(view(*names))
    turns = 0

    async def other_work() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    other = asyncio.get_running_loop().create_task(other_work())
    text = await metrics.render_in_slices()
    other.cancel()

    def values(rendered: bytes) -> list[bytes]:
        return [line for line in rendered.splitlines() if not line.startswith((b"process_", b"python_"))]

    assert values(text) == values(metrics.render())
    written = sum(not line.startswith(b"#") for line in values(text))
    assert turns >= written / 3 / RENDERED_AT_ONCE
    assert turns <= text.count(b"\n") / RENDERED_AT_ONCE + 2, "a scrape must not wait for the loop after each metric"


def test_counters_of_rare_events_begin_at_zero():
    """Prometheus sees no increase in the first sample of a series, so the first gap or disconnection would be lost."""
    metrics = RouterMetrics()
    metrics.of("demo")
    metrics.observe_cluster(view("r0", "r1"))

    samples = {(s.name, *s.labels.values()): s.value for family in metrics.collect() for s in family.samples}

    assert [samples["homing_events_gaps_total", "demo", each] for each in ("r0", "r1")] == [0, 0]
    assert [samples["homing_clients_cut_total", each] for each in ("unsent", "stalled", "connections")] == [0, 0, 0]


def test_the_page_counts_what_clients_asked_of_models_only() -> None:
    """Its own polls and those of Prometheus would make any share of failures look small."""
    metrics = RouterMetrics()
    for path in ("/metrics", "/", "/live", "/health", "/cluster", "/requests/{id}", "/v1/models", "/v1/models/{model}"):
        metrics.http_request(path, 200, 0.1)
    for path in ("/v1/chat/completions", "/v1/messages", "/v1/responses/{id}", "/inference/v1/generate"):
        metrics.http_request(path, 200, 0.1)
    metrics.http_request("/v1/completions", 429, 0.1)

    assert metrics.responses() == {200: 4, 429: 1}
