"""Replica loads as columns, one array per attribute, and the candidates of one decision over them.

Pure. With hundreds of replicas a decision is then a few array operations instead of a Python loop; `Candidate`s are
created on access. Costs are computed in the policies.
"""

from array import array
from collections.abc import Collection, Iterable, Mapping, Sequence
from math import inf
from typing import overload

import numpy as np
import numpy.typing as npt

from ..backend import FeedState
from .policy.base import LIVE, QUEUE_AHEAD, STALE, UNCERTAIN, Candidate, ManyCandidates, room_of
from .replica_load import ReplicaLoad

Numbers = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]
Lengths = npt.NDArray[np.int64]


def _load_numbers(load: ReplicaLoad) -> tuple[float, ...]:
    """One replica's value for each column that changes with its load, in the order of `LoadColumns._put_load`."""
    queued, running, unused = load.queued_prefill_tokens, load.running, load.free_blocks - load.cached_free_blocks
    return (
        load.busy_until if queued else -inf,
        queued,
        queued > 0,
        running,
        running + load.waiting,
        load.decode_step_s,
        load.decode_step_s if running else 0.0,
        load.answer_tokens,
        unused,
        load.total_blocks - unused,
        room_of(load),
    )


def _cost_numbers(load: ReplicaLoad) -> tuple[float, ...]:
    """The same for the columns that change with its prefill cost."""
    cost = load.prefill_cost
    return cost.prompt_s, cost.token_s, cost.pair_s, cost.context_s, load.max_batched_tokens


def _room_numbers(load: ReplicaLoad) -> tuple[float, ...]:
    """The same for the columns that matter only while a replica lacks room for a prompt."""
    return (
        load.spare_blocks,
        load.free_blocks,
        UNCERTAIN * max(1, load.total_blocks - load.free_blocks),
        load.requests + 1 - load.max_running_requests,
        load.waiting >= QUEUE_AHEAD,
        load.draining or load.warming or load.silent,
    )


class LoadColumns:
    """One array per load attribute, with one float per replica. Integers are exact: they are far below 2 ** 53.

    Call `complete` before reading an attribute of the third group.
    """

    def __init__(self, names: Sequence[str], loads: Sequence[ReplicaLoad]) -> None:
        self.names = names
        self.ranks = np.argsort(np.argsort(names))  #: each replica's position among the sorted names
        # Writing a number to an `array` is ten times as fast as writing it to numpy's view of it.
        self._load_columns = _columns(map(_load_numbers, loads))
        self._cost_columns = _columns(map(_cost_numbers, loads))
        self._room_columns = _columns(map(_room_numbers, loads))
        self._costs = [load.prefill_cost for load in loads]  #: those in `_cost_columns`
        self._incomplete: dict[int, ReplicaLoad] = {}  #: loads that `_room_columns` does not include yet, by place
        (
            self.busy_until,  #: -inf where nothing is queued
            self.queued,
            self.has_queue,
            self.running,
            self.requests,
            self.decode_step_s,
            self.running_step_s,  #: duration of a decode step; 0 where nothing runs
            self.answer_tokens,
            self.unused_blocks,
            self.occupied_blocks,
            self.room,  #: see `room_of`
        ) = map(np.frombuffer, self._load_columns)
        (
            self.prompt_s,
            self.token_s,
            self.pair_s,
            self.context_s,
            self.max_batched_tokens,
        ) = map(np.frombuffer, self._cost_columns)
        (
            self.spare_blocks,
            self.free_blocks,
            self.uncertain_blocks,
            self.excess_requests,  #: requests beyond the slots if one more is sent; at most 0 while a slot is free
            self.queues,  #: 1 if so many requests wait that a full replica counts as saturated
            self.unavailable,  #: 1 if the replica takes no new requests
        ) = map(np.frombuffer, self._room_columns)

    def put(self, place: int, load: ReplicaLoad) -> None:
        # Written out: a loop over the columns takes twice as long, and a decision is preceded by four calls.
        until, queued, queues, running, requests, step_s, running_s, answer, unused, occupied, room = self._load_columns
        (
            until[place],
            queued[place],
            queues[place],
            running[place],
            requests[place],
            step_s[place],
            running_s[place],
            answer[place],
            unused[place],
            occupied[place],
            room[place],
        ) = _load_numbers(load)
        if load.prefill_cost is not self._costs[place]:
            self._costs[place] = load.prefill_cost
            _put(self._cost_columns, place, _cost_numbers(load))
        self._incomplete[place] = load

    def complete(self) -> None:
        """Bring all columns up to date."""
        for place, load in self._incomplete.items():
            _put(self._room_columns, place, _room_numbers(load))
        self._incomplete.clear()

    def short_of(self, blocks: int) -> list[str]:
        """Replicas where a prompt of this many blocks may meet an obstacle or wait."""
        return [self.names[place] for place in np.flatnonzero(self.room <= blocks).tolist()]

    def check(self, place: int, load: ReplicaLoad) -> None:
        self.complete()
        columns = (*self._load_columns, *self._cost_columns, *self._room_columns)
        recorded = tuple([column[place] for column in columns])
        wanted = (*_load_numbers(load), *_cost_numbers(load), *_room_numbers(load))
        assert recorded == wanted, f"{recorded} is recorded for replica {place}, which has {wanted}"


def _columns(rows: Iterable[tuple[float, ...]]) -> list["array[float]"]:
    return [array("d", column) for column in zip(*rows, strict=True)]


def _put(columns: list["array[float]"], place: int, numbers: tuple[float, ...]) -> None:
    for column, number in zip(columns, numbers, strict=True):
        column[place] = number


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
        expected = held[:] if extensions else held
        for replica, blocks in extensions.items():  # few, so that a loop over an `array` is fastest
            expected[places[replica]] = blocks
        self.held = np.frombuffer(held, np.int64)
        self.expected = np.frombuffer(expected, np.int64)
        #: places of replicas where part of the prefix is still being computed
        self.ahead = [place for place in map(places.__getitem__, extensions) if expected[place] > held[place]]
        self.used: Lengths | None = None
        self._views = views
        self._not_live = not_live
        if used is not None:
            self.used = np.zeros(len(views), np.int64)
            for replica, blocks in used.items():
                self.used[places[replica]] = blocks

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

    def holders(self, blocks: int) -> int:
        self.loads.complete()
        holds = (self.expected >= blocks) & (self.loads.unavailable == 0)
        holds[[*self._not_live, *self.excluded]] = False
        return int(holds.sum())

    def longest_known(self) -> int:
        return int(max(self.held.max(), self.expected.max()))
