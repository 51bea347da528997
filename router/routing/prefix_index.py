"""Which replicas hold which blocks, and how long a prefix of a prompt each replica holds.

Pure state: no sockets, no clock, no tokens. Independent of load and of expected blocks (expected_blocks.py). Blocks are
identified by their wire hash. A hash identifies its whole prefix, so one flat dict replaces a tree. The router has no
other copy of what replicas hold; subscriptions change this one through `Placement.blocks_of`.

A replica's prefix ends at its first missing block. Our own replicas hold prefix-closed sets (kvcache/prefix_cache.py
asserts it, and heartbeats prove that the index holds the same), so a held block implies all blocks before it, and
bisection finds the end. For replicas without that guarantee (`closed=False`, external engines) the lookup goes block by
block, which is exact whatever caused a hole.

No call takes time that grows with the fleet. A replica that leaves or drops its blocks loses its bit at once; what the
bit left in the sets means nothing, and `sweep` removes it in slices, after which the bit is used again. The parts of a
snapshot are added under a bit that means nothing yet, until `install` puts it in the place of the replica's. The blocks
are spread over many small dicts, which a sweep can list one by one, and none of which takes long to grow.
"""

import logging
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from itertools import compress, count
from operator import is_not, xor

from ...events.follow.block_set import Digest

log = logging.getLogger(__name__)

#: Blocks are spread over dicts by the leading bits of their 64-bit hashes: a dict itself uses the trailing ones, and
#: would be full of collisions if its blocks shared them. With 3 million blocks, each of the 512 has 6,000.
SHARD_SHIFT = 64 - 9
SHARDS = 2 ** (64 - SHARD_SHIFT)
#: Blocks per slice of a sweep, at 0.1 to 0.3 µs each.
SWEPT_AT_ONCE = 2048
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
#: Looks a block up in one of the dicts.
_Getter = Callable[[int, int], int]


