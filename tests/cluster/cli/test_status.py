"""The table of `homing status`."""

from typing import Any

from homing.cluster.cli.status import hit_rates, render, tier_failures
from homing.cluster.output import plain

COUNTERS = ("requests", "finished", "failed", "cancelled", "continued", "delivered_cached_tokens")
METRICS = """\
# TYPE homing_prefix_cache_queries_tokens_total counter
homing_prefix_cache_queries_tokens_total{replica="r0"} 200.0
homing_prefix_cache_queries_tokens_total{replica="r1"} 0.0
# TYPE homing_prefix_cache_hits_tokens_total counter
homing_prefix_cache_hits_tokens_total{replica="r0"} 150.0
"""


def page(*args: Any, **more: Any) -> str:
    return plain(*render(*args, **more))


def replica(name: str) -> dict[str, Any]:
    return {
        "replica_id": name,
        "state": "serving",
        "feed": "live",
        "model": "demo",
        "node": "127.0.0.1",
        "pids": [1, 2],
        "running": 3,
        "waiting": 4,
        "num_blocks": 100,
        "free_blocks": 75,
        "indexed_blocks": 40,
        "report_age_s": 0.1,
    }


def model(name: str, serving: int = 2) -> dict[str, Any]:
    return {"name": name, "serving": serving, "in_flight": 1, "waiting": 3}


def test_a_replica_that_was_never_asked_has_no_hit_rate() -> None:
    """0 % would look like a fault."""
    assert hit_rates(METRICS) == {"r0": 0.75}


def test_every_replica_is_a_line_with_its_load_and_hit_rate() -> None:
    """The table must give the whole picture."""
    counters = dict.fromkeys(COUNTERS, 7)
    view = {
        "policy": "expected-ttft",
        "models": [model("demo")],
        "in_flight": 1,
        "waiting": 0,
        "replicas": [replica("r0"), replica("r1")],
        "absent": [{"replica_id": "r3", "state": "rebuilding", "reason": "the process died", "since": 100.0}],
        "refused": [{"replica_id": "r2", "message": "another tokenizer"}],
        "counters": counters,
    }

    lines = page("default", "http://h:1", [view], {"r0": 0.75}, now=112.4).splitlines()

    assert lines[0] == "default · http://h:1 · demo · policy expected-ttft"
    updated = page("default", "http://h:1", [view], {}, models="demo (./ox)", now=112.4)
    assert updated.startswith("default · http://h:1 · demo (./ox) · policy")  # an update keeps the name
    assert lines[3].split() == ["r0", "serving", "live", "2", "127.0.0.1", "3", "4", "25%", "-", "40", "blocks", "75%"]
    assert lines[4].split()[-1] == "-"
    assert lines[5].split() == ["r3", "rebuilding", *["-"] * 9]
    assert "7 failed, 7 cancelled, 7 continued elsewhere; 7 prompt tokens came from caches" in lines[7]
    assert lines[8] == "r3 has been rebuilding for 12 s: the process died"
    assert lines[9] == "refused r2: another tokenizer"


def test_a_cluster_elsewhere_is_known_by_its_address_alone() -> None:
    """The name in local settings would be another cluster's. Also, one block is singular."""
    one = replica("r0") | {"indexed_blocks": 1}
    view: dict[str, Any] = {
        "policy": "p",
        "models": [model("demo")],
        "in_flight": 0,
        "waiting": 0,
        "replicas": [one],
        "absent": [],
        "refused": [],
    }
    view["counters"] = dict.fromkeys(COUNTERS, 0)

    lines = page(None, "http://h:1", [view], {}, now=0.0).splitlines()

    assert lines[0] == "http://h:1 · demo · policy p"
    assert "1 block " in lines[3]


