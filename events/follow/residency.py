"""The blocks that a publisher holds, according to its events. Pure state, with two ways of counting.

Our publishers announce, for each medium, the first copy of a block and the removal of the last: a set for each medium.
vLLM announces every physical copy and its removal: reference counts, by medium and group. Either way, a plain set can
apply the returned events: of the removals, only those of last copies remain.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from operator import xor
from types import MappingProxyType
from typing import NamedTuple, Protocol, assert_never

from ..wire.cache_events import BlockHolder, CacheEvent, Cleared, Removed, Stored, apply_event
from ..wire.dialects import snapshot_pairs
from ..wire.messages import COMPUTE_MEDIUM, TIER_MEDIA, SnapshotBlock
from .block_set import Digest


class ResidentBlocks(BlockHolder, Protocol):
    """A set of blocks with a digest: a `CacheMirror`, or the router's index for one replica."""

    @property
    def digest(self) -> Digest: ...
    def replace(self, blocks: Iterable[tuple[int, int | None]]) -> object:
        """Hold exactly these `(block, parent)` pairs."""

    def stage(self, blocks: Iterable[tuple[int, int | None]], *, first: bool) -> object:
        """Take a part of a set that `install` will put in the place of the present one. `first`: drop earlier parts."""

    def install(self) -> object:
        """Hold exactly the staged blocks."""


class Residency(Protocol):
    """The storage of held blocks, as `Subscription` needs it."""

    @property
    def digest(self) -> Digest: ...
    def agrees(self, tiers: Mapping[str, Digest]) -> bool:
        """Whether these are the digests of the blocks in tiers, as far as tiers are followed."""

    def apply(self, events: Sequence[CacheEvent]) -> Sequence[CacheEvent]:
        """Apply events. Returns them as events for a plain set, which stores no copies."""

    def replace(self, blocks: Iterable[tuple[int, int | None]]) -> object:
        """Hold exactly these `(block, parent)` pairs."""

    def stage(
        self, blocks: Sequence[SnapshotBlock], tiers: Mapping[str, Sequence[SnapshotBlock]], *, first: bool
    ) -> None:
        """Take a part of a snapshot: of the pool and, by medium, of tiers. `first`: drop parts of an earlier one."""

    def install(self) -> "Staged":
        """Hold exactly the staged blocks; returns them, if anything but this object stores them."""


class Staged(NamedTuple):
    """The blocks of a snapshot."""

    pool: Sequence[SnapshotBlock] = ()
    tiers: Mapping[str, Sequence[SnapshotBlock]] = MappingProxyType({})  #: by medium


class _Collecting:
    """Collects a snapshot and takes it as a whole."""

    __slots__ = ("_parts",)

    def __init__(self) -> None:
        self._parts: list[SnapshotBlock] = []

    def stage(
        self, blocks: Sequence[SnapshotBlock], tiers: Mapping[str, Sequence[SnapshotBlock]], *, first: bool
    ) -> None:
        del tiers  # only our own publishers send snapshots
        if first:
            self._parts = []
        self._parts += blocks

    def install(self) -> Staged:
        parts, self._parts = self._parts, []
        self.replace(snapshot_pairs(parts))
        return Staged(parts)

    def agrees(self, tiers: Mapping[str, Digest]) -> bool:
        del tiers
        return True

    def replace(self, blocks: Iterable[tuple[int, int | None]]) -> object:
        raise NotImplementedError


