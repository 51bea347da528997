"""What an external engine holds, under our hashes: its cache events in, keys of the prefix index out.

Pure state: no sockets, no clock. An external engine hashes blocks in its own way. So a block is identified by our hash
of its content (tokens, extra keys and adapter, under the chain before it), its *key*. The engine's own hash, its
*handle*, is the same in every medium and group of layers, and is known until the last copy is removed. Engines announce
every copy and every removal of one: copies are counted by data-parallel rank, medium and group.

A block with unknown content cannot be hashed, nor can any block behind it. Either its parent was never announced (the
stream began in the middle, or its batch was lost for good), or its tokens are not one block for each handle: groups of
sliding windows skip blocks, and vLLM's offloading connector announces copies in CPU memory by their handles alone.
Those are credited once another group or medium has announced the content of the handle. All others are counted.

`hit` applies the engine's rules (hit_rules.py). The index holds what is in GPU memory, and answers alone for an engine
of which only that is known: one rank, one group of full attention, no other medium.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from typing import NamedTuple

import msgspec

from ....events.wire.cache_events import Stored
from ....kvcache.hashing import HASH_BYTES, BlockHash, BlockHasher, tenant_root, token_bytes, wire_hash
from ...errors import ParityMismatch
from .hit_rules import GPU, GroupRule, HeldBlocks, Hit, longest_hit

#: Marks a `cache_salt` as ours: a tenant's root, which comes back in the extra keys of a chain's first block.
SALT_PREFIX = "homing-"
_FULL_ATTENTION = GroupRule()
_ONE_GROUP = {0: _FULL_ATTENTION}


class Place(NamedTuple):
    """Where an engine has copies."""

    rank: int
    medium: str
    group: int


def cache_salt(root: bytes) -> str:
    """The salt that separates a tenant's blocks from others' in the engine's own cache."""
    return SALT_PREFIX + root.hex()


