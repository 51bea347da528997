"""The interface of what one rank of a replica runs, for our own and external engines. No torch."""

from abc import ABC, abstractmethod

from ..kvcache.block_index import CachedBlock
from .messages import ReplicaDescription


class RankServer(ABC):
    """The loaded server of one rank: a replica's server (rank 0) or a worker. Created and run in the same thread.

    The defaults suit a rank without requests of its own. All methods except `run` may be called from other threads.
    """

    description: ReplicaDescription | None  #: of the replica; None on ranks above 0

    @abstractmethod
    def run(self) -> None:
        """Serve until `stop` is called. Raises an error when serving fails."""

    @abstractmethod
    def stop(self) -> None:
        """Make `run` return soon."""

    def drain(self) -> None:  # noqa: B027 - workers have nothing to do
        """Accept no new requests. Called on rank 0 only."""

    def idle(self) -> bool:
        """Whether there are no requests. Called on rank 0 only."""
        return True

    def residents(self) -> list[CachedBlock]:
        """This rank's cached blocks, parents first; empty on ranks above 0."""
        return []

    def step_s(self) -> float:
        """Seconds since the current turn began; 0 while waiting for work, and on workers: rank 0 waits for them."""
        return 0.0
