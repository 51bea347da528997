"""What the clients of a run saw, and what the cluster said of itself meanwhile: values that a judge reads."""

from dataclasses import dataclass
from typing import Any


@dataclass(slots=True, frozen=True)
class Answer:
    """What a question yields when nothing goes wrong."""

    tokens: tuple[str, ...]
    text: str
    finish_reason: str


@dataclass(slots=True, frozen=True, kw_only=True)
class Seen:
    """One request as its client saw it. Times are of the client's own clock."""

    question: int
    streamed: bool
    url: str  #: of the router that was asked
    began_s: float
    ended_s: float
    status: int | None = None  #: None: no head came
    tokens: tuple[str, ...] = ()
    token_times_s: tuple[float, ...] = ()  #: when each of them came; empty where the answer came whole
    text: str = ""
    finish_reason: str | None = None
    usage_tokens: int | None = None
    whole: bool = False  #: the answer came to its proper end: its whole length, or `[DONE]`
    error: Any = None  #: a JSON object that came instead of an answer, or at the end of a stream
    trouble: str = ""  #: what the connection said, where it ended before the answer did
    refused: bool = False  #: nobody listened: the request was never accepted


@dataclass(slots=True, frozen=True)
class Sighting:
    """What `/cluster` said of one replica at one time."""

    at_s: float
    replica: str
    epoch: int
    state: str
    feed: str


@dataclass(slots=True, frozen=True)
class Struck:
    """What a fault hit."""

    at_s: float
    mended_s: float
    replica: str | None = None  #: which one it put out of action, if one
    epoch: int = 0  #: of that replica before the fault
    url: str | None = None  #: the router that it killed, if one


@dataclass(slots=True, frozen=True)
class Census:
    """What a process holds, while nothing runs."""

    pid: int
    title: str
    files: int  #: open descriptors
    kibibytes: int  #: resident memory
    threads: int = 0
    sockets: int = 0  #: of the open descriptors


@dataclass(slots=True, frozen=True)
class Reading:
    """One number that a soak watches: of a process (its class and pid), of a folder, or of a replica's pool."""

    at_s: float
    subject: str
    metric: str
    value: int


@dataclass(slots=True, frozen=True)
class Books:
    """A replica that has nothing to do, as the router sees it."""

    replica: str
    free_blocks: int
    num_blocks: int
    cached_blocks: int  #: by its own report
    indexed_blocks: int  #: by the router's index
