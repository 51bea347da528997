"""The messages that a cluster's processes exchange over Ray. Types only."""

from dataclasses import dataclass, field
from typing import Literal

from ...replica.messages import ReplicaDescription
from ..config import Settings
from ..logs import LogFormat

#: Names of the two actors in the cluster's namespace.
SUPERVISOR = "supervisor"
CONTROLLER = "controller"
#: Seconds between health checks of a rank.
HEALTH_INTERVAL_S = 2.0
#: What a router may do with a replica: send requests, only fill its cache, or start nothing new.
Role = Literal["serving", "warming", "draining"]


@dataclass(slots=True, frozen=True)
class ClusterModel:
    settings: Settings
    seed: int  #: 64 random bits; seeds all block hashes in this cluster
    model_dir: str | None  #: the model's folder on every node; None: each node locates it
    run_dir: str | None  #: socket folder if all processes are on one node; None: several nodes, which use TCP
    host: str | None  #: address to bind; None: each node's own
    log_dir: str | None = None  #: log folder if all processes are on one node; None: Ray keeps the logs
    all_ranks: int = 1  #: ranks of all models together, at their maximum number of replicas

    @property
    def name(self) -> str:
        return self.settings.served_name

    @property
    def runs_external_engine(self) -> bool:
        return self.settings.replica.engine != "homing"

    @property
    def log_format(self) -> LogFormat:
        return self.settings.cluster.log_format

    @property
    def text_dir(self) -> str | None:
        """The folder with tokenizer and chat template on every node; None: each node locates it."""
        return self.settings.replica.tokenizer or self.model_dir


#: All models of a cluster, at least one. What they share is read from the first: the settings in `config.COMMON`, the
#: seed, the run folder and the host.
Models = tuple[ClusterModel, ...]


@dataclass(slots=True, frozen=True)
class Rendezvous:
    """Where rank 0 of a group listens for the other ranks."""

    host: str
    port: int
    secret: bytes = field(repr=False)  #: known only to the group's ranks


@dataclass(slots=True, frozen=True)
class RankSpec:
    model: ClusterModel
    replica_id: str
    generation: int
    rank: int
    world: int
    rendezvous: Rendezvous


@dataclass(slots=True, frozen=True)
class Started:
    pid: int
    node: str
    description: ReplicaDescription | None


@dataclass(slots=True, frozen=True)
class Listening:
    """The ports on which a router listens or should listen; 0: any free one."""

    port: int
    direct_port: int  #: the router's own port if routers share `port`; else 0


@dataclass(slots=True, frozen=True)
class Failed:
    """A process could not start, stopped working or refused an order; the message is for users."""

    message: str


@dataclass(slots=True, frozen=True)
class ReplicaStatus:
    replica_id: str
    model: str  #: served name
    generation: int
    phase: str
    reason: str  #: what the replica waits for, or why it failed
    failures: int
    pids: tuple[int, ...]
    blocks: int
    last_error: str
    version: int = 1  #: settings version that the replica was started with


@dataclass(slots=True, frozen=True)
class Notice:
    seq: int
    level: str
    text: str


@dataclass(slots=True, frozen=True)
class ModelStatus:
    name: str
    wanted: int  #: number of replicas
    version: int  #: settings version for new replicas
    settled: bool  #: whether the wanted state is reached
    abandoned: str  #: why the last update was abandoned; empty if it was not
    source: str = ""  #: the model that runs under this name: a folder or Hugging Face name


@dataclass(slots=True, frozen=True)
class ClusterStatus:
    replicas: tuple[ReplicaStatus, ...]
    url: str | None  #: where the routers listen; None until all of them do
    router_urls: tuple[str, ...]  #: each router's own URL if there are several routers
    router_error: str | None
    notices: tuple[Notice, ...]
    models: tuple[ModelStatus, ...] = ()

    @property
    def settled(self) -> bool:
        return all(model.settled for model in self.models)
