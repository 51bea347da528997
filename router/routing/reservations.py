"""Blocks that requests in flight are expected to leave on their replica, from dispatch until the request ends there.

Pure state: the time is an argument. Without reservations, a burst of requests with a common prefix would scatter,
because the prefix is announced only after it is computed. Independent of load and of held blocks (prefix_index.py): a
held block may also be expected, and is not evicted while its request runs.

Each block is entered once, by the first request that expects it. Every other request that expects the block is a
follower of that request, and takes over the block if that request ends first.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import repeat
from typing import Generic, TypeVar

import msgspec


class _Reservation(msgspec.Struct, eq=False):
    """The blocks that one request will leave on its replica."""

    request_id: int
    replica: str
    chain: Sequence[int]  #: hashes of the whole prompt
    start: int  #: index in `chain` of the first block that was not held at dispatch
    expires: float
    #: requests that expect some of the same blocks. By id, so once each: a list would double with every release
    followers: dict[int, "_Reservation"] = {}
    released: bool = False


Label = TypeVar("Label", str, int)


class CountsByBlock(Generic[Label]):
    """Counts labels per block. A block without labels has no entry."""

    def __init__(self) -> None:
        self._counts: dict[int, dict[Label, int]] = {}

    def add(self, block: int, label: Label) -> None:
        counts = self._counts.setdefault(block, {})
        counts[label] = counts.get(label, 0) + 1

    def remove(self, block: int, label: Label) -> None:
        counts = self._counts[block]
        counts[label] -= 1
        if not counts[label]:
            del counts[label]
            if not counts:
                del self._counts[block]

    def of(self, block: int) -> Iterable[Label]:
        return self._counts.get(block, ())

    def check(self, prompts: Iterable[tuple[int, Label]]) -> None:
        """Assert that exactly these (block, label) pairs are counted."""
        expected = CountsByBlock[Label]()
        for block, label in prompts:
            expected.add(block, label)
        assert self._counts == expected._counts, f"{self._counts} is recorded instead of {expected._counts}"


class Reservations:
    """The expected blocks of each replica."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        #: A reservation can extend a prompt only if the prompt contains its first expected block. Hence two tables: by
        #: a chain's first block, the indices where reservations start; by the block at that index, their replicas.
        self._starts = CountsByBlock[int]()
        self._replicas = CountsByBlock[str]()
        self._expected: dict[str, dict[int, _Reservation]] = {}
        self._by_request: dict[int, _Reservation] = {}  # in order of expiry, as all have the same timeout

    def reserve(self, request_id: int, replica: str, hashes: Sequence[int], start: int, now: float) -> None:
        """Request `request_id`, with these prompt hashes, will compute the blocks from `start` on at `replica`."""
        assert request_id not in self._by_request, f"request {request_id} has a reservation already"
        reservation = _Reservation(request_id, replica, hashes, start, now + self._timeout_s)
        self._by_request[request_id] = reservation
        if start < len(hashes):
            self._starts.add(hashes[0], start)
            self._replicas.add(hashes[start], replica)
        self._add_blocks(reservation)

    def _add_blocks(self, reservation: _Reservation) -> None:
        expected = self._expected.setdefault(reservation.replica, {})
        # One C call for all blocks: a prompt may have thousands.
        owners = set(map(expected.setdefault, reservation.chain[reservation.start :], repeat(reservation)))
        owners.discard(reservation)
        for owner in owners:
            owner.followers[reservation.request_id] = reservation

    def release(self, request_id: int) -> None:
        """Drop a request that ended or left its replica; does nothing if it has no reservation."""
        gone = self._by_request.pop(request_id, None)
        if gone is None:
            return
        gone.released = True
        self._uncount(gone)
        expected = self._expected[gone.replica]
        for block in gone.chain[gone.start :]:
            if expected.get(block) is gone:
                del expected[block]
        followers, gone.followers = gone.followers, {}  # followers may refer to each other: leave no reference cycle
        for follower in followers.values():
            if not follower.released:
                self._add_blocks(follower)

    def _uncount(self, gone: _Reservation) -> None:
        if gone.start < len(gone.chain):
            self._starts.remove(gone.chain[0], gone.start)
            self._replicas.remove(gone.chain[gone.start], gone.replica)

    def expire(self, now: float) -> None:
        """Drop overdue reservations."""
        overdue = []
        for request_id, reservation in self._by_request.items():
            if reservation.expires > now:
                break
            overdue.append(request_id)
        for request_id in overdue:
            self.release(request_id)

    def leave(self, replica: str) -> None:
        """Drop all reservations at a replica that left."""
        self._expected.pop(replica, None)
        for gone in [each for each in self._by_request.values() if each.replica == replica]:
            del self._by_request[gone.request_id]
            gone.released, gone.followers = True, {}
            self._uncount(gone)

    def expected_prefixes(self, held: Mapping[str, int], hashes: Sequence[int]) -> dict[str, int]:
        """Longest prefix that each replica holds or is expected to hold, given the prefix that it certainly `held`."""
        return {**held, **self.extensions(held.get, hashes)}

    def extensions(self, held: Callable[[str], int | None], hashes: Sequence[int]) -> dict[str, int]:
        """The same, only where it is longer than the held prefix. Replicas for which `held` is None are skipped."""
        found, end = {}, len(hashes)
        starts = self._starts.of(hashes[0]) if end else ()
        near = [replica for start in starts if start < end for replica in self._replicas.of(hashes[start])]
        for replica in near:  # a replica may come twice, with the same result
            before = position = held(replica)
            if position is None:
                continue
            expected = self._expected[replica]
            while position < end and (owner := expected.get(hashes[position])) is not None:
                position = common_prefix(owner.chain, hashes, position)
            if position != before:
                found[replica] = position
        return found

    def count(self, replica: str) -> int:
        return len(self._expected.get(replica, ()))

    def check(self) -> None:
        wanted: dict[str, set[int]] = {}
        for request_id, held in self._by_request.items():
            assert held.request_id == request_id, f"request {held.request_id} is stored under {request_id}"
            assert not held.released, f"request {request_id} is released and has a reservation"
            wanted.setdefault(held.replica, set()).update(held.chain[held.start :])
        alive = [each for each in self._by_request.values() if each.start < len(each.chain)]
        self._starts.check([(each.chain[0], each.start) for each in alive])
        self._replicas.check([(each.chain[each.start], each.replica) for each in alive])
        for replica, expected in self._expected.items():
            assert expected.keys() == wanted.get(replica, set()), f"{replica}: expected blocks differ from those wanted"
            strays = [block for block, owner in expected.items() if owner.released or owner.replica != replica]
            assert not strays, f"{replica}: {len(strays)} expected blocks belong to no request"


def common_prefix(one: Sequence[int], other: Sequence[int], same: int) -> int:
    """Length of the common prefix of two chains that agree at index `same`, and hence at all before it."""
    low, high = same, min(len(one), len(other))
    while high - low > 1:
        middle = (low + high) // 2
        if one[middle] == other[middle]:
            low = middle
        else:
            high = middle
    return low + 1
