"""Peers' policies, each against an example worked out by hand from its description."""

from collections.abc import Sequence
from random import Random

import pytest

from homing.cluster.lab.simulate import ReplicaLimits
from homing.cluster.lab.simulate.peers import PEERS, Dynamo, Llmd, SglangCacheAware
from homing.cluster.lab.simulate.steering import Steering, describe
from homing.events.wire.messages import CacheCounters, LoadReport

from .fakes import BLOCK, arrival

LIMITS = ReplicaLimits(blocks=1000, block_tokens=BLOCK)


def peer(name: str, replicas: int = 2) -> Steering:
    made = PEERS[name](LIMITS, Random(0))
    for number in range(replicas):
        made.join(describe(f"r{number}", 1, LIMITS, (1000.0, 0.01)), 0.0)
    return made


def place(made: Steering, request_id: int, blocks: Sequence[int], *, tail: int = 0, now: float = 0.0) -> str:
    placed = made.place(request_id, arrival(now, list(blocks), tail=tail), 0, now)
    assert placed is not None
    return placed.replica


def report(made: Steering, replica: str, *, waiting: int = 0, free: int = 1000) -> None:
    told = LoadReport(
        epoch=1,
        step=0,
        ts=0.0,
        running=0,
        waiting=waiting,
        queued_prefill_tokens=0,
        decode_context_tokens=0,
        free_blocks=free,
        cached_free_blocks=0,
        total_blocks=1000,
        prefill_tokens_per_s=1000.0,
        decode_step_s=0.01,
        counters=CacheCounters(),
    )
    made.report(replica, told, 0.0)


@pytest.mark.parametrize("name", PEERS)
def test_no_peer_chooses_a_replica_that_left(name: str) -> None:
    """Conformance: books of a replica go with it."""
    made = peer(name, 3)
    for number in range(30):
        place(made, number, [number % 4])

    made.leave("r1")

    assert {place(made, number, [number % 4]) for number in range(30, 60)} <= {"r0", "r2"}


def test_round_robin_takes_turns() -> None:
    """Nothing else matters to it."""
    made = peer("rr", 3)

    assert [place(made, number, []) for number in range(4)] == ["r0", "r1", "r2", "r0"]


def test_least_requests_counts_what_is_not_over() -> None:
    """The one that has finished its request gets the next."""
    made = peer("least-requests")
    first = place(made, 1, [1])
    other = place(made, 2, [2])

    made.ended(other, 2)

    assert first != other
    assert place(made, 3, [3]) == other


def test_a_hash_depends_on_the_first_two_blocks_alone() -> None:
    """The rest of the prompt does not matter, and a new replica takes over only its share."""
    made = peer("hash", 8)
    homes = {head: place(made, head, [head, 1, 2]) for head in range(64)}

    made.join(describe("r8", 1, LIMITS, (1000.0, 0.01)), 0.0)
    again = {head: place(made, 100 + head, [head, 1, 9, 10]) for head in range(64)}

    moved = {again[head] for head in homes if again[head] != homes[head]}
    assert moved == {"r8"}


def test_sglang_follows_a_match_of_more_than_three_tenths() -> None:
    """4 of 10 blocks are more than 0.3 of the prompt, 3 of 10 are not: then the shortest queue wins."""
    made = peer("sglang")
    assert place(made, 1, range(10)) == "r0"

    assert place(made, 2, [0, 1, 2, 3, *range(20, 26)]) == "r0"
    assert place(made, 3, [0, 1, 2, *range(30, 37)]) == "r1"


def test_sglang_sends_everything_to_the_first_of_an_idle_cluster() -> None:
    """Ties go to the first in the list (sglang#32983)."""
    made = peer("sglang", 8)

    for number in range(5):
        assert place(made, number, [number]) == "r0"
        made.ended("r0", number)


def test_sglang_forgets_affinity_when_queues_differ_too_much() -> None:
    """More than 64 apart and more than 1.5 times: the 66th sibling goes to the empty one, and affinity to the first."""
    made = peer("sglang")
    homes = [place(made, number, range(10)) for number in range(66)]

    assert homes == ["r0"] * 65 + ["r1"]
    assert isinstance(made, SglangCacheAware)
    assert made._first[0] == "r0"


def test_dynamo_adds_blocks_to_prefill_and_blocks_in_use() -> None:
    """r0 holds 4 of 5 blocks and has one block to prefill and in use; r1 is empty."""
    made = peer("dynamo")
    made.stored("r0", range(4))
    assert isinstance(made, Dynamo)
    made._overlaps = {"r0": 0, "r1": 0}
    made._in_flight["r0"].add(7)
    made.booked("r0", 7, arrival(0.0, [], tail=BLOCK), 0, 0.0)
    request = arrival(0.0, list(range(5)))
    made._overlaps = made._index.match(request.blocks)

    costs = [made._cost(replica, request) for replica in ("r0", "r1")]

    # Active blocks: the request of one partial block, and five fresh ones with one for the answer.
    assert costs == [1 * (1 + 5 - 4) + (1 + 5 + 1), 5 + (5 + 1)]


def test_dynamo_clears_prefill_at_the_first_token_and_blocks_at_the_last() -> None:
    """Books must end empty, or a router slowly goes blind."""
    made = peer("dynamo")
    assert isinstance(made, Dynamo)
    replica = place(made, 1, range(5))

    made.started(replica, 1)
    assert made._prefill_tokens[replica] == 0
    assert len(made._active[replica]) == 5
    made.ended(replica, 1)

    assert not made._active[replica]
    assert made._partial[replica] == 0


def test_dynamo_keeps_what_an_engine_had_before_it_started_anew() -> None:
    """As measured: its events' numbers begin at 0 again, and are taken for old ones until they have caught up."""
    made = peer("dynamo")
    assert isinstance(made, Dynamo)
    made.stored("r0", range(3))
    made.stored("r0", range(3, 5))

    noticed = made.restarted("r0")
    for block in (10, 11, 12):
        made.stored("r0", [block])

    assert not noticed
    assert [block for block in range(20) if made._index.holds("r0", block)] == [0, 1, 2, 3, 4, 12]


def test_llmd_weighs_the_held_share_against_queue_and_memory() -> None:
    """r0 holds all (3), has the longest queue (0), and half its memory free (1): 4.0; r1 has 0 + 2 + 1.98."""
    made = peer("llm-d")
    made.stored("r0", range(10))
    report(made, "r0", waiting=5, free=500)
    report(made, "r1", waiting=0, free=990)

    assert place(made, 1, range(10)) == "r0"
    report(made, "r0", waiting=5, free=480)
    report(made, "r1", waiting=0, free=1000)
    assert place(made, 2, [*range(10), 11], tail=BLOCK) == "r1"


def test_llmd_bridges_two_seconds_from_decision_to_event() -> None:
    """Then it believes events alone."""
    made = peer("llm-d")
    assert isinstance(made, Llmd)
    home = place(made, 1, range(10))

    assert place(made, 2, range(10), now=1.0) == home
    made._speculative.expire(4.0)

    assert not any(made._speculative.count(replica) for replica in ("r0", "r1"))
