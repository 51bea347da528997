"""The state of the replicas when a request is placed."""

from collections import Counter
from collections.abc import Sequence
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from homing.cluster.lab.simulate.policies import POLICIES
from homing.router.backend import FeedState, RouterCounters
from homing.router.flow.fair_queue import FairQueue
from homing.router.routing.joined_replica import Foreseen, InFlight
from homing.router.routing.placement import Placement, known_tokens
from homing.router.routing.policy.base import Candidate, Decision, Policy, Prompt
from homing.router.routing.policy.expected_ttft import ExpectedTtft, LeastLoaded, cost_limit
from homing.router.routing.policy.explain import regret_tokens
from homing.router.routing.policy.round_robin import RoundRobin

from ..fakes import BLOCK, description_of, report_of

PROMPT = Prompt(tokens=1000, blocks=62, block_size=BLOCK)
KEYS = range(62)


def placement_of(policy: Policy, *, external: bool = False, counters: RouterCounters | None = None) -> Placement:
    placement = Placement(policy, router_id="router", silence_s=3.0, rng=Random(0), counters=counters)
    for name in ("r0", "r1"):
        placement.join(structs.replace(description_of(name), external=external), 0.0)
        placement.set_feed(name, FeedState.LIVE)
    return placement


@pytest.fixture
def placement() -> Placement:
    return placement_of(ExpectedTtft())


def place(placement: Placement, request_id: int) -> str:
    candidates = placement.candidates(KEYS, (), 0.0)
    decision = placement.decide(PROMPT, candidates)
    placement.book(request_id, decision, KEYS, 0.0)
    placement.check()
    assert decision.chosen is not None
    return decision.chosen.replica_id


def test_siblings_follow_each_other_before_any_event(placement: Placement) -> None:
    """The first one's blocks are expected on its replica, so the others need not compute them elsewhere."""
    first = place(placement, 1)

    assert {place(placement, request_id) for request_id in range(2, 8)} == {first}


def test_of_waiting_requests_the_shortest_computes_their_common_blocks(placement: Placement) -> None:
    """Of requests that no report includes yet, the one with the least to compute starts first and computes them."""
    for replica in ("r0", "r1"):
        placement.report(replica, report_of(step=1, running=2), 0.0)
    lengths = {1: 40, 2: 50, 3: 30}  # blocks, of which the first 20 are common
    for request_id, blocks in lengths.items():
        keys = [*range(20), *range(1000 * request_id, 1000 * request_id + blocks - 20)]
        prompt = Prompt(tokens=blocks * BLOCK + 1, blocks=blocks, block_size=BLOCK, hashes=keys)
        decision = placement.decide(prompt, placement.candidates(keys, (), 0.0)[:1])
        foreseen = placement.foresee(decision)
        expected = {1: (0, {}), 2: (20, {}), 3: (0, {1: 20, 2: 20})}[request_id]
        assert (foreseen.blocks, foreseen.passed) == expected
        placement.book(request_id, decision, keys, 0.0)

    placement.report("r0", report_of(step=2, running=2, waiting=3, accepted={"router": 3}), 0.0)
    prompt = Prompt(tokens=20 * BLOCK + 1, blocks=20, block_size=BLOCK, hashes=range(20))
    shortest = placement.decide(prompt, placement.candidates(range(20), (), 0.0)[:1])
    assert placement.foresee(shortest) == Foreseen(20, {}), "what a report includes has started in the next step"


def test_a_request_passes_only_one_that_still_waits_and_has_more_to_compute() -> None:
    """A replica compares requests by the tokens to compute, plus those that it computed before each arrived."""
    sent = InFlight(
        request_id=1,
        chain=(),
        start=0,
        uncached_tokens=100,
        blocks=7,
        prefill_s=0.1,
        prompt_tokens=500,
        computed_tokens=100,
        prefilled_tokens=1000,
        starts_by=1.0,
    )

    def passes(computed: int, prefilled: int = 1000, held: int = 0, now: float = 0.0) -> bool:
        return sent.is_passed_by(computed, prefilled, held, now)

    assert passes(99), "it has less to compute"
    assert not passes(100), "among equals, the first goes first"
    assert not passes(60, prefilled=1040), "40 tokens were computed since the other was sent"
    assert not passes(60, held=440), "meanwhile, only 60 tokens of the other's prompt are not cached"
    assert not passes(1, now=1.0), "the other has started"


