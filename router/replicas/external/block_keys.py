"""Translates an external engine's blocks to our hashes: its cache events in, prefix index keys out.

Pure state: no sockets, no clock. An external engine hashes blocks in its own way. So we identify a block by our own
hash of its content (tokens, extra keys and adapter, chained to the block before), its *key*. The engine's hash, its
*handle*, is the same in every medium and layer group and stays known until the last copy is removed. Engines announce
every added and every removed copy, so copies are counted per data-parallel rank, medium and group.

A block with unknown content cannot be hashed, and neither can its successors. Content is unknown if the parent was
never announced (we subscribed late, or its batch was lost for good) or if there are not exactly one block's tokens per
handle: sliding-window groups skip blocks, and vLLM's offloading connector announces copies in CPU memory by handle
only. Such copies are credited once another group or medium announces the handle's content; the rest are only counted.

Memory is bounded whatever an engine announces: beyond what it can hold, `trimmed` drops the ends of the chains that
were extended least recently, so that a prefix that is in use stays.

`hit` applies the engine's rules (hit_rules.py). The index holds only the blocks in GPU memory, and is sufficient for an
engine with one rank, one full-attention group and no other medium.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from ....events.wire.cache_events import Stored
from ....kvcache.hashing import HASH_BYTES, BlockHash, BlockHasher, adapter_root, token_bytes, wire_hash
from ...errors import ParityMismatch
from .hit_rules import GPU, GroupRule, HeldBlocks, Hit, longest_hit
from .load import UNKNOWN_BLOCKS

#: Prefix of our `cache_salt` values. The rest is a tenant's root; engines return it in a chain's first extra keys.
SALT_PREFIX = "homing-"
_FULL_ATTENTION = GroupRule()
_ONE_GROUP = {0: _FULL_ATTENTION}
#: Copies in all places for each block in GPU memory: host memory and disks are larger. Not tuned.
COPIES_PER_BLOCK = 16
#: `trimmed` also drops one in this many copies that would fit, so that it rarely has work: it looks at all of them.
TRIMMED_SHARE = 16
#: Blocks of further ranks, media and groups are not credited. A place that was cleared still counts.
MAX_PLACES = 1024


class Place(NamedTuple):
    """A part of an engine that can hold copies of blocks."""

    rank: int
    medium: str
    group: int


def cache_salt(root: bytes) -> str:
    """The `cache_salt` that separates a tenant's blocks from other tenants' in the engine's own cache."""
    return SALT_PREFIX + root.hex()


