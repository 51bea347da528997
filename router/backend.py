"""The interface between the HTTP front and the routing side. The front is tested with a fake of it.

Types alone: no sockets, no HTTP, no tokenizer. `ModelVersions` and `RouterService` (router/replicas) implement it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

import msgspec

from ..events.follow.subscription import FeedStatus
from ..events.wire.messages import EventEndpoints
from ..replica.messages import (
    Constraint,
    EmbeddingParams,
    FinishReason,
    ModelLimits,
    Pin,
    PositionLogprobs,
    SamplingParams,
)
from .errors import RouterError
from .text.parsers.deltas import Delta

if TYPE_CHECKING:
    from .activity import ModelActivity  # which holds an `Explanation`


@dataclass(slots=True, frozen=True)
class TextDigests:
    """Which tokenizer and chat template a folder has."""

    tokenizer: str
    template: str


@dataclass(slots=True, frozen=True)
class TextSource:
    """Where a tokenizer and a chat template are, and which they are: the folder may get others later."""

    path: str
    digests: TextDigests
    model_path: str = ""  #: where the model's configuration is; empty: `path`


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence to generate; `n` choices are n of these, with different seeds."""

    trace_id: str  #: the client's x-request-id
    traceparent: str = ""  #: W3C trace context, for engines that trace
    token_ids: bytes  #: the prompt, uint32 LE, at least one token
    sampling: SamplingParams  #: fully resolved
    salt: bytes = b""  #: requests share cached blocks only under the same salt
    session: str | None = None  #: requests of one session prefer one replica
    priority: int = 0  #: lower goes first, among all tenants' requests
    own_order: int = 0  #: likewise among the requests of its tenant that wait in the router
    tenant: bytes = b""  #: shares the queue with other tenants by weight
    weight: float = 1.0  #: the tenant's share in the queue
    deadline: float | None = None  #: monotonic seconds; None: `request_timeout_s` from now
    tokens_per_delta: int = 1  #: after the first token, deltas may wait until they hold so many
    pins: tuple[Pin, ...] = ()  #: prefixes of the prompt to keep where it runs
    constraint: Constraint | None = None  #: what the answer must match; checked already
    chat: bytes = b""  #: the same as a JSON chat, for an external engine's own template and parsers; empty: ids only
    embedding: EmbeddingParams | None = None  #: no tokens are generated: the only delta has the prompt's vector


class TextOutput(msgspec.Struct, frozen=True, array_like=True):
    """Output of an engine that reports no token ids. Such a request cannot continue at another replica."""

    request_id: int
    text: str
    num_tokens: int  #: that the text stands for, as far as the engine reports it
    finish_reason: FinishReason | None = None
    cached_tokens: int | None = None
    #: `text` with reasoning and calls, if the engine told them apart; empty: nothing but `text`
    deltas: Sequence[Delta] | None = None


class TokenDelta(msgspec.Struct, frozen=True, kw_only=True):
    """What one engine step added to a request. Only the last delta has a `finish_reason`."""

    token_ids: list[int]
    text: str | None = None  #: instead of ids, from an engine that reports none
    text_tokens: int = 0  #: that the text stands for
    deltas: Sequence[Delta] | None = None  #: as in `TextOutput`
    logprobs: list[PositionLogprobs] | None = None  #: one per token, if asked for
    prompt_logprobs: list[PositionLogprobs | None] | None = None  #: on the first delta only, if asked for
    finish_reason: FinishReason | None = None
    #: prompt tokens taken from the cache; on the first delta, with external engines on the last
    cached_tokens: int | None = None
    queue_s: float | None = None  #: from its arrival until it was first sent; only set beside `cached_tokens`
    predicted_cached_tokens: int | None = None  #: what the decision expected of `cached_tokens`; only set beside it
    stop_token_id: int | None = None  #: the last token is this stop id (it is part of `token_ids`)
    pinned_tokens: int | None = None  #: how far the prompt is pinned; only on the first delta of a request with pins
    embedding: bytes | None = None  #: float32 LE
    #: on the first delta of a request of a session: the prompt's longest prefix that some replica had or was to have
    known_tokens: int = 0


class TokenSink(Protocol):
    """Takes a request's deltas. Called on the service's loop, amid the work for other requests: it must not raise."""

    def delta(self, delta: TokenDelta) -> None:
        """The next delta, in order; the last one has a `finish_reason`."""

    def failed(self, error: RouterError) -> None:
        """The request failed; nothing follows."""


class TokenStream(Protocol):
    """Deltas of one request, which its one sink gets as they arrive."""

    @property
    def replica_id(self) -> str | None:
        """Where the request runs or ran last; None while the router holds it."""

    def listen(self, sink: TokenSink) -> None:
        """Hand over all deltas, from the first on, as they arrive. Call it once. After `cancel` there are none."""

    def cancel(self) -> None:
        """Stop the request and free its blocks. Idempotent, and harmless after the end."""


