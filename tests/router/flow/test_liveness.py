"""In every reachable state in which a request waits and a replica could take it, something happens soon."""

import pytest

from .liveness import run


@pytest.mark.parametrize("seed", range(1000, 1016))
def test_nothing_stands_still(seed: int) -> None:
    """A whole cluster stood still with every replica idle: no event was left that could change anything."""
    run(seed, events=20)


def test_reports_on_their_way_when_a_request_was_sent_do_not_make_it_lost() -> None:
    """They arrive after it was sent; then the replica stops."""
    run(644)


@pytest.mark.slow
@pytest.mark.parametrize("hundred", range(20))
def test_nothing_stands_still_in_thousands_of_cases(hundred: int) -> None:
    for seed in range(hundred * 100, (hundred + 1) * 100):
        run(seed)