class PrefixIndex:
    """Maps block hashes to sets of replicas; a set is an int with one bit per replica."""

    def __init__(self) -> None:
        #: Sets of holders by block. They may contain bits of `_retired`.
        self._shards: list[dict[int, int]] = [{} for _ in range(SHARDS)]
        self._getters = [shard.get for shard in self._shards]
        self._retired = 0  #: bits that mean nothing any more and may still be in sets
        self._sweeping = 0  #: those of them that the current sweep will have removed at its end
        self._swept = 0  #: number of dicts swept so far
        self._unswept: list[int] = []  #: blocks of the next one
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
        #: by replica: bit, number and XOR of the staged blocks
        self._staged: dict[str, tuple[int, int, int]] = {}
        #: bits of all replicas and of staged blocks
        self._kept = 0
        #: blocks ignored because a replica announced more than its capacity: bounds memory whatever replicas announce
        self.dropped = 0

    def join(self, replica: str, capacity: int, *, closed: bool) -> None:
        """Add a replica of at most `capacity` blocks. `closed`: the set of its blocks is always prefix-closed."""
        assert replica not in self._bits, f"{replica} has joined the index already"
        bit = self._bits[replica] = self._new_bit()
        self._known |= bit
        self._number()
        self._counts[replica] = self._xors[replica] = 0
        self._capacity[replica] = capacity
        if closed:
            self._closed |= bit

    def leave(self, replica: str) -> None:
        """Remove a replica and all its blocks."""
        self._unstage(replica)
        self._retire(self._bits.pop(replica))
        del self._counts[replica], self._xors[replica], self._capacity[replica]
        self._number()

    def _new_bit(self) -> int:
        used = self._kept | self._retired
        bit = ~used & (used + 1)  # the lowest free bit, so that masks stay small
        self._kept |= bit
        return bit

    def _retire(self, bit: int) -> None:
        self._kept ^= bit
        self._known &= ~bit
        self._closed &= ~bit
        self._retired |= bit
        self.sweep()  # so that the bits of an engine that drops its blocks again and again do not pile up

    def sweep(self, most: int = SWEPT_AT_ONCE) -> bool:
        """Remove retired bits from the sets of some blocks. Returns whether none are left."""
        if not self._retired:
            return True
        if not self._sweeping:
            self._sweeping, self._swept, self._unswept = self._retired, 0, []
        gone, share = self._sweeping, self._shares()
        while most > 0:
            if not self._unswept:
                if self._swept == SHARDS:
                    self._retired ^= gone
                    self._sweeping = 0
                    break
                self._unswept = list(self._shards[self._swept])
                self._swept += 1
                most -= 1
            shard, blocks = self._shards[self._swept - 1], self._unswept[-most:]
            del self._unswept[-most:]
            most -= len(blocks)
            for block in blocks:
                mask = shard.get(block, 0)
                if mask & gone:
                    if others := mask & ~gone:
                        shard[block] = share(others, others)
                    else:
                        del shard[block]
        return not self._retired

    def _number(self) -> None:
        self.places = {replica: place for place, replica in enumerate(self._bits)}
        self._names = {bit.bit_length(): (name, bit, self.places[name]) for name, bit in self._bits.items()}
        self._places_of_bits = array("q", [0]) * (self._known.bit_length() + 7)  # rounded up to whole octets
        for number, (_, _, place) in self._names.items():
            self._places_of_bits[number - 1] = place

    def add(self, replica: str, hashes: Iterable[int]) -> None:
        """Add blocks to those that the replica holds; blocks that it already holds are ignored."""
        self._counts[replica], self._xors[replica] = self._put(
            replica, hashes, self._bits[replica], self._counts[replica], self._xors[replica]
        )

    def _put(self, replica: str, hashes: Iterable[int], bit: int, held: int, digest: int) -> tuple[int, int]:
        """Add blocks under this bit, which `held` blocks have; returns their new number and XOR."""
        shards, shift, share = self._shards, SHARD_SHIFT, self._shares()
        room = before = self._capacity[replica] - held
        for block in hashes:
            holders = shards[block >> shift]
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
        return held + before - room, digest

    def remove(self, replica: str, hashes: Iterable[int]) -> None:
        """Remove blocks that the replica no longer holds; blocks that it did not hold are ignored."""
        bit, shards, shift, share = self._bits[replica], self._shards, SHARD_SHIFT, self._shares()
        gone, digest, kept = 0, self._xors[replica], self._kept
        for block in hashes:
            holders = shards[block >> shift]
            mask = holders.get(block, 0)
            if not mask & bit:
                continue
            gone += 1
            digest ^= block
            if others := (mask ^ bit) & kept:
                holders[block] = share(others, others)
            else:
                del holders[block]
        self._counts[replica] -= gone
        self._xors[replica] = digest

    def clear(self, replica: str) -> None:
        """Remove all blocks of the replica, except staged ones."""
        if self._counts[replica]:
            self._hold(replica, self._new_bit(), 0, 0)

    def reset(self, replica: str, hashes: Iterable[int]) -> None:
        """Replace the replica's blocks with exactly these."""
        self.stage(replica, hashes, first=True)
        self.install(replica)

    def stage(self, replica: str, hashes: Iterable[int], *, first: bool) -> None:
        """Add a part of the blocks that `install` will put in the place of the replica's. `first`: drop earlier parts.

        Between two parts, all other methods may be called.
        """
        if first:
            self._unstage(replica)
        bit, held, digest = self._staged.get(replica) or (self._new_bit(), 0, 0)
        self._staged[replica] = bit, *self._put(replica, hashes, bit, held, digest)

    def _unstage(self, replica: str) -> None:
        if replica in self._staged:
            self._retire(self._staged.pop(replica)[0])

    def install(self, replica: str) -> None:
        """Replace the replica's blocks with the staged ones."""
        self._hold(replica, *self._staged.pop(replica))

    def _hold(self, replica: str, bit: int, held: int, digest: int) -> None:
        """Hold the blocks that have this bit instead of the present ones."""
        before, self._bits[replica] = self._bits[replica], bit
        self._counts[replica], self._xors[replica] = held, digest
        self._known |= bit
        if self._closed & before:
            self._closed |= bit
        self._retire(before)
        self._number()

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
        holding = self._get(hashes[0]) & self._known if hashes else 0
        if not holding:
            return [(0, self._known)]
        closed = holding & self._closed
        if closed.bit_count() > PROBES and len(hashes) > PROBES and _crowded(self._getters, hashes, closed):
            closed = 0
        ends = [(0, self._known ^ holding)]
        if closed:
            ends += _bisect(self._getters, hashes, closed)
        if closed != holding:
            ends += _walk(self._getters, hashes, holding ^ closed)
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
                _put_group(found, position, replicas, self._places_of_bits)
                continue
            while replicas:
                _, bit, place = names[replicas.bit_length()]
                found[place] = position
                replicas ^= bit
        return found

    def run(self, replica: str, hashes: Sequence[int], start: int, end: int) -> int:
        """The number of consecutive blocks that the replica holds from `start` on, before `end`."""
        bit, getters, shift = self._bits[replica], self._getters, SHARD_SHIFT
        for place in range(start, end):
            block = hashes[place]
            if not getters[block >> shift](block, 0) & bit:
                return place - start
        return max(0, end - start)

    def holds(self, replica: str, block: int) -> bool:
        return bool(self._get(block) & self._bits[replica])

    def holders(self, hashes: Iterable[int]) -> dict[str, int]:
        """The number of these blocks that each replica holds; replicas that hold none are left out."""
        found: dict[str, int] = {}
        for mask, blocks in Counter(map(self._get, hashes)).items():
            replicas = mask & self._known
            while replicas:
                name, bit, _ = self._names[replicas.bit_length()]
                found[name] = found.get(name, 0) + blocks
                replicas ^= bit
        return found

    def __contains__(self, block: int) -> bool:
        return bool(self._get(block) & self._known)

    def _get(self, block: int) -> int:
        return self._getters[block >> SHARD_SHIFT](block, 0)

    def count(self, replica: str) -> int:
        return self._counts[replica]

    def digest(self, replica: str) -> Digest:
        return Digest(self._counts[replica], self._xors[replica])

    def unique(self) -> dict[str, int]:
        """By replica: the number of blocks that only it holds. Walks the whole index; rare."""
        known, holders = self._known, Counter[int]()
        for shard in self._shards:
            holders.update([mask & known for mask in shard.values()])
        return {replica: holders[bit] for replica, bit in self._bits.items()}

    def __len__(self) -> int:
        """The number of blocks, with those that only replicas which left held and that are not swept yet."""
        return sum(map(len, self._shards))

    def check(self) -> None:
        known = sum(self._bits.values())
        assert known.bit_count() == len(self._bits), f"replicas share a bit: {self._bits}"
        assert known == self._known, f"{self._known:#x} is recorded, but the bits are {known:#x}"
        places = {replica: place for place, replica in enumerate(self._bits)}
        names = {bit.bit_length(): (replica, bit, places[replica]) for replica, bit in self._bits.items()}
        assert (self._names, self.places) == (names, places), "the tables of bits or places are out of date"
        assert not self._closed & ~known, f"{self._closed:#x} contains replicas that left"
        assert self._kept == known | sum(bit for bit, _, _ in self._staged.values()), f"{self._kept:#x} are kept"
        assert not self._kept & self._retired, f"{self._retired:#x} is retired, {self._kept:#x} in use"
        assert not self._sweeping & ~self._retired, f"{self._sweeping:#x} is swept, {self._retired:#x} retired"
        sets = {block: mask for shard in self._shards for block, mask in shard.items()}
        strays = [mask for mask in sets.values() if not mask or mask & ~(self._kept | self._retired)]
        assert not strays, f"{len(strays)} masks are empty or contain replicas that left"
        for replica, bit in self._bits.items():
            held = [block for block, mask in sets.items() if mask & bit]
            digest = Digest(len(held), reduce(xor, held, 0))
            assert digest == self.digest(replica), f"{replica}: recorded {self.digest(replica)}, holds {digest}"
            assert len(held) <= self._capacity[replica], f"{replica} holds {len(held)} of {self._capacity[replica]}"

    def _shares(self) -> Callable[[int, int], int]:
        """A function that interns sets of several replicas: pass the set as key and as value."""
        if len(self._shared) > MAX_SHARED_SETS:
            self._shared = {}
        return self._shared.setdefault


