"""The choice of a replica by its expected time to first token."""

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from homing.router.backend import FeedState
from homing.router.routing.policy.base import Candidate, Prompt, Score, expected_ttft_s
from homing.router.routing.policy.expected_ttft import (
    EVICTING,
    TIE_MAX_S,
    TIE_RATIO,
    TIE_S,
    ExpectedTtft,
    LeastLoaded,
)
from homing.router.routing.replica_load import ReplicaLoad

from ...fakes import BLOCK, load_of
from .cases import PROMPT, candidate, chosen


def test_a_copy_that_evicts_something_costs_more_than_one_in_unused_memory() -> None:
    """The evicted blocks may be requested again: then two prompts are computed instead of one."""
    prompt_s = load_of().prefill_cost.seconds(0, PROMPT.tokens)
    unused, full = (
        [candidate("r0", free_blocks=500, cached_free_blocks=cached), candidate("r1", 62)] for cached in (0, 500)
    )
    lost = [ExpectedTtft().consider(PROMPT, candidates, Random(0)).table()[0].others_s for candidates in (unused, full)]

    assert lost[1] - lost[0] == pytest.approx((EVICTING - 1) * prompt_s, rel=0.05)


def test_an_answer_goes_where_its_tokens_come_faster() -> None:
    """Both replicas would send the first token about equally soon, and the slower one has less to compute."""
    slow, fast = ({"running": 2, "decode_step_s": step_s} for step_s in (0.011, 0.01))

    assert chosen(ExpectedTtft(), [candidate("r0", 62, **slow), candidate("r1", 61, **fast)]) == "r1"
    assert chosen(ExpectedTtft(), [candidate("r0", 62, **fast), candidate("r1", 61, **fast)]) == "r0"


def test_a_prompt_whose_prefix_is_being_computed_takes_one_step_more() -> None:
    """It starts after the step that computes its prefix, and the decoding requests take part in both steps."""
    about = {"running": 4, "queued_prefill_tokens": 100, "decode_step_s": 0.02}
    here, coming = candidate("r0", 62, **about), replace(candidate("r0", 62, **about), held_blocks=10)

    more_s = expected_ttft_s(PROMPT, coming, 8) - expected_ttft_s(PROMPT, here, 8)

    assert more_s == pytest.approx(0.02)


def test_a_prefill_goes_where_it_delays_fewer_answers() -> None:
    """A slightly longer prefill on an almost idle replica is better than delaying forty answers."""
    few, many = (candidate("r0", 45, running=running, max_running_requests=64) for running in (1, 40))
    others = [candidate("r1", 38)]

    assert chosen(ExpectedTtft(), [few, *others]) == "r0"
    assert chosen(ExpectedTtft(), [many, *others]) == "r1"


loads = st.builds(
    load_of,
    running=st.integers(0, 9),
    waiting=st.integers(0, 9),
    queued_prefill_tokens=st.integers(0, 5000),
    free_blocks=st.integers(0, 1000),
    prefill_tokens_per_s=st.floats(100, 100_000),
    decode_step_s=st.floats(0.0001, 0.1),
    draining=st.booleans(),
    silent=st.booleans(),
)


