"""Smoothing of measured rates."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from homing.events.load_report import PrefillSpan, work_of
from homing.events.wire.messages import PrefillCost, PrefillWork
from homing.replica.engine.throughput import MIN_PREFILL_TOKENS, SmoothedRates, StepAllowance


def prefill(tokens: int) -> PrefillWork:
    return PrefillWork(1, tokens, tokens * tokens / 2, 0.0)


@pytest.fixture
def rates():
    return SmoothedRates(prefill_tokens_per_s=1000.0, decode_step_s=0.01)


def test_rates_approach_what_is_observed(rates: SmoothedRates) -> None:
    """The router's forecasts must follow the machine's current speed, not the speed at warm-up."""
    for _ in range(200):
        rates.observe(prefill(1024), decode_rows=0, seconds=0.5)
        rates.observe(prefill(0), decode_rows=8, seconds=0.03)

    assert rates.prefill_tokens_per_s == pytest.approx(2048, rel=0.01)
    assert rates.decode_step_s == pytest.approx(0.03, rel=0.01)


def test_one_odd_step_moves_the_rates_only_a_little(rates: SmoothedRates) -> None:
    """A page fault or a burst of another process must not send all traffic elsewhere."""
    rates.observe(prefill(0), decode_rows=1, seconds=0.1)

    assert rates.decode_step_s < 0.015


def test_a_short_prefill_says_nothing_about_the_rate(rates: SmoothedRates) -> None:
    """A short step is dominated by its fixed cost: after a prefix hit, the rate would look far too low."""
    rates.observe(prefill(MIN_PREFILL_TOKENS - 1), decode_rows=0, seconds=5.0)

    assert rates.prefill_tokens_per_s == 1000.0


def test_decodes_in_the_same_step_are_not_charged_to_the_prefill(rates: SmoothedRates) -> None:
    """A mixed step takes longer than its prefill alone would."""
    rates.observe(prefill(100), decode_rows=4, seconds=0.11)

    assert rates.prefill_tokens_per_s == pytest.approx(1000.0)


@given(
    costs=st.tuples(*[st.floats(0, 1e-3)] * 4).map(lambda parts: PrefillCost(parts[0], parts[1] + 1e-6, *parts[2:])),
    seconds=st.floats(-1, 1),
    least=st.integers(-5, 100),
    start=st.integers(0, 5000),
    cached=st.integers(0, 5000),
)
def test_an_allowance_holds_as_many_tokens_as_cost_its_seconds(
    costs: PrefillCost, seconds: float, least: int, start: int, cached: int
) -> None:
    allowance = StepAllowance(seconds, least, costs)

    tokens = allowance.tokens(cached, start)

    def cost_of(count: int) -> float:
        return costs.total(work_of([PrefillSpan(cached, start, start + count)]))

    assert tokens >= max(0, least)
    assert tokens == max(0, least) or cost_of(tokens) <= seconds * (1 + 1e-6)
    assert cost_of(tokens + 1) >= seconds * (1 - 1e-6)
    allowance.spend(PrefillSpan(cached, start, start + max(1, tokens)))
    assert allowance.least == least - max(1, tokens)


def test_the_allowance_follows_a_machine_that_slows_down_and_leaves_room_for_decodes(rates: SmoothedRates) -> None:
    """Other processes may take half of the processor from one step to the next."""
    for _ in range(100):
        rates.observe(prefill(100), decode_rows=0, seconds=0.1)
    before, mixed = rates.allowance(0.2, 0, decodes=False), rates.allowance(0.2, 0, decodes=True)
    for _ in range(4):
        rates.observe(prefill(100), decode_rows=0, seconds=0.2)

    after = rates.allowance(0.2, 0, decodes=False)

    assert before.tokens(0, 0) == pytest.approx(200, rel=0.1)
    assert mixed.tokens(0, 0) == pytest.approx(190, rel=0.1)
    assert after.tokens(0, 0) == pytest.approx(100, rel=0.15)


@given(st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 64), st.floats(0, 100)), max_size=30))
def test_rates_stay_above_zero(steps: list[tuple[int, int, float]]) -> None:
    """Other code divides by the rates."""
    rates = SmoothedRates(prefill_tokens_per_s=500.0, decode_step_s=0.002)

    for tokens, decodes, seconds in steps:
        rates.observe(prefill(tokens), decodes, seconds)
        assert rates.prefill_tokens_per_s > 0
        assert rates.decode_step_s > 0
