"""The contract of every policy, the simulated ones of other routers included, through the production placement."""

import pickle
from math import inf, nan
from random import Random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from homing.cluster.lab.simulate.policies import POLICIES
from homing.events.wire.messages import PrefillCost
from homing.router.backend import FeedState
from homing.router.config import RouterSettings
from homing.router.routing.policy.base import Candidate, Policy, Prompt
from homing.router.routing.policy.registry import REGISTRY
from homing.router.routing.replica_load import ReplicaLoad

from ...fakes import report_of
from .cases import NAMES, SILENCE_S, SLOTS, Router, chain


def traffic(router: Router, seed: int, *, explain: bool = False) -> list[str]:
    """Send 60 requests that share prefixes, with events, reports, first tokens and finished requests in between."""
    rng, open_requests, taken = Random(seed), [], []
    for number in range(60):
        hashes = chain(rng.randrange(5), rng.randrange(12))
        if explain:
            router.explain(chain(number % 5, 6))
        replica, request_id = router.send(hashes, now=number / 10)
        taken.append(replica)
        open_requests.append((replica, request_id))
        router.placement.stored(replica, hashes)
        router.placement.started(replica, request_id)
        if number % 3:
            router.placement.ended(*open_requests.pop(rng.randrange(len(open_requests))))
        if number % 7 == 0:
            router.placement.removed(replica, hashes[-1:])
        router.placement.report(replica, report_of(step=number, waiting=rng.randrange(4)), number / 10)
        router.placement.check()
    return taken


@pytest.fixture(params=POLICIES)
def policy(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("policy", REGISTRY)
def test_names_are_unique_and_are_values_of_the_setting(policy: str) -> None:
    """Every policy in the registry can be selected by the setting."""
    assert REGISTRY[policy].name == policy
    assert msgspec.convert({"policy": policy}, RouterSettings).policy == policy
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"policy": policy + "s"}, RouterSettings)


def test_every_policy_class_is_registered_under_a_name_of_its_own() -> None:
    """A duplicate name would hide one of two policies; a forgotten POLICIES would hide all policies of a file."""

    def named(base: type) -> set[type]:
        own = {base} if "name" in vars(base) and base.__module__.startswith("homing.") else set()
        return own.union(*map(named, base.__subclasses__()))

    assert set(POLICIES.values()) == named(Policy)


def test_one_replica_gets_every_request(policy: str) -> None:
    """This includes a prompt without a full block, and one without overlap."""
    router = Router(policy, replicas=["r0"])

    assert {router.send(hashes)[0] for hashes in ([], [1], chain(1, 9), chain(1, 9))} == {"r0"}


def test_without_replicas_a_request_is_held(policy: str) -> None:
    """Neither `decide` nor `explain` fails."""
    router = Router(policy, replicas=[])

    assert router.decide([1, 2]).chosen is None
    assert router.explain([1, 2]).chosen is None


@pytest.mark.parametrize("obstacle", ["draining", "warming", "silent", "excluded"])
def test_a_replica_that_cannot_take_the_request_never_gets_it(policy: str, obstacle: str) -> None:
    """It looks idle and may be the only holder of the prefix, which makes it attractive."""
    router, hashes, now = Router(policy), chain(1, 10), 0.0
    router.placement.stored("r1", hashes)
    if obstacle == "silent":
        now = 2 * SILENCE_S
        for name in ("r0", "r2"):
            router.placement.report(name, report_of(step=1), now)
    elif obstacle != "excluded":
        router.placement.fleet.set_unavailable("r1", "draining" if obstacle == "draining" else "warming")

    excluded = ("r1",) if obstacle == "excluded" else ()
    taken = {router.send(hashes, now=now, excluded=excluded)[0] for _ in range(30)}

    assert taken <= {"r0", "r2"}
    assert router.decide(hashes, now=now, excluded=("r0", "r1", "r2")).chosen is None


def test_a_full_replica_gets_requests(policy: str) -> None:
    """Its own queue orders them better than the router could."""
    router = Router(policy, replicas=["r0"])
    router.placement.report("r0", report_of(running=SLOTS, waiting=40, free_blocks=0), 0.0)

    assert router.decide([1]).chosen is not None


def test_equal_seeds_give_equal_decisions(policy: str) -> None:
    """Runs that are compared must differ in one thing only."""
    assert traffic(Router(policy, seed=3), 1) == traffic(Router(policy, seed=3), 1)


