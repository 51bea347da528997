"""Pins: prefixes that stay cached while no request uses them, until a set time and within a tenant's budget.

Pure state: times are parameters, there is no clock. Works on hashes only and does not know blocks or the eviction
order; the cache withholds a pinned block from eviction and returns it when the pin ends.

A pin is a lease on the last block of a prefix; an earlier block is kept while any block after it is. The set of pinned
blocks is therefore prefix-closed, renewing a pin takes one lookup whatever its length, and blocks are freed children
first. Each tenant has an account: a block that two tenants pin is charged to both and freed when neither pins it.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from .hashing import BlockHash


@dataclass(slots=True, frozen=True)
class PinLimits:
    """Largest fractions of the pool that may be pinned."""

    tenant_share: float = 0.1
    total_share: float = 0.5


@dataclass(slots=True)
class PinStats:
    """Totals since the start. A renewal counts as `set`."""

    set: int = 0
    refused: int = 0  #: would have exceeded a budget
    expired: int = 0
    broken: int = 0  #: ended early to make room for a request


@dataclass(slots=True)
class _Account:
    """One tenant's pinned blocks, as dictionaries by hash, which are filled in C, instead of one object per block."""

    parents: dict[BlockHash, BlockHash | None] = field(default_factory=dict)  #: None for the first block of a chain
    #: Number of pinned blocks that directly follow a block; no entry for zero.
    followers: dict[BlockHash, int] = field(default_factory=dict)
    #: Expiry time of the lease on a block. Blocks without a lease are kept for the blocks after them.
    leases: dict[BlockHash, float] = field(default_factory=dict)


