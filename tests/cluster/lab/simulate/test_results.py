"""Statistics whose size does not grow with the trace."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from homing.cluster.lab.simulate.results import Durations, Windows


@given(st.lists(st.floats(1e-4, 1e4), min_size=1, max_size=200), st.sampled_from([0.5, 0.9, 0.99]))
def test_quantiles_are_exact_to_one_per_cent(values: list[float], share: float) -> None:
    """A histogram replaces the list of values; its error is at most half a bucket."""
    durations = Durations()
    for value in values:
        durations.add(value)

    wanted = sorted(values)[max(0, -(-len(values) * round(share * 100) // 100) - 1)]

    assert durations.quantile(share) == pytest.approx(wanted, rel=0.0101)
    assert durations.mean == pytest.approx(sum(values) / len(values))


def test_a_curve_rises_to_one() -> None:
    """The curve is a cumulative distribution."""
    durations = Durations()
    for value in (0.1, 0.2, 0.2, 5.0):
        durations.add(value)

    curve = durations.curve()

    assert curve == sorted(curve)
    assert curve[-1][1] == 1.0
    assert [share for seconds, share in curve if seconds < 1.0][-1] == 0.75


def test_windows_widen_instead_of_growing_in_number() -> None:
    """A week of virtual time takes no more memory than a minute."""
    windows = Windows(limit=16)
    for second in range(10_000):
        windows.add(second, 2.0)

    series = windows.series()

    assert len(series) <= 16
    assert {mean for _, mean in series} == {2.0}
