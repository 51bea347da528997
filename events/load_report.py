"""A replica's load report, and the prefill cost model that is fitted to its measured steps.

The cost of a prefill has four parts: per prompt, per computed token, per pair of computed tokens, and per pair of a
computed token and a cached token before it. The mean rate (replica/engine/throughput.py) does not suffice to compare
long prompts with short ones, or many with few: attention makes cost grow faster than length, and every prompt has a
fixed cost, however short its uncached part. Cached context has a separate part because its cost differs by engine.

Replicas report sums over their steps (`PrefillSums`); a router may add the sums of several replicas before fitting.
The fit is non-negative least squares, regularized towards the mean rate, so that steps that are all alike yield that
rate. A pair with a cached token never costs more than a pair of computed tokens: otherwise a few noisy steps would make
a prompt dearer after a cached prefix than without one. Errors are relative to the step's duration; otherwise long
prompts alone would determine the cost of short ones.
Pure: durations are parameters.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import combinations_with_replacement, repeat, starmap
from operator import add, itemgetter, le, mul
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
    partial_hit_tokens: int = 0  #: the part of `hit_tokens` copied from partially matching blocks
    host_hit_tokens: int = 0  #: the part of `hit_tokens` loaded from the host tier
    disk_hit_tokens: int = 0  #: the part of `hit_tokens` loaded from the disk tier
    demoted_tokens: int = 0  #: evicted from the pool, and kept in a tier
    promoted_tokens: int = 0  #: loaded from a tier into the pool
    tier_evicted_tokens: int = 0  #: evicted from the last tier that held them
    tier_failures: dict[str, int] = {}  #: blocks that a tier could not keep or give back, by kind of failure


class TierLoad(msgspec.Struct, frozen=True, array_like=True):
    """The state of one tier below the pool."""

    medium: str  #: CPU or DISK
    total_blocks: int
    used_blocks: int
    load_block_s: float  #: measured time to bring one block up into the pool


class PrefillWork(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The amount of work in prefilling parts of one or more prompts."""

    prompts: int
    tokens: int
    pairs: float  #: sum over the tokens of the computed tokens before each in its prompt
    context: float  #: sum over the tokens of the cached tokens before each


class PrefillCost(msgspec.Struct, frozen=True, array_like=True):
    """The cost of a prefill in seconds, by parts, as fitted to measured steps."""

    prompt_s: float  #: per prompt, however short its uncached part
    token_s: float  #: per computed token
    pair_s: float  #: per pair of a computed token and a computed token before it
    context_s: float = 0.0  #: per pair of a computed token and a cached token before it

    def seconds(self, cached: int, tokens: int) -> float:
        """Return the time to compute `tokens` of one prompt after `cached` tokens."""
        return self.prompt_s + tokens * (self.token_s + self.pair_s * (tokens / 2) + self.context_s * cached)

    def total(self, work: PrefillWork) -> float:
        return (
            work.prompts * self.prompt_s
            + work.tokens * self.token_s
            + work.pairs * self.pair_s
            + work.context * self.context_s
        )

    def times(self, factor: float) -> "PrefillCost":
        """Return the cost on a replica that takes `factor` times as long."""
        return PrefillCost(self.prompt_s * factor, self.token_s * factor, self.pair_s * factor, self.context_s * factor)


class LoadReport(msgspec.Struct, frozen=True, kw_only=True):
    """A replica's load: sent after a step, and repeated with every heartbeat."""

    epoch: int
    step: int
    ts: float
    running: int
    waiting: int
    queued_prefill_tokens: int  #: uncached prompt tokens not yet computed, of running and waiting requests
    decode_context_tokens: int  #: KV tokens of the decoding requests
    free_blocks: int  #: blocks that can be allocated: free or evictable, hence not pinned
    cached_free_blocks: int  #: the part of `free_blocks` that still holds cached KV
    total_blocks: int
    prefill_tokens_per_s: float  #: measured
    decode_step_s: float  #: measured
    counters: CacheCounters
    #: router id -> highest request id accepted from it; later requests are in transit and not counted above
    accepted: dict[str, int] = {}
    draining: bool = False
    pinned_blocks: int = 0  #: distinct pinned blocks, in use or not
    prefill_cost: PrefillCost | None = None  #: None if only the rate is known
    queued_prefill_s: float | None = None  #: time for `queued_prefill_tokens` by `prefill_cost`; None if unknown
    queued_prefill: PrefillWork | None = None  #: the work in `queued_prefill_tokens`; None if unknown
    prefill_sums: list[float] | None = None  #: `PrefillSums` of all steps since the start; None if not measured
    #: free blocks that the waiting requests will take, estimated at their arrival; None if unknown
    waiting_blocks: int | None = None
    tiers: tuple[TierLoad, ...] = ()  #: below the pool, the fastest first


