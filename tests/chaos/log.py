"""Records of a run: what clients received, and what the cluster reported. Plain values, read by judge.py."""

from dataclasses import dataclass
from typing import Any


@dataclass(slots=True, frozen=True)
class Answer:
    """The expected answer to a question, received without faults."""

    tokens: tuple[str, ...]
    text: str
    finish_reason: str


@dataclass(slots=True, frozen=True, kw_only=True)
class Seen:
    """One request as its client saw it. Times are those of the client's monotonic clock."""

    question: int
    streamed: bool
    url: str  #: URL of the router that was asked
    began_s: float
    ended_s: float
    status: int | None = None  #: None if no response head arrived
    tokens: tuple[str, ...] = ()
    token_times_s: tuple[float, ...] = ()  #: arrival time of each token; empty if not streamed
    text: str = ""
    finish_reason: str | None = None
    usage_tokens: int | None = None
    whole: bool = False  #: the answer ended properly: complete body, or `[DONE]`
    error: Any = None  #: error object received instead of an answer, or at the end of a stream
    trouble: str = ""  #: exception, if the connection ended before the answer did
    refused: bool = False  #: connection refused: the request was never accepted


@dataclass(slots=True, frozen=True)
class Sighting:
    """One replica's entry in `/cluster` at one time."""

    at_s: float
    replica: str
    epoch: int
    state: str
    feed: str


@dataclass(slots=True, frozen=True)
class Struck:
    """When a fault was injected, and what it hit."""

    at_s: float
    mended_s: float
    replica: str | None = None  #: id of the replica that it put out of action, if any
    epoch: int = 0  #: that replica's epoch before the fault
    url: str | None = None  #: URL of the router that it killed, if any


#: The title of spare processes in a census.
SPARE_PROCESS = "ray::Spare"


@dataclass(slots=True, frozen=True)
class Census:
    """Resources held by one process while no requests run."""

    pid: int
    title: str
    files: int  #: open descriptors
    kibibytes: int  #: resident memory
    threads: int = 0
    sockets: int = 0  #: number of sockets among `files`


@dataclass(slots=True, frozen=True)
class Reading:
    """One reading during a soak, of a process (named by class and pid), of a folder, or of a replica's pool."""

    at_s: float
    subject: str
    metric: str
    value: int


@dataclass(slots=True, frozen=True)
class Books:
    """The block counts of an idle replica, as the router reports them."""

    replica: str
    free_blocks: int
    num_blocks: int
    cached_blocks: int  #: from the replica's load report
    indexed_blocks: int  #: from the router's index
