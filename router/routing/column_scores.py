"""The decision of expected_ttft.py for hundreds of candidates, computed with array operations on columns.

The same operations run in the same order, so both give equal numbers to the last bit. The exception is the wait for
memory or a slot, which needs an exponential function: where a request may have to wait, costs start as lower bounds,
and those that may still be among the best are computed as in expected_ttft.py, lowest bound first.
"""

from collections.abc import Sequence
from random import Random

import numpy as np
import numpy.typing as npt

from .load_columns import CandidateColumns, Flags, Numbers
from .policy.base import NEGLIGIBLE, ManyCandidates, Prompt, Score, expected_ttft_s
from .policy.expected_ttft import BUSY_LIMIT, LONG_PREFILL_TOKENS, RECOMPUTED_SHARE, Weights, cost_limit

Places = npt.NDArray[np.intp]
#: As arrays, because operations on an array and a Python number take half as long again.
_ZERO, _HALF, _ONE = np.array(0.0), np.array(0.5), np.array(1.0)


def _least_of(numbers: Numbers | Flags) -> float:
    """`numbers.min()`, which takes four times as long for hundreds of numbers."""
    return float(numbers[numbers.argmin()])


class ColumnScores:
    """The counterpart of `CandidateScores`. `holds_requests`: whether a replica with a full queue gets no requests."""

    __slots__ = ("_all_have_room", "_candidates", "_prompt", "_sees_cache", "_used", "_weights", "obstructed")

    def __init__(
        self, prompt: Prompt, candidates: ManyCandidates, weights: Weights, *, holds_requests: bool, sees_cache: bool
    ) -> None:
        assert isinstance(candidates, CandidateColumns), f"{type(candidates)} has no columns"
        self._prompt = prompt
        self._candidates = candidates
        self._weights = weights
        self._sees_cache = sees_cache
        self._used = 0 if candidates.used is None else candidates.used
        #: Every replica takes requests and has room, as is usual: a third of the operations can be skipped.
        self._all_have_room = _least_of(candidates.loads.room) > prompt.blocks + 1  # 1: far above rounding errors
        if not self._all_have_room or candidates.excluded:
            candidates.loads.complete()
        self.obstructed = self._obstructed(holds_requests)

    def _obstructed(self, holds_requests: bool) -> Flags | None:
        """Flags of the candidates that cannot be chosen; None if every candidate can."""
        loads, candidates = self._candidates.loads, self._candidates
        if self._all_have_room and not candidates.excluded:
            return None
        found: Flags = loads.unavailable > 0
        if candidates.excluded:
            found[list(candidates.excluded)] = True
        if holds_requests and not self._all_have_room:
            missing = self._prompt.blocks + 1 - candidates.expected
            if candidates.stale:
                missing[candidates.stale] = self._prompt.blocks + 1
            found |= (loads.queues > 0) & ((loads.excess_requests > 0) | (loads.free_blocks < missing))
        return found

    def busy(self, weight: float) -> tuple[Numbers, bool]:
        """The busy shares including this decision, and whether no idle replica can be chosen."""
        loads, shares = self._candidates.loads, np.asarray(self._weights.busy)
        busy: Numbers | Flags = loads.has_queue
        if not self._all_have_room:
            busy = np.maximum(busy, loads.spare_blocks + self._used <= self._prompt.blocks)
        taken = busy if self.obstructed is None else busy + self.obstructed
        return shares + (busy - shares) * weight, _least_of(taken) > 0

    def choose(self, preferred: str | None, rng: Random) -> Score | None:
        """The best candidate, with ties broken as in `expected_ttft.py`; None if all have an obstacle."""
        uncached = self._uncached()
        prefill_s = self._prefill_s(uncached)
        ttft_s, waits = self._ttft_s(uncached, prefill_s)
        others_s = self._others_s(uncached, prefill_s)
        ties = self._ties(uncached, ttft_s, waits, others_s)
        if not len(ties):
            return None
        place = self._break_tie(ties, uncached, preferred, rng)
        ttft, others = float(ttft_s[place]), float(others_s[place])
        return Score(self._candidates[place], int(uncached[place]), ttft, None, others, ttft + others)

    def _uncached(self) -> Numbers:
        total = float(self._prompt.tokens)
        if not self._sees_cache:
            return np.full(len(self._candidates), total)
        found: Numbers = np.subtract(total, self._candidates.expected * self._prompt.block_size)
        if _least_of(found) < 1.0:
            np.maximum(found, 1.0, out=found)
        if self._candidates.stale:
            found[self._candidates.stale] = total
        return found

    def _prefill_s(self, uncached: Numbers | float) -> Numbers:
        loads, cached = self._candidates.loads, self._prompt.tokens - uncached
        seconds: Numbers = loads.pair_s * (uncached * _HALF)
        # In place from here on, which takes two thirds of the time.
        seconds += loads.token_s
        seconds += loads.context_s * cached
        seconds *= uncached
        seconds += loads.prompt_s
        return seconds

    def _ttft_s(self, uncached: Numbers, prefill_s: Numbers) -> tuple[Numbers, Flags | None]:
        """Seconds until the first token without any wait for memory or a slot; flags of replicas that may add one."""
        prompt, candidates, loads = self._prompt, self._candidates, self._candidates.loads
        seconds = loads.busy_until - prompt.now
        np.maximum(seconds, _ZERO, out=seconds)
        seconds += prefill_s
        steps = loads.queued + uncached
        steps /= loads.max_batched_tokens
        np.ceil(steps, steps)
        steps += _HALF
        for place in candidates.ahead:
            steps[place] += loads.has_queue[place]
        if self._all_have_room:
            steps *= loads.running_step_s
            seconds += steps
            return seconds, None
        working = (loads.running > 0) | (loads.spare_blocks <= prompt.blocks)
        seconds += np.where(working, steps * loads.decode_step_s, 0.0)
        room = loads.spare_blocks - prompt.blocks
        has_room = (room > NEGLIGIBLE * loads.uncertain_blocks) & (loads.excess_requests <= 0)
        return seconds, working & ~has_room

    def _others_s(self, uncached: Numbers, prefill_s: Numbers) -> Numbers:
        weights = self._weights
        prompt, loads, least = self._prompt, self._candidates.loads, _least_of(uncached)
        slower_s: Numbers = loads.decode_step_s - _least_of(loads.decode_step_s)
        slower_s *= loads.answer_tokens
        share = LONG_PREFILL_TOKENS / max(LONG_PREFILL_TOKENS, least)
        if least == float(self._prompt.tokens):  # no replica has any of it cached
            extra_s, answers_s = None, prefill_s * share
        else:
            least_s = self._prefill_s(least)
            extra_s, answers_s = prefill_s - least_s, least_s * share  # `extra_s` is 0 for the best holder
            np.maximum(extra_s, _ZERO, out=extra_s)
            answers_s += extra_s
        answers_s *= loads.running
        answers_s += slower_s
        answers_s *= weights.answers
        if extra_s is None:
            return answers_s
        busy = np.asarray(weights.busy)
        if busy[busy.argmax()] > BUSY_LIMIT:
            busy = np.minimum(busy, BUSY_LIMIT)
        factor = _ONE - busy
        np.divide(weights.all_busy, factor, factor)
        factor += RECOMPUTED_SHARE * (loads.unused_blocks * prompt.block_size <= uncached)
        extra_s *= factor
        extra_s += answers_s
        return extra_s

    def _ties(self, uncached: Numbers, ttft_s: Numbers, waits: Flags | None, others_s: Numbers) -> Places:
        """The candidates without an obstacle whose cost equals the least within the estimate's error."""
        cost_s = ttft_s + others_s
        if self.obstructed is not None:
            cost_s[self.obstructed] = np.inf
        known = cost_s if waits is None else np.where(waits, np.inf, cost_s)
        limit = cost_limit(_least_of(known))
        if waits is not None:
            candidates_left = np.flatnonzero(waits & (cost_s < np.inf) & (cost_s <= limit))
            for place in candidates_left[np.argsort(cost_s[candidates_left], kind="stable")].tolist():
                if cost_s[place] > limit:
                    break
                ttft_s[place] = expected_ttft_s(self._prompt, self._candidates[place], int(uncached[place]))
                known[place] = cost = float(ttft_s[place] + others_s[place])
                limit = min(limit, cost_limit(cost))
        found: Places = (known <= limit if limit < np.inf else known < limit).nonzero()[0]
        return found

    def _break_tie(self, ties: Places, uncached: Numbers, preferred: str | None, rng: Random) -> int:
        tied, loads, places = _least(ties, uncached), self._candidates.loads, self._candidates.places
        if preferred is not None and (place := places.get(preferred)) is not None and place in tied:
            return place
        tied = _least(_least(tied, loads.requests), loads.occupied_blocks)
        if len(tied) == 1:
            return int(tied[0])
        by_name: Sequence[int] = tied[np.argsort(loads.ranks[tied])].tolist()
        return rng.choice(by_name)


def _least(rows: Places, ranks: Numbers) -> Places:
    if len(rows) == 1:
        return rows
    ranks = ranks[rows]
    best: Places = rows[ranks == _least_of(ranks)]
    return best