def test_an_explanation_changes_no_later_decision(policy: str) -> None:
    """`homing explain` on a busy cluster must not steer it."""
    assert traffic(Router(policy, seed=3), 1, explain=True) == traffic(Router(policy, seed=3), 1)


def test_a_replica_that_left_gets_nothing_and_may_come_back(policy: str) -> None:
    """A replica's state is dropped when it leaves, and the ends of its requests arrive late."""
    router = Router(policy)
    late = [router.send(chain(number % 4, 6)) for number in range(30)]
    router.placement.leave("r1")

    assert {router.send(chain(number % 4, 6))[0] for number in range(30)} <= {"r0", "r2"}
    for replica, request_id in late:
        router.placement.ended(replica, request_id)
    router.join("r1")
    for number in range(60):
        router.send(chain(number % 20, 6))
    router.placement.check()


def test_memory_is_bounded_by_replicas_caches_and_requests_in_flight(policy: str) -> None:
    """A router runs for months: the requests it sent and the events it received must not pile up."""
    router = Router(policy, block_size=1 << 20)

    def serve(requests: range) -> int:
        for number in requests:
            hashes, now = chain(number, 4), number * 200.0
            for name in NAMES:
                router.placement.report(name, report_of(step=number), now)
            replica, request_id = router.send(hashes, now=now)
            router.placement.stored(replica, hashes)
            router.placement.started(replica, request_id)
            router.placement.ended(replica, request_id)
            router.placement.removed(replica, hashes)
        return len(pickle.dumps(router.placement.policy))

    early = serve(range(100))
    late = serve(range(100, 600))

    assert late <= early + 500
    for name in NAMES:
        router.placement.leave(name)
    assert len(pickle.dumps(router.placement.policy)) <= len(pickle.dumps(POLICIES[policy]())) + 500


#: Numbers that a broken replica may report, or a fit may yield.
WHOLE = st.sampled_from((0, 1, 7, -1, -5000, 2**31, 2**63, -(2**63)))
REAL = st.sampled_from((0.0, 1e-300, 0.002, 1.0, -1.0, 1e300, inf, -inf, nan))
ODD_LOADS = st.builds(
    ReplicaLoad,
    **dict.fromkeys(("running", "waiting", "queued_prefill_tokens", "free_blocks", "cached_free_blocks"), WHOLE),
    **dict.fromkeys(("spare_blocks", "total_blocks", "max_running_requests", "max_batched_tokens"), WHOLE),
    **dict.fromkeys(("busy_until", "prefill_tokens_per_s", "decode_step_s", "ends_per_step"), REAL),
    prefill_cost=st.builds(PrefillCost, REAL, REAL, REAL, REAL),
    draining=st.booleans(),
    silent=st.booleans(),
)
ODD_PROMPTS = st.builds(
    Prompt,
    tokens=st.sampled_from((1, 249, 2**31)),
    blocks=st.sampled_from((0, 15, 2**27)),
    block_size=st.sampled_from((1, 16)),
    hashes=st.sampled_from((range(0), range(15))),
    now=st.sampled_from((0.0, 1e9)),
)
ODD_CANDIDATES = st.tuples(ODD_LOADS, st.sampled_from((0, 11, 15)), st.sampled_from((0, 11, 2**31)), st.booleans())


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=40)
@given(ODD_PROMPTS, st.lists(ODD_CANDIDATES, min_size=1, max_size=4))
def test_whatever_replicas_report_a_request_waits_only_if_no_replica_can_take_it(
    policy: str, prompt: Prompt, drawn: list[tuple[ReplicaLoad, int, int, bool]]
) -> None:
    """A cluster stood still because costs were negative: then no cost is within the tie window of the least."""
    router = Router(policy, replicas=[f"r{place}" for place in range(len(drawn))])
    candidates = [
        Candidate(
            replica_id=f"r{place}",
            feed=FeedState.LIVE,
            load=load,
            held_blocks=held,
            expected_blocks=expected,
            excluded=excluded,
        )
        for place, (load, held, expected, excluded) in enumerate(drawn)
    ]

    decision = router.placement.policy.decide(prompt, candidates, Random(0))

    rows = decision.table()
    usable = [row for row in rows if row.obstacle is None]
    assert (decision.chosen is None) == (not usable)
    assert decision.chosen is None or decision.chosen.replica_id in {row.candidate.replica_id for row in usable}
    assert all(row.ttft_s >= 0 and row.others_s >= 0 and row.cost_s >= 0 for row in rows)
