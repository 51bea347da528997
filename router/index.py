"""Which replicas hold which blocks, and how long a prefix of a prompt each of them holds.

Pure state: no sockets, no clock, no tokens. Knows neither load nor what is merely expected (reservations.py). Blocks go
by their wire hash: as a hash names its whole prefix, one flat dict serves for the tree.

A replica's prefix ends at its first missing block, wherever the hole came from, so the match is exact without any
assumption on the order in which a replica evicts; a jump over several blocks at once would need prefix-closed sets.
"""

import logging
from collections.abc import Iterable, Sequence

log = logging.getLogger(__name__)


class PrefixIndex:
    """Block hash to set of replicas; a set is an int with one bit per replica."""

    __slots__ = ("_bits", "_capacity", "_counts", "_holders", "dropped")

    def __init__(self) -> None:
        #: no entry is 0: a block that nobody holds has none
        self._holders: dict[int, int] = {}
        self._bits: dict[str, int] = {}
        self._counts: dict[str, int] = {}
        self._capacity: dict[str, int] = {}
        #: blocks announced beyond a replica's own capacity, and not taken: memory stays bounded whatever it says
        self.dropped = 0

    def join(self, replica: str, capacity: int) -> None:
        """Let a replica hold up to `capacity` blocks."""
        assert replica not in self._bits, f"{replica} has joined the index already"
        taken = sum(self._bits.values())
        self._bits[replica] = ~taken & (taken + 1)  # lowest free bit, so that masks stay small
        self._counts[replica] = 0
        self._capacity[replica] = capacity

    def leave(self, replica: str) -> None:
        """Forget a replica and all that it holds."""
        self.clear(replica)
        del self._bits[replica], self._counts[replica], self._capacity[replica]

    def add(self, replica: str, hashes: Iterable[int]) -> None:
        """The replica holds these blocks now; those that it held already stay as they are."""
        bit, holders = self._bits[replica], self._holders
        room = before = self._capacity[replica] - self._counts[replica]
        for block in hashes:
            mask = holders.get(block, 0)
            if mask & bit:
                continue
            if not room:
                self._drop(replica)
                continue
            holders[block] = mask | bit
            room -= 1
        self._counts[replica] += before - room

    def remove(self, replica: str, hashes: Iterable[int]) -> None:
        """The replica holds these blocks no longer; unknown ones are ignored."""
        bit, holders, gone = self._bits[replica], self._holders, 0
        for block in hashes:
            mask = holders.get(block, 0)
            if not mask & bit:
                continue
            gone += 1
            if mask == bit:
                del holders[block]
            else:
                holders[block] = mask ^ bit
        self._counts[replica] -= gone

    def clear(self, replica: str) -> None:
        """The replica holds nothing. Walks the whole index: 50 ns a block, and rare."""
        if self._counts[replica]:
            bit = self._bits[replica]
            self._holders = {block: mask & ~bit for block, mask in self._holders.items() if mask != bit}
            self._counts[replica] = 0

    def reset(self, replica: str, hashes: Iterable[int]) -> None:
        """The replica holds exactly these blocks."""
        self.clear(replica)
        self.add(replica, hashes)

    def match(self, hashes: Sequence[int]) -> dict[str, int]:
        """Each replica's longest held prefix of `hashes`, in blocks."""
        alive = sum(self._bits.values())
        found = dict.fromkeys(self._bits, len(hashes))
        same = alive  # most neighbours have the same holders: one comparison tells that nobody drops out
        for position, mask in enumerate(map(self._holders.get, hashes)):
            if mask == same:
                continue
            held = mask or 0
            lost = alive & ~held
            if lost:
                found.update((replica, position) for replica, bit in self._bits.items() if bit & lost)
                alive &= held
                if not alive:
                    break
            same = held
        return found

    def holds(self, replica: str, block: int) -> bool:
        """Whether the replica holds this block (its prefix aside)."""
        return bool(self._holders.get(block, 0) & self._bits[replica])

    def count(self, replica: str) -> int:
        """Number of blocks that the replica holds."""
        return self._counts[replica]

    def __len__(self) -> int:
        """Number of distinct blocks."""
        return len(self._holders)

    def check(self) -> None:
        """Assert every invariant."""
        known = sum(self._bits.values())
        assert known.bit_count() == len(self._bits), f"replicas share a bit: {self._bits}"
        strays = [mask for mask in self._holders.values() if not mask or mask & ~known]
        assert not strays, f"{len(strays)} masks are empty or name replicas that left"
        for replica, bit in self._bits.items():
            held = sum(1 for mask in self._holders.values() if mask & bit)
            assert held == self._counts[replica], f"{replica}: counted {self._counts[replica]}, holds {held}"
            assert held <= self._capacity[replica], f"{replica} holds {held} of {self._capacity[replica]} blocks"

    def _drop(self, replica: str) -> None:
        if not self.dropped:
            log.warning("index_overflow replica=%s blocks=%d", replica, self._capacity[replica])
        self.dropped += 1
