"""A replica's load report, and the cost model of prefills that its measured steps fit.

A prefill costs a part for each prompt, one for each token, one for each pair of tokens computed, and one for each token
computed and each cached token that it attends to. The mean rate (replica/engine/throughput.py) is not enough for a
router that compares a long prompt with a short one, or many with few: attention makes long prompts cost more than their
length, and every prompt costs something however short its uncached rest is. Cached context has a part of its own, as
engines differ in what it costs.

Replicas report the sums of their steps (`PrefillSums`); a router may add the sums of several replicas before it fits
the parts. The fit is least squares with no part below zero, drawn towards the mean rate, so that steps which are all
alike give that rate. Errors count in proportion to the step's duration; otherwise long prompts alone would decide what
short ones cost. Pure: durations come in by parameter.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import combinations_with_replacement, starmap
from operator import add, mul
from typing import NamedTuple

import msgspec


class CacheCounters(msgspec.Struct, frozen=True, kw_only=True):
    """Totals since the replica's start."""

    query_tokens: int = 0
    hit_tokens: int = 0
    evicted_tokens: int = 0
    collisions: int = 0
    preemptions: int = 0
    generated_tokens: int = 0
    prefilled_tokens: int = 0
    pins_set: int = 0
    pins_refused: int = 0
    pins_expired: int = 0
    pins_broken: int = 0
    partial_hit_tokens: int = 0  #: of `hit_tokens`, those copied out of a block that then differs


