"""How fast an engine is that does not say so: learned from when its tokens come. Pure: durations come in.

Replicas of ours measure their steps themselves (replica/engine/throughput.py). Here only arrival times are seen,
so that network
and the engine's own queue count as part of its pace, as they do for whoever waits.
"""

from collections import deque
from dataclasses import dataclass, field
from statistics import median

#: Before the first observation; small enough that nobody is preferred for being unknown. Not measured.
UNKNOWN_PREFILL_TOKENS_PER_S = 2000.0
UNKNOWN_DECODE_STEP_S = 0.03
#: A first token behind fewer prompt tokens measures the fixed cost of a step and the way there. Not tuned.
MIN_PREFILL_TOKENS = 64
#: First tokens of which the median counts: an engine that compiles something for seconds must not look slow for long
#: (seen with vLLM 0.32: 4 s for the first request with logprobs). Not tuned.
PREFILL_OBSERVATIONS = 15
#: Nothing that comes over a network is faster.
CLOCK_S = 1e-6
#: Weight of one more gap between tokens. Not tuned.
DECODE_WEIGHT = 0.05


@dataclass(slots=True)
class Pace:
    """Rates of one engine; the first observation replaces the guess."""

    prefill_tokens_per_s: float = UNKNOWN_PREFILL_TOKENS_PER_S
    decode_step_s: float = UNKNOWN_DECODE_STEP_S
    _seconds_per_token: deque[float] = field(default_factory=lambda: deque(maxlen=PREFILL_OBSERVATIONS))
    _decode_seen: bool = False

    def first_token(self, tokens: int, seconds: float) -> None:
        """A first token came so long after its request was sent, behind so many uncached tokens, its own included."""
        if tokens < MIN_PREFILL_TOKENS or seconds <= 0:
            return
        self._seconds_per_token.append(max(seconds, CLOCK_S) / tokens)
        self.prefill_tokens_per_s = 1 / median(self._seconds_per_token)

    def next_tokens(self, tokens: int, seconds: float) -> None:
        """So many tokens of one request came so long after those before."""
        if tokens < 1 or seconds <= 0:
            return
        step_s = max(seconds, CLOCK_S) / tokens
        if self._decode_seen:
            step_s = (1 - DECODE_WEIGHT) * self.decode_step_s + DECODE_WEIGHT * step_s
        self._decode_seen = True
        self.decode_step_s = step_s

    def check(self) -> None:
        """Both rates are divided by: they stay above zero."""
        assert self.prefill_tokens_per_s > 0, f"prefill rate {self.prefill_tokens_per_s}"
        assert self.decode_step_s > 0, f"decode step {self.decode_step_s}"
