"""Example state of a small cluster for the tests of the live page."""

from typing import Any

import msgspec

from homing.events.load_report import CacheCounters, LoadReport
from homing.router.activity import FailedRequest, ModelActivity, PrefixNode, RoutedRequest, RunningRequest
from homing.router.backend import Explanation, ReplicaScore
from homing.router.http.live.trends import Sample
from homing.router.http.live.view import LiveSnapshot, ModelTotals

from ..fakes import FakeBackend, replica_view

#: A request id that a client might choose in order to inject markup.
HOSTILE = "</script><img/src=x/onerror=document.title='broken'>"


def report(*, total: int, free: int, cached: int, pinned: int = 0) -> LoadReport:
    """A load report of a replica with these numbers of blocks."""
    return LoadReport(
        epoch=1,
        step=1,
        ts=0.0,
        running=0,
        waiting=0,
        queued_prefill_tokens=0,
        decode_context_tokens=0,
        free_blocks=free,
        cached_free_blocks=cached,
        total_blocks=total,
        pinned_blocks=pinned,
        prefill_tokens_per_s=1.0,
        decode_step_s=1.0,
        counters=CacheCounters(query_tokens=100, hit_tokens=50),
    )


def score(name: str, ttft_s: float, *, chosen: bool = False) -> ReplicaScore:
    return ReplicaScore(
        replica_id=name,
        feed="live",
        eligible=True,
        held_blocks=1,
        expected_blocks=1,
        uncached_tokens=16,
        queued_prefill_tokens=0,
        running=0,
        waiting=0,
        expected_ttft_s=ttft_s,
        chosen=chosen,
        why="it is chosen" if chosen else "later",
    )


def activity(*, candidates: int = 2) -> ModelActivity:
    """One running request on r0, the last of `candidates`; one failed request; one prefix of two blocks."""
    scores = [score(f"r{number}", 1.0 + number) for number in range(candidates - 1, 0, -1)]
    scores.append(score("r0", 9999.0, chosen=True))
    table = Explanation(
        policy="p",
        chosen="r0",
        reason="prefix",
        why="because",
        prompt_tokens=32,
        prompt_blocks=2,
        block_size=16,
        replicas=scores,
    )
    common: dict[str, Any] = {"trace_id": HOSTILE, "tenant": b"t" * 16}
    return ModelActivity(
        model="demo",
        block_size=16,
        prefixes=[
            PrefixNode(
                parent=None, last_hash=0xAB << 56, start=0, blocks=2, requests=3, held={"r0": 2}, evicted_next={"r0": 1}
            )
        ],
        routed=[
            RoutedRequest(
                number=7,
                at=10.0,
                explanation=table,
                state="streaming",
                ttft_s=0.01,
                cached_tokens=16,
                generated_tokens=2,
                continuations=0,
                **common,
            )
        ],
        running=[
            RunningRequest(
                arrived=10.0,
                state="streaming",
                replica="r0",
                prompt_tokens=32,
                cached_tokens=16,
                generated_tokens=2,
                **common,
            )
        ],
        failed=[FailedRequest(number=1, at=9.0, replica="r1", status=502, reason="replica r1 was lost", **common)],
        next_evictions={"r0": (0xAB << 56,)},
    )


def situation(backend: FakeBackend, **changes: Any) -> LiveSnapshot:
    """A snapshot of the fake backend's cluster with `activity()`, and with `changes` to its fields."""
    view = msgspec.structs.replace(backend.view(), replicas=[replica_view("r0", "serving")])
    reports = {"r0": report(total=100, free=60, cached=20, pinned=10)}
    totals = ModelTotals(1, 2, [0] * 5 + [3] + [0] * 13, {"queue": [3] + [0] * 18}, reports, {"r0": 2})
    made = LiveSnapshot(
        version="1",
        started_at=1000,
        clock_offset_s=1000.0,
        cluster=view,
        activities=[activity()],
        totals={"demo": totals},
        responses={200: 5, 502: 1},
        refusals={("team", "max_running"): 4},
        trend=[(1, Sample(995.0, 0, 0, 0, 0, 0, 0, 0, [0] * 19))],
        streams_broken=1,
        tenants={b"t" * 16: "team"},
    )
    return msgspec.structs.replace(made, **changes)
