"""A publisher's event log: numbers batches, keeps the last ones for replay, and maintains the set of resident blocks.

Pure: changes in, payloads and snapshots out; time is a parameter. Has no sockets or threads.

The set changes when a batch gets its number, so anything read between two commits (heartbeat, snapshot, replay) is
exact at `last_seq`.
"""

import operator
import struct
import sys
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import reduce
from itertools import repeat
from typing import NamedTuple, assert_never

import msgspec

from ..config import EventsSettings
from ..wire.messages import (
    COMPUTE_MEDIUM,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    EventBatch,
    Heartbeat,
    SnapshotBlock,
    SnapshotChunk,
    TierDigest,
    WireHash,
)
from .step_changes import AllCleared, Change, LostSteps, RemovedBlocks, Step, StoredBlocks, net_changes

#: Blocks in one snapshot chunk: about 40 KiB without token ids. Not measured. The publisher sends events between two
#: chunks, so smaller chunks delay them less.
SNAPSHOT_CHUNK_BLOCKS = 2048


class SentBatch(NamedTuple):
    seq: int
    payload: bytes  #: for readers who know only blocks in the memory in which the engine computes
    tiered: bytes  #: with the blocks in the tiers below; the same object if no such block changed


#: A resident block: its hash, its parent's hash and its token bytes. A plain tuple, because creating one is a third of
#: the cost of storing a block.
_Resident = tuple[bytes, bytes | None, bytes]


class _Residents:
    """The blocks resident in one medium."""

    __slots__ = ("blocks", "salts", "xor")

    def __init__(self) -> None:
        #: by wire hash
        self.blocks: dict[int, _Resident] = {}
        #: salts of chains' first blocks, by wire hash
        self.salts: dict[int, str] = {}
        #: XOR of these wire hashes
        self.xor = 0

    def store(self, parent: bytes | None, hashes: Sequence[bytes], contents: Iterable[bytes], salt: str) -> None:
        names = _wire_hashes(hashes)
        blocks, xor = self.blocks, self.xor
        for name in names:
            if name not in blocks:
                xor ^= name
        self.xor = xor
        parents = (parent, *hashes)[: len(hashes)]
        if salt:
            self.salts[names[0]] = salt
        blocks.update(zip(names, zip(hashes, parents, contents, strict=True), strict=True))

    def remove(self, hashes: Sequence[bytes]) -> None:
        blocks, xor = self.blocks, self.xor
        for name in _wire_hashes(hashes):
            if blocks.pop(name, None) is not None:
                xor ^= name
        self.xor = xor
        if self.salts:
            for name in _wire_hashes(hashes):
                self.salts.pop(name, None)

    def parents_first(self) -> list[_Resident]:
        """Return the blocks, each after its parent if that is in this medium, too.

        Insertion order suffices, unless a parent was removed and stored again while its child stayed.
        """
        ordered: list[_Resident] = []
        done: set[int] = set()
        for name in self.blocks:
            line: list[_Resident] = []
            while name not in done and (block := self.blocks.get(name)) is not None:
                done.add(name)
                line.append(block)
                if block[1] is None:
                    break
                name = int.from_bytes(block[1][-8:], "big")
            ordered += reversed(line)
        return ordered

    def check(self) -> None:
        digest = reduce(operator.xor, self.blocks, 0)
        assert digest == self.xor, f"digest {self.xor:#x}, the resident blocks give {digest:#x}"
        assert self.salts.keys() <= self.blocks.keys(), "the salt of a block that is gone was kept"