def test_a_request_sent_to_a_replica_that_only_decodes_starts_within_a_step(placement: Placement) -> None:
    """A shorter request that is sent later does not pass it, even if no report includes it yet."""
    for replica in ("r0", "r1"):
        placement.report(replica, report_of(step=1, running=2, decode_step_s=0.01), 0.0)

    def passed(blocks: int, request_id: int, now: float) -> dict[int, int]:
        keys = [*range(20), *range(1000 * request_id, 1000 * request_id + blocks - 20)]
        prompt = Prompt(tokens=blocks * BLOCK + 1, blocks=blocks, block_size=BLOCK, hashes=keys, now=now)
        decision = placement.decide(prompt, placement.candidates(keys, (), now)[:1])
        foreseen = placement.foresee(decision)
        placement.book(request_id, decision, keys, now)
        return foreseen.passed

    assert passed(50, 1, now=0.0) == {}
    assert passed(40, 2, now=0.005) == {1: 20}
    assert passed(30, 3, now=0.02) == {2: 20}, "the second queues behind the first, which has started"


def test_a_request_that_ended_leaves_nothing_behind(placement: Placement) -> None:
    """Blocks that will not be computed are neither expected nor load."""
    replica = place(placement, 1)

    placement.ended(replica, 1)

    placement.check()
    assert len(placement.fleet[replica].expected) == 0
    assert placement.fleet.load(replica, 0.0).queued_prefill_tokens == 0


class Broken(RoundRobin):
    """Chooses the candidate with this name, usable or not; by default none."""

    choice: str | None = None

    def consider(self, prompt: Prompt, candidates: Sequence[Candidate], rng: Random) -> Decision:
        chosen = next((each for each in candidates if each.replica_id == self.choice), None)
        return self.choose(prompt, candidates, chosen, "broken")


@pytest.mark.parametrize("choice", [None, "r0"])
def test_a_policy_cannot_keep_a_request_from_a_replica_that_can_take_it(choice: str | None) -> None:
    """Nothing would place the request later: the whole cluster stood still."""
    policy, counters = Broken(), RouterCounters()
    policy.choice = choice
    placement = placement_of(policy, counters=counters)
    placement.fleet.set_unavailable("r0", "draining")

    decision = placement.decide(PROMPT, placement.candidates(KEYS, (), 0.0))

    assert decision.chosen is not None
    assert decision.chosen.replica_id == placement.explain(PROMPT, placement.candidates(KEYS, (), 0.0)).chosen == "r1"
    assert counters.overruled == 1
    placement.fleet.set_unavailable("r1", "draining")
    assert placement.decide(PROMPT, placement.candidates(KEYS, (), 0.0)).chosen is None


def test_a_replica_that_left_is_no_candidate(placement: Placement) -> None:
    """Requests cannot be sent to it."""
    placement.leave("r0")

    placement.check()
    assert "r0" not in placement
    assert [candidate.replica_id for candidate in placement.candidates(KEYS, (), 0.0)] == ["r1"]


def test_regret_is_the_best_hit_forgone() -> None:
    """A policy that ignores the cache computes blocks that another replica holds."""
    placement = placement_of(LeastLoaded())
    placement.stored("r0", KEYS)
    placement.book(1, placement.decide(PROMPT, placement.candidates([], (), 0.0)), [], 0.0)
    candidates = placement.candidates(KEYS, ("r0",), 0.0)

    decision = placement.decide(PROMPT, candidates)

    assert regret_tokens(PROMPT, candidates, decision) == 62 * BLOCK
    assert known_tokens(PROMPT, candidates) == PROMPT.tokens, "all full blocks are known"


