"""Consistent hashing of a prompt's head, with bounded loads."""

from collections import Counter
from math import ceil

from homing.router.routing.policy.base import Prompt
from homing.router.routing.policy.prefix_hash import BOUND, HEAD_TOKENS, PrefixHash

from .cases import BLOCK, candidate, chosen

HEAD = HEAD_TOKENS // BLOCK
EIGHT = [candidate(f"r{number}") for number in range(8)]


def prompt(head: int, tail: int = 0) -> Prompt:
    """`HEAD` blocks determined by `head`, followed by 9 blocks determined by `tail`."""
    hashes = [head * 1000 + place for place in range(HEAD)] + [tail * 7777 + place for place in range(9)]
    return Prompt(tokens=len(hashes) * BLOCK, blocks=len(hashes), block_size=BLOCK, hashes=hashes)


def test_prompts_with_one_head_go_to_one_replica() -> None:
    """This holds for any tail, in any router, and at any position of the replica in the list."""
    first = chosen(PrefixHash(), EIGHT, prompt(1))

    assert {chosen(PrefixHash(), EIGHT[::-1], prompt(1, tail)) for tail in range(20)} == {first}


def test_heads_spread_over_all_replicas() -> None:
    """The spread is by chance alone: 100 of 800 each, within 4 standard deviations."""
    taken = Counter(chosen(PrefixHash(), EIGHT, prompt(head)) for head in range(800))

    assert len(taken) == 8
    assert max(abs(count - 100) for count in taken.values()) < 40


def test_a_replica_that_leaves_moves_only_its_own_heads() -> None:
    """All other heads keep their cached blocks."""
    before = {head: chosen(PrefixHash(), EIGHT, prompt(head)) for head in range(100)}
    after = {head: chosen(PrefixHash(), EIGHT[:-1], prompt(head)) for head in range(100)}

    assert {before[head] for head in before if before[head] != after[head]} == {"r7"}


def test_a_hot_head_spreads_once_its_replica_reaches_the_bound() -> None:
    """One popular prefix must not overload one replica while others are idle."""
    running = dict.fromkeys((f"r{number}" for number in range(4)), 0)
    for _ in range(40):
        taken = chosen(PrefixHash(), [candidate(name, running=count) for name, count in running.items()], prompt(1))
        assert taken is not None
        running[taken] += 1

        assert running[taken] <= ceil(BOUND * sum(running.values()) / len(running))

    assert min(running.values()) > 0


def test_a_short_prompt_goes_somewhere() -> None:
    """It has no full block to hash."""
    empty = Prompt(tokens=5, blocks=0, block_size=BLOCK)

    assert chosen(PrefixHash(), EIGHT, empty) in {each.replica_id for each in EIGHT}
