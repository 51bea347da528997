"""What a tenant may use and has used: its limits, and an account of its requests and tokens.

Pure: the time comes in. Knows no keys (tenants.py), no HTTP and no queue.

A prompt is paid for when its request is let in, what is generated when the request is over: nobody knows it before.
That may leave the tenant in debt, which the next request waits for. So in the long run nobody gets more than the rate,
and in a minute at most two minutes' worth and what its running requests generate.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec import Meta

from .errors import PromptOverLimit, RateLimited

Positive = Annotated[int, Meta(ge=1)]
#: Of a token: who waits as long as it was told must not fail by the last digit of a float.
ROUNDING = 1e-6
#: When a running request may be over; nobody knows.
RUNNING_RETRY_S = 1.0


class TenantLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one tenant of the keys file may use; None: as much as it likes."""

    requests_per_minute: Positive | None = None
    tokens_per_minute: Positive | None = None  #: of prompts, cached or not, and generated ones
    max_running: Positive | None = None  #: requests at a time, waiting ones included
    max_prompt_tokens: Positive | None = None  #: of each prompt
    weight: Annotated[float, Meta(gt=0)] = 1.0  #: share of the replicas when requests wait, beside other tenants'


class TokenBucket:
    """Holds up to a minute's worth, fills steadily, and may be overdrawn."""

    __slots__ = ("_at", "_level", "capacity")

    def __init__(self, per_minute: int) -> None:
        self.capacity = per_minute
        self._level = float(per_minute)
        self._at = 0.0

    def level(self, now: float) -> float:
        """What may be taken now; negative: a debt."""
        if now > self._at:
            self._level = min(self.capacity, self._level + (now - self._at) * self.capacity / 60)
            self._at = now
        return self._level

    def take(self, amount: float, now: float) -> None:
        """Take it, whether it is there or not."""
        self._level = self.level(now) - amount

    def wait_s(self, amount: float, now: float) -> float:
        """Until so much is there; of what exceeds the capacity, until the bucket is full."""
        missing = min(amount, self.capacity) - self.level(now)
        return 0.0 if missing < ROUNDING else missing * 60 / self.capacity


@dataclass(slots=True, frozen=True)
class Standing:
    """How one rate of a tenant stands."""

    per_minute: int
    remaining: int
    reset_s: float  #: until the whole minute's worth is there again


class Meter:
    """The account of one tenant in one router process."""

    def __init__(self, tenant: str, limits: TenantLimits) -> None:
        self.tenant = tenant
        self.limits = limits
        self.running = 0
        self.requests = 0
        self.prompt_tokens = 0
        self.generated_tokens = 0
        self.refusals: Counter[str] = Counter()  #: by the limit that was met
        self._requests = _bucket(limits.requests_per_minute)
        self._tokens = _bucket(limits.tokens_per_minute)

    def check(self, prompts: Sequence[int], now: float) -> None:
        """Whether a request with prompts of so many tokens may begin now. Raises RateLimited and PromptOverLimit."""
        limits = self.limits
        if limits.max_prompt_tokens is not None and max(prompts, default=0) > limits.max_prompt_tokens:
            self.refusals["max_prompt_tokens"] += 1
            raise PromptOverLimit(max(prompts), limits.max_prompt_tokens)
        if limits.max_running is not None and self.running >= limits.max_running:
            self._refuse("max_running", limits.max_running, RUNNING_RETRY_S)
        if self._requests is not None and (wait_s := self._requests.wait_s(1, now)):
            self._refuse("requests_per_minute", self._requests.capacity, wait_s)
        if self._tokens is not None and (wait_s := self._tokens.wait_s(max(1, sum(prompts)), now)):
            self._refuse("tokens_per_minute", self._tokens.capacity, wait_s)

    def begin(self, prompt_tokens: int, now: float) -> None:
        """A request that `check` let in begins; `end` follows exactly once."""
        self.running += 1
        self.requests += 1
        self.prompt_tokens += prompt_tokens
        if self._requests is not None:
            self._requests.take(1, now)
        if self._tokens is not None:
            self._tokens.take(prompt_tokens, now)

    def end(self, generated_tokens: int, now: float) -> None:
        """A request is over, however it ended."""
        assert self.running > 0, f"tenant {self.tenant}: more requests end than began"
        self.running -= 1
        self.generated_tokens += generated_tokens
        if self._tokens is not None:
            self._tokens.take(generated_tokens, now)

    def standing(self, now: float) -> dict[str, Standing]:
        """Of the tenant's rates, by what they count: requests, tokens."""
        buckets = {"requests": self._requests, "tokens": self._tokens}
        return {name: _standing(bucket, now) for name, bucket in buckets.items() if bucket is not None}

    def _refuse(self, limit: str, value: int, retry_after_s: float) -> None:
        self.refusals[limit] += 1
        raise RateLimited(self.tenant, limit, value, retry_after_s)


def _bucket(per_minute: int | None) -> TokenBucket | None:
    return None if per_minute is None else TokenBucket(per_minute)


def _standing(bucket: TokenBucket, now: float) -> Standing:
    return Standing(bucket.capacity, max(0, int(bucket.level(now))), bucket.wait_s(bucket.capacity, now))