def test_blocks_that_are_held_or_expected_are_known(placement: Placement) -> None:
    assert known_tokens(PROMPT, placement.candidates(KEYS, (), 0.0)) == 0

    placement.stored("r0", KEYS[:3])
    held = known_tokens(PROMPT, placement.candidates(KEYS, (), 0.0))
    placement.book(1, placement.decide(PROMPT, placement.candidates(KEYS[:5], (), 0.0)), KEYS[:5], 0.0)

    assert held == 3 * BLOCK
    assert known_tokens(PROMPT, placement.candidates(KEYS, (), 0.0)) == 5 * BLOCK


@pytest.mark.parametrize("policy", ["expected-ttft", "dynamo"])
def test_what_a_subscription_stores_reaches_index_and_policy_alike(policy: str) -> None:
    """Policies of other routers keep their own state; they must see the same events as the index."""
    placement = placement_of(POLICIES[policy]())
    prompt = Prompt(tokens=1000, blocks=62, block_size=BLOCK, hashes=KEYS)
    for name in ("r0", "r1"):
        blocks = placement.blocks_of(name)
        blocks.store(None, KEYS)
        blocks.clear()
    placement.blocks_of("r1").replace([(block, None) for block in KEYS])
    placement.blocks_of("r1").remove(KEYS[40:])

    chosen = {placement.decide(prompt, placement.candidates(KEYS, (), 0.0)).chosen.replica_id for _ in range(20)}

    assert chosen == {"r1"}
    assert placement.index.count("r1") == placement.blocks_of("r1").digest.blocks == 40


def test_requests_that_wait_for_memory_keep_others_away(placement: Placement) -> None:
    """The holder will not have room for long: meanwhile, an empty replica computes the prompt."""
    placement.stored("r0", KEYS)
    full = {"free_blocks": 70, "waiting": 2, "running": 3, "step": 1}

    placement.report("r0", report_of(**full, waiting_blocks=0), 0.0)
    assert place(placement, 1) == "r0"
    placement.ended("r0", 1)

    placement.report("r0", report_of(**full | {"step": 2}, waiting_blocks=900), 0.0)
    assert place(placement, 2) == "r1"


def test_what_an_engine_will_evict_is_no_hit() -> None:
    """Requests ahead take free blocks; only blocks shared with running requests, or that still fit, will be found."""
    engine = placement_of(ExpectedTtft(), external=True)
    engine.stored("r0", KEYS)
    holder, _ = engine.candidates(KEYS, (), 0.0)
    assert (holder.held_blocks, holder.expected_blocks) == (62, 62)

    engine.report("r0", report_of(step=1, free_blocks=70, waiting_blocks=60, waiting=1, running=1), 0.0)
    assert engine.candidates(KEYS, (), 0.0)[0].expected_blocks == 10

    engine.book(1, engine.decide(PROMPT, [holder]), KEYS[:40], 0.0)
    crowded, _ = engine.candidates(KEYS, (), 0.0)
    assert (crowded.used_blocks, crowded.expected_blocks) == (40, 40)


def test_requests_ahead_take_no_hit_from_a_replica_of_ours() -> None:
    """It evicts what waiting requests will use after everything else (kvcache/prefix_cache.py)."""
    placement = placement_of(ExpectedTtft())
    placement.stored("r0", KEYS)

    placement.report("r0", report_of(step=1, free_blocks=70, waiting_blocks=60, waiting=1, running=1), 0.0)

    crowded = placement.candidates(KEYS, (), 0.0)[0]
    assert (crowded.load.spare_blocks, crowded.expected_blocks) == (10, 62)


