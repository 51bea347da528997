"""A replica's smoothed speed, and the prompt tokens that fit into a step. Pure: durations are passed in.

The router divides by these to predict a time to first token, so they must describe the recent past without jumping
after one unusual step.
"""

import math
from dataclasses import dataclass, field

from ...events.load_report import DECAY, PrefillSpan, PrefillSums, fit, steps_of, work_of
from ...events.wire.messages import PrefillCost, PrefillWork

#: A step with fewer prompt tokens measures its fixed cost, not the prefill rate: after a prefix hit on nearly a whole
#: prompt, the "rate" would be a tenth of the true one. Not tuned.
MIN_PREFILL_TOKENS = 32
#: Prefill tokens after which an observation has lost 63 % of its weight: four full default steps. Not tuned.
PREFILL_MEMORY_TOKENS = 8192.0
#: Weight of a new decode step: half of the estimate comes from the last 14 steps. Not tuned.
DECODE_WEIGHT = 0.05
#: Refit at one new step per this many in the sums: fewer change the cost little, and a fit takes 20 µs of a step.
REFIT_SHARE = 16
#: Weight of a step's pace, whose ratio to the fitted cost counts within the bounds. High, because other processes start
#: and end from one moment to the next, and the fit remembers a hundred steps. Not tuned.
PACE_WEIGHT = 0.5
PACE_BOUNDS = 0.25, 16.0


@dataclass(slots=True)
class StepAllowance:
    """The prompt tokens that one step may still compute."""

    seconds: float
    least: int  #: tokens that it computes anyway
    cost: PrefillCost

    def tokens(self, cached: int, start: int) -> int:
        """How many tokens of a prompt fit after its first `start`, of which `cached` came from the cache.

        Each token costs more than the one before it, so this solves a quadratic equation.
        """
        cost, cached = self.cost, min(cached, start)
        seconds = self.seconds - (cost.prompt_s if start == cached else 0.0)
        linear = cost.token_s + cost.pair_s * (start - cached) + cost.context_s * cached
        fit = 0.0 if seconds <= 0 else 2 * seconds / (linear + math.sqrt(linear * linear + 2 * cost.pair_s * seconds))
        return max(0, self.least, int(min(fit, 1e9)))

    def charge(self, seconds: float) -> None:
        """Take the time of something else than prompts from the step."""
        self.seconds -= seconds
        self.least -= round(seconds / self.cost.token_s) if self.cost.token_s > 0 else 0

    def spend(self, span: PrefillSpan) -> None:
        self.seconds -= self.cost.total(work_of([span]))
        self.least -= span.end - span.start


@dataclass(slots=True)
class SmoothedRates:
    prefill_tokens_per_s: float
    decode_step_s: float
    _recent: PrefillSums = field(default_factory=lambda: PrefillSums(DECAY))
    _since_start: PrefillSums = field(default_factory=PrefillSums)
    _cost: PrefillCost | None = None
    _unfitted: int = 0  #: prefills since the last fit
    _pace: float = 1.0  #: recent steps' seconds by those of the fitted cost

    def __post_init__(self) -> None:
        # Both are divisors.
        assert self.prefill_tokens_per_s > 0, f"prefill rate {self.prefill_tokens_per_s}"
        assert self.decode_step_s > 0, f"decode step {self.decode_step_s}"

    @property
    def prefill_cost(self) -> PrefillCost:
        cost, sums = self._cost, self._recent.values
        if cost is None or self._unfitted * REFIT_SHARE > steps_of(sums):
            cost = self._cost = fit(sums, self.prefill_tokens_per_s)
            self._unfitted = 0
        return cost

    def allowance(self, seconds: float, least: int, *, decodes: bool) -> StepAllowance:
        """The prompts of a step of about so many seconds, decodes included, but at least `least` tokens."""
        left = max(seconds / 2, seconds - self.decode_step_s) if decodes else seconds
        return StepAllowance(left, least, self.prefill_cost.times(self._pace))

    @property
    def prefill_sums(self) -> list[float]:
        """Sums over all prefills since the start, to be combined with those of other replicas."""
        return self._since_start.values

    def observe(self, work: PrefillWork, decode_rows: int, seconds: float) -> None:
        """Learn from one step that did this prefill work and decoded this many requests."""
        if seconds <= 0:
            return
        if work.tokens == 0 and decode_rows:
            self.decode_step_s += DECODE_WEIGHT * (seconds - self.decode_step_s)
        elif work.tokens:
            # The decode rows of a mixed step would have taken a step of their own: deduct it, up to half of this step.
            prefill_s = seconds - (min(self.decode_step_s, seconds / 2) if decode_rows else 0.0)
            low, high = PACE_BOUNDS
            self._pace += PACE_WEIGHT * (min(high, max(low, prefill_s / self.prefill_cost.total(work))) - self._pace)
            self.learn(work, prefill_s)
            if work.tokens >= MIN_PREFILL_TOKENS:
                # Smoothed in seconds per token, weighted by tokens, so that two half chunks count like a whole one.
                weight = min(work.tokens / PREFILL_MEMORY_TOKENS, 0.5)
                per_token = 1 / self.prefill_tokens_per_s
                self.prefill_tokens_per_s = 1 / (per_token + weight * (prefill_s / work.tokens - per_token))

    def learn(self, work: PrefillWork, seconds: float) -> None:
        """Add a prefill that took this long by itself to the sums that the cost is fitted to."""
        self._recent.observe(work, seconds)
        self._since_start.observe(work, seconds)
        self._unfitted += 1
