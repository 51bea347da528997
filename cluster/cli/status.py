"""`homing status`: prints what the router reports about its replicas as a table."""

import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Annotated, Any, TextIO

from prometheus_client.parser import text_string_to_metric_families
from rich.console import RenderableType

from ...events.errors import BadKeys, EventError
from ...events.security.curve_keys import reader_keys
from ..client import get_json, get_text, router_urls
from ..config import Settings, state_folder
from ..errors import ClusterError, SettingsError
from ..flags import NOTHING, FollowEvents, Out, Url, option, settings_of
from ..output import count, name_order, show, table
from ..registry import ClusterRegistry, describe_running
from ..request_records import printable

COLUMNS = (
    *("replica", "state", "events", "ranks", "node", "running", "waiting", "kv used", "for waiting", "cached"),
    "hit rate",
)
QUERIES, HITS = "homing_prefix_cache_queries_tokens_total", "homing_prefix_cache_hits_tokens_total"
FAILURES = "homing_tier_failures_total"
NO_FAILURES: Mapping[str, int] = MappingProxyType({})
RIGHT = frozenset({"ranks", "running", "waiting", "kv used", "for waiting", "cached", "hit rate"})


def status(
    *,
    flags: FollowEvents = NOTHING,
    out: Out,
    url: Url = None,
    verify: Annotated[
        bool,
        option("compare each router's index with what the replicas hold, by their events; exit code 1 if it differs"),
    ] = False,
    as_json: Annotated[bool, option("print the response of /cluster, for programs", "--json")] = False,
) -> int:
    """Print the state of a cluster. Raises NotRunning."""
    settings = settings_of(flags)
    found, *routers = router_urls(settings, url)
    if verify:
        return _verify(settings, routers or [found], out)
    views = [get_json(f"{each}/cluster") for each in routers or [found]]
    if as_json:
        json.dump(views[0] if len(views) == 1 else views, out, indent=2)
        print(file=out)
        return 0
    metrics = get_text(f"{found}/metrics")
    name, models, registry = None, "", ClusterRegistry(state_folder(settings))
    if not url:
        name = settings.cluster.name
        models = registry.running(name).model
    page = render(
        name,
        found,
        views,
        hit_rates(metrics),
        routers,
        models=models,
        failures=tier_failures(metrics),
        now=time.time(),
    )
    show(out, *page)
    if not url and (others := registry.others(settings.cluster.name)):
        print(f"also running: {describe_running(others)}", file=out)
    return 0


def _verify(settings: Settings, routers: Sequence[str], out: TextIO) -> int:
    """Print how each router's index compares with the replicas. Returns the exit code: 1 if one differs."""
    from ..index_check import compare_index

    try:
        keys = reader_keys(settings.events)
    except BadKeys as error:
        raise SettingsError(f"setting events_curve_keys: {error}") from error
    exact = True
    for router in routers:
        try:
            verdicts = compare_index(
                partial(get_json, f"{router}/cluster"),
                keys=keys,
                heartbeat_interval_s=settings.events.heartbeat_interval_s,
            )
        except EventError as error:
            raise ClusterError(str(error)) from error
        exact = exact and all(verdict.exact is not False for verdict in verdicts)
        rows = [
            (verdict.replica, verdict.text) for verdict in sorted(verdicts, key=lambda each: name_order(each.replica))
        ]
        show(out, router, table(("replica", "index"), rows) if rows else "no replica")
    return 0 if exact else 1


def tier_failures(metrics: str) -> Counter[str]:
    """The blocks that tiers could not keep or give back, by kind of failure, from the text of /metrics."""
    kinds = Counter[str]()
    for family in text_string_to_metric_families(metrics):
        for sample in family.samples:
            if sample.name == FAILURES:
                kinds[sample.labels["kind"]] += round(sample.value)
    return +kinds


def hit_rates(metrics: str) -> dict[str, float]:
    """The share of prompt tokens that each replica found in its cache, from the text of /metrics."""
    totals: dict[str, dict[str, float]] = {QUERIES: {}, HITS: {}}
    for family in text_string_to_metric_families(metrics):
        for sample in family.samples:
            if sample.name in totals:
                totals[sample.name][sample.labels["replica"]] = sample.value
    return {name: totals[HITS].get(name, 0.0) / asked for name, asked in totals[QUERIES].items() if asked}


