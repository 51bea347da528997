"""Requests spread over replicas: what affinity keeps, and what it must avoid."""

from collections import Counter

from homing.cluster.lab.analyze.replica_spread import Affine, ReplicaCaches, RoundRobinRule
from homing.cluster.lab.analyze.reuse_stack import ReuseStack


def curve_of(replicas: int, rule, log: list[list[str]]):
    caches = ReplicaCaches(replicas, rule)
    for blocks in log:
        caches.observe(blocks, len(blocks))
    return caches.curve()


def conversations(count: int, turns: int) -> list[list[str]]:
    """Interleaved turns; each prompt extends its predecessor by one block. No prefix is common to all conversations."""
    return [[f"c{who}b{turn}" for turn in range(length)] for length in range(1, turns + 1) for who in range(count)]


def test_one_replica_is_one_cache():
    """Holds for both rules."""
    log = conversations(3, 4)
    alone = ReuseStack()
    for blocks in log:
        alone.observe(blocks, len(blocks))

    for rule in (Affine(), RoundRobinRule()):
        curve = curve_of(1, rule, log)
        assert [curve.hits(size) for size in range(15)] == [alone.curve().hits(size) for size in range(15)]


def test_affinity_keeps_conversations_together():
    """Round robin over an odd number of replicas separates their turns."""
    log = conversations(4, 6)

    assert curve_of(3, Affine(), log).endless == curve_of(1, Affine(), log).endless
    assert curve_of(3, RoundRobinRule(), log).endless < curve_of(3, Affine(), log).endless


def test_a_prefix_that_all_share_does_not_draw_everything_to_one_replica():
    """Every request begins with the same block, so the longest prefix alone would choose one replica for all."""
    caches, rule = [ReuseStack() for _ in range(4)], Affine(lead_prompts=2)
    chosen: Counter[int] = Counter()
    for number in range(200):
        blocks = ["system", *(f"{number}-{place}" for place in range(4))]
        place = rule.choose(blocks, caches)
        caches[place].observe(blocks, len(blocks))
        chosen[place] += 1

    assert max(chosen.values()) - min(chosen.values()) <= 4


def test_requests_that_share_nothing_go_where_least_was_done():
    """Without affinity, the least loaded replica is chosen."""
    caches, rule = [ReuseStack() for _ in range(3)], Affine()
    chosen = []
    for number in range(6):
        place = rule.choose([f"{number}"], caches)
        caches[place].observe([f"{number}"], 1)
        chosen.append(place)

    assert chosen == [0, 1, 2, 0, 1, 2]
