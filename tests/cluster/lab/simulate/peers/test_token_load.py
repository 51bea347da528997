"""Routers that weigh queued tokens, compared with examples worked out by hand."""

from .....router.routing.policy.cases import Router


def router_of(name: str) -> Router:
    """r0 has one request with 3 blocks of prompt queued; r1 has none. The next prompt has 5 blocks."""
    router = Router(name, replicas=["r0", "r1"])
    router.send([900, 901, 902], tail=0, excluded=("r1",))
    return router


def cost(router: Router, replica: str, hashes: list[int]) -> str:
    """Return the request's cost on `replica`, from a decision that excludes the other replica."""
    placement, others = router.placement, {"r0", "r1"} - {replica}
    return placement.explain(router.prompt(hashes, tail=0), placement.candidates(hashes, others, 0.0)).why


def lowest(blocks: float, router: Router) -> str:
    return f"lowest cost, {blocks * router.block_size:g}"


def test_vllm_s_score_multiplies_tokens_by_requests() -> None:
    """r0: (1 of 5 blocks is new + 3 queued) * (1 request + 1) = 8. The empty r1: 5 * 1."""
    router, hashes = router_of("vllm-kv-aware"), list(range(5))
    router.placement.stored("r0", hashes[:4])

    assert cost(router, "r0", hashes) == lowest(8, router)
    assert cost(router, "r1", hashes) == lowest(5, router)


def test_own_misses_count_twice_beside_the_queue() -> None:
    """r0: 3 queued blocks plus twice 1 miss. r1: twice 5 misses."""
    router, hashes = router_of("queue-2-misses"), list(range(5))
    router.placement.stored("r0", hashes[:4])

    assert cost(router, "r0", hashes) == lowest(5, router)
    assert cost(router, "r1", hashes) == lowest(10, router)


def test_the_first_token_takes_a_prompt_out_of_the_queue() -> None:
    """The counts must return to zero, also when a request ends without a first token."""
    router = Router("queue-2-misses", replicas=["r0"])
    replica, first = router.send([1, 2], tail=0)
    _, second = router.send([3, 4], tail=0)
    router.placement.started(replica, first)
    router.placement.ended(replica, first)
    router.placement.ended(replica, second)

    assert cost(router, "r0", [7]) == lowest(2, router)


def test_llmd_stays_with_a_holder_until_its_queue_is_a_penalty_longer() -> None:
    """r0 holds 80 % of the prompt; with a penalty of 1 s, its queue of 2 s sends the request elsewhere."""
    for name, stays in (("llm-d-token-load", True), ("llm-d-sticky", False)):
        router, hashes = Router(name, replicas=["r0", "r1"]), list(range(10))
        rate = router.placement.fleet["r0"].description.prefill_tokens_per_s
        router.placement.stored("r0", hashes[:8])
        router.placement.stored("r1", hashes[:7])
        assert router.decide(hashes).chosen.replica_id == "r0"

        router.send([], tail=round(2 * rate), excluded=("r1",))

        assert (router.decide(hashes).chosen.replica_id == "r0") == stays
