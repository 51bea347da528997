"""Prefill costs learned from measured steps."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from homing.events.load_report import PrefillSpan, PrefillSums, fit, scaled, slowness, steps_of, work_of
from homing.events.wire.messages import PrefillCost, PrefillWork

RATE = 50_000.0
TRUE = PrefillCost(prompt_s=0.01, token_s=2e-5, pair_s=2e-9, context_s=1e-9)


def prefill(cached: int, tokens: int) -> PrefillWork:
    return work_of([PrefillSpan(cached, cached, cached + tokens)])


def mixed_steps(cost: PrefillCost, count: int = 200) -> PrefillSums:
    """Short and long prompts, with and without a cached prefix; durations vary by ±5 %."""
    rng, sums = Random(7), PrefillSums()
    for _ in range(count):
        work = prefill(rng.choice((0, 0, 4_000, 30_000)), rng.choice((20, 300, 2_000, 8_000)))
        sums.observe(work, cost.total(work) * rng.uniform(0.95, 1.05))
    return sums


def test_the_plain_rate_holds_until_something_is_observed() -> None:
    """A replica that has not computed anything yet must not look free."""
    assert fit(PrefillSums().values, RATE) == PrefillCost(0.0, 1 / RATE, 0.0, 0.0)


def test_mixed_steps_tell_the_parts() -> None:
    """Short prompts, long ones, and short suffixes of long cached prefixes differ only in these components."""
    cost = fit(mixed_steps(TRUE).values, RATE)

    assert cost.prompt_s == pytest.approx(TRUE.prompt_s, rel=0.05)
    assert cost.token_s == pytest.approx(TRUE.token_s, rel=0.1)
    assert cost.pair_s == pytest.approx(TRUE.pair_s, rel=0.2)
    assert cost.context_s == pytest.approx(TRUE.context_s, rel=0.2)


def test_context_that_costs_nothing_is_learned_to_be_free() -> None:
    """Dynamo's mocker has no context cost; a fit that must attribute it to pairs is wrong by seconds."""
    free = PrefillCost(prompt_s=0.0165, token_s=1.518e-5, pair_s=8.42e-10, context_s=0.0)

    cost = fit(mixed_steps(free).values, RATE)

    assert cost.context_s * 30_000 < 0.02 * cost.token_s
    assert cost.seconds(0, 100_000) == pytest.approx(free.seconds(0, 100_000), rel=0.15)


@given(st.integers(0, 999), st.floats(0.1, 2.0), st.integers(1, 300), st.integers(0, 30_000))
def test_noise_never_makes_a_prompt_dearer_after_a_cached_prefix(
    seed: int, noise: float, tokens: int, cached: int
) -> None:
    """After 40 short requests on a busy machine, 73 tokens after 176 cached ones were to take six times all 249."""
    rng, sums = Random(seed), PrefillSums()
    for _ in range(40):
        work = prefill(rng.choice((0, 16, 176)), rng.randrange(1, 300))
        sums.observe(work, (0.002 + work.tokens * 6e-5) * rng.lognormvariate(0, noise))

    cost = fit(sums.values, RATE)

    assert cost.seconds(cached, tokens) <= cost.seconds(0, cached + tokens) * 1.000001


def test_a_fit_foresees_what_it_has_seen() -> None:
    """Identical steps do not reveal the components, but their total must be right."""
    sums = PrefillSums()
    for _ in range(200):
        sums.observe(prefill(0, 1000), 0.1)

    assert fit(sums.values, RATE).seconds(0, 1000) == pytest.approx(0.1, rel=0.02)


def test_sums_of_a_slower_replica_tell_by_how_much() -> None:
    """Replicas of one shape differ by a factor; dividing their sums by it gives those of the fast one."""
    fast, slow = mixed_steps(TRUE), mixed_steps(TRUE.times(3))

    assert slowness(slow.values, fit(fast.values, RATE)) == pytest.approx(3, rel=0.02)
    assert scaled(slow.values, 3) == pytest.approx(fast.values)


def test_chunks_of_a_prompt_are_the_work_of_the_whole() -> None:
    """Chunking a prompt must not change the computed work."""
    whole = prefill(100, 50)

    chunks = work_of([PrefillSpan(100, 100, 120), PrefillSpan(100, 120, 150)])

    assert chunks == whole == PrefillWork(1, 50, 50 * 25, 50 * 100)


def test_the_last_few_tokens_of_a_prompt_do_not_outweigh_all_else() -> None:
    """Their step is so short that its relative error would dominate the fit."""
    sums = mixed_steps(TRUE)
    before = fit(sums.values, RATE)
    sums.observe(PrefillWork(0, 3, 9.0, 0.0), 2e-5)

    assert fit(sums.values, RATE).token_s == pytest.approx(before.token_s, rel=0.01)


@given(
    st.lists(
        st.tuples(
            st.integers(0, 8), st.integers(1, 20_000), st.floats(0, 1e9), st.floats(0, 1e9), st.floats(1e-6, 100)
        ),
        max_size=20,
    )
)
def test_no_part_is_ever_negative(steps: list[tuple[int, int, float, float, float]]) -> None:
    """A negative cost would attract all requests to one replica."""
    sums = PrefillSums()
    for prompts, tokens, pairs, context, seconds in steps:
        sums.observe(PrefillWork(prompts, tokens, pairs, context), seconds)

    cost = fit(sums.values, RATE)

    assert 0 <= steps_of(sums.values) <= len(steps)
    assert min(cost.prompt_s, cost.pair_s, cost.context_s) >= 0
    assert cost.token_s > 0
