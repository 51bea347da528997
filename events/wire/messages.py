"""What goes over the event sockets. Types alone: no sockets, no clock.

Two families:

* the vLLM-compatible stream as vLLM 0.33 sends it (`EventBatch` of `BlockStored | BlockRemoved | AllBlocksCleared`);
* our additions on sockets of their own, so that older readers never see them: `Heartbeat` and `LoadReport` on the
  state socket, `SnapshotChunk` on the snapshot socket.

The rules of evolution are those of docs/events.md.
"""

import msgspec

#: A block's name on the stream: the last 8 bytes of its hash as an unsigned int, or all of its bytes (`hash_format`).
WireHash = int | bytes

EVENTS_TOPIC = b"kv-events"
HEARTBEAT_TOPIC = b"heartbeat"
LOAD_TOPIC = b"load"


class EventEndpoints(msgspec.Struct, frozen=True, kw_only=True):
    """Where one publisher is heard."""

    events: str  #: PUB, vLLM-compatible
    replay: str  #: ROUTER, vLLM-compatible
    state: str  #: PUB: heartbeats and load reports
    snapshot: str  #: ROUTER: the full cached set
    curve_key: str = ""  #: public CURVE key of all the replica's sockets, 40 characters of Z85; empty: not encrypted


class BlockStored(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="BlockStored", omit_defaults=True):
    """Consecutive blocks of one chain whose KV is now there. The fields without a default are always on the wire."""

    block_hashes: list[WireHash]
    parent_block_hash: WireHash | None  #: None: the first of these blocks starts a prompt
    token_ids: list[int]  #: of all these blocks; empty in hash-only mode
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[object] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class BlockRemoved(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="BlockRemoved", omit_defaults=True):
    """Blocks of which the last copy is gone."""

    block_hashes: list[WireHash]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="AllBlocksCleared"):
    """Nothing is cached any more."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, frozen=True, array_like=True):
    """Payload of one message on the compatible stream: exactly these three elements."""

    ts: float
    events: list[Event]
    data_parallel_rank: int | None = None


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True):
    """Proof of what is resident after event `seq`: equal digests mean that a subscriber is exact."""

    epoch: int  #: random per publisher start
    seq: int | None  #: last sequence number sent; None before the first
    blocks: int  #: distinct resident blocks
    digest: int  #: XOR of their `wire_hash`es
    ts: float


class CacheCounters(msgspec.Struct, frozen=True, kw_only=True):
    """Totals since the replica's start."""

    query_tokens: int = 0
    hit_tokens: int = 0
    evicted_tokens: int = 0
    collisions: int = 0
    preemptions: int = 0
    generated_tokens: int = 0
    prefilled_tokens: int = 0
    pins_set: int = 0
    pins_refused: int = 0
    pins_expired: int = 0
    pins_broken: int = 0
    partial_hit_tokens: int = 0  #: of `hit_tokens`, those copied out of a block that then differs


class PrefillWork(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What is computed, or to be computed, of one prompt or several."""

    prompts: int
    tokens: int
    pairs: float  #: for each of those tokens, the computed ones of its prompt before it
    context: float  #: for each of those tokens, the cached ones before it


class PrefillCost(msgspec.Struct, frozen=True, array_like=True):
    """Seconds of a prefill by parts, as fitted to measured steps."""

    prompt_s: float  #: for each prompt, however short its uncached rest
    token_s: float  #: for each token computed
    pair_s: float  #: for each token computed and each computed one before it
    context_s: float = 0.0  #: for each token computed and each cached one before it

    def seconds(self, cached: int, tokens: int) -> float:
        """For `tokens` behind `cached` ones."""
        return self.prompt_s + tokens * (self.token_s + self.pair_s * (tokens / 2) + self.context_s * cached)

    def total(self, work: PrefillWork) -> float:
        """For several prompts."""
        return (
            work.prompts * self.prompt_s
            + work.tokens * self.token_s
            + work.pairs * self.pair_s
            + work.context * self.context_s
        )

    def times(self, factor: float) -> "PrefillCost":
        """On a replica that takes so many times as long."""
        return PrefillCost(self.prompt_s * factor, self.token_s * factor, self.pair_s * factor, self.context_s * factor)


class LoadReport(msgspec.Struct, frozen=True, kw_only=True):
    """A replica's load after a step, or at rest every heartbeat."""

    epoch: int
    step: int
    ts: float
    running: int
    waiting: int
    queued_prefill_tokens: int  #: uncached prompt tokens not yet computed, of running and waiting requests
    decode_context_tokens: int  #: tokens in KV of requests that decode
    free_blocks: int  #: allocatable: never used or evictable, hence not pinned
    cached_free_blocks: int  #: those of `free_blocks` that still hold cached KV
    total_blocks: int
    prefill_tokens_per_s: float  #: measured
    decode_step_s: float  #: measured
    counters: CacheCounters
    #: router id -> highest request id taken from it: later ones are on the way and not counted above
    accepted: dict[str, int] = {}
    draining: bool = False
    pinned_blocks: int = 0  #: distinct ones, in use or not
    prefill_cost: PrefillCost | None = None  #: None: only the rate is known
    queued_prefill_s: float | None = None  #: to compute `queued_prefill_tokens`, by that cost; None: not known
    queued_prefill: PrefillWork | None = None  #: those tokens by parts; None: not known
    prefill_sums: list[float] | None = None  #: prefill.py: of all steps since the start; None: not measured


class SnapshotRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Asks for all that is cached."""

    token_ids: bool = False


class SnapshotBlock(msgspec.Struct, frozen=True, array_like=True):
    """One cached block."""

    block_hash: WireHash
    parent: WireHash | None
    token_ids: list[int]


class SnapshotChunk(msgspec.Struct, frozen=True, kw_only=True):
    """A part of the cached set as it was after event `seq` of `epoch`; parents come before their children."""

    epoch: int
    seq: int | None
    index: int
    last: bool
    blocks: list[SnapshotBlock]
