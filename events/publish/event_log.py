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
from collections.abc import Iterable, Iterator, Sequence
from functools import reduce
from itertools import repeat
from typing import NamedTuple, assert_never

import msgspec

from ..config import EventsSettings
from ..wire.messages import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    EventBatch,
    Heartbeat,
    SnapshotBlock,
    SnapshotChunk,
    WireHash,
)
from .step_changes import AllCleared, Change, LostSteps, RemovedBlocks, Step, StoredBlocks, net_changes

#: Blocks in one snapshot chunk: about 40 KiB without token ids. Not measured. The publisher sends events between two
#: chunks, so smaller chunks delay them less.
SNAPSHOT_CHUNK_BLOCKS = 2048


#: The name that vLLM, SGLang and all who read them have for the memory in which the engine computes, on any device.
COMPUTE_MEDIUM = "GPU"


class SentBatch(NamedTuple):
    seq: int
    payload: bytes


#: A resident block: its hash, its parent's hash and its token bytes. A plain tuple, because creating one is a third of
#: the cost of storing a block.
_Resident = tuple[bytes, bytes | None, bytes]


class EventLog:
    """A publisher's state: its sequence number, history and resident blocks."""

    def __init__(self, settings: EventsSettings, *, epoch: int, block_size: int) -> None:
        self.epoch = epoch
        self.last_seq: int | None = None
        self._block_size = block_size
        self._hash_only = settings.hash_only
        self._as_bytes = settings.hash_format == "bytes"
        self._history: deque[SentBatch] = deque(maxlen=settings.replay_batches)
        #: by wire hash
        self._residents: dict[int, _Resident] = {}
        #: salts of chains' first blocks, by wire hash
        self._salts: dict[int, str] = {}
        #: XOR of these wire hashes
        self._xor = 0
        self._encode = msgspec.msgpack.Encoder().encode

    def commit(self, step: Step, ts: float) -> SentBatch:
        """Number one step, apply it to the resident blocks and encode it."""
        changes = net_changes(step)
        for change in changes:
            self._apply(change)
        sent = SentBatch(self._next_seq(), self._encode(EventBatch(ts, [self._event(change) for change in changes], 0)))
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
        return Heartbeat(epoch=self.epoch, seq=self.last_seq, blocks=len(self._residents), digest=self._xor, ts=ts)

    def snapshot(self, *, token_ids: bool, chunk_blocks: int = SNAPSHOT_CHUNK_BLOCKS) -> Iterator[SnapshotChunk]:
        """Iterate over the chunks, at least one, of the present resident set. Later commits do not affect them."""
        blocks = self._parents_first()
        seq = self.last_seq
        salts = {name.to_bytes(8, "big"): salt for name, salt in self._salts.items()}
        starts = range(0, max(len(blocks), 1), chunk_blocks)
        return (
            SnapshotChunk(
                epoch=self.epoch,
                seq=seq,
                index=index,
                last=index == len(starts) - 1,
                blocks=[
                    SnapshotBlock(
                        self._encode_hash(name),
                        parent and self._encode_hash(parent),
                        _token_ids(tokens if token_ids else b""),
                        salts.get(name[-8:]),
                    )
                    for name, parent, tokens in blocks[start : start + chunk_blocks]
                ],
            )
            for index, start in enumerate(starts)
        )

    def _next_seq(self) -> int:
        self.last_seq = 0 if self.last_seq is None else self.last_seq + 1
        return self.last_seq

    def _apply(self, change: Change) -> None:
        match change:
            case StoredBlocks(parent, hashes, _, salt):
                names = _wire_hashes(hashes)
                residents, xor = self._residents, self._xor
                for name in names:
                    if name not in residents:
                        xor ^= name
                self._xor = xor
                parents = (parent, *hashes)[: len(hashes)]
                if salt and not self._hash_only:
                    self._salts[names[0]] = salt
                residents.update(zip(names, zip(hashes, parents, self._contents(change), strict=True), strict=True))
            case RemovedBlocks(hashes):
                residents, xor = self._residents, self._xor
                for name in _wire_hashes(hashes):
                    if residents.pop(name, None) is not None:
                        xor ^= name
                self._xor = xor
                if self._salts:
                    for name in _wire_hashes(hashes):
                        self._salts.pop(name, None)
            case AllCleared():
                self._residents.clear()
                self._salts.clear()
                self._xor = 0
            case _:
                assert_never(change)

    def _contents(self, change: StoredBlocks) -> Iterable[bytes]:
        """Return each block's token bytes, empty if they are not kept."""
        hashes, tokens = change.hashes, change.tokens
        if self._hash_only or not tokens:
            return repeat(b"", len(hashes))
        stride = len(tokens) // len(hashes)
        return [content for (content,) in struct.iter_unpack(f"{stride}s", tokens)]

    def _parents_first(self) -> list[_Resident]:
        """Return the resident blocks, each after its parent.

        Insertion order suffices, unless a parent was removed and stored again while its child stayed.
        """
        ordered: list[_Resident] = []
        done: set[int] = set()
        for name in self._residents:
            line: list[_Resident] = []
            while name not in done and (block := self._residents.get(name)) is not None:
                done.add(name)
                line.append(block)
                if block[1] is None:
                    break
                name = int.from_bytes(block[1][-8:], "big")
            ordered += reversed(line)
        return ordered

    def _event(self, change: Change) -> Event:
        match change:
            case StoredBlocks(parent, hashes, tokens, salt):
                salt = "" if self._hash_only else salt
                return BlockStored(
                    block_hashes=self._encode_hashes(hashes),
                    parent_block_hash=parent and self._encode_hash(parent),
                    token_ids=[] if self._hash_only else _token_ids(tokens),
                    block_size=self._block_size,
                    lora_id=None,
                    medium=COMPUTE_MEDIUM,
                    lora_name=None,
                    extra_keys=[[salt], *[None] * (len(hashes) - 1)] if salt else None,
                    cache_salt=salt or None,
                    group_idx=0,
                    kv_cache_spec_kind="full_attention",
                )
            case RemovedBlocks(hashes):
                return BlockRemoved(block_hashes=self._encode_hashes(hashes), medium=COMPUTE_MEDIUM, group_idx=0)
            case AllCleared():
                return AllBlocksCleared()
            case _:
                assert_never(change)

    def _encode_hash(self, block: bytes) -> WireHash:
        return block if self._as_bytes else int.from_bytes(block[-8:], "big")

    def _encode_hashes(self, hashes: Sequence[bytes]) -> list[WireHash]:
        return list(hashes) if self._as_bytes else list(_wire_hashes(hashes))

    def check(self) -> None:
        """Assert that the digest matches the resident blocks and that the history is in order."""
        digest = reduce(operator.xor, self._residents, 0)
        assert digest == self._xor, f"digest {self._xor:#x}, the resident blocks give {digest:#x}"
        assert self._salts.keys() <= self._residents.keys(), "the salt of a block that is gone was kept"
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
