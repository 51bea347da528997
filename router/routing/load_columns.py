"""Replica loads as columns, one array per attribute, and the candidates of one decision over them.

Pure. With hundreds of replicas a decision is then a few array operations instead of a Python loop; `Candidate`s are
created on access. Costs are computed in the policies.
"""

from array import array
from collections.abc import Collection, Mapping, Sequence
from typing import overload

import numpy as np
import numpy.typing as npt

from ..backend import FeedState
from .policy.base import LIVE, QUEUE_AHEAD, STALE, UNCERTAIN, Candidate, ManyCandidates, room_of
from .replica_load import ReplicaLoad

Numbers = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]
Lengths = npt.NDArray[np.int64]


def _numbers(load: ReplicaLoad) -> tuple[float, ...]:
    """One replica's value for each column, in the order of the attributes of `LoadColumns`."""
    cost = load.prefill_cost
    return (
        cost.prompt_s,
        cost.token_s,
        cost.pair_s,
        cost.context_s,
        load.busy_until if load.queued_prefill_tokens else -np.inf,
        load.queued_prefill_tokens,
        load.running,
        load.requests,
        load.decode_step_s,
        load.answer_tokens,
        load.spare_blocks,
        load.free_blocks,
        load.free_blocks - load.cached_free_blocks,
        load.occupied_blocks,
        UNCERTAIN * max(1, load.total_blocks - load.free_blocks),
        load.max_batched_tokens,
        load.requests + 1 - load.max_running_requests,
        load.waiting >= QUEUE_AHEAD,
        load.draining or load.warming or load.silent,
        room_of(load),
        load.decode_step_s if load.running else 0.0,
        load.queued_prefill_tokens > 0,
    )


class LoadColumns:
    """One array per load attribute, with one float per replica. Integers are exact: they are far below 2 ** 53."""

    def __init__(self, names: Sequence[str], loads: Sequence[ReplicaLoad]) -> None:
        self.names = names
        self.ranks = np.argsort(np.argsort(names))  #: each replica's position among the sorted names
        #: Writing a number to an `array` is ten times as fast as writing it to numpy's view of it.
        self._columns = [array("d", column) for column in zip(*map(_numbers, loads), strict=True)]
        (
            self.prompt_s,
            self.token_s,
            self.pair_s,
            self.context_s,
            self.busy_until,  #: -inf where nothing is queued
            self.queued,
            self.running,
            self.requests,
            self.decode_step_s,
            self.answer_tokens,
            self.spare_blocks,
            self.free_blocks,
            self.unused_blocks,
            self.occupied_blocks,
            self.uncertain_blocks,
            self.max_batched_tokens,
            self.excess_requests,  #: requests beyond the slots if one more is sent; at most 0 while a slot is free
            self.queues,  #: 1 if so many requests wait that a full replica counts as saturated
            self.unavailable,  #: 1 if the replica takes no new requests
            self.room,  #: see `room_of`
            self.running_step_s,  #: duration of a decode step; 0 where nothing runs
            self.has_queue,
        ) = map(np.frombuffer, self._columns)

    def put(self, place: int, load: ReplicaLoad) -> None:
        for column, number in zip(self._columns, _numbers(load), strict=True):
            column[place] = number

    def short_of(self, blocks: int) -> list[str]:
        """Replicas where a prompt of this many blocks may meet an obstacle or wait."""
        return [self.names[place] for place in np.flatnonzero(self.room <= blocks).tolist()]

    def check(self, place: int, load: ReplicaLoad) -> None:
        recorded = tuple([column[place] for column in self._columns])
        assert recorded == _numbers(load), f"{recorded} is recorded for replica {place}, which has {_numbers(load)}"


class CandidateColumns(ManyCandidates):
    """All joined replicas as candidates for one prompt, indexed by place in the order of joining."""

    def __init__(
        self,
        loads: LoadColumns,
        places: Mapping[str, int],
        views: Sequence[ReplicaLoad],
        not_live: Mapping[int, FeedState],
        held: "array[int]",
        extensions: Mapping[str, int],
        used: Mapping[str, int] | None,
        excluded: Collection[int],
    ) -> None:
        """`not_live`: feeds that are not live, by place. `extensions`: expected prefixes longer than `held`. `used`:
        see `Candidate.used_blocks`, 0 for replicas that are missing; None if no replica's memory is short.
        """
        self.loads = loads  #: valid only during the decision, as it changes later
        self.places = places
        self.excluded = excluded
        self.stale = [place for place, feed in not_live.items() if feed is STALE]
        self.held = self.expected = np.frombuffer(held, np.int64)
        if extensions:
            self.expected = self.held.copy()
            self.expected[[places[replica] for replica in extensions]] = list(extensions.values())
        self.used: Lengths | None = None
        self._views = views
        self._not_live = not_live
        if used is not None:
            self.used = np.zeros(len(views), np.int64)
            for replica, blocks in used.items():
                self.used[places[replica]] = blocks
        #: places of replicas where part of the prefix is still being computed
        self.ahead = [place for place in map(places.__getitem__, extensions) if self.expected[place] > held[place]]

    def __len__(self) -> int:
        return len(self._views)

    @overload
    def __getitem__(self, place: int) -> Candidate: ...
    @overload
    def __getitem__(self, place: slice) -> list[Candidate]: ...
    def __getitem__(self, place: int | slice) -> Candidate | list[Candidate]:
        if isinstance(place, slice):
            return [self[each] for each in range(len(self))[place]]
        return Candidate(
            replica_id=self.loads.names[range(len(self))[place]],
            feed=self._not_live.get(place, LIVE),
            load=self._views[place],
            held_blocks=int(self.held[place]),
            expected_blocks=int(self.expected[place]),
            used_blocks=0 if self.used is None else int(self.used[place]),
            excluded=place in self.excluded,
        )

    def longest_live(self) -> int:
        live = self.expected
        if self._not_live:
            live = live.copy()
            live[list(self._not_live)] = 0
        return int(live.max())

    def longest_known(self) -> int:
        return int(max(self.held.max(), self.expected.max()))
