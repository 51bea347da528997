"""The autoscaler follows demand within its bounds: quickly up, slowly down, without oscillation."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from homing.cluster.config import ClusterSettings
from homing.cluster.control.autoscale import Autoscaler, ScalingTerms, combined_demand, expected_wait_s, terms_of
from homing.router.control import Demand

TERMS = ScalingTerms(min_replicas=1, max_replicas=8, target_s=1.0, up_after_s=3.0, down_after_s=60.0, cool_down_s=20.0)


def demand(serving: int, *, queued: int = 0, held: int = 0, running: int = 0) -> Demand:
    """The demand on `serving` replicas, each with 1,000 prefill tokens per second and 10 slots."""
    return Demand(
        held_requests=held,
        held_tokens=100 * held,
        queued_tokens=queued,
        running=running,
        slots=10 * serving,
        prefill_tokens_per_s=1000.0 * serving,
        serving=serving,
    )


def after(scaler: Autoscaler, wanted: int, seen: Demand, *, start: float, seconds: int) -> int:
    """The wanted replicas after this demand has lasted `seconds`, evaluated once a second."""
    for second in range(seconds + 1):
        wanted = scaler.decide(wanted, seen, start + second)
    return wanted


def test_overload_that_lasts_brings_replicas_and_a_spike_does_not() -> None:
    """Starting a replica takes longer than a spike lasts."""
    busy = demand(2, queued=3000)

    assert after(Autoscaler(TERMS), 2, busy, start=0, seconds=2) == 2
    assert after(Autoscaler(TERMS), 2, busy, start=0, seconds=3) == 3


def test_great_overload_at_most_doubles_the_replicas() -> None:
    """Much of the queue is gone by the time the new replicas are ready."""
    assert after(Autoscaler(TERMS), 2, demand(2, queued=50_000), start=0, seconds=3) == 4
    assert after(Autoscaler(TERMS), 6, demand(6, queued=500_000), start=0, seconds=3) == 8


def test_what_is_being_started_is_waited_for() -> None:
    """Otherwise every evaluation during an overload would start another replica."""
    assert after(Autoscaler(TERMS), 3, demand(2, queued=50_000), start=0, seconds=100) == 3


def test_idleness_that_lasts_takes_one_at_a_time() -> None:
    """A pause between two removals shows whether the remaining replicas suffice."""
    scaler = Autoscaler(TERMS)
    assert after(scaler, 4, demand(4), start=0, seconds=59) == 4
    assert after(scaler, 4, demand(4), start=60, seconds=0) == 3
    assert after(scaler, 3, demand(3), start=61, seconds=59) == 3


def test_between_too_much_and_too_little_nothing_happens() -> None:
    """One replica fewer would be too few, and one more is not needed: otherwise the count would oscillate."""
    assert after(Autoscaler(TERMS), 3, demand(3, queued=1500), start=0, seconds=1000) == 3
    assert after(Autoscaler(TERMS), 3, demand(3, running=15), start=0, seconds=1000) == 3


def test_zero_is_left_by_the_first_held_request_at_once() -> None:
    """The request already has to wait for a complete start."""
    scaler = Autoscaler(ScalingTerms(min_replicas=0, max_replicas=4))
    scaler.decide(0, demand(0), 0.0)

    assert scaler.decide(0, demand(0, held=1), 0.1) == 1


def test_at_rest_while_the_last_replica_still_drains_it_waits_for_a_held_request() -> None:
    """Utilization of zero replicas is undefined; an evaluation in this phase once crashed the autoscaler."""
    scaler = Autoscaler(ScalingTerms(min_replicas=0, max_replicas=4))
    scaler.decide(1, demand(1), 0.0)

    assert scaler.decide(0, demand(1), 1.0) == 0
    assert scaler.decide(0, demand(1, held=1), 2.0) == 1


def test_zero_is_reached_only_when_nothing_runs() -> None:
    """Only if the bounds allow zero; a single running request keeps the last replica."""
    terms = ScalingTerms(min_replicas=0, max_replicas=4, down_after_s=60.0)

    assert after(Autoscaler(terms), 1, demand(1, running=1), start=0, seconds=500) == 1
    assert after(Autoscaler(terms), 1, demand(1), start=0, seconds=60) == 0
    assert after(Autoscaler(TERMS), 1, demand(1), start=0, seconds=500) == 1


def test_replicas_that_start_one_after_the_other_are_not_taken_for_idle() -> None:
    """The last one may take longer to start than the idle period lasts."""
    scaler = Autoscaler(TERMS)

    assert after(scaler, 3, demand(2), start=0, seconds=500) == 3
    assert after(scaler, 3, demand(3), start=501, seconds=59) == 3
    assert after(scaler, 3, demand(2), start=561, seconds=0) == 2


def test_a_number_beyond_the_bounds_is_brought_back() -> None:
    """This holds for numbers set by hand as well."""
    assert Autoscaler(TERMS).decide(9, demand(9), 0.0) == 8
    assert Autoscaler(TERMS).decide(0, demand(0), 0.0) == 1


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 20_000), st.integers(0, 3), st.integers(0, 40)), max_size=60),
    st.integers(0, 2),
)
def test_whatever_is_seen_the_bounds_hold(sights: list[tuple[int, int, int, int]], least: int) -> None:
    """Holds even if routers see other replicas than are wanted."""
    scaler, wanted = Autoscaler(ScalingTerms(min_replicas=least, max_replicas=5, down_after_s=5, cool_down_s=2)), 2
    for now, (serving, queued, held, running) in enumerate(sights):
        wanted = scaler.decide(wanted, demand(serving, queued=queued, held=held, running=running), float(now))
        assert least <= wanted <= 5


def test_several_routers_hold_requests_of_their_own_and_see_the_same_replicas() -> None:
    """Counted twice, the replicas' speed would seem doubled."""
    seen = combined_demand([demand(2, queued=100, held=1), demand(2, queued=50, held=2)])

    assert (seen.held_requests, seen.held_tokens, seen.queued_tokens, seen.serving) == (3, 300, 100, 2)
    assert expected_wait_s(seen) == pytest.approx(0.2)


@pytest.mark.parametrize("bounds", ["3:2", "0:0", "a:b", "3", ":"])
def test_bounds_that_bound_nothing_are_refused(bounds: str) -> None:
    """The error is in words."""
    with pytest.raises(ValueError, match="MIN:MAX"):
        terms_of(ClusterSettings(autoscale=bounds))


def test_bounds_are_read() -> None:
    """An empty value disables autoscaling."""
    settings = ClusterSettings(autoscale="0:4", ttft_target_s=2.0, scale_down_after_s=9.0)

    assert terms_of(ClusterSettings()) is None
    assert terms_of(settings) == ScalingTerms(min_replicas=0, max_replicas=4, target_s=2.0, down_after_s=9.0)