class PinBook:
    """All pins of one cache. `tenant_blocks` and `total_blocks` are the budgets, in blocks."""

    __slots__ = ("_accounts", "_holders", "_leases", "stats", "tenant_blocks", "total_blocks")

    def __init__(self, tenant_blocks: int, total_blocks: int) -> None:
        self.tenant_blocks = tenant_blocks
        self.total_blocks = total_blocks
        self.stats = PinStats()
        self._accounts: dict[bytes, _Account] = {}
        #: Number of accounts that hold a block; exactly the pinned blocks have an entry.
        self._holders: dict[BlockHash, int] = {}
        #: Heap with one entry per lease. A renewal does not update its entry; that happens when it reaches the top.
        self._leases: list[tuple[float, bytes, BlockHash]] = []

    def __len__(self) -> int:
        return len(self._holders)

    def __contains__(self, block_hash: BlockHash) -> bool:
        return block_hash in self._holders

    def __iter__(self) -> Iterator[BlockHash]:
        return iter(self._holders)

    def charged(self, tenant: bytes) -> int:
        account = self._accounts.get(tenant)
        return len(account.parents) if account else 0

    def pin(self, tenant: bytes, chain: Sequence[BlockHash], expires_at: float) -> bool:
        """Pin this whole prefix or renew its pin. Return False, with no effect, if this would exceed a budget."""
        if not chain:
            return True
        account = self._accounts.get(tenant) or _Account()
        known = len(chain)
        while known and chain[known - 1] not in account.parents:
            known -= 1
        fresh = chain[known:]
        unheld = sum(block_hash not in self._holders for block_hash in fresh)
        if len(account.parents) + len(fresh) > self.tenant_blocks or len(self) + unheld > self.total_blocks:
            self.stats.refused += 1
            return False
        self._accounts[tenant] = account
        if fresh:
            _enter(account, fresh, chain[known - 1] if known else None)
            self._hold(fresh)
        tip, leases = chain[-1], account.leases
        if tip in leases:
            leases[tip] = max(leases[tip], expires_at)
        else:
            leases[tip] = expires_at
            heappush(self._leases, (expires_at, tenant, tip))
        self.stats.set += 1
        return True

    def expire(self, now: float) -> list[BlockHash]:
        """End the pins that are due. Return the blocks that are no longer pinned, children before their parents."""
        freed: list[BlockHash] = []
        while self._leases and self._leases[0][0] <= now:
            if self._soonest_is_exact():
                freed += self._end_soonest()
                self.stats.expired += 1
        return freed

    def break_soonest(self) -> list[BlockHash] | None:
        """End the pin that would expire first. Return the blocks it frees, or None if there are no pins."""
        if not self._leases:
            return None
        while not self._soonest_is_exact():
            pass
        self.stats.broken += 1
        return self._end_soonest()

    def clear(self) -> None:
        self._accounts.clear()
        self._holders.clear()
        self._leases.clear()

    def _hold(self, fresh: Sequence[BlockHash]) -> None:
        if self._holders.keys().isdisjoint(fresh):
            self._holders.update(dict.fromkeys(fresh, 1))
            return
        for block_hash in fresh:
            self._holders[block_hash] = self._holders.get(block_hash, 0) + 1

    def _soonest_is_exact(self) -> bool:
        """Return whether the top entry has its lease's current expiry time; if not, replace it by one that has."""
        noted, tenant, tip = self._leases[0]
        expires_at = self._accounts[tenant].leases[tip]
        if expires_at == noted:
            return True
        heappop(self._leases)
        heappush(self._leases, (expires_at, tenant, tip))
        return False

    def _end_soonest(self) -> list[BlockHash]:
        _, tenant, tip = heappop(self._leases)
        account = self._accounts[tenant]
        del account.leases[tip]
        freed: list[BlockHash] = []
        for block_hash in _leave(account, tip):
            self._holders[block_hash] -= 1
            if not self._holders[block_hash]:
                del self._holders[block_hash]
                freed.append(block_hash)
        if not account.parents:
            del self._accounts[tenant]
        return freed

    def check(self) -> None:
        holders: Counter[BlockHash] = Counter()
        leases = 0
        for tenant, account in self._accounts.items():
            _check_account(account)
            size = len(account.parents)
            assert 0 < size <= self.tenant_blocks, f"{size} blocks of tenant {tenant.hex()}, of {self.tenant_blocks}"
            holders.update(account.parents.keys())
            leases += len(account.leases)
        assert holders == self._holders, "accounts and holders differ"
        assert len(self) <= self.total_blocks, f"{len(self)} blocks pinned, {self.total_blocks} allowed"
        assert leases == len(self._leases), f"{leases} leases, {len(self._leases)} entries"


def _enter(account: _Account, fresh: Sequence[BlockHash], parent: BlockHash | None) -> None:
    """Add consecutive blocks that follow `parent`. All loops run in C, as a prompt may have thousands of blocks."""
    account.parents.update(zip(fresh, [parent, *fresh[:-1]], strict=True))
    account.followers.update(dict.fromkeys(fresh[:-1], 1))
    if parent is not None:
        account.followers[parent] = account.followers.get(parent, 0) + 1


def _leave(account: _Account, tip: BlockHash) -> list[BlockHash]:
    """Remove a block and its ancestors up to the first that another lease keeps. Return them, `tip` first."""
    left: list[BlockHash] = []
    parents, followers, leases = account.parents, account.followers, account.leases
    place: BlockHash | None = tip
    while place is not None and place not in followers and place not in leases:
        left.append(place)
        place = parents.pop(place)
        if place is not None:
            followers[place] -= 1
            if not followers[place]:
                del followers[place]
    return left


def _check_account(account: _Account) -> None:
    followers = Counter(parent for parent in account.parents.values() if parent is not None)
    assert followers == account.followers, f"{len(account.followers)} blocks listed as parents, {len(followers)} are"
    astray = followers.keys() - account.parents.keys()
    assert not astray, f"{len(astray)} blocks are not pinned although blocks after them are"
    idle = account.parents.keys() - followers.keys() - account.leases.keys()
    assert not idle, f"{len(idle)} pinned blocks have neither a lease nor a follower"
    assert account.leases.keys() <= account.parents.keys(), "a lease ends at a block that is not pinned"
