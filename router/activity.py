"""Data that a router shows people besides `ClusterView`: requests, decisions, prefixes, evictions.

For the live page, `homing top`, and the history of requests. Types only. None of them contains prompt text or tokens:
prefixes are shown by hash and length.
"""

import msgspec

from .backend import Explanation, Missing


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


class Decided(Explanation, frozen=True, kw_only=True):
    """A decision that was taken, with the best rows of its table."""

    at: float  #: seconds since 1970
    hidden: int = 0  #: number of candidates left out of `replicas`


class ChoiceRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What has become of one choice of a request: one sequence, generated on one replica or, if it moved, several."""

    replica: str | None  #: where it is or was last; None: it was never sent
    state: str  #: the request's `Phase`, or its outcome if it is over
    waits_for: str = ""  #: in the router's queue: why no replica could take it when it was last tried
    prompt_tokens: int
    predicted_tokens: int = 0  #: cached tokens that the last decision before the first token expected
    cached_tokens: int | None = None  #: None: no token has arrived
    loaded_tokens: dict[str, int] = {}  #: the part of these loaded from tiers, by medium
    generated_tokens: int = 0
    continuations: int = 0  #: how often it moved to another replica
    silent_s: float | None = None  #: while it is unfinished: seconds since its last token, or since the request arrived
    decisions: list[Decided] = []  #: oldest first
    missing: Missing | None = None  #: why it found no more cached, as of its first token or the last decision before it


class Refusal(msgspec.Struct, frozen=True):
    """The error that ended a request."""

    code: str | None
    message: str
    limit: str | None = None  #: the setting, or the tenant's limit, that was reached


class Times(msgspec.Struct, frozen=True, kw_only=True):
    """Where a request's time went, in seconds. None: it never got there."""

    receive_s: float = 0.0  #: network: from the request's first byte to its last
    queue_s: float | None = None  #: from then until a replica was chosen: reading, tokenizing and waiting in the router
    wait_s: float | None = None  #: from then until its first step on the replica; None also if an engine does not say
    prefill_s: float | None = None  #: from then until the first token
    decode_s: float | None = None  #: from then until the end
    blocked_s: float = 0.0  #: network: the part of all of them in which the client did not read its answer
    total_s: float = 0.0  #: from the last byte of the request to the end, or until now


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What has become of an HTTP request. Holds no text of its prompt or its answer."""

    id: str  #: `x-request-id`
    at: float  #: when it arrived, in seconds since 1970
    method: str
    path: str
    state: str  #: running, finished, refused (nothing was sent to a replica), failed or gone (its client left)
    status: int | None  #: None while no response has begun
    error: Refusal | None = None
    tenant: str = ""
    model: str = ""
    session: str | None = None
    agent: str | None = None
    parent: str | None = None  #: the agent that started `agent`
    times: Times
    ttft_s: float | None = None
    expected_ttft_s: float | None = None
    prompt_tokens: int = 0
    predicted_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    #: in a session, where the prompt departs from the last one or from what was cached: the token, and the part of the
    #: conversation (see http/departures.py)
    departure: tuple[int, str | None] | None = None
    choices: list[ChoiceRecord] = []  #: at most the first 8
    hidden: int = 0  #: number of further choices


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
