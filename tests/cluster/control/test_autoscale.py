"""The autoscaler: it follows demand between its bounds, soon up, late down, and comes to rest."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from homing.cluster.config import ClusterSettings
from homing.cluster.control.autoscale import Autoscaler, ScalingTerms, combined_demand, expected_wait_s, terms_of
from homing.router.control import Demand

TERMS = ScalingTerms(min_replicas=1, max_replicas=8, target_s=1.0, up_after_s=3.0, down_after_s=60.0, cool_down_s=20.0)


def demand(serving: int, *, queued: int = 0, held: int = 0, running: int = 0) -> Demand:
    """Replicas that prefill 1,000 tokens a second and run 10 requests each."""
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
    """What is wanted when it has looked like this for so long, looked at once a second."""
    for second in range(seconds + 1):
        wanted = scaler.decide(wanted, seen, start + second)
    return wanted


def test_overload_that_lasts_brings_replicas_and_a_spike_does_not() -> None:
    """A start takes longer than a spike."""
    busy = demand(2, queued=3000)

    assert after(Autoscaler(TERMS), 2, busy, start=0, seconds=2) == 2
    assert after(Autoscaler(TERMS), 2, busy, start=0, seconds=3) == 3


def test_great_overload_at_most_doubles_the_replicas() -> None:
    """Much of what waits is gone by the time they are there."""
    assert after(Autoscaler(TERMS), 2, demand(2, queued=50_000), start=0, seconds=3) == 4
    assert after(Autoscaler(TERMS), 6, demand(6, queued=500_000), start=0, seconds=3) == 8


def test_what_is_being_started_is_waited_for() -> None:
    """Else overload would start one more with every look."""
    assert after(Autoscaler(TERMS), 3, demand(2, queued=50_000), start=0, seconds=100) == 3


def test_idleness_that_lasts_takes_one_at_a_time() -> None:
    """With a pause between two, in which the others show whether they are enough."""
    scaler = Autoscaler(TERMS)
    assert after(scaler, 4, demand(4), start=0, seconds=59) == 4
    assert after(scaler, 4, demand(4), start=60, seconds=0) == 3
    assert after(scaler, 3, demand(3), start=61, seconds=59) == 3


def test_between_too_much_and_too_little_nothing_happens() -> None:
    """One less would be too few, one more is not needed yet: else it would go up and down for ever."""
    assert after(Autoscaler(TERMS), 3, demand(3, queued=1500), start=0, seconds=1000) == 3
    assert after(Autoscaler(TERMS), 3, demand(3, running=15), start=0, seconds=1000) == 3


def test_zero_is_left_by_the_first_held_request_at_once() -> None:
    """It waits for a whole start as it is."""
    scaler = Autoscaler(ScalingTerms(min_replicas=0, max_replicas=4))
    scaler.decide(0, demand(0), 0.0)

    assert scaler.decide(0, demand(0, held=1), 0.1) == 1


def test_at_rest_while_the_last_replica_still_drains_it_waits_for_a_held_request() -> None:
    """A share of no replicas cannot be computed: a look in these seconds once ended the autoscaler."""
    scaler = Autoscaler(ScalingTerms(min_replicas=0, max_replicas=4))
    scaler.decide(1, demand(1), 0.0)

    assert scaler.decide(0, demand(1), 1.0) == 0
    assert scaler.decide(0, demand(1, held=1), 2.0) == 1


def test_zero_is_reached_only_when_nothing_runs() -> None:
    """Where it is allowed; a single request keeps the last replica."""
    terms = ScalingTerms(min_replicas=0, max_replicas=4, down_after_s=60.0)

    assert after(Autoscaler(terms), 1, demand(1, running=1), start=0, seconds=500) == 1
    assert after(Autoscaler(terms), 1, demand(1), start=0, seconds=60) == 0
    assert after(Autoscaler(TERMS), 1, demand(1), start=0, seconds=500) == 1


def test_replicas_that_start_one_after_the_other_are_not_taken_for_idle() -> None:
    """The last of them may take longer to start than idleness must last."""
    scaler = Autoscaler(TERMS)

    assert after(scaler, 3, demand(2), start=0, seconds=500) == 3
    assert after(scaler, 3, demand(3), start=501, seconds=59) == 3
    assert after(scaler, 3, demand(2), start=561, seconds=0) == 2


def test_a_number_beyond_the_bounds_is_brought_back() -> None:
    """Whoever asked for it."""
    assert Autoscaler(TERMS).decide(9, demand(9), 0.0) == 8
    assert Autoscaler(TERMS).decide(0, demand(0), 0.0) == 1


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 20_000), st.integers(0, 3), st.integers(0, 40)), max_size=60),
    st.integers(0, 2),
)
def test_whatever_is_seen_the_bounds_hold(sights: list[tuple[int, int, int, int]], least: int) -> None:
    """Also where the routers see other replicas than are wanted."""
    scaler, wanted = Autoscaler(ScalingTerms(min_replicas=least, max_replicas=5, down_after_s=5, cool_down_s=2)), 2
    for now, (serving, queued, held, running) in enumerate(sights):
        wanted = scaler.decide(wanted, demand(serving, queued=queued, held=held, running=running), float(now))
        assert least <= wanted <= 5


def test_several_routers_hold_requests_of_their_own_and_see_the_same_replicas() -> None:
    """Counted twice, replicas would seem to be twice as fast."""
    seen = combined_demand([demand(2, queued=100, held=1), demand(2, queued=50, held=2)])

    assert (seen.held_requests, seen.held_tokens, seen.queued_tokens, seen.serving) == (3, 300, 100, 2)
    assert expected_wait_s(seen) == pytest.approx(0.2)


@pytest.mark.parametrize("bounds", ["3:2", "0:0", "a:b", "3", ":"])
def test_bounds_that_bound_nothing_are_refused(bounds: str) -> None:
    """In words."""
    with pytest.raises(ValueError, match="MIN:MAX"):
        terms_of(ClusterSettings(autoscale=bounds))


def test_bounds_are_read() -> None:
    """Nothing means that there is no autoscaling."""
    settings = ClusterSettings(autoscale="0:4", ttft_target_s=2.0, scale_down_after_s=9.0)

    assert terms_of(ClusterSettings()) is None
    assert terms_of(settings) == ScalingTerms(min_replicas=0, max_replicas=4, target_s=2.0, down_after_s=9.0)
