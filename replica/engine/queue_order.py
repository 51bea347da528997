"""The order in which requests start, and which running one is preempted. Pure; used by the engine and the simulator.

Requests start in ascending order of `queue_key`: the prompt tokens that the replica had scheduled when the request
arrived, plus PATIENCE times the request's own uncached tokens. So requests with little work go first, such as those
with a long cached prefix. Once the replica has computed PATIENCE times a request's own tokens, no later arrival passes
it, however small; this bounds how long a long prompt waits. The key is fixed on arrival, so a step costs no sorting.

When memory runs out, the request that loses least is preempted: the one with the fewest tokens to recompute.
"""

from collections.abc import Sequence
from typing import Protocol, TypeVar

#: Tuned by simulating the twelve `tune` cells of tests/bench/routing_grid.py with 0 (arrival order), 1, 4 and 16.
#: Without the one cell that tipped over, the geometric means were 0.203, 0.190, 0.192 and 0.192 s for mean TTFT, and
#: 0.77, 0.74, 0.79 and 0.80 s for p99 TTFT.
PATIENCE = 1


#: A prompt leaves free blocks for so many tokens of each running answer, at most this share of all: else the answers
#: would soon take what waiting requests hold.
ANSWER_TOKENS = 32
ANSWERS_SHARE = 1 / 64


def blocks_for_answers(running: int, block_tokens: int, total_blocks: int) -> int:
    """How many blocks a prompt leaves to so many running requests."""
    return min(ANSWER_TOKENS * running // block_tokens, int(ANSWERS_SHARE * total_blocks))


class Victim(Protocol):
    """A running request."""

    @property
    def priority(self) -> int: ...

    @property
    def loss(self) -> int:
        """Tokens to recompute if preempted: the generated ones, and the prompt tokens that were not cached."""


Running = TypeVar("Running", bound=Victim)


def queue_key(computed: int, uncached: int) -> int:
    """A request's place in the queue; the lowest starts first.

    `computed`: prompt tokens that the replica computed between its start and the request's arrival; `uncached`: prompt
    tokens that the request itself must compute.
    """
    return computed + PATIENCE * uncached


def choose_victim(running: Sequence[Running]) -> Running:
    """The request to preempt: within the least urgent priority, the one that loses least; among equals, the last.

    This guarantees progress: among the most urgent requests, the one that loses most is never chosen while another
    runs, and its loss grows with every token.
    """
    return min(reversed(running), key=lambda each: (-each.priority, each.loss))