class PrefillWork(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The work of computing a part of one or several prompts."""

    prompts: int
    tokens: int
    pairs: float  #: for each of those tokens, the computed ones of its prompt before it
    context: float  #: for each of those tokens, the cached ones before it


class PrefillCost(msgspec.Struct, frozen=True, array_like=True):
    """Seconds of a prefill by parts, as fitted to measured steps."""

    prompt_s: float  #: for each prompt, however short its uncached rest
    token_s: float  #: for each token computed
    pair_s: float  #: for each token computed and each computed one before it
    context_s: float = 0.0  #: for each token computed and each cached one before it

    def seconds(self, cached: int, tokens: int) -> float:
        """To compute `tokens` behind `cached` ones."""
        return self.prompt_s + tokens * (self.token_s + self.pair_s * (tokens / 2) + self.context_s * cached)

    def total(self, work: PrefillWork) -> float:
        return (
            work.prompts * self.prompt_s
            + work.tokens * self.token_s
            + work.pairs * self.pair_s
            + work.context * self.context_s
        )

    def times(self, factor: float) -> "PrefillCost":
        """The cost on a replica that takes `factor` times as long."""
        return PrefillCost(self.prompt_s * factor, self.token_s * factor, self.pair_s * factor, self.context_s * factor)


class LoadReport(msgspec.Struct, frozen=True, kw_only=True):
    """A replica's load: sent after a step, and repeated with every heartbeat."""

    epoch: int
    step: int
    ts: float
    running: int
    waiting: int
    queued_prefill_tokens: int  #: uncached prompt tokens not yet computed, of running and waiting requests
    decode_context_tokens: int  #: tokens in KV of requests that decode
    free_blocks: int  #: allocatable: never used or evictable, hence not pinned
    cached_free_blocks: int  #: those of `free_blocks` that still hold cached KV
    total_blocks: int
    prefill_tokens_per_s: float  #: measured
    decode_step_s: float  #: measured
    counters: CacheCounters
    #: router id -> highest request id taken from it: later ones are on the way and not counted above
    accepted: dict[str, int] = {}
    draining: bool = False
    pinned_blocks: int = 0  #: distinct ones, in use or not
    prefill_cost: PrefillCost | None = None  #: None: only the rate is known
    queued_prefill_s: float | None = None  #: to compute `queued_prefill_tokens`, by that cost; None: not known
    queued_prefill: PrefillWork | None = None  #: those tokens by parts; None: not known
    prefill_sums: list[float] | None = None  #: `PrefillSums` of all steps since the start; None: not measured
    #: free blocks that the waiting requests will take, as of their arrival; None: not known
    waiting_blocks: int | None = None
    #: running requests by what they have generated: none, 1, 2 to 3, 4 to 7, ... tokens; trailing zeros are left out
    running_generated: list[int] = []


#: Share of its weight that a step keeps with every later one: the last 100 count. Not tuned.
FADING = 0.99
#: How many steps the draw towards the plain rate is worth. Not tuned; 1 made replicas that had taken few steps
#: underestimate long prompts.
DRAW_STEPS = 0.1
#: Shorter steps count as if they took this long; otherwise the last few tokens of a prompt would outweigh all else.
SHORTEST_S = 0.001
#: Relative weight added to the diagonal: parts that differ by less cannot be told apart in 53 bits.
_ALIKE = 1e-9
#: Between these lie the sums of any steps; the products that are formed of them fit a float.
_LEAST, _MOST = 1e-30, 1e60
#: By how much a product may exceed its bound: sums are differences of totals, which have been rounded for days.
_ROUNDED = 1.001

#: A step's row is the four parts of its work, and its seconds, all over its seconds; the sums are those of the upper
#: triangle of its square, row by row: parts by parts, parts alone, and, last, the number of steps.
_WIDTH = 5
SUMS = _WIDTH * (_WIDTH + 1) // 2
_PLACES = [[0] * _WIDTH for _ in range(_WIDTH)]
for _place, (_i, _j) in enumerate(combinations_with_replacement(range(_WIDTH), 2)):
    _PLACES[_i][_j] = _PLACES[_j][_i] = _place
#: The places of each product of two parts, and of their squares.
_PRODUCTS = [(_PLACES[i][j], _PLACES[i][i], _PLACES[j][j]) for i in range(_WIDTH) for j in range(i)]
_PROMPT, _TOKEN, _PAIR, _CONTEXT, _ONE = range(_WIDTH)


class PrefillSpan(NamedTuple):
    """Tokens of one prompt, from `start` to `end`, of which the first `cached` came from a cache."""

    cached: int
    start: int
    end: int


def work_of(spans: Iterable[PrefillSpan]) -> PrefillWork:
    """The work of computing these spans; a prompt counts once, with its first chunk."""
    prompts, tokens, pairs, context = 0, 0, 0.0, 0.0
    for cached, start, end in spans:
        count = end - start
        cached = min(cached, start)  # a request that was preempted since may have found more at its next admission
        prompts += start == cached
        tokens += count
        pairs += count * ((start + end) / 2 - cached)
        context += count * cached
    return PrefillWork(prompts, tokens, pairs, context)


@dataclass(slots=True)
class PrefillSums:
    """Sums over steps; with `fading` below 1 older ones count less."""

    fading: float = 1.0
    values: list[float] = field(default_factory=lambda: [0.0] * SUMS)

    def observe(self, work: PrefillWork, seconds: float) -> None:
        if work.tokens <= 0 or seconds <= 0:
            return
        most = max(seconds, SHORTEST_S)
        row = (work.prompts / most, work.tokens / most, work.pairs / most, work.context / most, seconds / most)
        kept = self.values if self.fading == 1 else [self.fading * old for old in self.values]
        self.values = list(map(add, kept, starmap(mul, combinations_with_replacement(row, 2))))


def steps_of(sums: Sequence[float]) -> float:
    """The number of steps in the sums."""
    return sums[-1]


def are_possible(sums: Sequence[float]) -> bool:
    """Whether steps can have these sums: of squares and products, none beyond what any hardware computes."""
    if not all(value == 0 or _LEAST < value < _MOST for value in sums):
        return False
    return all(sums[both] * sums[both] <= sums[one] * sums[other] * _ROUNDED for both, one, other in _PRODUCTS)


def fit(sums: Sequence[float], tokens_per_s: float) -> PrefillCost:
    """The cost by parts; the plain rate alone while nothing was observed."""
    plain = (0.0, 1 / tokens_per_s, 0.0, 0.0)
    used = [part for part in range(_ONE) if sums[_PLACES[part][part]] > 0]
    while _TOKEN in used:
        parts = _solve(sums, used, plain)
        if parts is None:
            break
        wrong = [part for part in used if not parts[part] > 0]
        if not wrong:
            return PrefillCost(*parts)
        # The token part stays: if it is not positive, another part is too large.
        others = [part for part in wrong if part != _TOKEN] or [part for part in used if part != _TOKEN]
        if not others:
            break
        weight = {part: abs(parts[part]) * sums[_PLACES[part][part]] ** 0.5 for part in others}
        used.remove(max(others, key=weight.__getitem__))
    return PrefillCost(*plain)


def slowness(sums: Sequence[float], cost: PrefillCost) -> float:
    """Measured over predicted duration of the steps, above 0; 1 when there were none."""
    parts = (cost.prompt_s, cost.token_s, cost.pair_s, cost.context_s)
    predicted = sum([part * sums[_PLACES[at][_ONE]] for at, part in enumerate(parts)])
    squares = [sums[_PLACES[i][j]] * left * right for i, left in enumerate(parts) for j, right in enumerate(parts)]
    total = sum(squares)
    return predicted / total if predicted > 0 and total > 0 else 1.0


def scaled(sums: Sequence[float], factor: float) -> list[float]:
    """The same steps, with every duration divided by `factor`."""
    square = factor * factor
    ones = {_PLACES[part][_ONE] for part in range(_ONE)}
    return [
        value if place == SUMS - 1 else value * factor if place in ones else value * square
        for place, value in enumerate(sums)
    ]


def _solve(sums: Sequence[float], used: Sequence[int], plain: Sequence[float]) -> list[float] | None:
    """Least-squares solution over the parts in `used`; the others are zero. None if no steps have these sums."""
    draw = DRAW_STEPS / (steps_of(sums) + DRAW_STEPS) + _ALIKE
    matrix = [[sums[_PLACES[i][j]] * (1 + draw * (i == j)) for j in used] for i in used]
    goal = [sums[_PLACES[i][_ONE]] + draw * sums[_PLACES[i][i]] * plain[i] for i in used]
    solved = _eliminate(matrix, goal)
    if solved is None:
        return None
    parts = [0.0] * _ONE
    for part, value in zip(used, solved, strict=True):
        parts[part] = value
    return parts


def _eliminate(matrix: list[list[float]], goal: list[float]) -> list[float] | None:
    """Gaussian elimination without pivoting: normal equations with a drawn diagonal are positive definite.

    None if these are not.
    """
    size = len(goal)
    for at in range(size):
        if not matrix[at][at] > 0:
            return None
        for below in range(at + 1, size):
            ratio = matrix[below][at] / matrix[at][at]
            goal[below] -= ratio * goal[at]
            for place in range(at, size):
                matrix[below][place] -= ratio * matrix[at][place]
    solved = [0.0] * size
    for at in reversed(range(size)):
        rest = sum([matrix[at][place] * solved[place] for place in range(at + 1, size)])
        solved[at] = (goal[at] - rest) / matrix[at][at]
    return solved
