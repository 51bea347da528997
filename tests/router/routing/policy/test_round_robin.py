"""Round robin: each replica in turn."""

from homing.router.routing.policy.round_robin import RoundRobin

from .cases import candidate, chosen


def test_round_robin_takes_turns() -> None:
    """The order does not depend on load, and survives replicas that join and leave."""
    policy, three = RoundRobin(), [candidate("r0"), candidate("r1"), candidate("r2")]

    turns = [chosen(policy, three) for _ in range(4)] + [chosen(policy, three[2:]), chosen(policy, three)]

    assert turns == ["r0", "r1", "r2", "r0", "r2", "r0"]