def test_a_warm_up_shows_how_far_it_is() -> None:
    """Otherwise a new replica would look stuck. Another router's warm-up has no progress here."""
    warm_up = {"done_tokens": 300, "planned_tokens": 1200}
    replicas = [
        replica("r0") | {"state": "warming", "warm_up": warm_up},
        replica("r1") | {"state": "warming", "warm_up": None},
    ]
    view = {
        "policy": "p",
        "models": [model("demo")],
        "in_flight": 0,
        "waiting": 0,
        "replicas": replicas,
        "absent": [],
        "refused": [],
    }
    view["counters"] = dict.fromkeys(COUNTERS, 0)

    lines = page("default", "http://h:1", [view], {}, now=0.0).splitlines()

    assert "warming 25%" in lines[3]
    assert lines[4].split()[:3] == ["r1", "warming", "live"]


def test_tiers_show_how_full_they_are_and_what_failed() -> None:
    """A disk that takes nothing costs only hits, so nobody would look for it."""
    tier = {"used_blocks": 700, "total_blocks": 1000}
    replicas = [replica("r0") | {"tiers": {"DISK": tier}}, replica("r1") | {"tiers": {"DISK": tier, "CPU": tier}}]
    view: dict[str, Any] = {"policy": "p", "models": [model("demo")], "in_flight": 0, "waiting": 0}
    view |= {"replicas": replicas, "absent": [], "refused": [], "counters": dict.fromkeys(COUNTERS, 0)}
    metrics = "".join(
        f'homing_tier_failures_total{{replica="{name}",kind="{kind}"}} {number}\n'
        for name, kind, number in (("r0", "disk_io", 2.0), ("r1", "disk_io", 1.0), ("r1", "disk_full", 0.0))
    )
    failures = tier_failures(f"# TYPE homing_tier_failures_total counter\n{metrics}")

    told = page("default", "http://h:1", [view], {}, failures=failures, now=0.0)

    assert "blocks in tiers: DISK 1,400 of 2,000, CPU 700 of 1,000" in told
    assert told.endswith("blocks that tiers could not keep or give back: disk_io 3")


def test_several_routers_tell_each_what_they_did() -> None:
    """Counters are per process: a sum would hide a router that gets no requests."""
    views: list[dict[str, Any]] = [
        {"policy": "p", "models": [], "in_flight": 0, "waiting": 0, "replicas": [], "absent": [], "refused": []}
        for _ in range(2)
    ]
    for count, view in enumerate(views):
        view["counters"] = dict.fromkeys(COUNTERS, count)

    told = page("default", "http://h:1", views, {}, ["http://h:2", "http://h:3"], now=0.0)

    assert "http://h:2: 0 requests" in told
    assert "http://h:3: 1 request," in told


def test_several_models_have_a_line_each_and_their_replicas_stand_together() -> None:
    """A model without replicas appears nowhere else."""
    rows = [replica(name) for name in ("owl-r0", "fox-r10", "fox-r9")]
    view: dict[str, Any] = {"policy": "p", "models": [model("fox"), model("owl", 0)], "in_flight": 0, "waiting": 0}
    view |= {"replicas": rows, "absent": [], "refused": [], "counters": dict.fromkeys(COUNTERS, 0)}

    lines = page("default", "http://h:1", [view], {}, now=0.0).splitlines()

    assert lines[0] == "default · http://h:1 · fox, owl · policy p"
    assert [line.split()[0] for line in lines[3:6]] == ["fox-r9", "fox-r10", "owl-r0"]
    assert lines[7:9] == ["fox: 2 serving, 1 running, 3 waiting", "owl: 0 serving, 1 running, 3 waiting"]


def test_the_tenants_of_the_cached_blocks_are_told_if_there_are_several() -> None:
    """With one tenant, the answer is the number of blocks."""
    several = replica("r0") | {"tenant_blocks": {"team-a": 30, "team-b": 10}, "waiting_blocks": 5}
    view = {"replicas": [several], "models": [model("demo")], "absent": [], "refused": [], "policy": "p"}
    view |= {"counters": dict.fromkeys(COUNTERS, 0), "in_flight": 0, "waiting": 0}

    text = page("c", "u", [view], {}, now=0.0)

    assert "cached blocks by tenant: team-a 75%, team-b 25%" in text
    assert "5%" in text
    view["replicas"] = [several | {"tenant_blocks": {"team-a": 40}}]
    assert "by tenant" not in page("c", "u", [view], {}, now=0.0)
