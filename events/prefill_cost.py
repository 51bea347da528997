"""What a prefill costs, learned from steps: a part for each prompt, one for each token, one for each pair of tokens
computed, one for each token computed and each cached token that it attends to.

Pure: durations come in. A replica sends the sums of its steps with its load reports, and whoever reads them may add the
sums of several replicas before the parts are worked out.

The rate of replica/engine/throughput.py is the mean over what was computed lately; a router that compares a long prompt
with a
short one, or many with few, needs the parts: attention makes long prompts dearer than their length, and every prompt
costs something however short its uncached rest is. Context has a part of its own, as engines differ in what it costs.

Least squares, none of the parts below zero, drawn towards the plain rate, so that steps which are all alike leave it
there. Errors count in proportion to the step's duration, or long prompts alone would say what short ones cost.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from .wire.messages import PrefillCost, PrefillWork

#: Share of its weight that a step keeps with every later one: the last 100 count. Not tuned.
FADING = 0.99
#: How many steps the draw towards the plain rate is worth. Not tuned; 1 made replicas that had taken few steps
#: underestimate long prompts.
DRAW_STEPS = 0.1
#: Errors of steps that are shorter count as of one so long: the last few tokens of a prompt would outweigh all else.
SHORTEST_S = 0.001
#: Shares of what was observed that count as nothing: parts nearer to each other cannot be told apart in 53 bits.
_ALIKE = 1e-9

#: A step's row is the four parts of its work, and its seconds, all over its seconds; the sums are those of the upper
#: triangle of its square, row by row: parts by parts, parts alone, and, last, the number of steps.
_WIDTH = 5
SUMS = _WIDTH * (_WIDTH + 1) // 2
_PLACES = [[0] * _WIDTH for _ in range(_WIDTH)]
for _place, (_i, _j) in enumerate((i, j) for i in range(_WIDTH) for j in range(i, _WIDTH)):
    _PLACES[_i][_j] = _PLACES[_j][_i] = _place
_PROMPT, _TOKEN, _PAIR, _CONTEXT, _ONE = range(_WIDTH)


class PrefillSpan(NamedTuple):
    """Tokens of one prompt, from `start` to `end`, of which the first `cached` came from a cache."""

    cached: int
    start: int
    end: int


def work_of(spans: Iterable[PrefillSpan]) -> PrefillWork:
    """What it is to compute them; a prompt counts where it begins, not with each of its chunks."""
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
        """One step took so long."""
        if work.tokens <= 0 or seconds <= 0:
            return
        most = max(seconds, SHORTEST_S)
        row = (work.prompts / most, work.tokens / most, work.pairs / most, work.context / most, seconds / most)
        squares = [row[i] * row[j] for i in range(_WIDTH) for j in range(i, _WIDTH)]
        fading = self.fading
        self.values = [fading * old + square for old, square in zip(self.values, squares, strict=True)]


def steps_of(sums: Sequence[float]) -> float:
    """How many steps they tell of."""
    return sums[-1]


def fit(sums: Sequence[float], tokens_per_s: float) -> PrefillCost:
    """The parts; the plain rate alone as long as nothing was observed."""
    plain = (0.0, 1 / tokens_per_s, 0.0, 0.0)
    used = [part for part in range(_ONE) if sums[_PLACES[part][part]] > 0]
    while _TOKEN in used:
        parts = _solve(sums, used, plain)
        wrong = [part for part in used if not parts[part] > 0]
        if not wrong:
            return PrefillCost(*parts)
        # The token part stays: what it lacks, one of the others has too much of.
        others = [part for part in wrong if part != _TOKEN] or [part for part in used if part != _TOKEN]
        if not others:
            break
        weight = {part: abs(parts[part]) * sums[_PLACES[part][part]] ** 0.5 for part in others}
        used.remove(max(others, key=weight.__getitem__))
    return PrefillCost(*plain)


def slowness(sums: Sequence[float], cost: PrefillCost) -> float:
    """How many times as long as `cost` says the steps took; 1 when there were none."""
    parts = (cost.prompt_s, cost.token_s, cost.pair_s, cost.context_s)
    foreseen = sum([part * sums[_PLACES[at][_ONE]] for at, part in enumerate(parts)])
    squares = [sums[_PLACES[i][j]] * left * right for i, left in enumerate(parts) for j, right in enumerate(parts)]
    return foreseen / sum(squares) if foreseen > 0 else 1.0


def scaled(sums: Sequence[float], factor: float) -> list[float]:
    """The same steps, as if each had taken `factor` times less."""
    square = factor * factor
    ones = {_PLACES[part][_ONE] for part in range(_ONE)}
    return [
        value if place == SUMS - 1 else value * factor if place in ones else value * square
        for place, value in enumerate(sums)
    ]


def _solve(sums: Sequence[float], used: Sequence[int], plain: Sequence[float]) -> list[float]:
    """Minimum over the parts in `used`, the others being none."""
    draw = DRAW_STEPS / (steps_of(sums) + DRAW_STEPS) + _ALIKE
    matrix = [[sums[_PLACES[i][j]] * (1 + draw * (i == j)) for j in used] for i in used]
    goal = [sums[_PLACES[i][_ONE]] + draw * sums[_PLACES[i][i]] * plain[i] for i in used]
    parts = [0.0] * _ONE
    for part, value in zip(used, _eliminate(matrix, goal), strict=True):
        parts[part] = value
    return parts


def _eliminate(matrix: list[list[float]], goal: list[float]) -> list[float]:
    """Gauss without pivoting: normal equations with a drawn diagonal are positive definite."""
    size = len(goal)
    for at in range(size):
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
