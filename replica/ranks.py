"""The ranks that share one replica's weights: who am I, sum over all, gather to rank 0."""

from dataclasses import dataclass


@dataclass(slots=True, frozen=True)
class RankGroup:
    """One rank's handle on its group."""

    rank: int
    size: int
