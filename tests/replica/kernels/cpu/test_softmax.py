"""The compiled softmax of a prefill's scores equals float64's, of what each query sees; all else weighs nothing."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from homing.replica.kernels.cpu.softmax import causal_softmax

#: Of the greatest error: a weight is at most 1, and bfloat16 rounds it to 8 bits.
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2e-3}


def seen_by(count: int, keys: int, window: int | None) -> torch.Tensor:
    """[count, keys]"""
    last = torch.arange(keys - count, keys)[:, None]
    at = torch.arange(keys)
    return (at <= last) & (at > last - (window or keys))


def exact(scores: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """By the definition, in float64."""
    return scores.double().masked_fill(~seen, -math.inf).softmax(-1)


def scores_of(shape: tuple[int, ...], dtype: torch.dtype, spread: float = 4.0) -> torch.Tensor:
    return (spread * torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))).to(dtype)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 40),
    st.integers(0, 90),
    st.none() | st.integers(1, 140),
    st.integers(1, 3),
    st.sampled_from(list(TOLERANCE)),
)
def test_equals_float64_for_any_lengths(count, before, window, heads, dtype):
    """Whole prompts, chunks after a prefix, a lone token; windows that cut and such that do not."""
    scores = scores_of((heads, 2, count, before + count), dtype)
    seen = seen_by(count, before + count, window)
    wanted = exact(scores, seen)

    found = causal_softmax(scores, count, window)

    assert found is scores
    assert float((found.double() - wanted).abs().max()) < TOLERANCE[dtype]
    assert not found[(~seen).expand_as(found)].any()


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf, 3e38])
def test_scores_that_a_query_does_not_see_change_nothing(number, dtype):
    """They may be of a token whose numbers ran out of range."""
    scores, seen = scores_of((3, 17, 60), dtype), seen_by(17, 60, 9)
    wanted = exact(scores, seen)

    found = causal_softmax(scores.masked_fill(~seen, number), 17, 9)

    assert float((found.double() - wanted).abs().max()) < TOLERANCE[dtype]
    assert not found[(~seen).expand_as(found)].any()


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("number", [math.nan, -math.nan, math.inf])
def test_a_score_that_is_no_number_shows_in_all_who_see_it(number, dtype):
    """Whoever saw it must not look sound."""
    scores, seen = scores_of((1, 8, 20), dtype), seen_by(8, 20, None)
    scores[..., 15] = number

    found = causal_softmax(scores, 8, None)

    for query in range(8):
        assert bool(found[0, query][seen[query]].isnan().all()) == bool(seen[query, 15])
        assert bool(found[0, query][seen[query]].isfinite().all()) == (not seen[query, 15])


@pytest.mark.parametrize("spread", [1e-3, 1.0, 80.0, 1e4])
def test_any_spread_of_scores_is_weighed(spread):
    """Near ties and certainties; what is far below the greatest weighs nothing, and overflows nothing."""
    scores, seen = scores_of((2, 30, 64), torch.float32, spread), seen_by(30, 64, None)
    wanted = exact(scores, seen)

    found = causal_softmax(scores, 30, None)

    torch.testing.assert_close(found.double(), wanted, rtol=2e-6, atol=1e-30)
    torch.testing.assert_close(found.sum(-1), torch.ones(2, 30), rtol=1e-5, atol=0)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_share_the_rows(threads):
    """Each has scratch of its own."""
    before = torch.get_num_threads()
    scores = scores_of((4, 33, 700), torch.float32)
    wanted = exact(scores, seen_by(33, 700, None))

    torch.set_num_threads(threads)
    try:
        found = causal_softmax(scores, 33, None)
    finally:
        torch.set_num_threads(before)

    assert float((found.double() - wanted).abs().max()) < TOLERANCE[torch.float32]
