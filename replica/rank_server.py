"""What one rank of a replica runs, whatever serves it. No torch."""

from abc import ABC, abstractmethod

from ..kvcache.prefix_cache import CachedBlock
from .messages import ReplicaDescription


class RankServer(ABC):
    """What one rank runs, loaded: a replica's server (rank 0) or a worker. It is created and run in one thread.

    The defaults are those of a rank that has no requests of its own. All but `run` may be called from other threads.
    """

    description: ReplicaDescription | None  #: of the replica; None on ranks above 0

    @abstractmethod
    def run(self) -> None:
        """Serve until `stop`; raises when it fails."""

    @abstractmethod
    def stop(self) -> None:
        """Make `run` return soon."""

    def drain(self) -> None:  # noqa: B027 - there is nothing to do
        """Accept no new requests. Called on rank 0 only."""

    def idle(self) -> bool:
        """Whether there are no requests. Called on rank 0 only."""
        return True

    def residents(self) -> list[CachedBlock]:
        """The content of this rank's cache, parents first; empty on ranks above 0."""
        return []

    def step_s(self) -> float:
        """For how long the step that runs now has run; 0 between steps, and where rank 0 waits for all ranks."""
        return 0.0
