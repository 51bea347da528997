"""How fast this replica is: prefill tokens per second and seconds per decode step, smoothed. Pure: durations come in.

The router divides by these to foresee a time to first token, so both must describe the recent past and neither may
jump on one odd step.
"""

from dataclasses import dataclass, field

from ...events.load_report import FADING, PrefillSums, fit
from ...events.wire.messages import PrefillCost, PrefillWork

#: A step with fewer prompt tokens measures the fixed cost of a step, not the prefill rate: after a prefix hit of
#: nearly all of a prompt the "rate" would seem a tenth of the true one. Not tuned.
MIN_PREFILL_TOKENS = 32
#: Prefill tokens after which an observation has lost 63 % of its weight; four full default steps. Not tuned.
PREFILL_MEMORY_TOKENS = 8192.0
#: Weight of a new decode step. Half of the estimate is then of the last 14 steps. Not tuned.
DECODE_WEIGHT = 0.05


@dataclass(slots=True)
class Rates:
    """Smoothed rates; `observe` after every step."""

    prefill_tokens_per_s: float
    decode_step_s: float
    _lately: PrefillSums = field(default_factory=lambda: PrefillSums(FADING))
    _since_start: PrefillSums = field(default_factory=PrefillSums)
    _cost: PrefillCost | None = None

    def __post_init__(self) -> None:
        self.check()

    @property
    def prefill_cost(self) -> PrefillCost:
        """What a prefill costs, by parts."""
        cost = self._cost
        if cost is None:
            cost = self._cost = fit(self._lately.values, self.prefill_tokens_per_s)
        return cost

    @property
    def prefill_sums(self) -> list[float]:
        """Of all prefills since the start, for whoever puts several replicas' together."""
        return self._since_start.values

    def observe(self, work: PrefillWork, decode_rows: int, seconds: float) -> None:
        """Learn from one step that did so much prefill and decoded so many requests."""
        if seconds <= 0:
            return
        if work.tokens == 0 and decode_rows:
            self.decode_step_s += DECODE_WEIGHT * (seconds - self.decode_step_s)
        elif work.tokens:
            prefill_s = seconds - self._share_of_decode(decode_rows, seconds)
            self.learn(work, prefill_s)
            if work.tokens >= MIN_PREFILL_TOKENS:
                self._observe_prefill(work.tokens, prefill_s)

    def learn(self, work: PrefillWork, seconds: float) -> None:
        """What a prefill alone took, for its cost by parts."""
        self._lately.observe(work, seconds)
        self._since_start.observe(work, seconds)
        self._cost = None

    def check(self) -> None:
        """Both rates are divided by: they stay above zero."""
        assert self.prefill_tokens_per_s > 0, f"prefill rate {self.prefill_tokens_per_s}"
        assert self.decode_step_s > 0, f"decode step {self.decode_step_s}"

    def _share_of_decode(self, decode_rows: int, seconds: float) -> float:
        """Seconds of a mixed step that its decoding rows would have taken anyway; at most half of it."""
        return min(self.decode_step_s, seconds / 2) if decode_rows else 0.0

    def _observe_prefill(self, tokens: int, seconds: float) -> None:
        # Smoothed in seconds per token, weighted by tokens, so that two half chunks count like one whole.
        weight = min(tokens / PREFILL_MEMORY_TOKENS, 0.5)
        per_token = 1 / self.prefill_tokens_per_s
        self.prefill_tokens_per_s = 1 / (per_token + weight * (seconds / tokens - per_token))
