"""What goes wrong, or changes, in the middle of a run: values with a time, struck by the simulation."""

from dataclasses import dataclass
from typing import Protocol


class Cluster(Protocol):
    """What a fault can do (the simulation)."""

    def join(self, name: str) -> None: ...
    def kill(self, name: str) -> None: ...
    def restart_engine(self, name: str) -> None: ...
    def restart_router(self, number: int) -> None: ...


class Fault(Protocol):
    """Something that happens at a time."""

    @property
    def at_s(self) -> float: ...

    def strike(self, cluster: Cluster) -> None: ...


@dataclass(slots=True, frozen=True)
class ReplicaLost:
    """A replica dies; its requests go on elsewhere."""

    at_s: float
    replica: str

    def strike(self, cluster: Cluster) -> None:
        cluster.kill(self.replica)


@dataclass(slots=True, frozen=True)
class ReplicaAdded:
    """A replica joins with an empty cache: a new one, or one that was lost."""

    at_s: float
    replica: str

    def strike(self, cluster: Cluster) -> None:
        cluster.join(self.replica)


@dataclass(slots=True, frozen=True)
class EngineRestarted:
    """A replica's engine starts anew behind the same address: empty, with its events numbered from 0 again."""

    at_s: float
    replica: str

    def strike(self, cluster: Cluster) -> None:
        cluster.restart_engine(self.replica)


@dataclass(slots=True, frozen=True)
class RouterRestarted:
    """A router process is replaced; what it knew is gone."""

    at_s: float
    number: int = 0

    def strike(self, cluster: Cluster) -> None:
        cluster.restart_router(self.number)
