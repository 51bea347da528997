"""SGLang's `cache_aware`, compared with examples worked out by hand from its description."""

from collections.abc import Sequence

from .....router.fakes import report_of
from .....router.routing.policy.cases import Router


def router_of(replicas: Sequence[str] = ("r0", "r1")) -> Router:
    return Router("sglang", replicas=replicas)


def test_sglang_follows_a_match_of_more_than_three_tenths() -> None:
    """4 of 10 blocks are more than 0.3 of the prompt. 3 of 10 are not, so the shortest queue wins."""
    router = router_of()
    assert router.send(range(10), tail=0)[0] == "r0"

    assert router.send([0, 1, 2, 3, *range(20, 26)], tail=0)[0] == "r0"
    assert router.send([0, 1, 2, *range(30, 37)], tail=0)[0] == "r1"


def test_sglang_sends_everything_to_the_first_of_an_idle_cluster() -> None:
    """Ties go to the first in the list (sglang#32983)."""
    router = router_of([f"r{number}" for number in range(8)])

    for number in range(5):
        replica, request_id = router.send([number])
        assert replica == "r0"
        router.placement.ended(replica, request_id)


def test_sglang_forgets_affinity_when_queues_differ_too_much() -> None:
    """More than 64 apart and more than 1.5 times: the 66th sibling goes to the empty replica. Then affinity returns."""
    router = router_of()

    sent = [router.send(range(10)) for _ in range(66)]
    router.placement.ended(*sent[0])

    assert [replica for replica, _ in sent] == ["r0"] * 65 + ["r1"]
    assert router.send(range(10))[0] == "r0"


def test_sglang_forgets_what_was_used_longest_ago_when_its_tree_is_cut() -> None:
    """Every 120 s it is cut to 2^26 characters per replica: 16 blocks here. The tail of a prompt is removed first."""
    router = Router("sglang", replicas=["r0", "r1"], block_size=1 << 20)
    for hashes in (range(12), range(100, 106)):
        replica, request_id = router.send(hashes)
        router.placement.ended(replica, request_id)
        assert replica == "r0"
    for _ in range(3):  # r0 now has the longer queue, so only a match leads there
        router.send(range(100, 106), now=1.0)
    assert router.explain([10, 11]).chosen == "r0"

    report(router, now=121.0)
    router.send([], now=121.0)

    assert router.explain(range(100, 103)).chosen == "r0"
    assert router.explain([10, 11]).chosen == "r1"


def report(router: Router, now: float) -> None:
    for replica in router.placement.index.places:
        router.placement.report(replica, report_of(step=1), now)