class ExternalBlocks:
    """The blocks of one engine under our hashes. `stored`, `removed` and `cleared` return what changes in the index."""

    def __init__(self, replica: str, hasher: BlockHasher, model_root: BlockHash, rank: int | None = None) -> None:
        """`rank`: the one data-parallel rank that requests are sent to; None: the engine chooses among those it has."""
        self._replica = replica
        self._hasher = hasher
        self._model_root = model_root
        self._rank = rank
        #: by place: handle -> copies, no zeros
        self._copies: dict[Place, dict[int, int]] = {}
        #: by place: key -> handles that lead to it, no zeros
        self._held: dict[Place, dict[int, int]] = {}
        #: of handles with a copy and a known content; whole hashes, as later blocks are hashed from them
        self._hashes: dict[int, BlockHash] = {}
        self._rules: dict[int, GroupRule] = {}
        self._sizes: dict[tuple[int, str], int] = {}  #: by group and medium: of blocks that are not as long as ours
        self._ranks: set[int] = set()  #: that have announced anything
        self._on_gpu: dict[int, int] = {}  #: key -> ranks and groups that hold it in GPU memory, no zeros
        self.unplaced: Counter[str] = Counter()  #: blocks that were announced and could not be hashed, by reason

    def __len__(self) -> int:
        """Blocks in the index."""
        return len(self._on_gpu)

    def stored(self, event: Stored, rank: int | None = None) -> list[int]:
        """Add a copy of each block; returns the keys that are new in the index.

        Raises ParityMismatch when the blocks of the main group have another size: no prompt could ever match.
        """
        if self._is_of_another_rank(rank):
            return []
        if not event.hashes:
            return []
        place = Place(rank or 0, _medium(event.medium), event.group or 0)
        self._learn(event, place)
        self._ranks.add(place.rank)
        fresh = self._identify(event)
        copies, hashes = self._copies.setdefault(place, {}), self._hashes
        new = []
        for handle in event.hashes:
            before = copies.get(handle, 0)
            copies[handle] = before + 1
            if not before and (block := hashes.get(handle)) is not None:
                new.append(wire_hash(block))
        return fresh + self._hold(place, new)

    def removed(
        self, handles: Sequence[int], medium: str | None = None, group: int | None = None, rank: int | None = None
    ) -> list[int]:
        """Drop a copy of each block; returns the keys that leave the index."""
        if self._is_of_another_rank(rank):
            return []
        place = Place(rank or 0, _medium(medium), group or 0)
        copies = self._copies.get(place, {})
        gone: list[int] = []
        for handle in handles:
            left = copies.get(handle, 0) - 1
            if left > 0:
                copies[handle] = left
            elif left == 0:  # below: a removal of what we never heard of
                del copies[handle]
                gone.append(handle)
        return self._drop(place, gone)

    def cleared(self, rank: int | None = None) -> list[int]:
        """A rank holds nothing any more, in any medium; returns the keys that leave the index."""
        if self._is_of_another_rank(rank):
            return []
        gone: list[int] = []
        for place in [each for each in self._copies if each.rank == (rank or 0)]:
            gone += self._drop(place, self._copies.pop(place))
        return gone

    def forget(self) -> None:
        """What the engine holds, and how, is unknown: its stream begins anew."""
        self._copies.clear()
        self._held.clear()
        self._hashes.clear()
        self._rules.clear()
        self._sizes.clear()
        self._ranks.clear()
        self._on_gpu.clear()

    def hit(self, keys: Sequence[int]) -> Hit | None:
        """The prefix that the engine would find by its own rules; None: the index knows it as well.

        Where the engine chooses the rank, only what each of them has is sure.
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
        """Note the rule of the event's group, and the size of its blocks. 0 is a placeholder: the size is not told."""
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
        """Note the content of the event's blocks, as far as it is known; returns keys that copies gain by that."""
        fresh: list[int] = []
        for handle, block in zip(event.hashes, self._contents(event), strict=False):
            if handle not in self._hashes:
                self._hashes[handle] = block
                for place, copies in self._copies.items():
                    if handle in copies:
                        fresh += self._hold(place, [wire_hash(block)])
        return fresh

    def _hold(self, place: Place, keys: Sequence[int]) -> list[int]:
        """The place has one more handle for each key; returns the keys that the index has to hold now."""
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
        """The place has no copy of these handles any more; returns the keys that the index has to drop."""
        held, others = self._held.get(place, {}), [each for at, each in self._copies.items() if at != place]
        gone: list[int] = []
        for handle in handles:
            if (block := self._hashes.get(handle)) is None:
                continue
            if not any(handle in copies for copies in others):
                del self._hashes[handle]
            key = wire_hash(block)
            if _take(held, key) and place.medium == GPU and _take(self._on_gpu, key):
                gone.append(key)
        if not held:
            self._held.pop(place, None)
        return gone

    def _contents(self, event: Stored) -> list[BlockHash]:
        """Our hashes of the event's blocks, each at its end; empty when they cannot be computed."""
        known = sum(handle in self._hashes for handle in event.hashes)
        if known == len(event.hashes):
            return []
        tokens, size = _tokens(event), self._hasher.block_size
        if not tokens or event.block_size % size:
            self.unplaced["no_tokens"] += len(event.hashes) - known
            return []
        extras, root = _extras(event)
        if event.parent is None:
            adapter = b"" if event.lora_name is None else sha256(event.lora_name.encode()).digest()
            parent: BlockHash | None = root or tenant_root(self._model_root, lora_digest=adapter)
        else:
            parent = self._hashes.get(event.parent)
        if parent is None:
            self.unplaced["no_parent"] += len(event.hashes) - known
            return []
        factor = event.block_size // size
        if factor > 1 and extras:  # which of our blocks the keys belong to is not known
            self.unplaced["extra_keys"] += len(event.hashes) - known
            return []
        return self._hasher.chain(parent, tokens, extras)[factor - 1 :: factor]

    def check(self) -> None:
        """Assert that the tables agree."""
        for place, copies in self._copies.items():
            assert all(count > 0 for count in copies.values()), f"{place}: a count of zero was kept"
            counts = Counter(wire_hash(self._hashes[handle]) for handle in copies if handle in self._hashes)
            assert counts == self._held.get(place, {}), f"{place}: held blocks differ from the copies"
        copied = {handle for copies in self._copies.values() for handle in copies}
        assert self._hashes.keys() <= copied, "a handle without a copy was kept"
        on_gpu = Counter(key for place, held in self._held.items() if place.medium == GPU for key in held)
        assert on_gpu == self._on_gpu, f"{len(self._on_gpu)} blocks counted on the GPU, {len(on_gpu)} are"


def _take(counts: dict[int, int], key: int) -> bool:
    """Count one less; whether it was the last."""
    left = counts[key] - 1
    if left:
        counts[key] = left
    else:
        del counts[key]
    return not left


def _medium(name: str | None) -> str:
    return (name or GPU).upper()


def _tokens(event: Stored) -> bytes:
    """Empty when they are not one block for each hash, or not token ids at all."""
    if not event.block_size or len(event.token_ids) != len(event.hashes) * event.block_size:
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
