"""`homing status`: prints what the router reports about its replicas as a table."""

import json
import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from prometheus_client.parser import text_string_to_metric_families
from rich.console import RenderableType

from ..client import get_json, get_text, router_urls
from ..config import state_folder
from ..flags import NOTHING, FindCluster, Out, Url, option, settings_of
from ..output import count, name_order, show, table
from ..registry import ClusterRegistry, describe_running

COLUMNS = ("replica", "state", "events", "ranks", "node", "running", "waiting", "kv used", "cached", "hit rate")
QUERIES, HITS = "homing_prefix_cache_queries_tokens_total", "homing_prefix_cache_hits_tokens_total"
RIGHT = frozenset({"ranks", "running", "waiting", "kv used", "cached", "hit rate"})


def status(
    *,
    flags: FindCluster = NOTHING,
    out: Out,
    url: Url = None,
    as_json: Annotated[bool, option("print the response of /cluster, for programs", "--json")] = False,
) -> int:
    """Print the state of a cluster. Raises NotRunning."""
    settings = settings_of(flags)
    found, *routers = router_urls(settings, url)
    views = [get_json(f"{each}/cluster") for each in routers or [found]]
    if as_json:
        json.dump(views[0] if len(views) == 1 else views, out, indent=2)
        print(file=out)
        return 0
    rates = hit_rates(get_text(f"{found}/metrics"))
    name, models, registry = None, "", ClusterRegistry(state_folder(settings))
    if not url:
        name = settings.cluster.name
        models = registry.running(name).model
    show(out, *render(name, found, views, rates, routers, models=models, now=time.time()))
    if not url and (others := registry.others(settings.cluster.name)):
        print(f"also running: {describe_running(others)}", file=out)
    return 0


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
    now: float,
) -> list[RenderableType]:
    """Render the page: the replicas as the first router sees them, and each router's counters.

    `name`: None if the cluster was selected by URL. `models`: the models that run under the served names, if known.
    `now`: seconds since 1970.
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
    for absent in view["absent"]:
        seconds = max(0.0, now - absent["since"])
        lines.append(f"{absent['replica_id']} has been {absent['state']} for {seconds:.0f} s: {absent['reason']}")
    lines += [f"refused {refused['replica_id']}: {refused['message']}" for refused in view["refused"]]
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
