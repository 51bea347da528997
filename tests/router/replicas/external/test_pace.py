"""How fast an engine seems."""

from hypothesis import given
from hypothesis import strategies as st

from homing.router.replicas.external.pace import MIN_PREFILL_TOKENS, Pace


def test_the_first_observation_replaces_the_guess() -> None:
    """A guess is nobody's pace."""
    pace = Pace()

    pace.first_token(1000, 0.25)
    pace.next_tokens(2, 0.02)

    assert (round(pace.prefill_tokens_per_s), pace.decode_step_s) == (4000, 0.01)


def test_one_odd_answer_changes_little() -> None:
    """Engines compile things in the middle of serving."""
    pace = Pace()
    for _ in range(5):
        pace.first_token(1000, 0.1)

    pace.first_token(1000, 60.0)

    assert round(pace.prefill_tokens_per_s) == 10_000


def test_a_short_prompt_tells_nothing_of_prefill() -> None:
    """Its time is the way there and back."""
    pace, before = Pace(), Pace().prefill_tokens_per_s

    pace.first_token(MIN_PREFILL_TOKENS - 1, 5.0)

    assert pace.prefill_tokens_per_s == before


@given(st.lists(st.tuples(st.integers(-5, 10**6), st.floats(-1.0, 1e6, allow_nan=False)), max_size=40))
def test_rates_stay_above_zero(seen: list[tuple[int, float]]) -> None:
    """Whatever a clock says: they are divided by."""
    pace = Pace()
    for tokens, seconds in seen:
        pace.first_token(tokens, seconds)
        pace.next_tokens(tokens, seconds)

    pace.check()
