"""Data that a router's live page and `homing top` show besides `ClusterView`: requests, decisions, prefixes, evictions.

Types only. None of them contains prompt text or tokens: prefixes are shown by hash and length.
"""

import msgspec

from .backend import Explanation


class PrefixNode(msgspec.Struct, frozen=True, kw_only=True):
    """A node in the prefix tree of recent prompts: consecutive blocks that occur in the same requests."""

    parent: int | None  #: index of the parent in the list; None: the node starts a prompt
    last_hash: int  #: wire hash of its last block, which identifies the whole prefix
    start: int  #: number of blocks in the prefix before the node
    blocks: int
    requests: int  #: number of recent requests with this prefix
    held: dict[str, int]  #: number of these blocks that a replica holds, by replica, without zeros
    evicted_next: dict[str, int]  #: number of these blocks that a replica would evict next, by replica, without zeros


class RoutedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The last decision for a request and the request's progress. Times are seconds of the router's clock."""

    number: int  #: increases with each decision of this model in this router
    at: float
    trace_id: str
    tenant: bytes
    explanation: Explanation
    state: str  #: the request's `Phase`, or its outcome if it is over
    ttft_s: float | None
    cached_tokens: int | None
    generated_tokens: int
    continuations: int


class RunningRequest(msgspec.Struct, frozen=True, kw_only=True):
    """An unfinished request."""

    arrived: float
    trace_id: str
    tenant: bytes
    state: str
    waits_for: str = ""  #: in the router's queue: why no replica could take it when it was last tried
    replica: str | None
    prompt_tokens: int
    cached_tokens: int | None
    generated_tokens: int


class FailedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request that ended with an error."""

    number: int  #: increases with each failure
    at: float
    trace_id: str
    tenant: bytes
    replica: str | None
    status: int  #: the error's HTTP status
    reason: str


class ModelActivity(msgspec.Struct, frozen=True, kw_only=True):
    """The current activity of one version of a model. The length of every list is limited."""

    model: str
    block_size: int
    prefixes: list[PrefixNode]  #: most requests first, parents before their children
    routed: list[RoutedRequest]  #: newest first
    running: list[RunningRequest]  #: oldest first
    failed: list[FailedRequest]  #: newest first
    next_evictions: dict[str, tuple[int, ...]]  #: wire hashes that each replica would evict next, by its last answer
