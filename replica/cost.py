"""What a prefill costs, learned from steps: a part for each prompt, one for each token, one for each pair of tokens.

Pure: durations come in. The rate of rates.py is the mean over what was computed lately; a router that compares a long
prompt with a short one, or many with few, needs the parts: attention makes long prompts dearer than their length, and
every prompt costs something however short its uncached rest is.

A weighted least squares fit over the last steps (older ones fade), drawn a little towards the plain rate, so that steps
which are all alike leave it there. Errors count in proportion to the step's duration, or long prompts alone would say
what short ones cost.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..events.messages import PrefillCost

#: Share of its weight that a step keeps with every later one: the last 100 count. Not tuned.
FADING = 0.99
#: How strongly the fit is drawn towards the plain rate, in shares of what was observed. Not tuned.
DRAW = 0.01

_Vector = tuple[float, float, float]


@dataclass(slots=True)
class PrefillCostFit:
    """Sums over steps, faded; the fit is solved when it is asked for."""

    _squares: list[list[float]] = field(default_factory=lambda: [[0.0] * 3 for _ in range(3)])
    _products: list[float] = field(default_factory=lambda: [0.0] * 3)

    def observe(self, prompts: int, tokens: int, pairs: float, seconds: float) -> None:
        """One step computed so many tokens of so many prompts; `pairs`: for each token those it attends to."""
        if tokens <= 0 or seconds <= 0:
            return
        weighted = (prompts / seconds, tokens / seconds, pairs / seconds)  # the goal is then 1
        for row, left in zip(self._squares, weighted, strict=True):
            for place, right in enumerate(weighted):
                row[place] = FADING * row[place] + left * right
        self._products = [FADING * old + left for old, left in zip(self._products, weighted, strict=True)]

    def cost(self, tokens_per_s: float) -> PrefillCost:
        """The parts; the plain rate alone as long as nothing was observed."""
        prior = (0.0, 1 / tokens_per_s, 0.0)
        for used in ((0, 1, 2), (0, 1), (1, 2)):
            parts = self._solve(used, prior)
            if parts is not None and min(parts) >= 0 and parts[1] > 0:
                return PrefillCost(prompt_s=parts[0], token_s=parts[1], pair_s=parts[2])
        return PrefillCost(prompt_s=0.0, token_s=prior[1], pair_s=0.0)

    def _solve(self, used: Sequence[int], prior: _Vector) -> _Vector | None:
        """Minimum over the parts in `used`, the others being none; None when they cannot be told apart."""
        matrix = [[self._squares[i][j] * (1 + DRAW * (i == j)) for j in used] for i in used]
        goal = [self._products[i] + DRAW * self._squares[i][i] * prior[i] for i in used]
        found = _eliminate(matrix, goal)
        if found is None:
            return None
        parts = dict(zip(used, found, strict=True))
        return parts.get(0, 0.0), parts.get(1, 0.0), parts.get(2, 0.0)


def _eliminate(matrix: list[list[float]], goal: list[float]) -> list[float] | None:
    """Gauss without pivoting: normal equations with a drawn diagonal are positive definite."""
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
        rest = sum(matrix[at][place] * solved[place] for place in range(at + 1, size))
        solved[at] = (goal[at] - rest) / matrix[at][at]
    return solved
