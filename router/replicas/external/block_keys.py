"""What a foreign engine holds, in our names: its cache events in, keys of the prefix index out.

Pure state: no sockets, no clock. A foreign engine hashes blocks in its own way, so a block goes by our hash of its
content (tokens, extra keys and adapter, under the chain before it), and by the engine's own hash, its *handle*, only
until it is removed. Expects events with set meaning (events/follow/residency.py counts copies).

A block whose content cannot be known has no name, and nothing behind it either: its parent was never told (the stream
began in the middle, or its batch was lost for good), or its tokens are not one block for each hash (groups of sliding
windows). Such blocks are counted and earn the engine nothing, until it stores them anew.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256

import msgspec

from ....events.wire.cache_events import Stored
from ....kvcache.hashing import HASH_BYTES, BlockHash, BlockHasher, tenant_root, token_bytes, wire_hash
from ...errors import ParityMismatch

#: Marks a `cache_salt` as one of ours: a tenant's root, known again among the extra keys of a chain's first block.
SALT_PREFIX = "homing-"
#: Groups whose blocks have the block size of prompts; others (`group_idx` from 1 on) may have sizes of their own.
_MAIN_GROUPS = (None, 0)


def cache_salt(root: bytes) -> str:
    """What keeps the chains under a tenant's root apart from others' in the engine's cache, too."""
    return SALT_PREFIX + root.hex()


@dataclass(slots=True)
class Unplaced:
    """Blocks that were announced and could not be named."""

    no_parent: int = 0
    no_tokens: int = 0

    @property
    def blocks(self) -> int:
        """All of them."""
        return self.no_parent + self.no_tokens


class ForeignChains:
    """The named blocks of one engine. `stored` and `removed` return what has changed for the index."""

    __slots__ = ("_handles", "_hasher", "_held", "_model_root", "_replica", "unknown_removals", "unplaced")

    def __init__(self, replica: str, hasher: BlockHasher, model_root: BlockHash) -> None:
        self._replica = replica
        self._hasher = hasher
        self._model_root = model_root
        #: by the engine's own hash; whole ones, as chains go on from them
        self._handles: dict[int, BlockHash] = {}
        #: key of the index -> handles that lead to it; no zeros
        self._held: dict[int, int] = {}
        self.unplaced = Unplaced()
        self.unknown_removals = 0

    def __len__(self) -> int:
        return len(self._held)

    def stored(self, event: Stored) -> list[int]:
        """Name these blocks; returns the keys that were not held before.

        Raises ParityMismatch when the engine's blocks are of another size: no prompt of ours could ever match.
        """
        if event.block_size != self._hasher.block_size and event.group in _MAIN_GROUPS:
            remedy = f"start homing with --block-size {event.block_size}"
            ours = self._hasher.block_size
            raise ParityMismatch(self._replica, "block_size", ours, event.block_size, remedy=remedy)
        names = self._names(event)
        return [wire_hash(name) for handle, name in zip(event.hashes, names, strict=False) if self._hold(handle, name)]

    def removed(self, handles: Sequence[int]) -> list[int]:
        """Forget these blocks; returns the keys that are no longer held."""
        gone: list[int] = []
        for handle in handles:
            name = self._handles.pop(handle, None)
            if name is None:
                self.unknown_removals += 1
            elif self._let_go(wire_hash(name)):
                gone.append(wire_hash(name))
        return gone

    def clear(self) -> None:
        """Nothing is held."""
        self._handles.clear()
        self._held.clear()

    def _names(self, event: Stored) -> list[BlockHash]:
        """Our hashes of the event's blocks; empty when they cannot be told."""
        tokens = _tokens(event)
        if not tokens or event.block_size != self._hasher.block_size:
            self.unplaced.no_tokens += len(event.hashes)
            return []
        extras, root = _extras(event)
        parent = root or self._root(event) if event.parent is None else self._handles.get(event.parent)
        if parent is None:
            self.unplaced.no_parent += len(event.hashes)
            return []
        return self._hasher.chain(parent, tokens, extras)

    def _root(self, event: Stored) -> BlockHash:
        adapter = b"" if event.lora_name is None else sha256(event.lora_name.encode()).digest()
        return tenant_root(self._model_root, lora_digest=adapter)

    def _hold(self, handle: int, name: BlockHash) -> bool:
        """Whether the block is held now and was not before."""
        if handle in self._handles:
            return False
        self._handles[handle] = name
        key = wire_hash(name)
        count = self._held.get(key, 0)
        self._held[key] = count + 1
        return not count

    def _let_go(self, key: int) -> bool:
        self._held[key] -= 1
        if self._held[key]:
            return False
        del self._held[key]
        return True

    def check(self) -> None:
        """Assert that the two tables agree."""
        counts: dict[int, int] = {}
        for name in self._handles.values():
            counts[wire_hash(name)] = counts.get(wire_hash(name), 0) + 1
        assert counts == self._held, "held blocks differ from the handles that lead to them"


def _tokens(event: Stored) -> bytes:
    """Empty when they are not one block for each hash, or no token ids at all."""
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
