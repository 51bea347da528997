"""What our replicas hold in the tiers below their pools: one more `PrefixIndex` for each medium.

Pure state. Only replicas that have announced a block in a tier are in it, so a fleet without tiers pays nothing. Tiers
are not prefix-closed: a prefix may begin in the pool, go on in host memory and end on disk, in runs of any length.
"""

from collections.abc import Sequence

from ...events.wire.messages import TIER_MEDIA
from .hits import SlowerBlocks
from .prefix_index import PrefixIndex

#: Most blocks that a replica may announce in one tier: those of 64 million tokens at 16 tokens per block.
TIER_BLOCKS = 2**22


class TierIndex:
    """The blocks in tiers by replica and medium."""

    def __init__(self) -> None:
        self._indexes: dict[str, PrefixIndex] = {}  #: by medium
        self._media: dict[str, list[str]] = {}  #: by replica: the media in which it has announced blocks, fastest first

    def __bool__(self) -> bool:
        """Whether any replica has tiers."""
        return bool(self._media)

    def media(self, replica: str) -> Sequence[str]:
        """The media in which the replica has announced blocks, fastest first."""
        return self._media.get(replica, ())

    def of(self, replica: str, medium: str) -> PrefixIndex:
        """The index of this medium, which the replica has joined."""
        index = self._indexes.setdefault(medium, PrefixIndex())
        media = self._media.setdefault(replica, [])
        if medium not in media:
            index.join(replica, TIER_BLOCKS, closed=False)
            media.append(medium)
            media.sort(key=TIER_MEDIA.index)
        return index

    def leave(self, replica: str) -> None:
        for medium in self._media.pop(replica, ()):
            self._indexes[medium].leave(replica)

    def sweep(self) -> None:
        for index in self._indexes.values():
            index.sweep()

    def holds(self, replica: str, block: int) -> bool:
        """Whether any of the replica's tiers has the block."""
        return any(self._indexes[medium].holds(replica, block) for medium in self.media(replica))

    def run(self, replica: str, keys: Sequence[int], start: int, end: int, media: Sequence[str]) -> SlowerBlocks:
        """Blocks that continue a prefix of `start` blocks, before block `end`: numbers by medium.

        `media`: fastest first. A block that several have is loaded from the fastest.
        """
        found: dict[str, int] = {}
        while start < end:
            before = start
            for medium in media:
                # One block of a slower medium at a time: a faster one may have the next.
                last = end if medium == media[0] else start + 1
                blocks = self._indexes[medium].run(replica, keys, start, last)
                if blocks:
                    found[medium] = found.get(medium, 0) + blocks
                    start += blocks
                    break
            if start == before:
                break
        return tuple(found.items())

    def check(self) -> None:
        for index in self._indexes.values():
            index.check()
        for replica, media in self._media.items():
            assert media == [each for each in TIER_MEDIA if each in media], f"{replica}: {media} are not in order"
            for medium in media:
                assert replica in self._indexes[medium].places, f"{replica} is not in the index of {medium}"
