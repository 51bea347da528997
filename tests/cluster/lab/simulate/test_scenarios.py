"""Prepared scenarios, and the time to recover from a fault."""

from collections.abc import Iterable

import pytest

from homing.cluster.errors import SettingsError
from homing.cluster.lab.simulate.scenarios import SCENARIOS, find, recovery_s, stage
from homing.cluster.lab.simulate.workload import Arrival


def course(*spans: tuple[int, float]) -> list[tuple[float, float]]:
    """One window per second; each span is a number of seconds and their share of hits."""
    shares = [share for seconds, share in spans for _ in range(seconds)]
    return [(float(at_s), share) for at_s, share in enumerate(shares)]


def test_recovery_is_the_time_until_hits_stay_where_they_were() -> None:
    """Ten poor seconds, plus the effect of smoothing over five."""
    assert recovery_s(course((50, 0.8), (10, 0.2), (40, 0.8)), 50.0) == pytest.approx(12.0, abs=2.0)


def test_a_fault_that_costs_nothing_is_forgotten_at_once() -> None:
    """There is nothing to recover from."""
    assert recovery_s(course((100, 0.8)), 50.0) == 0.0


def test_hits_that_stay_low_never_recover() -> None:
    """Happens with a policy that does not settle."""
    assert recovery_s(course((50, 0.8), (50, 0.4)), 50.0) is None


def test_the_last_window_does_not_count() -> None:
    """It covers only part of a second; its few requests do not count as a relapse."""
    assert recovery_s(course((99, 0.8), (1, 0.0)), 50.0) == 0.0


def test_faults_strike_within_the_scaled_span() -> None:
    """Fault times are shares of the time span, which follows from the load."""
    staged = stage(find("burst"), policy="expected-ttft")
    strikes = [fault.at_s for scenario in SCENARIOS.values() for fault in scenario.faults]

    assert staged.fault_s is None
    assert all(0 < at_s < 1 for at_s in strikes)


def test_an_unknown_scenario_is_refused_with_the_known_ones() -> None:
    """The error lists the valid names."""
    with pytest.raises(SettingsError, match="four-routers"):
        find("five-routers")


def endless(arrivals: Iterable[Arrival], block_tokens: int) -> float:
    """Share of prompt tokens found in one unlimited cache, if each prompt is computed before the next arrives."""
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
    """The share is derived from the lengths alone; equality shows that the traffic is as described."""
    scenario = find(name)

    assert endless(scenario.arrivals(), scenario.block_tokens) == pytest.approx(scenario.hits, abs=0.01)
