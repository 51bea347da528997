"""Which replicas hold which blocks, and how long a prefix of a prompt each replica holds.

Pure state: no sockets, no clock, no tokens. Independent of load and of expected blocks (reservations.py). Blocks are
identified by their wire hash. A hash identifies its whole prefix, so one flat dict replaces a tree. The router has no
other copy of what replicas hold; subscriptions change this one through `ReplicaBlocks`.

A replica's prefix ends at its first missing block. Our own replicas hold prefix-closed sets (kvcache/prefix_cache.py
asserts it, and heartbeats prove that the index holds the same), so a held block implies all blocks before it, and
bisection finds the end. For replicas without that guarantee (`closed=False`, external engines) the lookup goes block by
block, which is exact whatever caused a hole.
"""

import logging
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from itertools import compress, count, repeat
from operator import is_not, xor

from ...events.follow.block_set import Digest

log = logging.getLogger(__name__)

#: Number of interned replica sets. Beyond it the intern table is cleared: existing blocks keep their sets, later blocks
#: get copies, which costs only memory.
MAX_SHARED_SETS = 4096
#: Positions at which a prompt is sampled to decide whether bisection pays: it does if two neighbours have equal sets.
PROBES = 64
#: Blocks that a walk reads at once.
STRETCH = 512
#: If more replicas than this share the end of their prefix, numpy writes their lengths faster than a loop.
GROUP = 24

#: The length of a prefix in blocks, and the bits of the replicas whose prefix has this length.
_End = tuple[int, int]


