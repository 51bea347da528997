"""Dynamo's KV router, compared with examples worked out by hand from its documentation."""

import pytest

from .....router.routing.policy.cases import Router


def router_of(name: str = "dynamo") -> Router:
    return Router(name, replicas=["r0", "r1"])


def cost(router: Router, replica: str, hashes: list[int]) -> str:
    """Return the request's cost on `replica`, from a decision that excludes the other replica."""
    placement, others = router.placement, {"r0", "r1"} - {replica}
    return placement.explain(router.prompt(hashes, tail=0), placement.candidates(hashes, others, 0.0)).why


def blocks(count: float) -> str:
    return f"lowest cost, {count:g} blocks"


def test_dynamo_adds_blocks_to_prefill_and_blocks_in_use() -> None:
    """r0 holds 4 of 5 blocks and has a request of one partial block to prefill and in use; r1 is empty."""
    router = router_of()
    router.send([], tail=router.block_size, excluded=("r1",))
    router.placement.stored("r0", range(4))
    hashes = list(range(5))

    # Blocks in use: the request of one partial block, and five new ones plus one for the answer.
    assert cost(router, "r0", hashes) == blocks(1 * (1 + 5 - 4) + (1 + 5 + 1))
    assert cost(router, "r1", hashes) == blocks(5 + (5 + 1))


def test_dynamo_clears_prefill_at_the_first_token_and_blocks_at_the_last() -> None:
    """The counts must return to zero, or the router's decisions slowly degrade."""
    router, other = router_of(), [9]
    replica, request_id = router.send(range(5), tail=0)
    assert cost(router, replica, other) == blocks((5 + 1) + (5 + 1 + 1 + 1))

    router.placement.started(replica, request_id)
    assert cost(router, replica, other) == blocks(1 + (5 + 1 + 1 + 1))
    router.placement.ended(replica, request_id)

    assert cost(router, replica, other) == blocks(1 + (1 + 1))


def test_dynamo_keeps_what_an_engine_had_before_it_restarted() -> None:
    """As measured: event numbers restart at 0 and are ignored as old ones until they have caught up."""
    router = router_of()
    router.placement.stored("r0", range(3))
    router.placement.stored("r0", range(3, 5))

    router.placement.policy.restarted("r0")
    for block in (10, 11, 12):
        router.placement.stored("r0", [block])

    assert not router.placement.policy.notices_restarts
    held = [block for block in range(20) if cost(router, "r0", [block]) == blocks(0 + 2)]
    assert held == [0, 1, 2, 3, 4, 12]


@pytest.mark.parametrize(
    ("name", "held", "empty"),
    [
        ("dynamo", 3 + 6, 5 + 6),
        ("dynamo-scale8", 8 * 3 + 6, 8 * 5 + 6),
        ("dynamo-scale16", 16 * 3 + 6, 16 * 5 + 6),
        ("dynamo-scale64", 64 * 3 + 6, 64 * 5 + 6),
        ("dynamo-credit4", 0 + 6, 5 + 6),
    ],
)
def test_the_variants_weigh_prefill_or_overlap(name: str, held: int, empty: int) -> None:
    """Scale 8: eight times the blocks to prefill. Credit 4: four times the overlap, here of 2 of 5 blocks."""
    router = router_of(name)
    router.placement.stored("r0", range(2))

    assert cost(router, "r0", list(range(5))) == blocks(held)
    assert cost(router, "r1", list(range(5))) == blocks(empty)


def test_wspt_holds_requests_while_all_replicas_are_over_the_threshold_and_starts_the_shortest_first() -> None:
    """Each replica has four steps' tokens plus one queued; the first token of one request makes room."""
    router, step = router_of("dynamo-wspt"), 8192
    sent = [router.send([], tail=4 * step + 1) for _ in range(2)]

    assert router.decide([1, 2]).chosen is None
    placement = router.placement
    assert placement.rank(router.prompt([1, 2])) < placement.rank(router.prompt([1, 2, 3]))
    placement.stored("r0", [1, 2, 3])
    assert placement.rank(router.prompt([1, 2])) == placement.rank(router.prompt([1, 2, 3]))
    placement.started(*sent[0])
    assert router.decide([1, 2]).chosen.replica_id == sent[0][0]
