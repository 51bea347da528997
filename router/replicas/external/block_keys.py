"""What an external engine holds, under our hashes: its cache events in, keys of the prefix index out.

Pure state: no sockets, no clock. An external engine hashes blocks in its own way. So a block is identified by our hash
of its content (tokens, extra keys and adapter, under the chain before it). The engine's own hash, its *handle*, is kept
only until the block is removed. Expects events with set semantics (events/follow/residency.py counts copies).

A block with unknown content cannot be hashed, nor can any block behind it. Either its parent was never announced (the
stream began in the middle, or its batch was lost for good), or its tokens are not one block for each hash (groups of
sliding windows). Such blocks are counted, and not credited to the engine until it stores them anew.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from hashlib import sha256

import msgspec

from ....events.wire.cache_events import Stored
from ....kvcache.hashing import HASH_BYTES, BlockHash, BlockHasher, tenant_root, token_bytes, wire_hash
from ...errors import ParityMismatch

#: Marks a `cache_salt` as ours: a tenant's root, which comes back in the extra keys of a chain's first block.
SALT_PREFIX = "homing-"
#: Groups whose blocks have the block size of prompts; others (`group_idx` from 1 on) may have sizes of their own.
_MAIN_GROUPS = (None, 0)


def cache_salt(root: bytes) -> str:
    """The salt that separates a tenant's blocks from others' in the engine's own cache."""
    return SALT_PREFIX + root.hex()


class ExternalBlocks:
    """The blocks of one engine under our hashes. `stored` and `removed` return what changes in the index."""

    def __init__(self, replica: str, hasher: BlockHasher, model_root: BlockHash) -> None:
        self._replica = replica
        self._hasher = hasher
        self._model_root = model_root
        #: by the engine's own hash; whole hashes, as later blocks are hashed from them
        self._handles: dict[int, BlockHash] = {}
        #: key of the index -> handles that lead to it; no zeros
        self._held: Counter[int] = Counter()
        self.unplaced: Counter[str] = Counter()  #: blocks that were announced and could not be hashed, by reason
        self.unknown_removals = 0

    def __len__(self) -> int:
        return len(self._held)

    def stored(self, event: Stored) -> list[int]:
        """Add these blocks; returns the keys that were not held before.

        Raises ParityMismatch when the engine's blocks have another size: no prompt could ever match.
        """
        if event.block_size != self._hasher.block_size and event.group in _MAIN_GROUPS:
            remedy = f"start homing with --block-size {event.block_size}"
            ours = self._hasher.block_size
            raise ParityMismatch(self._replica, "block_size", ours, event.block_size, remedy=remedy)
        fresh: list[int] = []
        for handle, block in zip(event.hashes, self._hashes(event), strict=False):
            if handle not in self._handles:
                self._handles[handle] = block
                key = wire_hash(block)
                self._held[key] += 1
                if self._held[key] == 1:
                    fresh.append(key)
        return fresh

    def removed(self, handles: Sequence[int]) -> list[int]:
        """Drop these blocks; returns the keys that are no longer held."""
        gone: list[int] = []
        for handle in handles:
            block = self._handles.pop(handle, None)
            if block is None:
                self.unknown_removals += 1
                continue
            key = wire_hash(block)
            self._held[key] -= 1
            if not self._held[key]:
                del self._held[key]
                gone.append(key)
        return gone

    def clear(self) -> None:
        self._handles.clear()
        self._held.clear()

    def _hashes(self, event: Stored) -> list[BlockHash]:
        """Our hashes of the event's blocks; empty when they cannot be computed."""
        tokens = _tokens(event)
        if not tokens or event.block_size != self._hasher.block_size:
            self.unplaced["no_tokens"] += len(event.hashes)
            return []
        extras, root = _extras(event)
        parent: BlockHash | None
        if event.parent is None:
            adapter = b"" if event.lora_name is None else sha256(event.lora_name.encode()).digest()
            parent = root or tenant_root(self._model_root, lora_digest=adapter)
        else:
            parent = self._handles.get(event.parent)
        if parent is None:
            self.unplaced["no_parent"] += len(event.hashes)
            return []
        return self._hasher.chain(parent, tokens, extras)

    def check(self) -> None:
        """Assert that the two tables agree."""
        counts = Counter(map(wire_hash, self._handles.values()))
        assert counts == self._held, "held blocks differ from the handles that lead to them"


def _tokens(event: Stored) -> bytes:
    """Empty when they are not one block for each hash, or not token ids at all."""
    if len(event.token_ids) != len(event.hashes) * event.block_size:
        return b""
    try:
        return token_bytes(event.token_ids)
    except OverflowError:
        return b""


def _extras(event: Stored) -> tuple[Mapping[int, bytes], BlockHash | None]:
    """What distinguishes blocks of equal tokens, by the place of the block, and the root if its salt is ours."""
    extras: dict[int, bytes] = {}
    root: BlockHash | None = None
    for index, keys in enumerate(event.extra_keys or ()):
        kept = keys
        if index == 0 and event.parent is None and isinstance(keys, list):
            root = next(filter(None, map(_own_root, keys)), None)
            kept = [key for key in keys if _own_root(key) is None]
        if kept:
            extras[index] = msgspec.msgpack.encode(kept)
    return extras, root


def _own_root(key: object) -> BlockHash | None:
    if not isinstance(key, str) or not key.startswith(SALT_PREFIX):
        return None
    try:
        root = bytes.fromhex(key.removeprefix(SALT_PREFIX))
    except ValueError:
        return None
    return BlockHash(root) if len(root) == HASH_BYTES else None