class ExternalBlocks:
    """One engine's blocks under our hashes. `stored`, `removed` and `cleared` return the changes for the index."""

    def __init__(self, replica: str, hasher: BlockHasher, model_root: BlockHash, rank: int | None = None) -> None:
        """`rank`: the data-parallel rank that requests are sent to; None: the engine chooses the rank."""
        self._replica = replica
        self._hasher = hasher
        self._model_root = model_root
        self._rank = rank
        #: by place: handle -> number of copies, never zero; handles stored last come last
        self._copies: dict[Place, dict[int, int]] = {}
        #: by place: key -> number of handles with that key, never zero
        self._held: dict[Place, dict[int, int]] = {}
        #: handle -> full hash (successors are chained to it), for handles with a copy and known content
        self._hashes: dict[int, BlockHash] = {}
        self._parents: dict[int, int | None] = {}  #: handle -> the handle before it, for the same handles
        self._rules: dict[int, GroupRule] = {}  #: by group
        self._sizes: dict[tuple[int, str], int] = {}  #: block sizes that differ from ours, by group and medium
        self._ranks: set[int] = set()  #: ranks that have announced anything
        self._on_gpu: dict[int, int] = {}  #: key -> number of ranks and groups with it in GPU memory, never zero
        self.capacity = UNKNOWN_BLOCKS  #: blocks in the engine's GPU memory
        self.dropped = 0  #: copies dropped because the engine announced more than it can hold
        self.unplaced: Counter[str] = Counter()  #: announced blocks that could not be hashed, by reason

    def __len__(self) -> int:
        """Number of blocks in the index."""
        return len(self._on_gpu)

    def __contains__(self, key: int) -> bool:
        """Whether a key is in the index."""
        return key in self._on_gpu

    def stored(self, event: Stored, rank: int | None = None) -> list[int]:
        """Add a copy of each block; returns the keys to add to the index.

        Raises ParityMismatch if the main group's block size differs from ours: no prompt could ever match.
        """
        if self._is_of_another_rank(rank):
            return []
        if not event.hashes:
            return []
        place = Place(rank or 0, _medium(event.medium), event.group or 0)
        if place not in self._copies and len(self._copies) >= MAX_PLACES:
            self.unplaced["no_place"] += len(event.hashes)
            return []
        self._learn(event, place)
        self._ranks.add(place.rank)
        fresh = self._identify(event)
        copies, hashes = self._copies.setdefault(place, {}), self._hashes
        new = []
        for handle in event.hashes:
            before = copies.pop(handle, 0)
            copies[handle] = before + 1
            if not before and (block := hashes.get(handle)) is not None:
                new.append(wire_hash(block))
        return fresh + self._hold(place, new)

    def removed(
        self, handles: Sequence[int], medium: str | None = None, group: int | None = None, rank: int | None = None
    ) -> list[int]:
        """Remove a copy of each block; returns the keys to remove from the index."""
        if self._is_of_another_rank(rank):
            return []
        place = Place(rank or 0, _medium(medium), group or 0)
        copies = self._copies.get(place, {})
        gone: list[int] = []
        for handle in handles:
            left = copies.get(handle, 0) - 1
            if left > 0:
                copies[handle] = left
            elif left == 0:  # negative: the removal of a block that we never heard of
                del copies[handle]
                gone.append(handle)
        return self._drop(place, gone)

    def cleared(self, rank: int | None = None) -> list[int]:
        """Remove a rank's blocks in all media; returns the keys to remove from the index."""
        if self._is_of_another_rank(rank):
            return []
        gone: list[int] = []
        for place in [each for each in self._copies if each.rank == (rank or 0)]:
            handles, self._copies[place] = self._copies[place], {}
            gone += self._drop(place, handles)
        return gone

    def trimmed(self) -> list[int]:
        """Drop what was unused longest beyond what the engine can hold; returns the keys to remove from the index."""
        gone: list[int] = []
        while (excess := len(self._on_gpu) - self.capacity) > 0:
            gone += self._drop_unused([each for each in self._copies if each.medium == GPU], excess)
        while (excess := sum(map(len, self._copies.values())) - COPIES_PER_BLOCK * self.capacity) > 0:
            gone += self._drop_unused(list(self._copies), excess)
        return gone

    def _drop_unused(self, places: Sequence[Place], count: int) -> list[int]:
        """Drop at least so many copies, or all that there are, from the fullest of these places.

        A chain was used when its last block was stored; blocks before it stay longer than it does.
        """
        place = max(places, key=lambda each: len(self._copies[each]))
        copies = self._copies[place]
        fitting = max(0, len(copies) - count)
        room = fitting - fitting // TRIMMED_SHARE
        kept: set[int | None] = set()
        for last in reversed(copies):
            if len(kept) == room:
                break
            chain: list[int | None] = []
            handle: int | None = last
            while handle in copies and handle not in kept:
                chain.append(handle)
                kept.add(handle)
                handle = self._parents.get(handle)
            kept.difference_update(chain[: max(0, len(kept) - room)])
        unused = [handle for handle in copies if handle not in kept]
        for handle in unused:
            del copies[handle]
        self.dropped += len(unused)
        return self._drop(place, unused)

    def forget(self) -> None:
        """Forget the engine's blocks and group rules, because its event stream restarts."""
        self._copies.clear()
        self._held.clear()
        self._hashes.clear()
        self._parents.clear()
        self._rules.clear()
        self._sizes.clear()
        self._ranks.clear()
        self._on_gpu.clear()

    def hit(self, keys: Sequence[int]) -> Hit | None:
        """The prefix that the engine would find cached by its own rules; None: the index gives the same result.

        If the engine chooses the rank, only the shortest hit over all ranks is certain.
        """
        only_gpu = all(place.medium == GPU for place in self._held)
        if only_gpu and len(self._ranks) < 2 and self._rules in ({}, _ONE_GROUP):
            return None
        found = [longest_hit(keys, self._hasher.block_size, self._groups(rank)) for rank in self._ranks]
        return min(found, key=lambda hit: hit.blocks, default=Hit(0))

    def _groups(self, rank: int) -> list[HeldBlocks]:
        by_group: dict[int, dict[str, dict[int, int]]] = {group: {} for group in self._rules}
        for place, held in self._held.items():
            if place.rank == rank:
                by_group.setdefault(place.group, {})[place.medium] = held
        return [
            HeldBlocks(
                self._rules.get(group, _FULL_ATTENTION),
                media,
                {medium: size for (of, medium), size in self._sizes.items() if of == group},
            )
            for group, media in by_group.items()
        ]

    def _is_of_another_rank(self, rank: int | None) -> bool:
        return self._rank is not None and rank is not None and rank != self._rank

    def _learn(self, event: Stored, place: Place) -> None:
        """Record the rule and block size of the event's group. Size 0 is a placeholder for "not reported"."""
        size, ours = event.block_size, self._hasher.block_size
        kind = event.kind or _FULL_ATTENTION.kind
        if size not in (0, ours):
            if place.medium == GPU and not place.group and kind == _FULL_ATTENTION.kind:
                remedy = f"start homing with --block-size {size}"
                raise ParityMismatch(self._replica, "block_size", ours, size, remedy=remedy)
            self._sizes[place.group, place.medium] = size
        if place.medium == GPU:
            self._rules.setdefault(place.group, GroupRule(kind, event.window or 0))

    def _identify(self, event: Stored) -> list[int]:
        """Record known contents of the event's blocks; returns index keys for existing copies that this identifies."""
        fresh: list[int] = []
        parents = (event.parent, *event.hashes)
        for handle, parent, block in zip(event.hashes, parents, self._contents(event), strict=False):
            if handle not in self._hashes:
                self._hashes[handle] = block
                self._parents[handle] = parent
                for place, copies in self._copies.items():
                    if handle in copies:
                        fresh += self._hold(place, [wire_hash(block)])
        return fresh

    def _hold(self, place: Place, keys: Sequence[int]) -> list[int]:
        """Count one more handle per key at this place; returns the keys to add to the index."""
        if not keys:
            return []
        held, fresh = self._held.setdefault(place, {}), []
        for key in keys:
            before = held.get(key, 0)
            held[key] = before + 1
            if not before and place.medium == GPU:
                holders = self._on_gpu[key] = self._on_gpu.get(key, 0) + 1
                if holders == 1:
                    fresh.append(key)
        return fresh

    def _drop(self, place: Place, handles: Iterable[int]) -> list[int]:
        """The place lost its last copy of these handles; returns the keys to remove from the index."""
        held, others = self._held.get(place, {}), [each for at, each in self._copies.items() if at != place]
        gone: list[int] = []
        for handle in handles:
            if (block := self._hashes.get(handle)) is None:
                continue
            if not any(handle in copies for copies in others):
                del self._hashes[handle], self._parents[handle]
            key = wire_hash(block)
            if _decrement(held, key) and place.medium == GPU and _decrement(self._on_gpu, key):
                gone.append(key)
        if not held:
            self._held.pop(place, None)
        return gone

    def _contents(self, event: Stored) -> list[BlockHash]:
        """Our hash at the end of each of the event's blocks; empty if they are known already or cannot be computed."""
        known = sum(handle in self._hashes for handle in event.hashes)
        if known == len(event.hashes):
            return []
        tokens, size = _tokens(event), self._hasher.block_size
        if not tokens or event.block_size % size:
            self.unplaced["no_tokens"] += len(event.hashes) - known
            return []
        extras, root = _extras(event)
        if event.parent is None:
            parent: BlockHash | None = root or adapter_root(self._model_root, b"", event.lora_name or "")
        else:
            parent = self._hashes.get(event.parent)
        if parent is None:
            self.unplaced["no_parent"] += len(event.hashes) - known
            return []
        factor = event.block_size // size
        if factor > 1 and extras:  # unknown which of our blocks the extra keys belong to
            self.unplaced["extra_keys"] += len(event.hashes) - known
            return []
        return self._hasher.chain(parent, tokens, extras)[factor - 1 :: factor]

    def check(self) -> None:
        """Assert that the tables are consistent."""
        for place, copies in self._copies.items():
            assert all(count > 0 for count in copies.values()), f"{place}: a count of zero was kept"
            counts = Counter(wire_hash(self._hashes[handle]) for handle in copies if handle in self._hashes)
            assert counts == self._held.get(place, {}), f"{place}: held blocks differ from the copies"
        copied = {handle for copies in self._copies.values() for handle in copies}
        assert self._hashes.keys() <= copied, "a handle without a copy was kept"
        assert self._parents.keys() == self._hashes.keys(), "not exactly the known handles have a parent"
        on_gpu = Counter(key for place, held in self._held.items() if place.medium == GPU for key in held)
        assert on_gpu == self._on_gpu, f"{len(self._on_gpu)} blocks counted on the GPU, {len(on_gpu)} are"


