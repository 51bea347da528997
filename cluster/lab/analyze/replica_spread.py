"""Estimates reuse when requests are spread over several replicas, each with its own cache.

Pure state. Two rules bound the expected result: `RoundRobinRule` ignores caches, `Affine` follows them. Neither models
time, queues or evictions, which `homing simulate` does.
"""

from collections.abc import Hashable, Sequence
from itertools import count

from .reuse_stack import HitCurve, PlaceCounts, ReuseStack

#: How far a replica may be ahead of the least loaded one, in mean prompts, before others get requests. On the Mooncake
#: conversation trace and 8 replicas, 1 keeps 76 % of the possible sharing, 2 keeps 86 %, 8 keeps all. 2 is a cautious
#: choice, because a real router also weighs queues. Not compared with a running cluster.
LEAD_PROMPTS = 2.0


class RoundRobinRule:
    def __init__(self) -> None:
        self._requests = count()

    def choose(self, _: Sequence[Hashable], caches: Sequence[ReuseStack]) -> int:
        """Index of the replica that takes this request."""
        return next(self._requests) % len(caches)


class Affine:
    """Chooses the replica that has seen most of the prompt, unless it is too far ahead of the others in work done.

    Work is the number of blocks computed since the start: a block that a replica has seen costs nothing there, as if
    nothing were ever evicted. Among equals, the replica with the least work is chosen.
    """

    def __init__(self, lead_prompts: float = LEAD_PROMPTS) -> None:
        self._lead_prompts = lead_prompts
        self._work: list[int] = []
        self._requests = 0
        self._blocks = 0

    def choose(self, blocks: Sequence[Hashable], caches: Sequence[ReuseStack]) -> int:
        work = self._work = self._work or [0] * len(caches)
        self._requests += 1
        self._blocks += len(blocks)
        limit = min(work) + self._lead_prompts * self._blocks / self._requests
        known = [cache.known(blocks) for cache in caches]
        within = (place for place in range(len(caches)) if work[place] <= limit)
        chosen = min(within, key=lambda place: (-known[place], work[place]))
        work[chosen] += len(blocks) - known[chosen]
        return chosen


class ReplicaCaches:
    def __init__(self, replicas: int, rule: RoundRobinRule | Affine) -> None:
        self._counts = PlaceCounts()
        self._caches = [ReuseStack(self._counts) for _ in range(replicas)]
        self._rule = rule

    def observe(self, blocks: Sequence[Hashable], usable: int) -> None:
        chosen = self._rule.choose(blocks, self._caches)
        self._caches[chosen].observe(blocks, usable)

    def curve(self) -> HitCurve:
        """Blocks found by all replicas together, by the cache size of one replica."""
        return self._counts.curve()
