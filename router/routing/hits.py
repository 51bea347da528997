"""What a request finds cached on a replica: one strategy for our own replicas, and one for external engines.

Ours announce every block, hold prefix-closed sets and evict what waiting requests will use after everything else, so
the index is exact. An engine has its own rules for hits, evicts in its own order, and announces a request's blocks some
time after its last token.
"""

from collections.abc import Callable, Sequence

from ...replica.messages import ReplicaDescription
from .eviction_order import EvictionOrder

#: Blocks in memory slower than the GPU's: pairs of medium and number of blocks.
SlowerBlocks = tuple[tuple[str, int], ...]
#: For engines with rules of their own (router/replicas/external/hit_rules.py): the number of a prompt's leading blocks
#: that are cached, and those of them in slower memory. None: the index applies, all in GPU memory.
HitRule = Callable[[Sequence[int]], tuple[int, SlowerBlocks] | None]


class ExactHits:
    """The index and the requests in flight tell exactly what one of our own replicas will have."""

    #: Whether a request computes what its predecessors have not, in an order that `JoinedReplica.foresee` predicts.
    exact = True
    rule: HitRule | None = None

    def stored(self, blocks: Sequence[int]) -> None:
        """The replica announced these blocks."""

    def removed(self, blocks: Sequence[int]) -> None:
        """The replica evicted these blocks."""

    def reset(self, blocks: Sequence[int]) -> None:
        """The replica holds exactly these blocks."""

    def sent(self, request_id: int, chain: Sequence[int], cached: int) -> None:
        """A request is sent there; the first `cached` blocks of its prompt are cached."""

    def ended(self, request_id: int) -> None:
        """The request has left the replica."""

    def announces_late(self, chain: Sequence[int]) -> bool:
        """Whether a prompt was computed whose blocks will be announced only now."""
        del chain
        return False

    def remaining_hit(self, chain: Sequence[int], held: int) -> int:
        """How many of the first `held` blocks are left when the requests sent so far have started."""
        del chain
        return held

    def when_crowded(self, expected: int, used: int, spare_blocks: int) -> int:
        """How many of the `expected` blocks are left once requests ahead have memory; `used` of them are in use."""
        del used, spare_blocks
        return expected

    def surplus(self) -> list[int]:
        """Blocks for which there is probably no memory left."""
        return []

    def check(self) -> None:
        """Assert that the tables agree."""


class EngineHits(EvictionOrder, ExactHits):
    """Predicts what an external engine has not evicted by then, by its own rule for hits if it has one."""

    exact = False

    def __init__(self, total_blocks: int) -> None:
        super().__init__(total_blocks)
        self.rule: HitRule | None = None

    def announces_late(self, chain: Sequence[int]) -> bool:
        return bool(chain) and chain[-1] not in self

    def when_crowded(self, expected: int, used: int, spare_blocks: int) -> int:
        # Requests ahead take the free blocks and evict what is cached in them, a prompt's last blocks first.
        return min(expected, used + max(0, spare_blocks))


def hits_of(description: ReplicaDescription) -> ExactHits:
    return EngineHits(description.num_blocks) if description.external else ExactHits()
