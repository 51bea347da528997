"""The interface between the HTTP front and the routing side; the front's tests use a fake of it.

Types only: no sockets, no HTTP, no tokenizer. `ModelVersions` and `RouterService` (router/replicas) implement it.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

import msgspec

from ..events.follow.subscription import FeedStatus
from ..events.wire.messages import EventEndpoints
from ..replica.messages import (
    Constraint,
    EmbeddingParams,
    EncodedPosition,
    FinishReason,
    ModelLimits,
    Pin,
    PositionLogprobs,
    SamplingParams,
)
from .errors import RouterError
from .text.parsers.deltas import Delta

if TYPE_CHECKING:
    from .activity import ChoiceRecord, ModelActivity  # which hold an `Explanation`


@dataclass(slots=True, frozen=True)
class TextDigests:
    """Digests that identify a folder's tokenizer and chat template."""

    tokenizer: str
    template: str


@dataclass(slots=True, frozen=True)
class TextSource:
    """The folder of a tokenizer and a chat template, with their digests, as its content may change later."""

    path: str
    digests: TextDigests
    model_path: str = ""  #: folder of the model's configuration; empty: `path`


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence to generate; `n` choices are n of these, with different seeds."""

    trace_id: str  #: the client's x-request-id
    traceparent: str = ""  #: W3C trace context, for engines that trace
    token_ids: bytes  #: the prompt, uint32 LE, at least one token
    sampling: SamplingParams  #: fully resolved
    salt: bytes = b""  #: only requests with the same salt share cached blocks
    session: str | None = None  #: its prompts are compared with each other
    priority: int = 0  #: across all tenants; lower goes first
    own_order: int = 0  #: among the tenant's own waiting requests; lower goes first
    tenant: bytes = b""  #: the tenant's digest; tenants share the queue by weight
    weight: float = 1.0  #: the tenant's relative share of the queue
    deadline: float | None = None  #: monotonic seconds; None: `request_timeout_s` from now
    tokens_per_delta: int = 1  #: after the first token, deltas may be held back until they have this many tokens
    pins: tuple[Pin, ...] = ()  #: prefixes of the prompt to keep cached on the replica
    constraint: Constraint | None = None  #: what the answer must match; already validated
    chat: bytes = b""  #: the prompt as a JSON chat, for an external engine's own template and parsers; empty: ids only
    given: dict[str, Any] = {}  #: for external engines that get ids: the fields that the client set
    embedding: EmbeddingParams | None = None  #: set: generate no tokens; the only delta has the prompt's vector
    adapter: str = ""  #: name of the engines' adapter that answers; empty: the model itself


class TextOutput(msgspec.Struct, frozen=True, array_like=True):
    """Output of an engine that reports no token ids. Such a request cannot continue on another replica."""

    request_id: int
    text: str
    num_tokens: int  #: tokens in the text, estimated if the engine does not report it
    finish_reason: FinishReason | None = None
    cached_tokens: int | None = None
    #: `text` split into text, reasoning and tool calls, if the engine parsed them; empty: only `text`
    deltas: Sequence[Delta] | None = None


#: Why a request was sent to its replica. only: the only one. prefix: no other has as much of the prompt in its cache.
#: load: another has as much of it or more, but is busier: the answer would start later there or delay other requests
#: more. cold: none has any of it, so load decided. policy: the rule of a policy that does not weigh caches against
#: load. held: not sent yet.
Reason = Literal["only", "prefix", "load", "cold", "policy", "held"]


class TokenDelta(msgspec.Struct, frozen=True, kw_only=True):
    """What one engine step added to a request. Only the last delta has a `finish_reason`."""

    token_ids: list[int]
    text: str | None = None  #: text instead of ids, from an engine that reports no ids
    text_tokens: int = 0  #: number of tokens in `text`
    deltas: Sequence[Delta] | None = None  #: see `TextOutput.deltas`
    logprobs: list[PositionLogprobs] | None = None  #: one per token, if requested
    prompt_logprobs: list[EncodedPosition] | None = None  #: only on the first delta, if requested
    finish_reason: FinishReason | None = None
    #: prompt tokens found in the cache; set on the first delta, with external engines on the last
    cached_tokens: int | None = None
    loaded_tokens: tuple[tuple[str, int], ...] = ()  #: the part of `cached_tokens` loaded from tiers, by medium
    #: seconds from arrival at the replica to its first step there; set together with `cached_tokens`, if it is known
    waited_s: float | None = None
    stop_token_id: int | None = None  #: the stop id that ended the answer; also the last of `token_ids`
    pinned_tokens: int | None = None  #: length of the prompt's pinned prefix; only on the first delta, if it has pins
    embedding: bytes | None = None  #: float32 LE


class TokenSink(Protocol):
    """Receives a request's deltas. Called on the service's loop while it also serves other requests; must not raise."""

    def delta(self, delta: TokenDelta) -> None:
        """Receive the next delta, in order; the last one has a `finish_reason`."""

    def failed(self, error: RouterError) -> None:
        """The request failed. No call follows."""


class TokenStream(Protocol):
    """One request's deltas, which its single sink receives as they arrive."""

    @property
    def replica_id(self) -> str | None:
        """The replica that the request is on or was last on; None while the router holds it."""

    @property
    def forecast(self) -> "Forecast | None":
        """What the last decision before the first token expected; None: the request has not been sent yet."""

    @property
    def continuations(self) -> int:
        """How often the request moved to another replica."""

    def listen(self, sink: TokenSink) -> None:
        """Pass all deltas to the sink, from the first one on, as they arrive. Call once. `cancel` ends the calls."""

    def record(self, clock_offset_s: float) -> "ChoiceRecord":
        """What has become of the request so far, with its decisions. `clock_offset_s`: wall time less router's clock.

        Computes the decisions' tables, so it is for the end of a request and for people.
        """

    def cancel(self, *, answered: bool = False) -> None:
        """Stop the request and free its blocks. Idempotent; does nothing after the end.

        `answered`: the answer is complete, such as at a stop string; the request counts as finished.
        """


