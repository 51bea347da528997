"""`homing status`: what the router says about its replicas, as a table. Formatting only."""

import json
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TextIO

from prometheus_client.parser import text_string_to_metric_families

from ..config import Settings, state_folder
from ..registry import ClusterRegistry, addressed
from .client import get_json, get_text, router_urls

COLUMNS = ("replica", "state", "events", "ranks", "node", "running", "waiting", "kv used", "cached", "hit rate")
QUERIES, HITS = "homing_prefix_cache_queries_tokens_total", "homing_prefix_cache_hits_tokens_total"
RIGHT = frozenset({"ranks", "running", "waiting", "kv used", "cached", "hit rate"})


def status(settings: Settings, out: TextIO, *, url: str | None, as_json: bool) -> int:
    """Print the state of the cluster at `url`, or of the one that runs here. Raises NotRunning."""
    found, *routers = router_urls(settings, url)
    views = [get_json(f"{each}/cluster") for each in routers or [found]]
    if as_json:
        json.dump(views[0] if len(views) == 1 else views, out, indent=2)
        print(file=out)
        return 0
    rates = hit_rates(get_text(f"{found}/metrics"))
    name = None if url else settings.cluster.name
    print(render(name, found, views, rates, routers, now=time.time()), file=out)
    if url:
        return 0
    if others := ClusterRegistry(state_folder(settings)).others(settings.cluster.name):
        print(f"beside it there {addressed(others)}", file=out)
    return 0


def hit_rates(metrics: str) -> dict[str, float]:
    """Share of the prompt tokens that each replica found in its cache, of what /metrics says."""
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
    now: float,
) -> str:
    """The whole page: the replicas as the first router sees them, and what each of `routers` has done.

    `name`: None for one that is known by its address alone. `now`: seconds since 1970.
    """
    view = views[0]
    title = [url] if name is None else [name, url]
    lines = [" · ".join([*title, _models(view), f"policy {view['policy']}"]), ""]
    lines += table(
        COLUMNS,
        [
            *[_row(replica, rates.get(replica["replica_id"])) for replica in sorted(view["replicas"], key=by_name)],
            *[_absent_row(replica) for replica in sorted(view["absent"], key=by_name)],
        ],
        right=RIGHT,
    )
    lines.append("")
    if len(view["models"]) > 1:
        lines += [_model(model) for model in view["models"]]
    if routers:
        lines += [f"{each}: {_totals(seen)}" for each, seen in zip(routers, views, strict=True)]
    else:
        lines.append(_totals(view))
    lines += [_absence(replica, now) for replica in view["absent"]]
    lines += [f"refused {refused['replica_id']}: {refused['message']}" for refused in view["refused"]]
    return "\n".join(lines)


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, right: Collection[str]) -> list[str]:
    """Lines of equal width; the columns in `right` are set to the right."""
    widths = [max(len(row[index]) for row in (columns, *rows)) for index in range(len(columns))]

    def line(cells: Sequence[str]) -> str:
        return "  ".join(
            cell.rjust(width) if column in right else cell.ljust(width)
            for cell, width, column in zip(cells, widths, columns, strict=True)
        ).rstrip()

    return [line(columns), *(line(row) for row in rows)]


def by_name(replica: Mapping[str, Any]) -> tuple[str, int, str]:
    """Sorts replicas as people count them: r9 before r10, and each model's together."""
    name: str = replica["replica_id"]
    kind = name.rstrip("0123456789")
    return kind, len(name), name


def _row(replica: dict[str, Any], rate: float | None) -> tuple[str, ...]:
    total = replica["num_blocks"]
    used = total - replica["free_blocks"] if replica["report_age_s"] is not None else 0
    return (
        replica["replica_id"],
        _state(replica),
        replica["feed"],
        str(len(replica["pids"])),
        replica["node"],
        str(replica["running"]),
        str(replica["waiting"]),
        f"{used / total:.0%}" if total else "-",
        f"{replica['indexed_blocks']} block{'' if replica['indexed_blocks'] == 1 else 's'}",
        "-" if rate is None else f"{rate:.0%}",
    )


def _state(replica: dict[str, Any]) -> str:
    """With how far a warm-up is."""
    state, warm_up = str(replica["state"]), replica.get("warm_up")
    if not warm_up or not warm_up["planned_tokens"]:
        return state
    return f"{state} {warm_up['done_tokens'] / warm_up['planned_tokens']:.0%}"


def _absent_row(replica: dict[str, Any]) -> tuple[str, ...]:
    return (replica["replica_id"], replica["state"], *["-"] * (len(COLUMNS) - 2))


def _absence(replica: dict[str, Any], now: float) -> str:
    seconds = max(0.0, now - replica["since"])
    return f"{replica['replica_id']} has been {replica['state']} for {seconds:.0f} s: {replica['reason']}"


def _totals(view: dict[str, Any]) -> str:
    counters = view["counters"]
    return (
        f"{counters['requests']} requests, {counters['finished']} finished, {view['in_flight']} running, "
        f"{view['waiting']} waiting, {counters['failed']} failed, {counters['cancelled']} cancelled, "
        f"{counters['continued']} continued elsewhere; "
        f"{counters['delivered_cached_tokens']} prompt tokens came from caches"
    )


def _models(view: dict[str, Any]) -> str:
    return ", ".join(model["name"] for model in view["models"]) or "no replica"


def _model(model: dict[str, Any]) -> str:
    return f"{model['name']}: {model['serving']} serve, {model['in_flight']} running, {model['waiting']} waiting"
