"""A replica's smoothed speed: prefill tokens per second and seconds per decode step. Pure: durations are passed in.

The router divides by these to predict a time to first token, so they must describe the recent past without jumping
after one unusual step.
"""

from dataclasses import dataclass, field

from ...events.load_report import DECAY, PrefillSums, fit, steps_of
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


@dataclass(slots=True)
class SmoothedRates:
    prefill_tokens_per_s: float
    decode_step_s: float
    _recent: PrefillSums = field(default_factory=lambda: PrefillSums(DECAY))
    _since_start: PrefillSums = field(default_factory=PrefillSums)
    _cost: PrefillCost | None = None
    _unfitted: int = 0  #: prefills since the last fit

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