#: Which chats go to the external engines' own chat endpoints instead of as token ids; `parsed`: those in whose answers
#: an engine may find tool calls, reasoning or another structure.
EngineChats = Literal["none", "parsed", "all"]

#: How far a replica's events can be trusted; "syncing", "live", "approximate" or "stale" in JSON.
FeedState = FeedStatus


class ReplicaScore(msgspec.Struct, frozen=True, kw_only=True):
    """One replica's row in a decision's table."""

    replica_id: str
    feed: FeedState
    eligible: bool  #: not draining, silent or saturated
    held_blocks: int  #: longest prefix of the prompt that the replica holds, according to its events
    expected_blocks: int  #: the same, including blocks that running requests are expected to store
    #: the part of `expected_blocks` that must be loaded from memory slower than that in which it computes, by medium
    slower_blocks: dict[str, int] = {}
    loading_s: float = 0.0  #: seconds to load these, part of `expected_ttft_s`
    uncached_tokens: int  #: of this prompt, as used in the score
    queued_prefill_tokens: int  #: uncached tokens queued ahead of it
    running: int
    waiting: int
    expected_ttft_s: float | None  #: None: the policy does not estimate it
    others_s: float = 0.0  #: delay of other prompts, in seconds, if this one is computed here
    chosen: bool
    why: str  #: the reason in words


#: short: the prompt fills no block. scored: its tokens must be computed in any case. unknown: no events are received.
#: elsewhere: another replica has them. evicted, lost: they were cached once. new: they never were, or long ago.
MissReason = Literal["short", "scored", "unknown", "elsewhere", "evicted", "lost", "other tenant", "new"]


#: `why` of the reason `new`.
NEW = "no request that the router remembers had these tokens here before"


class Missing(msgspec.Struct, frozen=True, kw_only=True):
    """Why the cached prefix of a prompt ends where it does on the chosen replica."""

    token: int  #: the first prompt token that is not in a cached block
    reason: MissReason
    why: str  #: in words
    replica: str | None = None  #: that has, evicted or lost the block
    at: float | None = None  #: when it was evicted or lost: seconds since 1970, within half a second
    request: str | None = None  #: id of the request for which it was probably evicted, or that computed it
    tenant: str | None = None  #: the other tenant

    def moved(self, offset_s: float, *, token: int | None = None) -> "Missing":
        """The same on another clock, by default with the same token."""
        at = None if self.at is None else self.at + offset_s
        return msgspec.structs.replace(self, at=at, token=self.token if token is None else token)


