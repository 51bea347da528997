"""Hit rate of an LRU prefix cache of every size, from one pass over the requests.

Pure state. Knows blocks by name only, and a name stands for a whole prefix: equal names follow equal names.

Mattson, Gecsei, Slutz and Traiger (1970): under LRU a smaller cache holds a subset of what a larger one holds, so one
list of blocks, the latest used first, tells for each access the smallest cache that would have had it: the block's
place in the list. Here the list has more structure. A request uses a chain and frees its tail first
(`PrefixCache.release`), so the blocks whose last user is one request lie side by side, in the chain's order, and who
comes later takes away their head: they stay a run. It is enough to keep the length of each request's run (a Fenwick
tree) and each block's last user; a request costs O(runs that it meets · log requests) beside two dictionary operations
for each of its blocks.

Memory: about 120 bytes for each distinct block beside its name, 16 for each request.

What it leaves out: requests run one after the other (blocks in use by concurrent ones cannot be evicted), answers are
not cached, and a request that is larger than the cache counts as if the cache kept its head. `PrefixCache` needs one
more block while a prompt's last, partial block is computed: its hits at a size of C blocks lie between those given
here for C - 1 and C.
"""

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Hashable, Sequence
from itertools import accumulate, repeat
from operator import neg


class HitCurve:
    """Blocks found by a cache, by its size in blocks. Never falls."""

    def __init__(self, hits: "array[int]") -> None:
        """`hits[i]` is what a cache of i + 1 blocks finds."""
        self._hits = hits

    @property
    def endless(self) -> int:
        """What a cache finds that never evicts."""
        return self._hits[-1] if self._hits else 0

    def hits(self, size: int) -> int:
        if size < 1 or not self._hits:
            return 0
        return self._hits[min(size, len(self._hits)) - 1]

    def size_for(self, share: float) -> int:
        """The smallest cache that finds at least `share` (0 to 1) of what an endless one finds."""
        if not self.endless:
            return 0
        return bisect_left(self._hits, share * self.endless) + 1


class PlaceCounts:
    """How many accesses each place of the list has seen. Several lists may count into one: their hits add up."""

    def __init__(self) -> None:
        self._changes = array("q")  #: differences between neighbouring places

    def add(self, place: int, count: int) -> None:
        """One access each to `count` places from `place` on."""
        changes = self._changes
        if (missing := place + count + 1 - len(changes)) > 0:
            changes.frombytes(bytes(missing * changes.itemsize))
        changes[place] += 1
        changes[place + count] -= 1

    def curve(self) -> HitCurve:
        return HitCurve(array("q", accumulate(accumulate(self._changes))))


class RunLengths:
    """Numbers in a row that can be changed, appended and summed up to any place in O(log n) (Fenwick 1994)."""

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
        """Sum of the numbers behind `index`; -1 stands before all of them."""
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
    """The list of all blocks by last use, as runs; and how many accesses each place of the list has seen."""

    def __init__(self, counts: PlaceCounts | None = None) -> None:
        self._last_user: dict[Hashable, int] = {}
        self._runs = RunLengths()
        self._known_before = array("q")  #: for each request, how many of its leading blocks were known before it
        self._counts = PlaceCounts() if counts is None else counts
        self.shared = 0  #: distinct blocks that two or more requests had

    @property
    def requests(self) -> int:
        return len(self._runs)

    @property
    def distinct(self) -> int:
        return len(self._last_user)

    def known(self, blocks: Sequence[Hashable]) -> int:
        """What `observe` would return; changes nothing."""
        seen = self._last_user
        return bisect_left(blocks, True, key=lambda block: block not in seen)

    def used_since(self, request: int) -> int:
        """Distinct blocks that requests after the one of this number used (-1: all)."""
        return self._runs.after(request)

    def observe(self, blocks: Sequence[Hashable], usable: int) -> int:
        """The next request: its full blocks in order, and how many of them a cache may serve (at least one token of a
        prompt is always computed, so that not all of a prompt of whole blocks is). Returns how many leading blocks
        some earlier request had, too."""
        now = self.requests
        users = list(map(self._last_user.get, blocks, repeat(-1)))
        known = 0
        while known < len(users) and (user := users[known]) >= 0:
            # Last users never get later along a chain: who used a block used all before it.
            end = bisect_right(users, -user, known, key=neg)
            # The chain's earlier blocks have left the list already; at the time of the access they stood before this
            # user's run, of which the chain now takes away the head.
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