class PrefixIndex:
    """Maps block hashes to sets of replicas; a set is an int with one bit per replica."""

    def __init__(self) -> None:
        #: sets are never empty: a block without holders has no entry
        self._holders: dict[int, int] = {}
        self._bits: dict[str, int] = {}
        #: each replica's place in the order of joining
        self.places: dict[str, int] = {}
        self._places_of_bits = array("q")  #: the same places, by bit number counted from 0
        #: each replica's name, bit and place, by `bit.bit_length()`
        self._names: dict[int, tuple[str, int, int]] = {}
        #: interned sets of several replicas, shared by blocks: a set of 512 replicas takes 96 bytes
        self._shared: dict[int, int] = {}
        #: bits of all replicas
        self._known = 0
        #: bits of the replicas whose residency is prefix-closed
        self._closed = 0
        self._counts: dict[str, int] = {}
        #: by replica: XOR of the hashes of its blocks, as in heartbeats
        self._xors: dict[str, int] = {}
        self._capacity: dict[str, int] = {}
        #: blocks ignored because a replica announced more than its capacity: bounds memory whatever replicas announce
        self.dropped = 0

    def join(self, replica: str, capacity: int, *, closed: bool) -> None:
        """Add a replica of at most `capacity` blocks. `closed`: the set of its blocks is always prefix-closed."""
        assert replica not in self._bits, f"{replica} has joined the index already"
        bit = ~self._known & (self._known + 1)  # the lowest free bit, so that masks stay small
        self._known |= bit
        self._bits[replica] = bit
        self._number()
        self._counts[replica] = self._xors[replica] = 0
        self._capacity[replica] = capacity
        if closed:
            self._closed |= bit

    def leave(self, replica: str) -> None:
        """Remove a replica and all its blocks."""
        self.clear(replica)
        bit = self._bits.pop(replica)
        self._known ^= bit
        self._closed &= ~bit
        del self._counts[replica], self._xors[replica], self._capacity[replica]
        self._number()

    def _number(self) -> None:
        self.places = {replica: place for place, replica in enumerate(self._bits)}
        self._names = {bit.bit_length(): (name, bit, self.places[name]) for name, bit in self._bits.items()}
        self._places_of_bits = array("q", [0]) * (self._known.bit_length() + 7)  # rounded up to whole octets
        for number, (_, _, place) in self._names.items():
            self._places_of_bits[number - 1] = place

    def add(self, replica: str, hashes: Iterable[int]) -> None:
        """Add blocks to those that the replica holds; blocks that it already holds are ignored."""
        bit, holders, share = self._bits[replica], self._holders, self._shares()
        room = before = self._capacity[replica] - self._counts[replica]
        digest = self._xors[replica]
        for block in hashes:
            mask = holders.get(block)
            if mask is not None and mask & bit:
                continue
            if not room:
                if not self.dropped:
                    log.warning("index_overflow replica=%s blocks=%d", replica, self._capacity[replica])
                self.dropped += 1
                continue
            holders[block] = bit if mask is None else share(both := mask | bit, both)
            room -= 1
            digest ^= block
        self._counts[replica] += before - room
        self._xors[replica] = digest

    def remove(self, replica: str, hashes: Iterable[int]) -> None:
        """Remove blocks that the replica no longer holds; blocks that it did not hold are ignored."""
        bit, holders, share, gone = self._bits[replica], self._holders, self._shares(), 0
        digest = self._xors[replica]
        for block in hashes:
            mask = holders.get(block, 0)
            if not mask & bit:
                continue
            gone += 1
            digest ^= block
            if mask == bit:
                del holders[block]
            else:
                holders[block] = share(others := mask ^ bit, others)
        self._counts[replica] -= gone
        self._xors[replica] = digest

    def clear(self, replica: str) -> None:
        """Remove all blocks of the replica. Walks the whole index, at 50 ns per block; rare."""
        if self._counts[replica]:
            bit, share = self._bits[replica], self._shares()
            self._holders = {
                block: share(others := mask ^ bit, others) if mask & bit else mask
                for block, mask in self._holders.items()
                if mask != bit
            }
            self._counts[replica] = self._xors[replica] = 0

    def reset(self, replica: str, hashes: Iterable[int]) -> None:
        """Replace the replica's blocks with exactly these."""
        self.clear(replica)
        self.add(replica, hashes)

    def match(self, hashes: Sequence[int]) -> dict[str, int]:
        """Each replica's longest held prefix of `hashes`, in blocks."""
        return dict(zip(self._bits, self.lengths(hashes), strict=True))

    def lengths(self, hashes: Sequence[int]) -> "array[int]":
        """Like `match`, as an array in the order of joining, which is cheaper with hundreds of replicas."""
        return self._spread(self._ends(hashes))

    def longest(self, hashes: Sequence[int], replica: str) -> tuple[int, int]:
        """The longest prefix that any replica holds, and the longest that this one holds, in blocks."""
        bit, longest, here = self._bits[replica], 0, 0
        for end, holders in self._ends(hashes):
            if holders and end > longest:
                longest = end
            if holders & bit and end > here:
                here = end
        return longest, here

    def _ends(self, hashes: Sequence[int]) -> list[_End]:
        holding = self._holders.get(hashes[0], 0) if hashes else 0
        if not holding:
            return [(0, self._known)]
        closed = holding & self._closed
        if closed.bit_count() > PROBES and len(hashes) > PROBES and self._crowded(hashes, closed):
            closed = 0
        ends = [(0, self._known ^ holding)]
        if closed:
            ends += self._bisect(hashes, closed)
        if closed != holding:
            ends += self._walk(hashes, holding ^ closed)
        return ends

    def _crowded(self, hashes: Sequence[int], holding: int) -> bool:
        """Whether prefixes end so close together that bisection would read most blocks anyway."""
        get, before = self._holders.get, holding
        step = len(hashes) // PROBES
        for block in hashes[step::step]:
            held = get(block, 0) & holding
            if held == before:
                return False
            before = held
        return True

    def _bisect(self, hashes: Sequence[int], holding: int) -> list[_End]:
        """The ends of replicas that hold the first block, found by bisecting wherever the set of holders shrinks."""
        get = self._holders.get
        ends = []
        # (low, holders at low, high, holders at high). The end has no holders, so it needs no special case.
        spans = [(0, holding, len(hashes), 0)]
        while spans:
            low, holders, high, left = spans.pop()
            while high - low > 1:
                middle = (low + high) // 2
                mask = get(hashes[middle], 0) & holders
                if mask == holders:
                    low = middle
                    continue
                if mask != left:
                    spans.append((middle, mask, high, left))
                high, left = middle, mask
            ends.append((high, holders & ~left))
        return ends

    def _walk(self, hashes: Sequence[int], holding: int) -> list[_End]:
        """The ends of replicas that hold the first block, found block by block.

        Most neighbours have the same set, usually the same object, and are skipped without an interpreter iteration.
        Equal sets that are distinct objects cost one iteration.
        """
        get = self._holders.get
        ends = []
        before = holding
        for start in range(0, len(hashes), STRETCH):
            masks = list(map(get, hashes[start : start + STRETCH], repeat(0)))
            for place in compress(count(), map(is_not, masks, [before, *masks])):
                held = holding & masks[place]
                if held == holding:
                    continue
                ends.append((start + place, holding ^ held))
                holding = held
                if not holding:
                    return ends
            before = masks[-1]
        ends.append((len(hashes), holding))
        return ends

    def _spread(self, ends: list[_End]) -> "array[int]":
        """Prefix lengths by place. Most replicas share one end and others form groups; a loop handles only the rest."""
        common, most = ends[0], ends[0][1].bit_count()
        for end in ends:
            if (size := end[1].bit_count()) > most:
                common, most = end, size
        found = array("q", common[:1]) * len(self._bits)
        names = self._names
        for end in ends:
            position, replicas = end
            if end is common:
                continue
            if replicas.bit_count() > GROUP:
                self._put_group(found, position, replicas)
                continue
            while replicas:
                _, bit, place = names[replicas.bit_length()]
                found[place] = position
                replicas ^= bit
        return found

    def _put_group(self, found: "array[int]", position: int, replicas: int) -> None:
        import numpy as np  # not at the top: it takes 15 MB, and small fleets never get here

        octets = np.frombuffer(replicas.to_bytes((replicas.bit_length() + 7) // 8, "little"), np.uint8)
        bits = np.unpackbits(octets, bitorder="little").view(np.bool_)
        places = np.frombuffer(self._places_of_bits, np.int64)[: len(bits)][bits]
        np.frombuffer(found, np.int64)[places] = position

    def holds(self, replica: str, block: int) -> bool:
        return bool(self._holders.get(block, 0) & self._bits[replica])

    def holders(self, hashes: Iterable[int]) -> dict[str, int]:
        """The number of these blocks that each replica holds; replicas that hold none are left out."""
        found: dict[str, int] = {}
        for mask, blocks in Counter(map(self._holders.get, hashes, repeat(0))).items():
            replicas = mask or 0
            while replicas:
                name, bit, _ = self._names[replicas.bit_length()]
                found[name] = found.get(name, 0) + blocks
                replicas ^= bit
        return found

    def __contains__(self, block: int) -> bool:
        return block in self._holders

    def count(self, replica: str) -> int:
        return self._counts[replica]

    def digest(self, replica: str) -> Digest:
        return Digest(self._counts[replica], self._xors[replica])

    def unique(self) -> dict[str, int]:
        """By replica: the number of blocks that only it holds. Walks the whole index; rare."""
        holders = Counter(self._holders.values())
        return {replica: holders[bit] for replica, bit in self._bits.items()}

    def __len__(self) -> int:
        return len(self._holders)

    def check(self) -> None:
        known = sum(self._bits.values())
        assert known.bit_count() == len(self._bits), f"replicas share a bit: {self._bits}"
        assert known == self._known, f"{self._known:#x} is recorded, but the bits are {known:#x}"
        places = {replica: place for place, replica in enumerate(self._bits)}
        names = {bit.bit_length(): (replica, bit, places[replica]) for replica, bit in self._bits.items()}
        assert (self._names, self.places) == (names, places), "the tables of bits or places are out of date"
        assert not self._closed & ~known, f"{self._closed:#x} contains replicas that left"
        strays = [mask for mask in self._holders.values() if not mask or mask & ~known]
        assert not strays, f"{len(strays)} masks are empty or contain replicas that left"
        for replica, bit in self._bits.items():
            held = [block for block, mask in self._holders.items() if mask & bit]
            digest = Digest(len(held), reduce(xor, held, 0))
            assert digest == self.digest(replica), f"{replica}: recorded {self.digest(replica)}, holds {digest}"
            assert len(held) <= self._capacity[replica], f"{replica} holds {len(held)} of {self._capacity[replica]}"

    def _shares(self) -> Callable[[int, int], int]:
        """A function that interns sets of several replicas: pass the set as key and as value."""
        if len(self._shared) > MAX_SHARED_SETS:
            self._shared = {}
        return self._shared.setdefault


class ReplicaBlocks:
    """One replica's blocks in the index. Its subscription changes them here and stores no copy.

    Implements `ResidentBlocks` (events/follow/residency.py).
    """

    def __init__(self, index: PrefixIndex, replica: str) -> None:
        self._index = index
        self._replica = replica

    @property
    def digest(self) -> Digest:
        return self._index.digest(self._replica)

    def store(self, parent: int | None, hashes: Sequence[int]) -> None:  # noqa: ARG002 - a hash names its whole prefix
        self._index.add(self._replica, hashes)

    def remove(self, hashes: Sequence[int]) -> None:
        self._index.remove(self._replica, hashes)

    def clear(self) -> None:
        self._index.clear(self._replica)

    def replace(self, blocks: Iterable[tuple[int, int | None]]) -> None:
        self._index.reset(self._replica, (block for block, _ in blocks))