class SetResidency:
    """For publishers that announce first and last copies: their events apply to `blocks` unchanged.

    `blocks` is the only record of the blocks in the publisher's pool. A router passes its index, so that it stores a
    held block only once, and takes a snapshot part by part. `tier` returns the record for a medium of `TIER_MEDIA`;
    without it, and in other media, blocks are ignored. `reports`: whether `install` returns the blocks.
    """

    __slots__ = ("_blocks", "_parts", "_reports", "_staged", "_tier", "_tiers")

    def __init__(
        self,
        blocks: ResidentBlocks,
        *,
        tier: Callable[[str], ResidentBlocks] | None = None,
        reports: bool = True,
    ) -> None:
        self._blocks = blocks
        self._tier = tier
        self._tiers: dict[str, ResidentBlocks] = {}
        self._reports = reports
        self._parts: dict[str, list[SnapshotBlock]] = {}
        self._staged: set[str] = set()  #: media of tiers with staged blocks

    def replace(self, blocks: Iterable[tuple[int, int | None]]) -> None:
        """Hold exactly these blocks in the pool, and none in tiers."""
        self._blocks.replace(blocks)
        for each in self._tiers.values():
            each.clear()

    def stage(
        self, blocks: Sequence[SnapshotBlock], tiers: Mapping[str, Sequence[SnapshotBlock]], *, first: bool
    ) -> None:
        if first:
            self._parts = {}
            self._staged = set()
        self._blocks.stage(snapshot_pairs(blocks), first=first)
        if self._reports:
            self._parts.setdefault(COMPUTE_MEDIUM, []).extend(blocks)
        for medium, held in tiers.items():
            if (tier := self._of(medium)) is not None:
                tier.stage(snapshot_pairs(held), first=medium not in self._staged)
                self._staged.add(medium)
                if self._reports:
                    self._parts.setdefault(medium, []).extend(held)

    def install(self) -> Staged:
        self._blocks.install()
        for medium, tier in self._tiers.items():
            if medium in self._staged:
                tier.install()
            else:
                tier.clear()
        parts, self._parts, self._staged = self._parts, {}, set()
        return Staged(parts.pop(COMPUTE_MEDIUM, ()), parts)

    @property
    def digest(self) -> Digest:
        return self._blocks.digest

    def agrees(self, tiers: Mapping[str, Digest]) -> bool:
        if self._tier is None:
            return True
        held = {medium: tier.digest for medium, tier in self._tiers.items() if tier.digest.blocks}
        return held == {medium: digest for medium, digest in tiers.items() if medium in TIER_MEDIA}

    def apply(self, events: Sequence[CacheEvent]) -> Sequence[CacheEvent]:
        for event in events:
            if isinstance(event, Cleared):
                for each in (self._blocks, *self._tiers.values()):
                    each.clear()
            elif (blocks := self._of(event.medium)) is not None:
                apply_event(event, blocks)
        return events

    def _of(self, medium: str | None) -> ResidentBlocks | None:
        if medium is None or medium == COMPUTE_MEDIUM:
            return self._blocks
        tier = self._tiers.get(medium)
        if tier is None and self._tier is not None and medium in TIER_MEDIA:
            tier = self._tiers[medium] = self._tier(medium)
        return tier


class UncountedResidency(_Collecting):
    """Stores nothing and returns all events unchanged, for consumers that count copies themselves."""

    __slots__ = ()
    digest = Digest(0, 0)

    def apply(self, events: Sequence[CacheEvent]) -> Sequence[CacheEvent]:
        return events

    def replace(self, blocks: Iterable[tuple[int, int | None]]) -> None: ...


class CountedResidency(_Collecting):
    """For publishers that announce every copy. A block is held while any medium and group has a copy of it."""

    __slots__ = ("_by_medium", "_copies", "_held", "_xor")

    def __init__(self, *, by_medium: bool = False) -> None:
        """`by_medium`: return removals of the last copies in each medium; otherwise of the last anywhere."""
        super().__init__()
        self._by_medium = by_medium
        #: by medium and group: block -> number of copies, never zero. There are few media and groups.
        self._copies: dict[tuple[str | None, int | None], dict[int, int]] = {}
        self._held = 0
        self._xor = 0

    @property
    def digest(self) -> Digest:
        return Digest(self._held, self._xor)

    def __contains__(self, block: object) -> bool:
        return any(block in copies for copies in self._copies.values())

    def apply(self, events: Sequence[CacheEvent]) -> Sequence[CacheEvent]:
        left: list[CacheEvent] = []
        for event in events:
            match event:
                case Stored():
                    self._add(event.hashes, event.medium, event.group)
                    left.append(event)
                case Removed():
                    gone = [block for block in event.hashes if self._take(block, event.medium, event.group)]
                    if gone:
                        left.append(Removed(gone, event.medium, event.group, event.remote))
                case Cleared():
                    self.replace([])
                    left.append(event)
                case _:
                    assert_never(event)
        return left

    def replace(self, blocks: Iterable[tuple[int, int | None]]) -> None:
        """Hold exactly these blocks, one copy each."""
        self._copies.clear()
        self._held = self._xor = 0
        self._add([block for block, _ in blocks], None, None)

    def _add(self, hashes: Sequence[int], medium: str | None, group: int | None) -> None:
        if not hashes:
            return
        copies = self._copies.setdefault((medium, group), {})
        for block in hashes:
            if block not in self:
                self._held += 1
                self._xor ^= block
            copies[block] = copies.get(block, 0) + 1

    def _take(self, block: int, medium: str | None, group: int | None) -> bool:
        """Remove one copy. Returns True when it was the block's last, in its medium or anywhere."""
        copies = self._copies.get((medium, group), {})
        count = copies.get(block, 0)
        if count == 0:
            return False
        if count > 1:
            copies[block] = count - 1
            return False
        del copies[block]
        if not copies:
            del self._copies[medium, group]
        if block in self:
            if not self._by_medium:
                return False
            return not any(block in held for (of, _), held in self._copies.items() if of == medium)
        self._held -= 1
        self._xor ^= block
        return True

    def check(self) -> None:
        held = {block for copies in self._copies.values() for block in copies}
        assert len(held) == self._held, f"{self._held} blocks counted, {len(held)} held"
        assert all(self._copies.values()), "an empty table was kept"
        assert all(min(copies.values()) > 0 for copies in self._copies.values()), "a count of zero was kept"
        digest = reduce(xor, held, 0)
        assert digest == self._xor, f"digest {self._xor:#x}, the held blocks give {digest:#x}"
