"""The message types of the event sockets. Types only: no sockets, no clock.

Two families:

* the vLLM-compatible stream as vLLM 0.33 sends it (`EventBatch` of `BlockStored | BlockRemoved | AllBlocksCleared`);
* our additions, on separate sockets so that older readers never see them: `Heartbeat` and `LoadReport`
  (load_report.py) on the state socket, `SnapshotChunk` on the snapshot socket.

docs/events.md has the rules for changing them.
"""

from typing import Annotated

import msgspec

from ..load_report import CacheCounters as CacheCounters
from ..load_report import LoadReport as LoadReport
from ..load_report import PrefillCost as PrefillCost
from ..load_report import PrefillWork as PrefillWork
from ..load_report import TierLoad as TierLoad

#: A block hash on the stream: the last 8 bytes as an unsigned int, or all bytes (setting `hash_format`).
WireHash = int | bytes

#: The largest sequence number. The next one must fit into the 8 bytes of a frame.
MAX_SEQ = 2**63 - 1
SequenceNumber = Annotated[int, msgspec.Meta(ge=0, le=MAX_SEQ)]

EVENTS_TOPIC = b"kv-events"
HEARTBEAT_TOPIC = b"heartbeat"
LOAD_TOPIC = b"load"


#: The name that vLLM, SGLang and all who read them have for the memory in which the engine computes, on any device.
COMPUTE_MEDIUM = "GPU"
#: The memories below it that our replicas may have, fastest first. Readers ignore blocks in any other.
TIER_MEDIA = ("CPU", "DISK")


class EventEndpoints(msgspec.Struct, frozen=True, kw_only=True):
    """Addresses of one publisher's sockets."""

    events: str  #: PUB, vLLM-compatible; only blocks in the memory in which the engine computes
    replay: str  #: ROUTER, vLLM-compatible
    state: str  #: PUB: heartbeats and load reports
    snapshot: str  #: ROUTER: the full set of cached blocks
    fixed_events: str = ""  #: PUB, the same batches on the port and under the topic of settings; empty: none
    fixed_replay: str = ""  #: ROUTER for these
    tiered_events: str = ""  #: PUB, the same batches with the blocks in the tiers below; empty: there are no tiers
    tiered_replay: str = ""  #: ROUTER for these
    curve_key: str = ""  #: public CURVE key of all the replica's sockets, 40 characters of Z85; empty: no encryption


class BlockStored(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="BlockStored", omit_defaults=True):
    """Consecutive blocks of one chain are now cached. Fields without a default are always on the wire."""

    block_hashes: list[WireHash]
    parent_block_hash: WireHash | None  #: None if the first of these blocks starts a prompt
    token_ids: list[int]  #: token ids of all these blocks; empty in hash-only mode
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    #: by block, None for most: what distinguishes blocks of the same tokens. A chain's first block has the salt.
    extra_keys: list[object] | None = None
    cache_salt: str | None = None  #: the same salt, where SGLang sends it
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class BlockRemoved(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="BlockRemoved", omit_defaults=True):
    """The last copies of these blocks were evicted."""

    block_hashes: list[WireHash]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="AllBlocksCleared"):
    """The cache was emptied."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, frozen=True, array_like=True):
    """Payload of one message on the compatible stream: exactly these three elements."""

    ts: float
    events: list[Event]
    data_parallel_rank: int | None = None


class TierDigest(msgspec.Struct, frozen=True, array_like=True):
    """Digest of the blocks in one tier, as in a heartbeat."""

    medium: str
    blocks: int
    digest: int


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True):
    """Digest of the resident blocks after event `seq`: equal digests mean that a subscriber is exact."""

    epoch: int  #: random number of this start of the publisher
    seq: SequenceNumber | None  #: last sequence number sent; None before the first
    blocks: int  #: distinct resident blocks
    digest: int  #: XOR of their `wire_hash`es
    ts: float
    tiers: list[TierDigest] = []  #: of the tiers that hold blocks


class SnapshotRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Requests the full set of cached blocks."""

    token_ids: bool = False


class SnapshotBlock(msgspec.Struct, frozen=True, array_like=True):
    block_hash: WireHash
    parent: WireHash | None
    token_ids: list[int]
    cache_salt: str | None = None  #: of a chain's first block


class SnapshotChunk(msgspec.Struct, frozen=True, kw_only=True):
    """A part of the set of cached blocks after event `seq` of `epoch`; parents come before their children."""

    epoch: int
    seq: SequenceNumber | None
    index: int
    last: bool
    blocks: list[SnapshotBlock]
    #: blocks in tiers, by medium. A block's parent may be in another medium, hence in another part.
    tiers: dict[str, list[SnapshotBlock]] = {}
