"""The loads of hundreds of replicas as columns of numbers, and the candidates of one decision among them.

Pure. A decision then takes some operations on arrays instead of a loop in Python; `Candidate`s are made where somebody
looks at them. Costs are in the policies.
"""

from array import array
from collections.abc import Collection, Mapping, Sequence
from typing import overload

import numpy as np
import numpy.typing as npt

from ..backend import FeedState
from .policy.base import LIVE, NEGLIGIBLE, QUEUE_AHEAD, STALE, UNCERTAIN, Candidate, ManyCandidates
from .replica_load import ReplicaLoad

Numbers = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]
Lengths = npt.NDArray[np.int64]


def _numbers(load: ReplicaLoad) -> tuple[float, ...]:
    """In the order of the attributes of `LoadColumns`."""
    cost = load.prefill_cost
    uncertain = UNCERTAIN * max(1, load.total_blocks - load.free_blocks)
    excess = load.requests + 1 - load.max_running_requests
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
        uncertain,
        load.max_batched_tokens,
        excess,
        queues := load.waiting >= QUEUE_AHEAD,
        barred := load.draining or load.warming or load.silent,
        -np.inf if excess > 0 or queues or barred else load.spare_blocks - NEGLIGIBLE * uncertain,
        load.decode_step_s if load.running else 0.0,
        load.queued_prefill_tokens > 0,
    )


class LoadColumns:
    """A number of each replica in each column; integers are exact, as they are far below 2 ** 53."""

    def __init__(self, names: Sequence[str], loads: Sequence[ReplicaLoad]) -> None:
        self.names = names
        self.ranks = np.argsort(np.argsort(names))  #: places in the order of names
        #: A number is written to an array ten times as fast as to numpy's view of it.
        self._columns = [array("d", column) for column in zip(*map(_numbers, loads), strict=True)]
        (
            self.prompt_s,
            self.token_s,
            self.pair_s,
            self.context_s,
            self.busy_until,  #: long past where nothing is queued
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
            self.excess_requests,  #: with one more, beyond the slots
            self.queues,  #: so many wait that a full replica is saturated
            self.barred,  #: takes no new requests at all
            self.room,  #: where it exceeds a prompt's blocks, nothing is in that prompt's way
            self.running_step_s,  #: a decode step where something runs
            self.has_queue,
        ) = map(np.frombuffer, self._columns)

    def put(self, place: int, load: ReplicaLoad) -> None:
        for column, number in zip(self._columns, _numbers(load), strict=True):
            column[place] = number

    def check(self, place: int, load: ReplicaLoad) -> None:
        noted = tuple([column[place] for column in self._columns])
        assert noted == _numbers(load), f"{noted} is noted of replica {place}, which has {_numbers(load)}"


class CandidateColumns(ManyCandidates):
    """All joined replicas as they stand for one prompt, by their place in the order of joining."""

    def __init__(
        self,
        loads: LoadColumns,
        places: Mapping[str, int],
        views: Sequence[ReplicaLoad],
        doubted: Mapping[int, FeedState],
        held: "array[int]",
        extended: Mapping[str, int],
        used: Mapping[str, int] | None,
        excluded: Collection[int],
    ) -> None:
        """`doubted`: feeds that are not live. `extended`: expected prefixes longer than `held`. `used`: None where it
        does not matter; replicas left out have none.
        """
        self.loads = loads  #: as of the decision: it changes later
        self.places = places
        self.excluded = excluded
        self.stale = [place for place, feed in doubted.items() if feed is STALE]
        self.held = self.expected = np.frombuffer(held, np.int64)
        if extended:
            self.expected = self.held.copy()
            self.expected[[places[replica] for replica in extended]] = list(extended.values())
        self.used: Lengths | None = None
        self._views = views
        self._doubted = doubted
        if used is not None:
            self.used = np.zeros(len(views), np.int64)
            for replica, blocks in used.items():
                self.used[places[replica]] = blocks
            # Requests ahead take what is free, and evict what it holds; of a prompt its last blocks first.
            room = np.maximum(loads.spare_blocks, 0).astype(np.int64)
            self.expected = np.minimum(self.expected, self.used + room)
        #: where a part of the prefix is still being computed
        self.ahead = [place for place in map(places.__getitem__, extended) if self.expected[place] > held[place]]

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
            feed=self._doubted.get(place, LIVE),
            load=self._views[place],
            held_blocks=int(self.held[place]),
            expected_blocks=int(self.expected[place]),
            used_blocks=0 if self.used is None else int(self.used[place]),
            excluded=place in self.excluded,
        )

    def longest_live(self) -> int:
        live = self.expected
        if self._doubted:
            live = live.copy()
            live[list(self._doubted)] = 0
        return int(live.max())

    def longest_known(self) -> int:
        return int(max(self.held.max(), self.expected.max()))