#: Factor by which a step's weight shrinks with every later step, so that about the last 100 count. Not tuned.
DECAY = 0.99
#: Weight of the regularization towards the mean rate, in steps. Not tuned; with 1, replicas that had run few steps
#: underestimated long prompts.
PRIOR_STEPS = 0.1
#: Shorter steps count as if they took this long; otherwise the last few tokens of a prompt would outweigh all else.
SHORTEST_S = 0.001
#: Relative weight always added to the diagonal: parts that differ by less are indistinguishable in 53 bits.
_ALIKE = 1e-9
#: Bounds on the nonzero sums of real steps; the products formed of sums within them fit a float.
_LEAST, _MOST = 1e-30, 1e60
#: Factor by which a product may exceed its bound: sums are differences of totals with days of rounding errors.
_ROUNDED = 1.001

#: A step's row holds the four parts of its work and its seconds, all divided by its seconds. The sums are of the upper
#: triangle of the row's outer square, row by row: parts by parts, parts alone and, last, the number of steps.
_WIDTH = 5
SUMS = _WIDTH * (_WIDTH + 1) // 2
_PLACES = [[0] * _WIDTH for _ in range(_WIDTH)]
for _place, (_i, _j) in enumerate(combinations_with_replacement(range(_WIDTH), 2)):
    _PLACES[_i][_j] = _PLACES[_j][_i] = _place
#: For each pair of parts, their product, and their two squares: all in the same order of pairs.
_PAIRS = [(i, j) for i in range(_WIDTH) for j in range(i)]
_products = itemgetter(*[_PLACES[i][j] for i, j in _PAIRS])
_squares = itemgetter(*[_PLACES[i][i] for i, _ in _PAIRS])
_other_squares = itemgetter(*[_PLACES[j][j] for _, j in _PAIRS])
_PROMPT, _TOKEN, _PAIR, _CONTEXT, _ONE = range(_WIDTH)
#: The sums of parts alone, and of all pairs of parts; then the two parts of each pair, from a sequence of the parts.
_parts_alone = itemgetter(*[_PLACES[part][_ONE] for part in range(_ONE)])
_parts_by_parts = itemgetter(*[_PLACES[i][j] for i in range(_ONE) for j in range(_ONE)])
_left_parts = itemgetter(*[i for i in range(_ONE) for _ in range(_ONE)])
_right_parts = itemgetter(*[j for _ in range(_ONE) for j in range(_ONE)])
#: For each sum, the item whose index is the number of its factors that are divided by a step's duration.
_by_durations = itemgetter(*[(i != _ONE) + (j != _ONE) for i, j in combinations_with_replacement(range(_WIDTH), 2)])


class PrefillSpan(NamedTuple):
    """Tokens `start` to `end` of a prompt whose first `cached` tokens came from the cache."""

    cached: int
    start: int
    end: int


def work_of(spans: Iterable[PrefillSpan]) -> PrefillWork:
    """Return the work of computing these spans. A prompt is counted once, with its first chunk."""
    prompts, tokens, pairs, context = 0, 0, 0.0, 0.0
    for cached, start, end in spans:
        count = end - start
        cached = min(cached, start)  # a preempted request may have found more at its next admission
        prompts += start == cached
        tokens += count
        pairs += count * ((start + end) / 2 - cached)
        context += count * cached
    return PrefillWork(prompts, tokens, pairs, context)


@dataclass(slots=True)
class PrefillSums:
    """Sums over steps. With `decay` below 1, older steps count less."""

    decay: float = 1.0
    values: list[float] = field(default_factory=lambda: [0.0] * SUMS)

    def observe(self, work: PrefillWork, seconds: float) -> None:
        if work.tokens <= 0 or seconds <= 0:
            return
        most = max(seconds, SHORTEST_S)
        row = (work.prompts / most, work.tokens / most, work.pairs / most, work.context / most, seconds / most)
        kept = self.values if self.decay == 1 else map(mul, self.values, repeat(self.decay))
        self.values = list(map(add, kept, starmap(mul, combinations_with_replacement(row, 2))))


def steps_of(sums: Sequence[float]) -> float:
    """Return the number of steps in the sums."""
    return sums[-1]


def are_possible(sums: Sequence[float]) -> bool:
    """Return whether real steps can have these sums: in range, and no product above the bound its squares set."""
    # Without a Python loop, as every report of a step with prefill is checked.
    some = list(filter(None, sums))
    if some and not _LEAST < min(some) <= max(some) < _MOST:
        return False
    products, bounds = _products(sums), map(mul, map(mul, _squares(sums), _other_squares(sums)), repeat(_ROUNDED))
    return all(map(le, map(mul, products, products), bounds))  # False if any number is NaN


