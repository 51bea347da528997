"""Power of two: the better of two random replicas."""

from homing.router.routing.policy.power_of_two import PowerOfTwo

from .cases import candidate, chosen


def test_power_of_two_never_takes_the_busiest() -> None:
    """In every pair that includes it, the other replica is better."""
    three = [candidate("r0"), candidate("r1", running=1), candidate("r2", running=7)]

    taken = {chosen(PowerOfTwo(), three, seed=seed) for seed in range(50)}

    assert taken == {"r0", "r1"}
