"""The policies that most proxies offer."""

from .....router.routing.policy.cases import Router


def test_round_robin_takes_turns() -> None:
    """Neither cache nor load matters."""
    router = Router("rr")

    assert [router.send([])[0] for _ in range(4)] == ["r0", "r1", "r2", "r0"]


def test_least_requests_counts_what_is_not_over() -> None:
    """The replica that has finished its request gets the next one."""
    router = Router("least-requests", replicas=["r0", "r1"])
    first, _ = router.send([1])
    other, request_id = router.send([2])

    router.placement.ended(other, request_id)

    assert first != other
    assert router.send([3])[0] == other


def test_a_hash_depends_on_the_first_two_blocks_alone() -> None:
    """The rest of the prompt does not matter, and a new replica takes over only its own share."""
    router = Router("hash", replicas=[f"r{number}" for number in range(8)])
    homes = {head: router.send([head, 1, 2])[0] for head in range(64)}

    router.join("r8")
    again = {head: router.send([head, 1, 9, 10])[0] for head in range(64)}

    assert {again[head] for head in homes if again[head] != homes[head]} == {"r8"}
