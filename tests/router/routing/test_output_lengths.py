"""The expected lengths of answers, learned from finished ones."""

from random import Random
from statistics import fmean

import pytest

from homing.router.routing.output_lengths import TYPICAL_TOKENS, OutputLengths, bucket_of


def learned(lengths: list[int]) -> OutputLengths:
    known = OutputLengths()
    for tokens in lengths:
        known.finished(tokens)
    return known


def test_nothing_known_is_the_prior_at_any_length() -> None:
    """Without evidence, an answer of any length is expected to continue for the prior's length."""
    assert set(OutputLengths().remaining()) == {TYPICAL_TOKENS}


def test_a_new_request_generates_the_mean_of_recent_answers() -> None:
    """Old traffic fades: after a change, only the new mean counts."""
    known = learned([2000] * 1000 + [50] * 5000)

    assert known.remaining()[0] == pytest.approx(50, rel=0.05)


def test_a_long_answer_is_expected_to_go_on_for_longer() -> None:
    """With mixed lengths, an answer that is longer than the short ones is one of the long ones."""
    known = learned([20, 2000] * 500)
    remaining = known.remaining()

    assert remaining[bucket_of(0)] == pytest.approx(1010, rel=0.05)
    assert remaining[bucket_of(100)] > 1500


def test_remaining_lengths_follow_the_drawn_distribution() -> None:
    """Compared with the samples themselves, within the width of a bucket."""
    rng = Random(1)
    lengths = [max(1, round(rng.lognormvariate(5.7, 1.0))) for _ in range(4000)]
    remaining = learned(lengths).remaining()

    for generated in (48, 192, 768):
        exact = fmean(length - generated for length in lengths if length > generated)
        assert remaining[bucket_of(generated)] == pytest.approx(exact, rel=0.35)


def test_ends_add_up_over_what_runs() -> None:
    """Each request ends at the rate of its bucket; requests in no bucket count as new."""
    known = learned([100] * 2000)
    new, old = known.remaining()[0], known.remaining()[3]

    assert known.ends_per_step([1, 0, 0, 2], running=4) == pytest.approx(2 / new + 2 / old)
    assert known.ends_per_step([], running=0) == 0.0


def test_weights_stay_bounded() -> None:
    """Each request gets a larger weight than the one before, and the weights are rescaled in time."""
    known = learned([7] * 100_000)

    assert known.remaining()[0] == pytest.approx(7, rel=0.2)
