"""Hit rate of an LRU prefix cache of every size, from one pass over the requests.

Pure state. Blocks are only names, and a name identifies a whole prefix: equal names have equal predecessors.

Mattson, Gecsei, Slutz and Traiger (1970): under LRU, a smaller cache holds a subset of the blocks of a larger one. So
in a single list of blocks, most recently used first, an accessed block's position is the size of the smallest cache
that would have hit. Here the list has more structure. A request uses a chain and frees its tail first
(`PrefixCache.release`), so the blocks with the same last user are adjacent, in the chain's order. Later requests remove
blocks only from the head of such a run, so it remains a run. It is enough to keep the length of each request's run (a
Fenwick tree) and each block's last user. A request costs O(touched runs · log requests) plus two dictionary operations
per block.

Memory: about 120 bytes per distinct block in addition to its name, 16 per request.

Simplifications: requests run one after the other (in reality, blocks in use by concurrent ones cannot be evicted),
answers are not cached, and a request larger than the cache counts as if the cache kept its head. `PrefixCache` needs
one more block while a prompt's last, partial block is computed: its hits at a size of C blocks lie between those given
here for C - 1 and C.
"""

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Hashable, Sequence
from itertools import accumulate, repeat
from operator import neg


class HitCurve:
    """Number of hits (blocks found) of a cache by its size in blocks; it never decreases."""

    def __init__(self, hits: "array[int]") -> None:
        """`hits[i]` is the number of hits of a cache of i + 1 blocks."""
        self._hits = hits

    @property
    def endless(self) -> int:
        """Hits of a cache that never evicts."""
        return self._hits[-1] if self._hits else 0

    def hits(self, size: int) -> int:
        if size < 1 or not self._hits:
            return 0
        return self._hits[min(size, len(self._hits)) - 1]

    def size_for(self, share: float) -> int:
        """Size of the smallest cache with at least `share` (0 to 1) of an endless one's hits; 0 if that has none."""
        if not self.endless:
            return 0
        return bisect_left(self._hits, share * self.endless) + 1


class PlaceCounts:
    """Number of accesses at each position of the list. Several lists may share one instance: their hits add up."""

    def __init__(self) -> None:
        self._changes = array("q")  #: differences between counts of neighbouring positions

    def add(self, place: int, count: int) -> None:
        """Count one access at each of `count` positions from `place` on."""
        changes = self._changes
        if (missing := place + count + 1 - len(changes)) > 0:
            changes.frombytes(bytes(missing * changes.itemsize))
        changes[place] += 1
        changes[place + count] -= 1

    def curve(self) -> HitCurve:
        return HitCurve(array("q", accumulate(accumulate(self._changes))))


class RunLengths:
    """A sequence of numbers with O(log n) changes, appends and prefix sums (Fenwick 1994)."""

    def __init__(self) -> None:
        self._tree = array("q", [0])
        self.total = 0

    def append(self, value: int) -> None:
        place = len(self._tree)
        below = place - (place & -place)
        self._tree.append(value + self.total - self._through(below))
        self.total += value

    def add(self, index: int, change: int) -> None:
        tree, place, end = self._tree, index + 1, len(self._tree)
        while place < end:
            tree[place] += change
            place += place & -place
        self.total += change

    def after(self, index: int) -> int:
        """Sum of the numbers after `index`; -1: of all numbers."""
        return self.total - self._through(index + 1)

    def _through(self, place: int) -> int:
        tree, found = self._tree, 0
        while place:
            found += tree[place]
            place &= place - 1
        return found

    def __len__(self) -> int:
        return len(self._tree) - 1


class ReuseStack:
    """The list of all blocks by last use, stored as runs, and the number of accesses at each position."""

    def __init__(self, counts: PlaceCounts | None = None) -> None:
        self._last_user: dict[Hashable, int] = {}
        self._runs = RunLengths()
        self._known_before = array("q")  #: for each request, the number of its leading blocks known before it
        self._counts = PlaceCounts() if counts is None else counts
        self.shared = 0  #: distinct blocks that two or more requests had

    @property
    def requests(self) -> int:
        return len(self._runs)

    @property
    def distinct(self) -> int:
        return len(self._last_user)

    def known(self, blocks: Sequence[Hashable]) -> int:
        """Number of leading blocks that some earlier request had; changes nothing."""
        seen = self._last_user
        return bisect_left(blocks, True, key=lambda block: block not in seen)

    def used_since(self, request: int) -> int:
        """Number of distinct blocks used after the request with this index (-1: by all requests)."""
        return self._runs.after(request)

    def observe(self, blocks: Sequence[Hashable], usable: int) -> int:
        """Add the next request: its full blocks in order, and how many of them a cache may serve (at least one token
        is always computed, so a prompt of whole blocks has one fewer). Returns the number of its leading blocks that
        some earlier request had."""
        now = self.requests
        users = list(map(self._last_user.get, blocks, repeat(-1)))
        known = 0
        while known < len(users) and (user := users[known]) >= 0:
            # Last users never increase along a chain: a request that used a block used all earlier ones.
            end = bisect_right(users, -user, known, key=neg)
            # The chain's earlier blocks have already been removed from the list; at the time of the access they
            # preceded this user's run, whose head the chain now removes.
            if min(end, usable) > known:
                self._counts.add(self._runs.after(user) + known, min(end, usable) - known)
            self._runs.add(user, known - end)
            self.shared += max(0, end - max(known, self._known_before[user]))
            known = end
        self._last_user.update(zip(blocks, repeat(now)))
        self._runs.append(len(blocks))
        self._known_before.append(known)
        return known

    def curve(self) -> HitCurve:
        return self._counts.curve()