def render(
    name: str | None,
    url: str,
    views: Sequence[dict[str, Any]],
    rates: Mapping[str, float],
    routers: Sequence[str] = (),
    *,
    models: str = "",
    failures: Mapping[str, int] = NO_FAILURES,
    now: float,
) -> list[RenderableType]:
    """Render the page: the replicas as the first router sees them, and each router's counters.

    `name`: None if the cluster was selected by URL. `models`: the models that run under the served names, if known.
    `failures`: of tiers, by kind. `now`: seconds since 1970.
    """
    view = views[0]
    models = (view["models"] and models) or ", ".join(model["name"] for model in view["models"]) or "no replica"
    title = " · ".join([*([url] if name is None else [name, url]), models, f"policy {view['policy']}"])
    rows = [_row(replica, rates.get(replica["replica_id"])) for replica in sorted(view["replicas"], key=by_name)]
    blank = ["-"] * (len(COLUMNS) - 2)
    rows += [(absent["replica_id"], absent["state"], *blank) for absent in sorted(view["absent"], key=by_name)]
    lines: list[RenderableType] = [title, "", table(COLUMNS, rows, right=RIGHT), ""]
    if len(view["models"]) > 1:
        lines += [
            f"{model['name']}: {model['serving']} serving, {model['in_flight']} running, {model['waiting']} waiting"
            for model in view["models"]
        ]
    if routers:
        lines += [f"{each}: {_totals(seen)}" for each, seen in zip(routers, views, strict=True)]
    else:
        lines.append(_totals(view))
    lines += [*_tenants(view["replicas"]), *_tiers(view["replicas"], failures)]
    for absent in view["absent"]:
        seconds = max(0.0, now - absent["since"])
        lines.append(f"{absent['replica_id']} has been {absent['state']} for {seconds:.0f} s: {absent['reason']}")
    lines += [f"refused {refused['replica_id']}: {refused['message']}" for refused in view["refused"]]
    return lines


def _tenants(replicas: Sequence[Mapping[str, Any]]) -> list[str]:
    """Whose blocks fill the caches; nothing with less than two tenants."""
    blocks = Counter[str]()
    for replica in replicas:
        blocks.update(replica.get("tenant_blocks", {}))
    total = sum(replica["indexed_blocks"] for replica in replicas)
    if len(blocks) < 2 or not total:
        return []
    shares = [f"{printable(tenant)} {number / total:.0%}" for tenant, number in blocks.most_common(8)]
    return [f"cached blocks by tenant: {', '.join(shares)}"]


def _tiers(replicas: Sequence[Mapping[str, Any]], failures: Mapping[str, int]) -> list[str]:
    """How full the tiers below the pools are, and what they failed to do."""
    used, total = Counter[str](), Counter[str]()
    for replica in replicas:
        for medium, tier in replica.get("tiers", {}).items():
            used[medium] += tier["used_blocks"]
            total[medium] += tier["total_blocks"]
    lines = []
    if total:
        lines.append("blocks in tiers: " + ", ".join(f"{each} {used[each]:,} of {total[each]:,}" for each in total))
    if failures:
        kinds = ", ".join(f"{printable(kind)} {number:,}" for kind, number in failures.items())
        lines.append(f"blocks that tiers could not keep or give back: {kinds}")
    return lines


def by_name(replica: Mapping[str, Any]) -> tuple[str, int, str]:
    return name_order(replica["replica_id"])


def _row(replica: dict[str, Any], rate: float | None) -> tuple[str, ...]:
    total = replica["num_blocks"]
    used = total - replica["free_blocks"] if replica["report_age_s"] is not None else 0
    state, warm_up = str(replica["state"]), replica.get("warm_up")
    if warm_up and warm_up["planned_tokens"]:
        state += f" {warm_up['done_tokens'] / warm_up['planned_tokens']:.0%}"
    return (
        replica["replica_id"],
        state,
        replica["feed"],
        str(len(replica["pids"])),
        replica["node"],
        str(replica["running"]),
        str(replica["waiting"]),
        f"{used / total:.0%}" if total else "-",
        f"{replica['waiting_blocks'] / total:.0%}" if total and replica.get("waiting_blocks") is not None else "-",
        count(replica["indexed_blocks"], "block"),
        "-" if rate is None else f"{rate:.0%}",
    )


def _totals(view: dict[str, Any]) -> str:
    counters = view["counters"]
    return (
        f"{count(counters['requests'], 'request')}, {counters['finished']} finished, {view['in_flight']} running, "
        f"{view['waiting']} waiting, {counters['failed']} failed, {counters['cancelled']} cancelled, "
        f"{counters['continued']} continued elsewhere; "
        f"{counters['delivered_cached_tokens']} prompt tokens came from caches"
    )
