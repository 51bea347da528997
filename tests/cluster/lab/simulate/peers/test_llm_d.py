"""llm-d's scorers, compared with examples worked out by hand from its description."""

from .....router.fakes import report_of
from .....router.routing.policy.cases import Router


def router_of() -> Router:
    return Router("llm-d", replicas=["r0", "r1"])


def report(router: Router, replica: str, *, waiting: int = 0, free: int = 1000) -> None:
    router.placement.report(replica, report_of(waiting=waiting, free_blocks=free), 0.0)


def test_llmd_weighs_the_held_share_against_queue_and_memory() -> None:
    """r0 holds all blocks (3), has the longest queue (0) and half its memory free (1): 4.0; r1 has 0 + 2 + 1.98."""
    router = router_of()
    router.placement.stored("r0", range(10))
    report(router, "r0", waiting=5, free=500)
    report(router, "r1", waiting=0, free=990)

    assert router.explain(range(10)).why == "highest score, 4.00"
    assert router.send(range(10))[0] == "r0"
    report(router, "r0", waiting=5, free=480)
    report(router, "r1", waiting=0, free=1000)
    assert router.send([*range(10), 11])[0] == "r1"


def test_llmd_bridges_two_seconds_from_decision_to_event() -> None:
    """Afterwards it uses events only: without a prefix, both replicas score 2 for the queue and 2 for memory."""
    router = router_of()
    home, _ = router.send(range(10))

    assert router.send(range(10), now=1.0)[0] == home
    assert router.explain(range(10)).why == "highest score, 7.00"
    router.decide([99], now=4.0)

    assert router.explain(range(10)).why == "highest score, 4.00"