def fit(sums: Sequence[float], tokens_per_s: float) -> PrefillCost:
    """Fit the cost by parts. With no observed steps, or no valid fit, it is the mean rate alone."""
    cost = _fit_parts(sums, tokens_per_s)
    if cost.context_s <= cost.pair_s:
        return cost
    # At the bound, both kinds of pairs cost the same: fit them as one part.
    alike = _fit_parts(_pairs_alike(sums), tokens_per_s)
    return PrefillCost(alike.prompt_s, alike.token_s, alike.pair_s, alike.pair_s)


def _pairs_alike(sums: Sequence[float]) -> list[float]:
    """Return the sums of the same steps with pairs of both kinds counted as pairs of computed tokens."""
    merged = list(sums)
    for part in (_PROMPT, _TOKEN, _ONE):
        merged[_PLACES[_PAIR][part]] += merged[_PLACES[_CONTEXT][part]]
    merged[_PLACES[_PAIR][_PAIR]] += 2 * merged[_PLACES[_PAIR][_CONTEXT]] + merged[_PLACES[_CONTEXT][_CONTEXT]]
    for place in _PLACES[_CONTEXT]:
        merged[place] = 0.0
    return merged


def _fit_parts(sums: Sequence[float], tokens_per_s: float) -> PrefillCost:
    """Fit the cost by parts without a bound between them."""
    plain = (0.0, 1 / tokens_per_s, 0.0, 0.0)
    used = [part for part in range(_ONE) if sums[_PLACES[part][part]] > 0]
    while _TOKEN in used:
        parts = _solve(sums, used, plain)
        if parts is None:
            break
        wrong = [part for part in used if not parts[part] > 0]
        if not wrong:
            return PrefillCost(*parts)
        # Keep the token part: if it is not positive, another part is too large.
        others = [part for part in wrong if part != _TOKEN] or [part for part in used if part != _TOKEN]
        if not others:
            break
        weight = {part: abs(parts[part]) * sums[_PLACES[part][part]] ** 0.5 for part in others}
        used.remove(max(others, key=weight.__getitem__))
    return PrefillCost(*plain)


def slowness(sums: Sequence[float], cost: PrefillCost) -> float:
    """Return the ratio of measured to predicted step durations, above 0; 1 without steps."""
    parts = (cost.prompt_s, cost.token_s, cost.pair_s, cost.context_s)
    predicted = sum(map(mul, parts, _parts_alone(sums)))
    total = sum(map(mul, map(mul, _parts_by_parts(sums), _left_parts(parts)), _right_parts(parts)))
    return predicted / total if predicted > 0 and total > 0 else 1.0


def scaled(sums: Sequence[float], factor: float) -> list[float]:
    """Return the sums of the same steps with every duration divided by `factor`."""
    return list(map(mul, sums, _by_durations((1.0, factor, factor * factor))))


def _solve(sums: Sequence[float], used: Sequence[int], plain: Sequence[float]) -> list[float] | None:
    """Return the least-squares solution over the parts in `used`, others zero. None if no steps have these sums."""
    draw = PRIOR_STEPS / (steps_of(sums) + PRIOR_STEPS) + _ALIKE
    matrix, goal = [], []
    for at, part in enumerate(used):
        places = _PLACES[part]
        row = [sums[places[other]] for other in used]
        goal.append(sums[places[_ONE]] + draw * row[at] * plain[part])
        row[at] *= 1 + draw
        matrix.append(row)
    solved = _eliminate(matrix, goal)
    if solved is None:
        return None
    parts = [0.0] * _ONE
    for part, value in zip(used, solved, strict=True):
        parts[part] = value
    return parts


def _eliminate(matrix: list[list[float]], goal: list[float]) -> list[float] | None:
    """Solve by Gaussian elimination without pivoting: regularized normal equations are positive definite.

    Returns None if these are not.
    """
    size = len(goal)
    for at, pivot in enumerate(matrix):
        if not pivot[at] > 0:
            return None
        for below in range(at + 1, size):
            row = matrix[below]
            ratio = row[at] / pivot[at]
            goal[below] -= ratio * goal[at]
            for place in range(at + 1, size):  # what is left of it is not read again
                row[place] -= ratio * pivot[place]
    solved = [0.0] * size
    for at in reversed(range(size)):
        rest = sum([matrix[at][place] * solved[place] for place in range(at + 1, size)])
        solved[at] = (goal[at] - rest) / matrix[at][at]
    return solved