def test_a_replica_that_reports_no_waiting_blocks_is_estimated(placement: Placement) -> None:
    """External engines do not report it: each of their waiting requests counts like a running one."""
    placement.report("r0", report_of(step=1, free_blocks=0, total_blocks=100, running=4, waiting=2), 0.0)

    assert placement.fleet.load("r0", 0.0).spare_blocks == -50


def test_waits_follow_the_measured_lengths_of_answers(placement: Placement) -> None:
    """Long answers free their memory late."""
    report = {"free_blocks": 0, "total_blocks": 100, "running": 4, "waiting": 1, "waiting_blocks": 30}
    placement.report("r0", report_of(step=1, **report), 0.0)
    before = placement.fleet.load("r0", 0.0).ends_per_step

    for _ in range(1000):
        placement.fleet.finished(1280)
    placement.report("r0", report_of(step=2, **report), 0.0)

    assert placement.fleet.load("r0", 0.0).ends_per_step == pytest.approx(before / 10, rel=0.1)


@settings(max_examples=100, deadline=None)
@given(
    came=st.lists(st.tuples(st.floats(0.0, 3.0), st.integers(1, 60_000), st.integers(0, 1)), min_size=2, max_size=40),
    left=st.randoms(use_true_random=False),
)
def test_no_held_request_waits_for_those_that_come_later_than_its_own_prefill_takes(
    came: list[tuple[float, int, int]], left: Random
) -> None:
    """The bound on starvation: an endless stream of short prompts cannot keep a long one waiting."""
    placement, queue = placement_of(ExpectedTtft()), FairQueue()
    now = 0.0
    since: dict[int, float] = {}
    patience_s: dict[int, float] = {}

    def take() -> None:
        name = queue.head()
        assert name is not None
        queue.take(name, 1.0)
        arrived_s = since.pop(name)
        for waiting, waits_since in since.items():
            assert arrived_s <= waits_since + patience_s[waiting] + 1e-9, f"{name} passed {waiting}"

    for name, (gap_s, tokens, takes) in enumerate(came):
        now += gap_s
        prompt = Prompt(tokens=tokens, blocks=0, block_size=BLOCK, now=now)
        queue.push(name, priority=0, tenant=b"", weight=1.0, rank=(0, placement.rank(prompt)))
        since[name], patience_s[name] = now, tokens / description_of("r0").prefill_tokens_per_s
        for _ in range(min(takes * left.randrange(3), len(queue))):
            take()
    while len(queue):
        take()


def test_an_engine_with_rules_of_its_own_is_asked_for_its_hit(placement: Placement) -> None:
    """Its index entries do not equal its hits; blocks in slower memory take time to load."""
    seen: list[int] = []

    def rule(keys) -> tuple[int, tuple[tuple[str, int], ...]]:
        seen.append(len(keys))
        return 40, (("CPU", 30),)

    placement.stored("r0", list(KEYS))
    placement.stored("r1", list(KEYS[:40]))
    placement.set_hit_rule("r0", rule)

    rows = placement.explain(PROMPT, placement.candidates(KEYS, (), 0.0, usable=61)).replicas

    assert seen == [61]
    assert [(row.held_blocks, row.slower_blocks) for row in rows] == [(40, {"CPU": 30}), (40, {})]
    assert rows[0].expected_ttft_s > rows[1].expected_ttft_s
    assert [row.chosen for row in rows] == [False, True]


@pytest.fixture
def engine() -> Placement:
    """A placement with one external engine."""
    placement = Placement(ExpectedTtft(), router_id="router", silence_s=3.0, rng=Random(0))
    placement.join(structs.replace(description_of("b0"), external=True, num_blocks=100), 0.0)
    placement.set_feed("b0", FeedState.LIVE)
    return placement


def expected_at(engine: Placement, now: float) -> int:
    engine.expire(now)
    engine.check()
    [candidate] = engine.candidates(KEYS, (), now)
    return candidate.expected_blocks