@given(st.lists(loads, min_size=1, max_size=6), st.integers(1, 5000), st.integers(0, 99))
def test_without_any_overlap_the_decision_is_least_loaded_bit_for_bit(
    drawn: list[ReplicaLoad], tokens: int, seed: int
) -> None:
    """A cache-aware router that is worse than least-loaded without reuse is the field's most cited failure."""
    prompt = Prompt(tokens=tokens, blocks=tokens // BLOCK, block_size=BLOCK)
    candidates = [
        Candidate(replica_id=f"r{index}", feed=FeedState.LIVE, load=load, held_blocks=0, expected_blocks=0)
        for index, load in enumerate(drawn)
    ]

    cache_aware = ExpectedTtft().decide(prompt, candidates, Random(seed))
    least_loaded = LeastLoaded().decide(prompt, candidates, Random(seed))

    assert cache_aware.chosen == least_loaded.chosen
    assert cache_aware.expected_ttft_s == least_loaded.expected_ttft_s


@given(st.lists(loads, min_size=2, max_size=6), st.randoms(use_true_random=False), st.integers(0, 99))
def test_the_order_of_the_list_never_decides(drawn: list[ReplicaLoad], shuffler: Random, seed: int) -> None:
    """A router that breaks ties by position sends everything in an idle cluster to the first worker."""
    candidates = [
        Candidate(replica_id=f"r{index}", feed=FeedState.LIVE, load=load, held_blocks=0, expected_blocks=0)
        for index, load in enumerate(drawn)
    ]
    shuffled = list(candidates)
    shuffler.shuffle(shuffled)

    assert chosen(ExpectedTtft(), candidates, seed=seed) == chosen(ExpectedTtft(), shuffled, seed=seed)


overlaps = st.tuples(loads, st.integers(0, 62), st.integers(0, 62), st.sampled_from(list(FeedState)))


@given(st.lists(overlaps, min_size=1, max_size=12), st.integers(0, 99), st.floats(0, 0.3))
def test_the_decision_is_the_documented_rule(
    drawn: list[tuple[ReplicaLoad, int, int, FeedState]], seed: int, now: float
) -> None:
    """The table shows exactly what was weighed."""
    prompt = Prompt(tokens=1000, blocks=62, block_size=BLOCK, now=now)
    candidates = [
        Candidate(replica_id=f"r{index}", feed=feed, load=load, held_blocks=held, expected_blocks=max(held, expected))
        for index, (load, held, expected, feed) in enumerate(drawn)
    ]

    decision = ExpectedTtft().decide(prompt, candidates, Random(seed))

    assert decision.chosen == weighing_all(decision.table(), Random(seed))


def weighing_all(rows: Sequence[Score], rng: Random) -> Candidate | None:
    """Apply the documented rule step by step."""
    usable = [row for row in rows if row.obstacle is None]
    if not usable:
        return None
    least = min(row.cost_s for row in usable)
    equals = [row for row in usable if row.cost_s <= least + min(least * TIE_RATIO, TIE_MAX_S) + TIE_S]

    def rank(row: Score) -> tuple[int, int, int]:
        return row.uncached_tokens, row.candidate.load.requests, row.candidate.load.occupied_blocks

    best = min(rank(row) for row in equals)
    tied = sorted((row.candidate for row in equals if rank(row) == best), key=lambda tie: tie.replica_id)
    return tied[0] if len(tied) == 1 else rng.choice(tied)


def test_equal_replicas_share_at_random() -> None:
    """Nothing distinguishes them, so only chance may decide."""
    equal = [candidate(f"r{index}") for index in range(4)]

    taken = Counter(chosen(ExpectedTtft(), equal, seed=seed) for seed in range(400))

    assert min(taken[f"r{index}"] for index in range(4)) > 60, taken


def test_the_holder_is_chosen() -> None:
    """Computing 8 tokens takes less time than computing 1,000."""
    assert chosen(ExpectedTtft(), [candidate("r0"), candidate("r1", 62)]) == "r1"


def test_an_expected_block_counts_as_a_held_one() -> None:
    """The siblings of a burst come before the first event."""
    assert chosen(ExpectedTtft(), [candidate("r0"), candidate("r1", expected=62)]) == "r1"


def test_a_hot_prefix_spreads_when_waiting_costs_more_than_recomputing() -> None:
    """The holder must first compute 4,000 tokens; the idle replica only 1,000, which delay others by as much."""
    candidates = [candidate("r0"), candidate("r1", 62, queued_prefill_tokens=4000)]

    assert chosen(ExpectedTtft(), candidates) == "r0"


def test_a_replica_whose_feed_is_stale_is_scored_by_load_alone() -> None:
    """Its publisher has been silent: the indexed blocks may be gone by now, and so may the replica."""
    candidates = [
        candidate("r0", running=1),
        candidate("r1", 62, feed=FeedState.STALE, running=2, queued_prefill_tokens=100),
    ]

    assert chosen(ExpectedTtft(), candidates) == "r0"


def test_a_hole_in_the_stream_does_not_void_what_was_known_before_it() -> None:
    """The index was right a moment ago. If it counted for nothing, one lost message would move whole prefixes."""
    candidates = [candidate("r0"), candidate("r1", 62, feed=FeedState.SYNCING, running=1, queued_prefill_tokens=100)]

    assert chosen(ExpectedTtft(), candidates) == "r1"


def test_a_long_prompt_does_not_wait_where_it_need_not() -> None:
    """5 % of 20 seconds is one second; but an error in the 20 seconds is the same on both replicas."""
    prompt = Prompt(tokens=200_000, blocks=0, block_size=BLOCK)
    candidates = [candidate("r0", queued_prefill_tokens=800), candidate("r1", cached_free_blocks=500)]

    assert chosen(ExpectedTtft(), candidates, prompt) == "r1"


def test_the_least_work_wins_among_equal_times() -> None:
    """Recomputing elsewhere what is already being computed gains nothing."""
    candidates = [candidate("r0"), candidate("r1", expected=62, queued_prefill_tokens=1000)]

    assert chosen(ExpectedTtft(), candidates) == "r1"


def test_unlike_prompts_go_to_the_replica_with_the_emptier_cache() -> None:
    """On the other replica they would evict blocks that later requests need."""
    candidates = [candidate("r0", cached_free_blocks=500), candidate("r1", cached_free_blocks=100)]

    assert {chosen(ExpectedTtft(), candidates, seed=seed) for seed in range(9)} == {"r1"}


def test_of_two_holders_the_one_with_memory_to_spare_is_chosen() -> None:
    """It is chosen before any block is lacking, because the estimate of free blocks at admission is not exact."""
    about = {"running": 4, "total_blocks": 1000}
    candidates = [
        candidate("r0", 62, free_blocks=70, cached_free_blocks=62, **about),
        candidate("r1", 62, free_blocks=400, cached_free_blocks=62, **about),
    ]

    assert chosen(ExpectedTtft(), candidates) == "r1"


def test_a_small_load_on_an_empty_replica_is_no_shortage() -> None:
    """The error is a share of the few blocks in use: a prompt that needs nearly all memory does not wait."""
    empty = candidate("r0", free_blocks=64, total_blocks=66, running=1)

    assert expected_ttft_s(PROMPT, empty, 1000) == pytest.approx(0.1, abs=0.01)


def test_the_worked_example_of_the_docs_is_what_the_policy_computes() -> None:
    """docs/decides.md explains the rule with numbers, which must be its own."""
    prompt = Prompt(tokens=4000, blocks=250, block_size=16, hashes=range(250))
    speed = {"decode_step_s": 0.01, "max_batched_tokens": 8192}
    replicas = [
        candidate("r0", 248, queued_prefill_tokens=6000, running=4, **speed),
        candidate("r1", 125, running=6, **speed),
        candidate("r2", 0, **speed),
    ]

    decision = ExpectedTtft().decide(prompt, replicas, Random(0))

    page = (Path(__file__).parents[4] / "docs" / "decides.md").read_text().replace("**", "")
    shown = re.findall(r"^\| (r\d) \| (\d+) \| ([\d,]+) \| .* \| (.*) s \| (.*) s \| (.*) s \|$", page, re.MULTILINE)
    assert shown == [
        (
            row.candidate.replica_id,
            str(row.candidate.held_blocks),
            f"{row.uncached_tokens:,}",
            *(f"{seconds:.3f}" for seconds in (row.ttft_s, row.others_s, row.cost_s)),
        )
        for row in decision.table()
    ]
    assert decision.chosen.replica_id == "r1"