class Forecast(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """What a decision by which a request was sent to a replica expects, and why it was taken."""

    reason: Reason
    queue_s: float  #: seconds from the request's arrival to its first dispatch
    ttft_s: float  #: seconds from its arrival to its first token, as expected
    cached_tokens: int = 0  #: prompt tokens that it will find in the cache
    loaded_tokens: tuple[tuple[str, int], ...] = ()  #: the part of these that it will load from tiers, by medium
    regret_tokens: int = 0  #: see `RouterCounters`
    known_tokens: int = 0  #: with a session: the longest prefix that any replica held or was expected to hold
    missing: Missing | None = None  #: why no more is cached; its times are on the router's clock


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """A decision and its reasons. Rows are in the order in which replicas joined, which does not affect decisions."""

    policy: str
    chosen: str | None  #: None: the request would be held
    reason: Reason
    why: str
    prompt_tokens: int
    prompt_blocks: int
    block_size: int
    replicas: list[ReplicaScore]
    missing: Missing | None = None  #: None: all that a cache may serve is cached, or nothing was chosen

    def best(self, most: int) -> list[ReplicaScore]:
        """Up to `most` rows: all in their order or, if some are left out, the chosen one and the best of the others."""
        if len(self.replicas) <= most:
            return self.replicas
        return sorted(self.replicas, key=_rank)[:most]


def _rank(row: ReplicaScore) -> tuple[bool, bool, float]:
    return not row.chosen, not row.eligible, (row.expected_ttft_s or 0.0) + row.others_s


#: joining: no load report yet; warming: gets no requests until its cache holds the hottest prefixes.
ReplicaState = Literal["joining", "warming", "serving", "draining", "silent"]


class WarmUpProgress(msgspec.Struct, frozen=True, kw_only=True):
    """Progress of a replica's warm-up in prompt tokens. Tokens shared by several prefixes count for each of them."""

    done_tokens: int
    planned_tokens: int


class TierView(msgspec.Struct, frozen=True, kw_only=True):
    """One tier of a replica below its pool."""

    total_blocks: int
    used_blocks: int
    load_block_s: float  #: measured seconds to bring a block into the pool
    indexed_blocks: int  #: its blocks in the router's index
    index_digest: str  #: XOR of the wire hashes of those blocks, in hex


class ReplicaView(msgspec.Struct, frozen=True, kw_only=True):
    """One replica as the router sees it now."""

    replica_id: str
    epoch: int
    node: str
    state: ReplicaState
    feed: FeedState
    model: str
    num_blocks: int
    indexed_blocks: int = 0  #: its blocks in the router's index
    index_digest: str = ""  #: XOR of the wire hashes of those blocks, in hex
    events_seq: int | None = None  #: the first batch of its events that the index does not include yet; None: unknown
    tiers: dict[str, TierView] = {}  #: the tiers below its pool by medium, fastest first
    expected_blocks: int = 0  #: blocks that running requests are expected to store
    in_flight: int = 0  #: this router's unfinished requests on it
    running: int = 0
    waiting: int = 0
    queued_prefill_tokens: int = 0
    free_blocks: int = 0
    cached_free_blocks: int = 0
    prefill_tokens_per_s: float
    decode_step_s: float
    report_age_s: float | None = None  #: None: no report yet
    pids: tuple[int, ...] = ()
    pinned_blocks: int = 0
    waiting_blocks: int | None = None  #: free blocks that its waiting requests will take; None: unknown
    #: its blocks by the tenant whose request was first to need them, largest first; the rest is of unknown tenants
    tenant_blocks: dict[str, int] = {}
    event_endpoints: EventEndpoints | None = None  #: addresses where it publishes its events
    url: str | None = None  #: an external engine's server; None: one of homing's own replicas
    trouble: str = ""  #: why that server cannot be reached
    approximate: bool = False  #: it publishes no events: `indexed_blocks` counts the blocks of prompts sent to it
    unplaced_blocks: int = 0  #: blocks announced with unknown content, which are not credited
    dropped_blocks: int = 0  #: blocks dropped from the index because an engine announced more than it can hold
    warm_up: WarmUpProgress | None = None  #: the warm-up by this router; None: there is none


class AbsentReplica(msgspec.Struct, frozen=True, kw_only=True):
    """A replica that should exist but does not serve, as reported by the controller."""

    replica_id: str
    model: str  #: the name that requests use
    state: Literal["starting", "rebuilding"]
    reason: str  #: why it was lost and what it is waiting for
    since: float  #: seconds since 1970


class EngineView(msgspec.Struct, frozen=True, kw_only=True):
    """A listed external engine and what was found out about it."""

    name: str
    url: str
    source: str  #: where it is listed: `flags`, `api`, a file, a DNS name, or a label of Ray actors
    summary: str  #: kind, version, model, limits and event sockets; empty: it has not answered
    replicas: list[str]  #: ids of its replicas, one per data-parallel rank
    missing: list[str]  #: what was not found, and what to do about it
    trouble: str  #: why it could not be queried


class EngineList(Protocol):
    """The list of external engines behind a router."""

    def views(self) -> list[EngineView]: ...
    async def add(self, url: str, events: str, replay: str) -> EngineView:
        """Add an engine. Raises BackendsInvalid."""

    def remove(self, url: str) -> EngineView:
        """Remove an engine. Its requests continue elsewhere. Raises EngineNotFound or BackendsInvalid."""


class RefusedReplica(msgspec.Struct, frozen=True, kw_only=True):
    """A refused replica and the reason."""

    replica_id: str
    epoch: int
    field: str  #: a field of `Parity`, or `curve_keys`; for external engines also `model`, `tokenizer`, `max_model_len`
    message: str


class RouterCounters(msgspec.Struct, kw_only=True):
    """Totals of one model since the router's start, as plain numbers that metrics read."""

    requests: int = 0  #: accepted by `generate`
    finished: int = 0  #: ended with a finish reason
    failed: int = 0  #: ended with an error
    cancelled: int = 0
    rejected: int = 0  #: refused by `generate` with QueueFull or PromptTooLong
    held: int = 0  #: requests that waited in the router on arrival
    continued: int = 0  #: number of times that a request continued on another replica
    suspected: int = 0  #: number of times that a request was suspected because its replica died
    blamed: int = 0  #: requests that ended because a second replica died with them
    duplicate_tokens: int = 0  #: tokens delivered twice by replicas and dropped
    malformed_frames: int = 0  #: replies that could not be decoded
    malformed_events: int = 0
    unsent: int = 0  #: messages that a full or lost connection did not accept
    replicas_joined: int = 0
    replicas_lost: int = 0
    replicas_refused: int = 0
    refused_connections: int = 0  #: connections to replicas that failed because CURVE keys do not match
    predicted_cached_tokens: int = 0  #: for finished requests
    delivered_cached_tokens: int = 0  #: likewise
    regret_tokens: int = 0  #: cached tokens forgone against the best replica, summed over decisions
    overruled: int = 0  #: decisions of the policy that were not followed: it chose no usable replica although one was
    # Noticed at the tick: requests that stood still although a replica could go on with them (flow/stalls.py).
    stalls_queue: int = 0  #: requests waited while no replica computed any
    stalls_idle_replica: int = 0  #: a replica was idle while a request waited that it could take
    stalls_lost: int = 0  #: a replica did not have requests that were sent to it
    predictions_exact: int = 0  #: reported cached tokens were as predicted, or less than a block more
    predictions_low: int = 0  #: a whole block or more above the prediction
    predictions_high: int = 0  #: below the prediction
    predicted_loaded_tokens: int = 0  #: the part of `predicted_cached_tokens` to be loaded from tiers
    delivered_loaded_tokens: int = 0  #: likewise, as reported
    # First tokens for which a load was predicted or reported.
    loads_exact: int = 0  #: as many whole blocks of each medium as predicted
    loads_wrong: int = 0
    warm_up_requests: int = 0  #: completed warm-up requests; not counted anywhere else
    warm_up_tokens: int = 0  #: prompt tokens that replicas computed for them
    warm_ups_cut: int = 0  #: warm-ups that were ended before they were complete


def total(counters: Iterable[RouterCounters]) -> RouterCounters:
    """Sum the counters of several models."""
    each = list(counters)
    return RouterCounters(
        **{field: sum(getattr(one, field) for one in each) for field in RouterCounters.__struct_fields__}
    )


class ModelView(msgspec.Struct, frozen=True, kw_only=True):
    """One model as the router sees it now."""

    name: str  #: the name that requests use
    max_model_len: int | None  #: None: no replica has joined yet
    serving: int  #: number of serving replicas
    waiting: int  #: requests held by the router
    waiting_tokens: int = 0  #: KV tokens that those will take
    in_flight: int  #: requests sent to replicas
    counters: RouterCounters


class ClusterView(msgspec.Struct, frozen=True, kw_only=True):
    """The content of /cluster."""

    router_id: str
    policy: str
    waiting: int  #: requests held by the router
    in_flight: int  #: requests sent to replicas
    models: list[ModelView]
    replicas: list[ReplicaView]
    absent: list[AbsentReplica] = []  #: replicas that should exist but are not in `replicas`
    refused: list[RefusedReplica]
    counters: RouterCounters  #: the sum over all models


def model_view(
    name: str,
    limits: ModelLimits | None,
    views: Sequence[ClusterView],
    counters: RouterCounters,
    waiting_tokens: int = 0,
) -> ModelView:
    """Summarize the model whose replicas are in `views`."""
    return ModelView(
        name=name,
        max_model_len=limits.max_model_len if limits else None,
        serving=sum(replica.state == "serving" for view in views for replica in view.replicas),
        waiting=sum(view.waiting for view in views),
        waiting_tokens=waiting_tokens,
        in_flight=sum(view.in_flight for view in views),
        counters=counters,
    )


class ModelBackend(Protocol):
    """Accepts requests for one model. All methods are called on the service's event loop."""

    def model(self) -> ModelLimits | None:
        """The model's limits and served name; None until a replica has joined."""

    def text(self) -> TextSource | None:
        """The tokenizer and template for its requests; None until a replica has joined."""

    @property
    def has_engines(self) -> bool:
        """Whether the replicas are external engines, which have defaults of their own."""

    def adapters(self) -> Collection[str]:
        """Names of the adapters that at least one external engine offers now."""

    def engine_chats(self) -> EngineChats:
        """Which chats must be sent as chats, for the engines to render and parse."""

    def generate(self, request: GenerationRequest) -> TokenStream:
        """Accept a request. Raises `NoReplica` (503), `QueueFull` (429) or `PromptTooLong` (400)."""

    def explain(self, request: GenerationRequest) -> Explanation:
        """Explain the decision that `generate` would make now; no side effects. Raises NoReplica or PromptTooLong."""


class Backend(Protocol):
    """The routing side as the HTTP front sees it. All methods are called on the service's event loop."""

    def choose(self, model: str | None) -> ModelBackend:
        """The backend for the next request to this model, or to one of its `adapters`; None: the only one.

        Use it for the whole request, because the prompt must be tokenized for the version that it serves.

        Raises `ModelNotFound` (404), `InvalidRequest` if `model` is None and there are several, or `NoReplica`.
        """

    def models(self) -> list[ModelLimits]:
        """The limits of every model that has had a replica, so that prompts can be tokenized for it."""

    def texts(self) -> list[TextSource]:
        """The tokenizers and templates of all models, including versions that are being replaced."""

    def exact(self) -> bool:
        """Whether the index was, at any time since the start, exact for all replicas at once."""

    def view(self) -> ClusterView:
        """The cluster as the router sees it now. Takes 2 to 3 µs per replica."""

    async def view_in_slices(self) -> ClusterView:
        """The same without delaying streams in large clusters: other work is done between two slices of replicas."""

    def tenant_blocks(self) -> dict[str, dict[bytes, int]]:
        """The number of blocks of each tenant, by its digest, that each replica holds. Takes milliseconds."""

    def activity(self) -> "list[ModelActivity]":
        """Requests, decisions and prefixes of each model. Takes milliseconds, so only for interactive views.

        Asks the replicas which blocks they would evict next; a later call returns their answers.
        """

    def end_requests(self) -> None:
        """End every running request with `RouterClosed`. Idempotent."""

    async def reset_caches(self, model: str | None = None) -> list[str]:
        """Make every replica (of this model) drop its cached blocks; returns the replica ids.

        Raises `ModelNotFound`, `NoReplica`, `CacheInUse` (409) or `ReplicaLost`.
        """