#: How far a replica's events can be trusted; "syncing", "live" or "stale" in JSON.
FeedState = FeedStatus


class ReplicaScore(msgspec.Struct, frozen=True, kw_only=True):
    """One row of a decision's table."""

    replica_id: str
    feed: FeedState
    eligible: bool  #: not draining, silent or saturated
    held_blocks: int  #: longest prefix of the prompt that the replica holds, according to its events
    expected_blocks: int  #: the same with the blocks that running requests will leave there
    slower_blocks: dict[str, int] = {}  #: of `held_blocks`, those in slower memory than the GPU's, by medium
    uncached_tokens: int  #: of this prompt, as counted in the score
    queued_prefill_tokens: int  #: uncached tokens ahead of it
    running: int
    waiting: int
    expected_ttft_s: float | None  #: None: the policy does not estimate it
    others_s: float = 0.0  #: seconds that other prompts lose if this one is computed here
    chosen: bool
    why: str  #: in words


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """A decision and its reasons. Rows are in the order in which replicas joined, which never decides."""

    policy: str
    chosen: str | None  #: None: the request would be held
    why: str
    prompt_tokens: int
    prompt_blocks: int
    block_size: int
    replicas: list[ReplicaScore]


#: joining: no load report yet; warming: it gets no requests before its cache holds the hottest prefixes.
ReplicaState = Literal["joining", "warming", "serving", "draining", "silent"]


class WarmUpProgress(msgspec.Struct, frozen=True, kw_only=True):
    """How much of a replica's warm-up is done, in prompt tokens. Tokens that prefixes share count for each of them."""

    done_tokens: int
    planned_tokens: int


class ReplicaView(msgspec.Struct, frozen=True, kw_only=True):
    """One replica as the router sees it now."""

    replica_id: str
    epoch: int
    node: str
    state: ReplicaState
    feed: FeedState
    model: str
    num_blocks: int
    indexed_blocks: int = 0  #: blocks of it in the router's index
    expected_blocks: int = 0  #: blocks expected there from running requests
    in_flight: int = 0  #: this router's requests there
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
    event_endpoints: EventEndpoints | None = None  #: where it publishes its events
    url: str | None = None  #: of an external engine's server; None: a replica of ours
    trouble: str = ""  #: why that server cannot be reached
    approximate: bool = False  #: it publishes no events: `indexed_blocks` are those of what was sent there
    unplaced_blocks: int = 0  #: blocks that it announced with unknown content: not credited
    warm_up: WarmUpProgress | None = None  #: by this router; None: there is no warm-up


class AbsentReplica(msgspec.Struct, frozen=True, kw_only=True):
    """A replica that is wanted and does not serve, as the controller reports it."""

    replica_id: str
    model: str  #: as requests call it
    state: Literal["starting", "rebuilding"]
    reason: str  #: why it was lost, and what it waits for
    since: float  #: seconds since 1970


class EngineView(msgspec.Struct, frozen=True, kw_only=True):
    """An external engine that the router is to use, and what was found out about it."""

    name: str
    url: str
    source: str  #: who lists it: `flags`, `api`, a file, or a name in DNS
    summary: str  #: kind, version, model, limits and event sockets; empty: it has not answered
    replicas: list[str]  #: one for each of its data-parallel ranks
    missing: list[str]  #: what was not found, and what to do about it
    trouble: str  #: why nothing is known of it


class EngineList(Protocol):
    """The engines of a router that is in front of external ones."""

    def views(self) -> list[EngineView]: ...
    async def add(self, url: str, events: str, replay: str) -> EngineView:
        """List one more. Raises BackendsInvalid."""

    def remove(self, url: str) -> EngineView:
        """Requests that run there continue elsewhere. Raises EngineNotFound and BackendsInvalid."""


class RefusedReplica(msgspec.Struct, frozen=True, kw_only=True):
    """A replica that was refused, and why."""

    replica_id: str
    epoch: int
    field: str  #: of `Parity`, or `curve_keys`; for external engines also `model`, `tokenizer`, `max_model_len`
    message: str


