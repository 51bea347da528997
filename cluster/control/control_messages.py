"""The messages that the processes of one cluster exchange over Ray. Types only."""

from dataclasses import dataclass, field
from typing import Literal

from ...replica.messages import ReplicaDescription
from ..config import Settings
from ..logs import LogFormat

#: Names of the two actors in the cluster's namespace.
SUPERVISOR = "supervisor"
CONTROLLER = "controller"
#: What a router may do with a replica: send it requests, only fill its cache, or nothing new.
Role = Literal["serving", "warming", "draining"]


@dataclass(slots=True, frozen=True)
class ModelSpec:
    settings: Settings
    seed: int  #: 64 random bits; the seed of all block hashes of this cluster
    model_dir: str | None  #: the model's folder on every node; None: each node finds it by itself
    run_dir: str | None  #: folder for sockets on a single node; None: several nodes, which use TCP
    host: str | None  #: address to bind; None: each node's own
    log_dir: str | None = None  #: folder of the log files on a single node; None: Ray keeps the logs
    all_ranks: int = 1  #: of all models together, with as many replicas as there may be

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
        """The folder of tokenizer and chat template on every node; None: each node finds it by itself."""
        return self.settings.replica.tokenizer or self.model_dir


#: All models of a cluster, at least one. The first one stands for what all share: the settings in `config.COMMON`,
#: the seed, the run folder and the host.
Models = tuple[ModelSpec, ...]


@dataclass(slots=True, frozen=True)
class Rendezvous:
    """Where rank 0 of a group listens for the other ranks."""

    host: str
    port: int
    secret: bytes = field(repr=False)  #: known to these ranks only


@dataclass(slots=True, frozen=True)
class RankSpec:
    model: ModelSpec
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
    """Where a router takes connections, or is to take them (port 0: any free one)."""

    port: int
    direct_port: int  #: its own, where it shares `port` with others; else 0


@dataclass(slots=True, frozen=True)
class Failed:
    """A part could not start or stopped working, in its own words."""

    message: str


@dataclass(slots=True, frozen=True)
class ReplicaStatus:
    replica_id: str
    model: str  #: its name
    generation: int
    phase: str
    reason: str  #: what it waits for, or why it failed
    failures: int
    pids: tuple[int, ...]
    blocks: int
    last_error: str
    version: int = 1  #: of the settings that it was started with


@dataclass(slots=True, frozen=True)
class Notice:
    seq: int
    level: str
    text: str


@dataclass(slots=True, frozen=True)
class ModelStatus:
    name: str
    wanted: int  #: replicas
    version: int  #: of the settings that they are started with
    settled: bool  #: whether the wanted state is reached
    abandoned: str  #: why the last update was abandoned
    source: str = ""  #: the model that runs under this name: a folder, or its name on the hub


@dataclass(slots=True, frozen=True)
class ClusterStatus:
    replicas: tuple[ReplicaStatus, ...]
    url: str | None  #: where the routers listen; None until all do
    router_urls: tuple[str, ...]  #: of each router alone, when there are several
    router_error: str | None
    notices: tuple[Notice, ...]
    models: tuple[ModelStatus, ...] = ()

    @property
    def settled(self) -> bool:
        return all(model.settled for model in self.models)