def _crowded(getters: Sequence[_Getter], hashes: Sequence[int], holding: int) -> bool:
    """Whether prefixes end so close together that bisection would read most blocks anyway."""
    before = holding
    step = len(hashes) // PROBES
    for block in hashes[step::step]:
        held = getters[block >> SHARD_SHIFT](block, 0) & holding
        if held == before:
            return False
        before = held
    return True


def _bisect(getters: Sequence[_Getter], hashes: Sequence[int], holding: int) -> list[_End]:
    """The ends of replicas that hold the first block, found by bisecting wherever the set of holders shrinks."""
    ends = []
    # (low, holders at low, high, holders at high). The end has no holders, so it needs no special case.
    spans = [(0, holding, len(hashes), 0)]
    while spans:
        low, holders, high, left = spans.pop()
        while high - low > 1:
            middle = (low + high) // 2
            block = hashes[middle]
            mask = getters[block >> SHARD_SHIFT](block, 0) & holders
            if mask == holders:
                low = middle
                continue
            if mask != left:
                spans.append((middle, mask, high, left))
            high, left = middle, mask
        ends.append((high, holders & ~left))
    return ends


def _walk(getters: Sequence[_Getter], hashes: Sequence[int], holding: int) -> list[_End]:
    """The ends of replicas that hold the first block, found block by block.

    Most neighbours have the same set, usually the same object, and are skipped without an interpreter iteration.
    Equal sets that are distinct objects cost one iteration.
    """
    shift = SHARD_SHIFT
    ends = []
    before = holding
    for start in range(0, len(hashes), STRETCH):
        masks = [getters[block >> shift](block, 0) for block in hashes[start : start + STRETCH]]
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


def _put_group(found: "array[int]", position: int, replicas: int, places_of_bits: "array[int]") -> None:
    """Write the length of these replicas' prefixes at their places."""
    import numpy as np  # not at the top: it takes 15 MB, and small fleets never get here

    octets = np.frombuffer(replicas.to_bytes((replicas.bit_length() + 7) // 8, "little"), np.uint8)
    bits = np.unpackbits(octets, bitorder="little").view(np.bool_)
    places = np.frombuffer(places_of_bits, np.int64)[: len(bits)][bits]
    np.frombuffer(found, np.int64)[places] = position