class RouterCounters(msgspec.Struct, kw_only=True):
    """Totals of one model since the router's start; plain numbers that metrics read."""

    requests: int = 0  #: accepted by `generate`
    finished: int = 0  #: ended with a finish reason
    failed: int = 0  #: ended with an error
    cancelled: int = 0
    rejected: int = 0  #: QueueFull, PromptTooLong and NoReplica
    held: int = 0  #: requests that waited in the router at least once
    continued: int = 0  #: times a request continued at another replica
    duplicate_tokens: int = 0  #: delivered twice by replicas and dropped
    malformed_frames: int = 0  #: of replicas' replies
    malformed_events: int = 0
    unsent: int = 0  #: messages that a full or lost connection did not take
    replicas_joined: int = 0
    replicas_lost: int = 0
    replicas_refused: int = 0
    refused_connections: int = 0  #: connections to replicas that failed because CURVE keys do not match
    predicted_cached_tokens: int = 0  #: of finished requests
    delivered_cached_tokens: int = 0
    regret_tokens: int = 0  #: best hit forgone, summed over decisions
    predictions_exact: int = 0  #: the first output had the predicted cached tokens, or a partial block more
    predictions_low: int = 0  #: a whole block or more beyond what was predicted
    predictions_high: int = 0  #: fewer than predicted
    warm_up_requests: int = 0  #: for the caches of new replicas; not counted anywhere else
    warm_up_tokens: int = 0  #: prompt tokens that replicas computed for them
    warm_ups_cut: int = 0  #: that ended early: requests waited, or the time was over


def total(counters: Iterable[RouterCounters]) -> RouterCounters:
    """The sum over several models."""
    each = list(counters)
    return RouterCounters(
        **{field: sum(getattr(one, field) for one in each) for field in RouterCounters.__struct_fields__}
    )


class ModelView(msgspec.Struct, frozen=True, kw_only=True):
    """One model as the router sees it now."""

    name: str  #: as requests call it
    max_model_len: int | None  #: None: no replica has joined yet
    serving: int  #: replicas
    waiting: int  #: requests held by the router
    in_flight: int  #: requests sent to replicas
    counters: RouterCounters


class ClusterView(msgspec.Struct, frozen=True, kw_only=True):
    """What /cluster shows."""

    router_id: str
    policy: str
    waiting: int  #: requests held by the router
    in_flight: int  #: requests sent to replicas
    models: list[ModelView]
    replicas: list[ReplicaView]
    absent: list[AbsentReplica] = []  #: those that should be in `replicas` and are not
    refused: list[RefusedReplica]
    counters: RouterCounters  #: of all models together


def model_view(
    name: str, limits: ModelLimits | None, views: Sequence[ClusterView], counters: RouterCounters
) -> ModelView:
    """The model whose replicas these views show."""
    return ModelView(
        name=name,
        max_model_len=limits.max_model_len if limits else None,
        serving=sum(replica.state == "serving" for view in views for replica in view.replicas),
        waiting=sum(view.waiting for view in views),
        in_flight=sum(view.in_flight for view in views),
        counters=counters,
    )


class ModelBackend(Protocol):
    """Takes requests for one model. All methods are called on the service's event loop."""

    def model(self) -> ModelLimits | None:
        """Limits of the model, and the name under which it is served; None until a replica joined."""

    def text(self) -> TextSource | None:
        """What its requests are tokenized with; None until a replica joined."""

    def generate(self, request: GenerationRequest) -> TokenStream:
        """Accept a request. Raises `NoReplica` (503), `QueueFull` (429) or `PromptTooLong` (400)."""

    def explain(self, request: GenerationRequest) -> Explanation:
        """The table of the decision that `generate` would take now; changes nothing. Raises `NoReplica`."""


class Backend(Protocol):
    """The routing side as the HTTP front sees it. All methods are called on the service's event loop."""

    def choose(self, model: str | None) -> ModelBackend:
        """The backend for the next request to the model of this name; None: the only one.

        Use it for the whole request: the prompt is tokenized for the model that it returns.

        Raises `ModelNotFound` (404), `InvalidRequest` where there are several and none is named, and `NoReplica`.
        """

    def models(self) -> list[ModelLimits]:
        """Of every model that has had a replica, so that prompts can be tokenized for it."""

    def texts(self) -> list[TextSource]:
        """What the requests of all models, and of old versions that are being replaced, are tokenized with."""

    def exact(self) -> bool:
        """Whether the index has been exact for every replica at once, since the start."""

    def view(self) -> ClusterView:
        """The cluster as the router sees it now."""

    def activity(self) -> "list[ModelActivity]":
        """Requests, decisions and prefixes of each model. Takes milliseconds: only for people who watch.

        Asks the replicas which blocks they would evict next; their answers are part of later calls.
        """

    def end_requests(self) -> None:
        """End every running request with `RouterClosed`. Harmless when repeated."""

    async def reset_caches(self, model: str | None = None) -> list[str]:
        """Have every replica (of this model) forget its cached blocks; returns their ids.

        Raises `ModelNotFound`, `NoReplica`, `CacheInUse` (409) or `ReplicaLost`.
        """
