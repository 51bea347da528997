"""Which prefixes are kept although nobody uses them: until when, and on whose account.

Pure state: times come in, no clock. Knows hashes only: neither blocks nor the order in which blocks are given up. The
cache withholds a pinned block from its eviction policy and hands it over when the pin has ended.

A pin is a lease on the last block of a prefix; the blocks before it are kept as long as one after them is. So what is
pinned is prefix-closed, renewing costs one lookup whatever the length, and ends come children first. Each tenant has
an account: a block that two tenants pin is charged to both, and is free when neither holds it any more.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from .hashing import BlockHash


@dataclass(slots=True, frozen=True)
class PinLimits:
    """How much of the pool may be pinned, as shares of it."""

    tenant_share: float = 0.1
    total_share: float = 0.5


@dataclass(slots=True)
class PinStats:
    """Totals since the start; a renewal counts as a pin that was set."""

    set: int = 0
    refused: int = 0  #: over a budget
    expired: int = 0
    broken: int = 0  #: ended early, because a request found no room otherwise


@dataclass(slots=True)
class _Node:
    """A pinned block in one tenant's account."""

    parent: BlockHash | None  #: None: first of its chain
    children: int = 0  #: pinned blocks that follow it
    expires_at: float | None = None  #: of the lease that ends here; None: it is kept for what follows it


class PinBook:
    """All pins of one cache. `tenant_blocks` and `total_blocks` are the budgets, in blocks."""

    __slots__ = ("_accounts", "_holders", "_leases", "stats", "tenant_blocks", "total_blocks")

    def __init__(self, tenant_blocks: int, total_blocks: int) -> None:
        self.tenant_blocks = tenant_blocks
        self.total_blocks = total_blocks
        self.stats = PinStats()
        self._accounts: dict[bytes, dict[BlockHash, _Node]] = {}
        #: In how many accounts a block stands; exactly the pinned blocks have an entry.
        self._holders: dict[BlockHash, int] = {}
        #: Heap with one entry per lease. A renewal leaves it as it is; the entry is put right when it comes up.
        self._leases: list[tuple[float, bytes, BlockHash]] = []

    def __len__(self) -> int:
        """Distinct pinned blocks."""
        return len(self._holders)

    def __contains__(self, block_hash: BlockHash) -> bool:
        return block_hash in self._holders

    def __iter__(self) -> Iterator[BlockHash]:
        """The distinct pinned blocks."""
        return iter(self._holders)

    def charged(self, tenant: bytes) -> int:
        """Blocks on this tenant's account."""
        return len(self._accounts.get(tenant, ()))

    def pin(self, tenant: bytes, chain: Sequence[BlockHash], expires_at: float) -> bool:
        """Keep this prefix, all of it, or renew its pin. False, and nothing has changed: it is over a budget."""
        if not chain:
            return True
        account = self._accounts.get(tenant, {})
        known = len(chain)
        while known and chain[known - 1] not in account:
            known -= 1
        fresh = chain[known:]
        unheld = sum(block_hash not in self._holders for block_hash in fresh)
        if len(account) + len(fresh) > self.tenant_blocks or len(self) + unheld > self.total_blocks:
            self.stats.refused += 1
            return False
        self._enter(self._accounts.setdefault(tenant, account), chain, known)
        self._lease(tenant, account[chain[-1]], chain[-1], expires_at)
        self.stats.set += 1
        return True

    def expire(self, now: float) -> list[BlockHash]:
        """End what is due. The blocks that nobody pins any more, children before their parents."""
        freed: list[BlockHash] = []
        while self._leases and self._leases[0][0] <= now:
            if self._soonest_is_exact():
                freed += self._end_soonest()
                self.stats.expired += 1
        return freed

    def break_soonest(self) -> list[BlockHash] | None:
        """End the pin that would expire first, before its time. The blocks that it frees; None when there is no pin."""
        if not self._leases:
            return None
        while not self._soonest_is_exact():
            pass
        self.stats.broken += 1
        return self._end_soonest()

    def clear(self) -> None:
        """Forget every pin."""
        self._accounts.clear()
        self._holders.clear()
        self._leases.clear()

    def _enter(self, account: dict[BlockHash, _Node], chain: Sequence[BlockHash], known: int) -> None:
        for place in range(known, len(chain)):
            block_hash, parent = chain[place], chain[place - 1] if place else None
            account[block_hash] = _Node(parent)
            if parent is not None:
                account[parent].children += 1
            self._holders[block_hash] = self._holders.get(block_hash, 0) + 1

    def _lease(self, tenant: bytes, node: _Node, tip: BlockHash, expires_at: float) -> None:
        if node.expires_at is None:
            heappush(self._leases, (expires_at, tenant, tip))
            node.expires_at = expires_at
        else:
            node.expires_at = max(node.expires_at, expires_at)

    def _soonest_is_exact(self) -> bool:
        """Whether the first entry names its lease's time; one that was renewed goes back with the right one."""
        noted, tenant, tip = self._leases[0]
        expires_at = self._accounts[tenant][tip].expires_at
        assert expires_at is not None, f"{tip.hex()} stands among the leases and has none"
        if expires_at == noted:
            return True
        heappop(self._leases)
        heappush(self._leases, (expires_at, tenant, tip))
        return False

    def _end_soonest(self) -> list[BlockHash]:
        _, tenant, tip = heappop(self._leases)
        account = self._accounts[tenant]
        account[tip].expires_at = None
        freed: list[BlockHash] = []
        place: BlockHash | None = tip
        while place is not None:
            node = account[place]
            if node.children or node.expires_at is not None:
                break
            del account[place]
            if self._unhold(place):
                freed.append(place)
            place = node.parent
            if place is not None:
                account[place].children -= 1
        if not account:
            del self._accounts[tenant]
        return freed

    def _unhold(self, block_hash: BlockHash) -> bool:
        """One account fewer holds it; True when that was the last."""
        left = self._holders[block_hash] - 1
        if left:
            self._holders[block_hash] = left
            return False
        del self._holders[block_hash]
        return True

    def check(self) -> None:
        """Assert every invariant; O(blocks)."""
        holders: Counter[BlockHash] = Counter()
        leases = 0
        for tenant, account in self._accounts.items():
            assert account, f"tenant {tenant.hex()} has an empty account"
            assert len(account) <= self.tenant_blocks, (
                f"{len(account)} blocks of one tenant, {self.tenant_blocks} allowed"
            )
            children_of = Counter(node.parent for node in account.values())
            for block_hash, node in account.items():
                children = children_of[block_hash]
                assert node.children == children, f"{block_hash.hex()}: {node.children} children counted of {children}"
                assert node.parent is None or node.parent in account, f"{block_hash.hex()} is pinned, its parent is not"
                assert children or node.expires_at is not None, f"{block_hash.hex()} is pinned for nothing"
                holders[block_hash] += 1
                leases += node.expires_at is not None
        assert holders == self._holders, "accounts and holders differ"
        assert len(self) <= self.total_blocks, f"{len(self)} blocks pinned, {self.total_blocks} allowed"
        assert leases == len(self._leases), f"{leases} leases, {len(self._leases)} entries"
