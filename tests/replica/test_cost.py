"""What a prefill costs, learned from steps."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from homing.replica.cost import PrefillCostFit

RATE = 10_000.0


def test_the_plain_rate_holds_until_something_is_observed() -> None:
    """A replica that has done nothing yet must not look free."""
    cost = PrefillCostFit().cost(RATE)

    assert (cost.prompt_s, cost.token_s, cost.pair_s) == (0.0, 1 / RATE, 0.0)


def test_steps_of_different_shapes_tell_the_parts() -> None:
    """Many short prompts, one long one, and a short rest behind a long cached prefix differ in their parts only."""
    fit = PrefillCostFit()
    for _ in range(50):
        for prompts, tokens, pairs in ((4, 400, 20_000), (1, 8000, 32e6), (1, 500, 5e6), (2, 2000, 1e6)):
            fit.observe(prompts, tokens, pairs, 0.01 * prompts + 2e-5 * tokens + 1e-9 * pairs)

    cost = fit.cost(RATE)

    assert cost.prompt_s == pytest.approx(0.01, rel=0.15)
    assert cost.token_s == pytest.approx(2e-5, rel=0.15)
    assert cost.pair_s == pytest.approx(1e-9, rel=0.4)  # the smallest part, and drawn to none


def test_a_fit_foresees_what_it_has_seen() -> None:
    """Steps that are all alike do not tell the parts, but their sum."""
    fit = PrefillCostFit()
    for _ in range(200):
        fit.observe(1, 1000, 500_000, 0.1)

    assert fit.cost(RATE).seconds(0, 1000) == pytest.approx(0.1, rel=0.02)


@given(
    st.lists(st.tuples(st.integers(1, 8), st.integers(1, 20_000), st.floats(0, 1e9), st.floats(1e-6, 100)), max_size=20)
)
def test_no_part_is_ever_negative(steps: list[tuple[int, int, float, float]]) -> None:
    """A cost below nothing would draw all requests to one replica."""
    fit = PrefillCostFit()
    for prompts, tokens, pairs, seconds in steps:
        fit.observe(prompts, tokens, pairs, seconds)

    cost = fit.cost(RATE)

    assert cost.prompt_s >= 0
    assert cost.token_s > 0
    assert cost.pair_s >= 0
