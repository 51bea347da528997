"""What a router's page and `homing top` show beyond `ClusterView`: requests, decisions, prefixes and evictions.

Types alone. None of them holds a prompt or a part of one: prefixes are shown by hashes and lengths.
"""

import msgspec

from .backend import Explanation


class PrefixNode(msgspec.Struct, frozen=True, kw_only=True):
    """A stretch of the tree of recent prompts: its blocks follow each other, and the same requests went through all."""

    parent: int | None  #: place of its parent in the list
    last_hash: int  #: of its last block, as the index names it; stands for the whole prefix
    start: int  #: blocks of the prefix before it
    blocks: int
    requests: int  #: of the recent ones, that begin with it
    held: dict[str, int]  #: by replica: how many of these blocks it holds; those that hold none are left out
    evicted_next: dict[str, int]  #: by replica: how many of them are among the next that it would evict


class RoutedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The last decision for a request, and what came of it. Times are seconds of the router's clock."""

    number: int  #: rises with each decision of this model in this router
    at: float
    trace_id: str
    tenant: bytes
    explanation: Explanation
    state: str  #: a `Phase`, or the outcome of a request that is over
    ttft_s: float | None
    cached_tokens: int | None
    generated_tokens: int
    continuations: int


class RunningRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request that is not over."""

    arrived: float
    trace_id: str
    tenant: bytes
    state: str
    replica: str | None
    prompt_tokens: int
    cached_tokens: int | None
    generated_tokens: int


class FailedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request that ended with an error."""

    number: int  #: rises
    at: float
    trace_id: str
    tenant: bytes
    replica: str | None
    status: int  #: the HTTP status of that error
    reason: str


class ModelActivity(msgspec.Struct, frozen=True, kw_only=True):
    """One version of a model, as the router sees it now. Every list has a limit."""

    model: str
    block_size: int
    prefixes: list[PrefixNode]  #: most requests first, parents before their children
    routed: list[RoutedRequest]  #: newest first
    running: list[RunningRequest]  #: oldest first
    failed: list[FailedRequest]  #: newest first
    next_evictions: dict[str, tuple[int, ...]]  #: by replica: what it would evict next, as of its last answer
