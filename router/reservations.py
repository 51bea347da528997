"""Blocks that requests under way will leave on their replica, from dispatch until they are really announced.

Pure state: the time comes in. Without it a burst of one prefix would scatter, as the first block of it is announced
only when it has been computed. Knows nothing of load or of what is held already (index.py).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol


class Holds(Protocol):
    """Who knows what is held (the index)."""

    def holds(self, replica: str, block: int) -> bool:
        """Whether the replica holds this block."""


@dataclass(slots=True)
class _Expected:
    """One block expected on one replica."""

    requests: int = 0


@dataclass(slots=True, frozen=True)
class _Reservation:
    replica: str
    blocks: tuple[tuple[int, _Expected], ...]
    expires: float


class Reservations:
    """Expected blocks by replica: expected until stored, or until nobody is left who would store them."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._expected: dict[str, dict[int, _Expected]] = {}
        self._by_request: dict[int, _Reservation] = {}  # in the order of expiry, as the timeout is one for all

    def reserve(self, request_id: int, replica: str, hashes: Iterable[int], now: float) -> None:
        """Request `request_id` will compute these blocks on `replica`."""
        assert request_id not in self._by_request, f"request {request_id} has a reservation already"
        expected = self._expected.setdefault(replica, {})
        blocks = []
        for block in hashes:
            entry = expected.get(block)
            if entry is None:
                entry = expected[block] = _Expected()
            entry.requests += 1
            blocks.append((block, entry))
        self._by_request[request_id] = _Reservation(replica, tuple(blocks), now + self._timeout_s)

    def release(self, request_id: int) -> None:
        """The request is over, or has left its replica; harmless when it has no reservation."""
        reservation = self._by_request.pop(request_id, None)
        if reservation is None:
            return
        expected = self._expected.get(reservation.replica, {})
        for block, entry in reservation.blocks:
            entry.requests -= 1
            # Identity: a block that was stored, evicted and is expected anew belongs to others.
            if not entry.requests and expected.get(block) is entry:
                del expected[block]

    def stored(self, replica: str, hashes: Iterable[int]) -> None:
        """These blocks are announced: the index has them now."""
        expected = self._expected.get(replica)
        if expected:
            for block in hashes:
                expected.pop(block, None)

    def expire(self, now: float) -> int:
        """Forget what is overdue; says how many requests that concerned."""
        overdue = []
        for request_id, reservation in self._by_request.items():
            if reservation.expires > now:
                break
            overdue.append(request_id)
        for request_id in overdue:
            self.release(request_id)
        return len(overdue)

    def leave(self, replica: str) -> None:
        """The replica is gone, and with it all that was expected there."""
        self._expected.pop(replica, None)
        gone = [request_id for request_id, held in self._by_request.items() if held.replica == replica]
        for request_id in gone:
            del self._by_request[request_id]

    def extend(self, held: Mapping[str, int], hashes: Sequence[int], holds: Holds) -> dict[str, int]:
        """Longest prefix that each replica holds or is expected to hold, given what it `held` for sure."""
        return {replica: self._extend_one(replica, start, hashes, holds) for replica, start in held.items()}

    def count(self, replica: str) -> int:
        """Number of blocks expected there."""
        return len(self._expected.get(replica, ()))

    def check(self) -> None:
        """Assert every invariant."""
        counted: dict[int, int] = {}
        entries: dict[int, _Expected] = {}
        for reservation in self._by_request.values():
            for _, entry in reservation.blocks:
                entries[id(entry)] = entry
                counted[id(entry)] = counted.get(id(entry), 0) + 1
        for key, entry in entries.items():
            assert entry.requests == counted[key], f"{entry.requests} requests counted, {counted[key]} hold it"
        for replica, expected in self._expected.items():
            strays = [block for block, entry in expected.items() if id(entry) not in entries]
            assert not strays, f"{replica}: {len(strays)} blocks are expected of nobody"

    def _extend_one(self, replica: str, start: int, hashes: Sequence[int], holds: Holds) -> int:
        expected = self._expected.get(replica)
        if not expected:
            return start
        position, end = start, len(hashes)
        while position < end and (hashes[position] in expected or holds.holds(replica, hashes[position])):
            position += 1
        return position
