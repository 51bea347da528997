"""Prepared situations, and how long it takes until a fault is forgotten."""

from collections.abc import Iterable

import pytest

from homing.cluster.errors import SettingsError
from homing.cluster.lab.simulate.scenarios import SCENARIOS, find, recovery_s, stage
from homing.cluster.lab.simulate.workload import Arrival


def course(*spans: tuple[int, float]) -> list[tuple[float, float]]:
    """Windows of a second: so many with that share of hits, and then so many with the next."""
    shares = [share for seconds, share in spans for _ in range(seconds)]
    return [(float(at_s), share) for at_s, share in enumerate(shares)]


def test_recovery_is_the_time_until_hits_stay_where_they_were() -> None:
    """Ten poor seconds, and what smoothing over five adds to them."""
    assert recovery_s(course((50, 0.8), (10, 0.2), (40, 0.8)), 50.0) == pytest.approx(12.0, abs=2.0)


def test_a_fault_that_costs_nothing_is_forgotten_at_once() -> None:
    """Nothing to recover from."""
    assert recovery_s(course((100, 0.8)), 50.0) == 0.0


def test_hits_that_stay_low_never_recover() -> None:
    """As with a policy that does not settle."""
    assert recovery_s(course((50, 0.8), (50, 0.4)), 50.0) is None


def test_the_last_window_does_not_count() -> None:
    """It ends in the middle of its requests; the few that it has are no relapse."""
    assert recovery_s(course((99, 0.8), (1, 0.0)), 50.0) == 0.0


def test_faults_strike_within_the_scaled_span() -> None:
    """Their times are shares of it; the span follows from the load."""
    staged = stage(find("burst"), policy="expected-ttft")
    strikes = [fault.at_s for scenario in SCENARIOS.values() for fault in scenario.faults]

    assert staged.fault_s is None
    assert all(0 < at_s < 1 for at_s in strikes)


def test_an_unknown_scenario_is_refused_with_the_known_ones() -> None:
    """So that the next word is right."""
    with pytest.raises(SettingsError, match="four-routers"):
        find("five-routers")


def endless(arrivals: Iterable[Arrival], block_tokens: int) -> float:
    """The share of prompt tokens that one endless cache has, if each prompt is computed before the next one comes."""
    seen: set[int] = set()
    cached = total = 0
    for each in arrivals:
        held = next((place for place, block in enumerate(each.blocks) if block not in seen), len(each.blocks))
        seen.update(each.blocks)
        cached += min(held * block_tokens, each.tokens - 1)
        total += each.tokens
    return cached / total


@pytest.mark.parametrize("name", ["shared-system", "few-shot", "rag", "chat", "tree-search", "agents"])
def test_what_a_classic_workload_shares_is_what_was_worked_out_by_hand(name: str) -> None:
    """From its lengths alone, in docs/simulate.md: so the traffic is what its name says."""
    scenario = find(name)

    assert endless(scenario.arrivals(), scenario.block_tokens) == pytest.approx(scenario.hits, abs=0.01)
