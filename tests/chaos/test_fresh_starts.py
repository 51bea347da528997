"""A few fresh starts with small pools; `make fresh-starts` runs a hundred."""

import pytest

from .fresh_starts import try_start


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
async def test_no_request_stands_still_after_a_fresh_start(seed: int) -> None:
    """Rates are measured anew, and the first fits come from few requests."""
    outcome = await try_start(seed, seconds=4.0)

    assert outcome.requests
    assert not outcome.faults
