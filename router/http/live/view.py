"""The live page's data as small named JSON documents, and the difference between two states of them.

Pure: values in, bytes out. Names and documents are a private interface between this file, `page.html` and `homing top`
of the same version. A document is sent only when it has changed, so its times must be absolute (seconds since 1970).

Documents hold no prompts, but ids that clients chose, tenants' names, hashes and lengths, so `/live` serves them
to admins only.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from ....events.load_report import LoadReport
from ...activity import FailedRequest, ModelActivity, PrefixNode, RoutedRequest, RunningRequest
from ...backend import ClusterView, ModelView, ReplicaScore, ReplicaView
from ...metrics import TTFT_BUCKETS
from .trends import Sample

#: The encoded documents by name.
Items = dict[str, bytes]

#: Maximum number of candidates shown for a decision: the chosen one, and the best of the others.
MAX_CANDIDATES = 16
#: Maximum number of replicas shown, so that a frame stays below a megabyte; the page says how many are left out.
MAX_REPLICAS = 256
MAX_REFUSALS = 20
#: Hex digits shown of a block hash: enough to identify it, because `homing watch --hash` accepts a prefix.
HASH_DIGITS = 12
#: Age at which a replica's last report is shown as old; replicas report five times a second.
OLD_REPORT_S = 2.0

_encode = msgspec.json.Encoder().encode


class ModelTotals(msgspec.Struct, frozen=True):
    """Totals of a model since the router's start, from which viewers compute rates."""

    prompt_tokens: int
    completion_tokens: int
    ttft: Sequence[int]  #: number of first tokens by bucket of `TTFT_BUCKETS`, and beyond
    phases: Mapping[str, Sequence[int]]  #: number of requests by bucket of their time in each phase
    reports: Mapping[str, LoadReport]  #: last load report, by replica
    gaps: Mapping[str, int]  #: gaps in the event stream, by replica


class LiveSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot of everything that the page shows."""

    version: str
    started_at: int  #: seconds since 1970
    clock_offset_s: float  #: seconds since 1970, less the router's clock
    cluster: ClusterView
    activities: Sequence[ModelActivity]
    totals: Mapping[str, ModelTotals]  #: by model
    responses: Mapping[int, int]  #: HTTP responses by status
    refusals: Mapping[tuple[str, str], int]  #: refused requests by tenant and limit
    trend: Sequence[tuple[int, Sample]]  #: samples of the last minutes with their numbers, oldest first
    streams_broken: int
    tenants: Mapping[bytes, str]  #: names of the tenants in the keys file, by digest


def items_of(now: LiveSnapshot) -> Items:
    """All documents by name, encoded."""
    documents: dict[str, Any] = {"router": _router(now)}
    documents |= {f"model/{model.name}": _model(model, now.totals[model.name]) for model in now.cluster.models}
    for replica in now.cluster.replicas[:MAX_REPLICAS]:
        totals = now.totals.get(replica.model)
        documents[f"replica/{replica.replica_id}"] = _replica(replica, totals)
    documents |= {f"trend/{number}": sample for number, sample in now.trend}
    for number, activity in enumerate(now.activities):
        documents |= {f"{kind}/{number}/{name}": each for kind, name, each in _activity(now, activity)}
    return {name: _encode(document) for name, document in documents.items()}


def frame(before: Items, after: Items, wall_s: float) -> bytes:
    """The server-sent event that turns the documents `before` into `after`; if `before` is empty, it holds all."""
    changed = [b"%b:%b" % (_encode(name), value) for name, value in after.items() if before.get(name) != value]
    gone = [name for name in before if name not in after]
    return b'data: {"now":%.3f,"all":%b,"set":{%b},"gone":%b}\n\n' % (
        wall_s,
        b"false" if before else b"true",
        b",".join(changed),
        _encode(gone),
    )


def _router(now: LiveSnapshot) -> dict[str, Any]:
    view = now.cluster
    return {
        "id": view.router_id,
        **_fields(now, "version started_at streams_broken"),
        **_fields(view, "policy waiting in_flight"),
        "absent": [msgspec.structs.asdict(each) for each in view.absent],
        "refused": [msgspec.structs.asdict(each) for each in view.refused],
        "hidden_replicas": max(0, len(view.replicas) - MAX_REPLICAS),
        "buckets": TTFT_BUCKETS,
        "refusals": [
            (*key, now.refusals[key]) for key in sorted(now.refusals, key=now.refusals.__getitem__)[-MAX_REFUSALS:]
        ],
        "responses": {str(status): count for status, count in sorted(now.responses.items())},
    }


def _model(view: ModelView, totals: ModelTotals) -> dict[str, Any]:
    return {
        **_fields(view, "serving waiting in_flight"),
        **_fields(view.counters, "requests finished failed cancelled continued"),
        **_fields(totals, "prompt_tokens completion_tokens ttft phases"),
        "waiting_tokens": view.waiting_tokens,
        "cached_tokens": view.counters.delivered_cached_tokens,
    }


def _replica(view: ReplicaView, totals: ModelTotals | None) -> dict[str, Any]:
    report = totals.reports.get(view.replica_id) if totals else None
    old = view.report_age_s is not None and view.report_age_s > OLD_REPORT_S
    return {
        **_fields(view, "model node state running waiting in_flight decode_step_s"),
        "events": view.feed,
        "gaps": totals.gaps.get(view.replica_id, 0) if totals else 0,
        "indexed": view.indexed_blocks,
        "queued_tokens": view.queued_prefill_tokens,
        "blocks": None if report is None or view.report_age_s is None else _blocks(report),
        "query_tokens": report.counters.query_tokens if report else 0,
        "hit_tokens": report.counters.hit_tokens if report else 0,
        "preemptions": report.counters.preemptions if report else 0,
        "prefill_tokens_per_s": round(view.prefill_tokens_per_s),
        "trouble": view.trouble or ("no report for some seconds" if old else ""),
        "waiting_blocks": view.waiting_blocks,
        "tenants": view.tenant_blocks,
        "warm_up": None if view.warm_up is None else msgspec.structs.asdict(view.warm_up),
    }


def _blocks(report: LoadReport) -> dict[str, int]:
    """Number of blocks by state; the four add up to the total. Pinned blocks may be in use."""
    busy = report.total_blocks - report.free_blocks
    pinned = min(report.pinned_blocks, busy)
    return {
        "referenced": busy - pinned,
        "pinned": pinned,
        "cached": report.cached_free_blocks,
        "free": report.free_blocks - report.cached_free_blocks,
    }


def _activity(now: LiveSnapshot, activity: ModelActivity) -> Iterator[tuple[str, str, Any]]:
    """The kind, name and content of each document about one model's activity."""
    nodes = [_prefix(node, activity.block_size) for node in activity.prefixes]
    yield "tree", "", {**_fields(activity, "model block_size"), "nodes": nodes}
    for replica, hashes in activity.next_evictions.items():
        yield "evictions", replica, [_hex(each) for each in hashes]
    for routed in activity.routed:
        yield "decision", str(routed.number), _routed(now, routed)
    yield "running", "", [_running(now, each) for each in activity.running]
    for failed in activity.failed:
        yield "failure", str(failed.number), _failed(now, failed)


