"""What the processes of one cluster tell each other over Ray: orders and reports. Types alone."""

from dataclasses import dataclass, field
from typing import Literal

from ...replica.messages import ReplicaDescription
from ..config import Settings

#: Names of the two actors in the cluster's namespace.
KEEPER = "keeper"
CONTROLLER = "controller"
#: What a router may do with a replica: send it requests, only fill its cache, or nothing new.
Role = Literal["serving", "warming", "draining"]


@dataclass(slots=True, frozen=True)
class ModelSpec:
    """What replicas of one model are started with."""

    settings: Settings
    seed: int  #: 64 random bits; the seed of all block hashes of this cluster
    model_dir: str | None  #: where the model lies on every node; None: each node finds it by itself
    run_dir: str | None  #: folder for sockets on the one node; None: several nodes, so TCP
    host: str | None  #: address to bind; None: each node's own

    @property
    def name(self) -> str:
        """The name that requests use for the model."""
        return self.settings.served_name


@dataclass(slots=True, frozen=True)
class ClusterSpec:
    """What it takes to build everything."""

    models: tuple[ModelSpec, ...]  #: at least one

    @property
    def common(self) -> ModelSpec:
        """For what is alike in all of them: `config.COMMON` and all that is no setting, but for the folder."""
        return self.models[0]


@dataclass(slots=True, frozen=True)
class Rendezvous:
    """Where the ranks of one gang meet: rank 0 listens there."""

    host: str
    port: int
    secret: bytes = field(repr=False)  #: that only these ranks are given


@dataclass(slots=True, frozen=True)
class RankSpec:
    """What one rank is to be."""

    model: ModelSpec
    replica_id: str
    generation: int
    rank: int
    world: int
    rendezvous: Rendezvous


@dataclass(slots=True, frozen=True)
class Started:
    """A rank serves. Rank 0 describes the replica."""

    pid: int
    node: str
    description: ReplicaDescription | None


@dataclass(slots=True, frozen=True)
class Doors:
    """Where a router is to take connections; port 0: any free one."""

    host: str
    port: int
    direct_port: int
    shared: bool  #: `port` belongs to several processes, and this one gets `direct_port` besides
    seat: int  #: number of this router among them


@dataclass(slots=True, frozen=True)
class Listening:
    """Where a router takes connections."""

    port: int
    direct_port: int  #: its own, where it shares `port` with others; else 0


@dataclass(slots=True, frozen=True)
class Failed:
    """A part could not start or stopped working, in its own words."""

    message: str


@dataclass(slots=True, frozen=True)
class GangStatus:
    """One replica for somebody who watches."""

    replica_id: str
    model: str  #: its name
    generation: int
    phase: str
    reason: str  #: what is being waited for, or why it failed
    failures: int
    pids: tuple[int, ...]
    blocks: int
    last_error: str
    version: int = 1  #: of the settings that it was started with


@dataclass(slots=True, frozen=True)
class Notice:
    """Something that happened and that a person may want to know."""

    seq: int
    level: str
    text: str


@dataclass(slots=True, frozen=True)
class ModelStatus:
    """What is wanted of one model."""

    name: str
    wanted: int  #: replicas
    version: int  #: of the settings that they are started with
    settled: bool  #: everything is as it is wanted
    abandoned: str  #: why the last update was given up


@dataclass(slots=True, frozen=True)
class ClusterStatus:
    """What the controller knows."""

    gangs: tuple[GangStatus, ...]
    url: str | None  #: where the routers listen, once all do
    router_urls: tuple[str, ...]  #: of each router alone, when there are several
    router_error: str | None
    notices: tuple[Notice, ...]
    models: tuple[ModelStatus, ...] = ()

    @property
    def settled(self) -> bool:
        """Whether everything is as it is wanted."""
        return all(model.settled for model in self.models)