class EventLog:
    """A publisher's state: its sequence number, history and resident blocks."""

    def __init__(self, settings: EventsSettings, *, epoch: int, block_size: int) -> None:
        self.epoch = epoch
        self.last_seq: int | None = None
        self._block_size = block_size
        self._hash_only = settings.hash_only
        self._as_bytes = settings.hash_format == "bytes"
        self._history: deque[SentBatch] = deque(maxlen=settings.replay_batches)
        self._pool = _Residents()
        self._tiers: dict[str, _Residents] = {}  #: by medium
        self._encode = msgspec.msgpack.Encoder().encode

    def commit(self, step: Step, ts: float) -> SentBatch:
        """Number one step, apply it to the resident blocks and encode it."""
        changes = net_changes(step)
        for change in changes:
            self._apply(change)
        payload = tiered = self._encode(EventBatch(ts, [self._event(change) for change in changes], 0))
        pool = [change for change in changes if isinstance(change, AllCleared) or change.medium == COMPUTE_MEDIUM]
        if len(pool) < len(changes):
            payload = self._encode(EventBatch(ts, [self._event(change) for change in pool], 0))
        sent = SentBatch(self._next_seq(), payload, tiered)
        self._history.append(sent)
        return sent

    def record_loss(self, lost: LostSteps) -> None:
        """Apply steps that will not be sent and use up their sequence numbers, so that subscribers notice the gap."""
        for change in lost.changes():
            self._apply(change)
        for _ in range(lost.batches):
            self._next_seq()

    def replay(self, since: int) -> Iterator[SentBatch]:
        """Iterate over a copy of the kept batches from number `since` on."""
        return iter([sent for sent in self._history if sent.seq >= since])

    def heartbeat(self, ts: float) -> Heartbeat:
        pool = self._pool
        tiers = [TierDigest(medium, len(of.blocks), of.xor) for medium, of in self._tiers.items() if of.blocks]
        return Heartbeat(
            epoch=self.epoch, seq=self.last_seq, blocks=len(pool.blocks), digest=pool.xor, ts=ts, tiers=tiers
        )

    def snapshot(self, *, token_ids: bool, chunk_blocks: int = SNAPSHOT_CHUNK_BLOCKS) -> Iterator[SnapshotChunk]:
        """Iterate over the chunks, at least one, of the present resident set. Later commits do not affect them."""
        seq = self.last_seq
        parts: list[tuple[str, Sequence[_Resident], Mapping[bytes, str]]] = []
        for medium, residents in {COMPUTE_MEDIUM: self._pool, **self._tiers}.items():
            blocks = residents.parents_first()
            salts = {name.to_bytes(8, "big"): salt for name, salt in residents.salts.items()}
            parts += [(medium, blocks[at : at + chunk_blocks], salts) for at in range(0, len(blocks), chunk_blocks)]
        parts = parts or [(COMPUTE_MEDIUM, (), {})]

        def chunk(index: int, medium: str, blocks: Sequence[_Resident], salts: Mapping[bytes, str]) -> SnapshotChunk:
            listed = [
                SnapshotBlock(
                    self._encode_hash(name),
                    parent and self._encode_hash(parent),
                    _token_ids(tokens if token_ids else b""),
                    salts.get(name[-8:]),
                )
                for name, parent, tokens in blocks
            ]
            pool = medium == COMPUTE_MEDIUM
            return SnapshotChunk(
                epoch=self.epoch,
                seq=seq,
                index=index,
                last=index == len(parts) - 1,
                blocks=listed if pool else [],
                tiers={} if pool else {medium: listed},
            )

        return (chunk(index, *part) for index, part in enumerate(parts))

    def _next_seq(self) -> int:
        self.last_seq = 0 if self.last_seq is None else self.last_seq + 1
        return self.last_seq

    def _apply(self, change: Change) -> None:
        match change:
            case StoredBlocks(parent, hashes, _, salt, medium):
                self._of(medium).store(parent, hashes, self._contents(change), "" if self._hash_only else salt)
            case RemovedBlocks(hashes, medium):
                self._of(medium).remove(hashes)
            case AllCleared():
                self._pool = _Residents()
                self._tiers.clear()
            case _:
                assert_never(change)

    def _of(self, medium: str) -> _Residents:
        return self._pool if medium == COMPUTE_MEDIUM else self._tiers.setdefault(medium, _Residents())

    def _contents(self, change: StoredBlocks) -> Iterable[bytes]:
        """Return each block's token bytes, empty if they are not kept."""
        hashes, tokens = change.hashes, change.tokens
        if self._hash_only or not tokens:
            return repeat(b"", len(hashes))
        stride = len(tokens) // len(hashes)
        return [content for (content,) in struct.iter_unpack(f"{stride}s", tokens)]

    def _event(self, change: Change) -> Event:
        match change:
            case StoredBlocks(parent, hashes, tokens, salt, medium):
                salt = "" if self._hash_only else salt
                return BlockStored(
                    block_hashes=self._encode_hashes(hashes),
                    parent_block_hash=parent and self._encode_hash(parent),
                    token_ids=[] if self._hash_only else _token_ids(tokens),
                    block_size=self._block_size,
                    lora_id=None,
                    medium=medium,
                    lora_name=None,
                    extra_keys=[[salt], *[None] * (len(hashes) - 1)] if salt else None,
                    cache_salt=salt or None,
                    group_idx=0,
                    kv_cache_spec_kind="full_attention",
                )
            case RemovedBlocks(hashes, medium):
                return BlockRemoved(block_hashes=self._encode_hashes(hashes), medium=medium, group_idx=0)
            case AllCleared():
                return AllBlocksCleared()
            case _:
                assert_never(change)

    def _encode_hash(self, block: bytes) -> WireHash:
        return block if self._as_bytes else int.from_bytes(block[-8:], "big")

    def _encode_hashes(self, hashes: Sequence[bytes]) -> list[WireHash]:
        return list(hashes) if self._as_bytes else list(_wire_hashes(hashes))

    def check(self) -> None:
        """Assert that the digests match the resident blocks and that the history is in order."""
        for residents in (self._pool, *self._tiers.values()):
            residents.check()
        numbers = [sent.seq for sent in self._history]
        assert numbers == sorted(set(numbers)), f"history out of order: {numbers}"


def _wire_hashes(hashes: Sequence[bytes]) -> tuple[int, ...]:
    """Return the last 8 bytes of each hash as an unsigned int; one C call for hashes of 16 bytes."""
    joined = b"".join(hashes)
    if len(joined) == 16 * len(hashes):
        names: tuple[int, ...] = struct.unpack(f">{len(joined) // 8}Q", joined)[1::2]
        return names
    return tuple(int.from_bytes(block[-8:], "big") for block in hashes)


def _token_ids(tokens: bytes) -> list[int]:
    """Decode uint32 little-endian. Raises ValueError when `tokens` is not a whole number of ids."""
    ids = array("I")
    ids.frombytes(tokens)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tolist()