def _decrement(counts: dict[int, int], key: int) -> bool:
    """Decrement a count; returns whether it was the last."""
    left = counts[key] - 1
    if left:
        counts[key] = left
    else:
        del counts[key]
    return not left


def _medium(name: str | None) -> str:
    return (name or GPU).upper()


def _tokens(event: Stored) -> bytes:
    """The event's tokens as bytes; empty if they are not one block per hash or not valid token ids."""
    if not event.block_size or len(event.token_ids) != len(event.hashes) * event.block_size:
        return b""
    try:
        return token_bytes(event.token_ids)
    except OverflowError:
        return b""


def _extras(event: Stored) -> tuple[Mapping[int, bytes], BlockHash | None]:
    """Extra keys that distinguish blocks with equal tokens, by block index, and the root if the salt is ours."""
    extras: dict[int, bytes] = {}
    root: BlockHash | None = None
    for index, keys in enumerate(event.extra_keys or ()):
        # vLLM repeats the adapter's name in each block; the root covers it.
        kept = [key for key in keys if key != event.lora_name] if isinstance(keys, list) else keys
        if index == 0 and event.parent is None and isinstance(kept, list):
            root = next(filter(None, map(_own_root, kept)), None)
            kept = [key for key in kept if _own_root(key) is None]
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