def _prefix(node: PrefixNode, block_size: int) -> dict[str, Any]:
    return {
        **_fields(node, "parent blocks requests held evicted_next"),
        "hash": _hex(node.last_hash),
        "start": node.start * block_size,
        "tokens": node.blocks * block_size,
    }


def _routed(now: LiveSnapshot, routed: RoutedRequest) -> dict[str, Any]:
    table = routed.explanation
    return {
        "at": round(routed.at + now.clock_offset_s, 3),
        "id": routed.trace_id,
        "tenant": _tenant(now, routed.tenant),
        **_fields(routed, "state ttft_s cached_tokens generated_tokens continuations"),
        **_fields(table, "policy chosen why prompt_tokens prompt_blocks"),
        "candidates": [_candidate(row) for row in table.best(MAX_CANDIDATES)],
        "hidden": max(0, len(table.replicas) - MAX_CANDIDATES),
    }


def _candidate(row: ReplicaScore) -> dict[str, Any]:
    return {
        **_fields(row, "chosen running waiting why"),
        "replica": row.replica_id,
        "events": row.feed,
        "held": row.held_blocks,
        "expected": row.expected_blocks,
        "to_compute": row.uncached_tokens,
        "queued": row.queued_prefill_tokens,
        "ttft_s": row.expected_ttft_s,
    }


def _running(now: LiveSnapshot, each: RunningRequest) -> dict[str, Any]:
    return {
        "since": round(each.arrived + now.clock_offset_s, 3),
        "id": each.trace_id,
        "tenant": _tenant(now, each.tenant),
        **_fields(each, "state waits_for replica prompt_tokens cached_tokens generated_tokens"),
    }


def _failed(now: LiveSnapshot, failed: FailedRequest) -> dict[str, Any]:
    return {
        "at": round(failed.at + now.clock_offset_s, 3),
        "id": failed.trace_id,
        "tenant": _tenant(now, failed.tenant),
        **_fields(failed, "replica status reason"),
    }


def _fields(source: object, names: str) -> dict[str, Any]:
    """The attributes of `source` with these space-separated names."""
    return {name: getattr(source, name) for name in names.split()}


def _tenant(now: LiveSnapshot, digest: bytes) -> str:
    return now.tenants.get(digest) or digest[:4].hex()


def _hex(block: int) -> str:
    return f"{block:016x}"[:HASH_DIGITS]