def test_what_an_engine_has_computed_is_expected_until_it_is_announced(engine: Placement) -> None:
    """Events arrive separately from replies, so the next turn may come before them. Blocks that are never announced,
    because the engine caches nothing, are expected for one second.
    """
    place(engine, 1)
    engine.ended("b0", 1, computed_at=5.0)

    assert [expected_at(engine, 5.5), expected_at(engine, 6.0)] == [62, 0]

    place(engine, 2)
    engine.ended("b0", 2, computed_at=7.0)
    engine.stored("b0", list(KEYS))
    engine.removed("b0", list(KEYS[10:]))
    assert expected_at(engine, 7.1) == 10


@pytest.mark.parametrize("event", ["announced", "cut off", "reset"])
def test_what_will_not_be_announced_any_more_is_not_expected(engine: Placement, event: str) -> None:
    """They were announced before the end, may not have been computed, or the engine reported an empty cache."""
    place(engine, 1)
    if event == "announced":
        engine.stored("b0", list(KEYS))
    engine.ended("b0", 1, computed_at=None if event == "cut off" else 5.0)
    if event == "announced":
        engine.removed("b0", list(KEYS))
    if event == "reset":
        engine.reset("b0", ())

    assert expected_at(engine, 5.0) == 0


def test_a_request_behind_one_that_evicts_its_prefix_finds_nothing_there(engine: Placement) -> None:
    """This holds for external engines, which say how they evict; ours keep what waiting requests will use."""
    engine.stored("b0", list(reversed(KEYS)))
    others = range(1000, 1062)

    decision = engine.decide(PROMPT, engine.candidates(others, (), 0.0))
    engine.book(1, decision, others, 0.0)
    [behind] = engine.candidates(KEYS, (), 0.0)

    assert (behind.held_blocks, behind.expected_blocks) == (62, 36)
    engine.removed("b0", list(KEYS[36:]))
    engine.stored("b0", list(others))
    [behind] = engine.candidates(KEYS, (), 0.0)
    assert behind.expected_blocks == 36
    engine.ended("b0", 1)
    engine.check()


@pytest.mark.parametrize("seed", range(5))
def test_equal_prompts_that_two_replicas_hold_spread_evenly(seed: int) -> None:
    """24 at once went 17 to 7 on average, and 22 to 2 at worst."""
    placement = Placement(ExpectedTtft(), router_id="router", silence_s=3.0, rng=Random(seed))
    for name in ("r0", "r1"):
        placement.join(description_of(name, max_running_requests=32), 0.0)
        placement.set_feed(name, FeedState.LIVE)
        placement.stored(name, KEYS)
    taken = Counter(place(placement, number) for number in range(1, 25))

    assert max(taken.values()) <= 14, taken


@pytest.mark.parametrize("seed", range(3))
def test_in_a_large_fleet_only_contenders_are_compared(seed: int) -> None:
    """The decision is as good as that among all. Replicas that cannot be chosen take no place."""
    rng = Random(seed)
    placement = Placement(ExpectedTtft(), router_id="router", silence_s=3.0, rng=Random(0))
    for number in range(100):
        name = f"r{number}"
        placement.join(description_of(name), 0.0)
        placement.set_feed(name, FeedState.LIVE)
        placement.stored(name, KEYS[: rng.choice((0, 0, 10, 30, 62))])
        queued = rng.choice((0, 0, 500, 4000))
        placement.report(name, report_of(step=1, running=rng.randrange(8), queued_prefill_tokens=queued), 0.0)
        if number % 3 == 0:
            placement.fleet.set_unavailable(name, "draining")

    few, every = (placement.candidates(KEYS, ("r1",), 0.0, every=each) for each in (False, True))
    best = min(row.cost_s for row in ExpectedTtft().consider(PROMPT, every, Random(0)).table() if not row.obstacle)
    decision = placement.decide(PROMPT, few)

    assert len(every) == 100 > 2 * len(few)
    assert decision.row is not None
    assert decision.row.cost_s <= cost_limit(best)
    assert max(each.expected_blocks for each in few) == max(each.expected_blocks for each in every)
