"""Whose blocks fill the caches: the tenant whose request was first to need each block. Pure state.

Exact while at most `MOST` blocks are known, and an estimate from a sample beyond: only blocks count whose hashes end
with enough zero bits. Blocks whose request this router has not seen (those of other routers, or from
before its start) have no tenant until a request here needs them.
"""

from collections import defaultdict
from collections.abc import Sequence

from .prefix_index import PrefixIndex

#: Sampled blocks: a tenth of the cache is then known to within a hundredth of the whole.
MOST = 8192


class TenantBlocks:
    """The tenants of a sample of blocks. Blocks that no replica holds any more are dropped when the sample is full."""

    def __init__(self, index: PrefixIndex, most: int = MOST) -> None:
        self._index = index
        self._most = most
        self._mask = 0  #: bits that are zero in the hashes of sampled blocks
        self._tenants: dict[int, bytes] = {}

    def needed(self, blocks: Sequence[int], tenant: bytes, held: int = 0) -> None:
        """A request of this tenant was sent, whose prompt has these blocks; the first `held` of them are cached.

        Nearly always, an earlier request needed the cached ones: if the last of those in the sample is known, all are.
        """
        mask, tenants = self._mask, self._tenants
        if next((block for block in reversed(blocks[:held]) if not block & mask), None) in tenants:
            blocks = blocks[held:]
        for block in blocks if not mask else [block for block in blocks if not block & mask]:
            tenants.setdefault(block, tenant)
        if len(tenants) > self._most:
            self._shrink(blocks)

    def _shrink(self, expected: Sequence[int]) -> None:
        """Drop what is cached nowhere and not `expected` to be, then halve the sample until it has some room."""
        kept = set(expected)
        self._tenants = {each: owner for each, owner in self._tenants.items() if each in kept or each in self._index}
        while len(self._tenants) > self._most // 2:
            self._mask = self._mask << 1 | 1
            self._tenants = {each: owner for each, owner in self._tenants.items() if not each & self._mask}

    def by_replica(self) -> dict[str, dict[bytes, int]]:
        """The number of blocks of each tenant that each replica holds. Takes a few milliseconds."""
        owned: dict[bytes, list[int]] = defaultdict(list)
        for block, tenant in self._tenants.items():
            owned[tenant].append(block)
        found: dict[str, dict[bytes, int]] = defaultdict(dict)
        for tenant, blocks in owned.items():
            for replica, held in self._index.holders(blocks).items():
                found[replica][tenant] = held * (self._mask + 1)
        return dict(found)

    def __len__(self) -> int:
        return len(self._tenants)
