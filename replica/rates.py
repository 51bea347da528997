"""How fast this replica is: prefill tokens per second and seconds per decode step, smoothed. Pure: durations come in.

The router divides by these to foresee a time to first token, so both must describe the recent past and neither may
jump on one odd step.
"""

from dataclasses import dataclass, field

from ..events.messages import PrefillCost
from .cost import PrefillCostFit

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
    _fit: PrefillCostFit = field(default_factory=PrefillCostFit)

    def __post_init__(self) -> None:
        self.check()

    @property
    def prefill_cost(self) -> PrefillCost:
        """What a prefill costs, by parts."""
        return self._fit.cost(self.prefill_tokens_per_s)

    def observe(
        self, prefill_tokens: int, decode_rows: int, seconds: float, *, prompts: int = 1, pairs: float = 0.0
    ) -> None:
        """Learn from one step that computed so many tokens of so many prompts and decoded so many requests.

        `pairs`: for each prompt token computed, the number of those before it.
        """
        if seconds <= 0:
            return
        if prefill_tokens == 0 and decode_rows:
            self.decode_step_s += DECODE_WEIGHT * (seconds - self.decode_step_s)
        elif prefill_tokens:
            prefill_s = seconds - self._share_of_decode(decode_rows, seconds)
            self.learn(prompts, prefill_tokens, pairs, prefill_s)
            if prefill_tokens >= MIN_PREFILL_TOKENS:
                self._observe_prefill(prefill_tokens, prefill_s)

    def learn(self, prompts: int, tokens: int, pairs: float, seconds: float) -> None:
        """What a prefill alone took, for its cost by parts."""
        self._fit.observe(prompts, tokens, pairs, seconds)

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
