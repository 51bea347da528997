"""A tenant's limits and its usage of requests and tokens.

Pure: the time is an argument, and so is the record of the usage, which several routers may share (`shared_usage.py`).

A prompt is charged when its request begins, generated tokens when the request ends, as their number is not known
before. That may overdraw a rate; the tenant's next request is then refused until the debt is repaid. So no tenant
exceeds its rate in the long run, and within one minute a tenant gets at most two minutes' worth plus what its running
requests generate.
"""

from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from ..errors import PromptOverLimit, RateLimited

Positive = Annotated[int, Meta(ge=1)]
#: Tolerance in tokens: a client that waited for exactly `retry_after_s` must not fail because of rounding.
ROUNDING = 1e-6
#: Retry-After if too many requests run; when one will end is unknown.
RUNNING_RETRY_S = 1.0


class TenantLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The limits of one tenant in the keys file; None: no limit."""

    requests_per_minute: Positive | None = None
    tokens_per_minute: Positive | None = None  #: prompt tokens, cached or not, plus generated tokens
    max_running: Positive | None = None  #: concurrent requests, including waiting ones
    max_prompt_tokens: Positive | None = None  #: length of each prompt
    global_priority: bool = False  #: whether a priority below 0 also puts its requests ahead of other tenants'
    weight: Annotated[float, Meta(gt=0)] = 1.0  #: share of the replicas relative to other tenants while requests wait


#: Numbers in local or shared memory.
Floats: TypeAlias = "list[float] | memoryview[float]"


@dataclass(slots=True, frozen=True)
class UsageRecord:
    """One tenant's usage, all numbers initially 0. Changed only while holding the lock."""

    requests: Floats = field(default_factory=lambda: [0.0, 0.0])  #: see `TokenBucket`
    tokens: Floats = field(default_factory=lambda: [0.0, 0.0])
    running: Floats = field(default_factory=lambda: [0.0])  #: number of running requests per router
    router: int = 0  #: index of this router in `running`
    lock: AbstractContextManager[None] = field(default_factory=nullcontext)  #: reusable context manager


class TokenBucket:
    """A token bucket that holds up to one minute's worth, refills continuously and may be overdrawn."""

    __slots__ = ("_numbers", "capacity")

    def __init__(self, per_minute: int, numbers: Floats) -> None:
        """`numbers`: the amount missing from a full bucket, and the time of that amount (monotonic seconds)."""
        self.capacity = per_minute
        self._numbers = numbers

    def level(self, now: float) -> float:
        """The amount available now; negative: a debt."""
        return self.capacity - self._missing(now)

    def take(self, amount: float, now: float) -> None:
        """Take an amount, even if the bucket holds less; a negative amount is put back."""
        numbers = self._numbers
        numbers[0] = max(0.0, self._missing(now) + amount)
        numbers[1] = max(now, numbers[1])

    def wait_s(self, amount: float, now: float) -> float:
        """Seconds until the bucket holds this amount or, if that exceeds its capacity, until it is full."""
        missing = min(amount, self.capacity) - self.level(now)
        return 0.0 if missing < ROUNDING else missing * 60 / self.capacity

    def _missing(self, now: float) -> float:
        missing, since = self._numbers
        return max(0.0, missing - max(0.0, now - since) * self.capacity / 60)


@dataclass(slots=True, frozen=True)
class RateStatus:
    """The current state of one of a tenant's rates."""

    per_minute: int
    remaining: int
    reset_s: float  #: seconds until a full minute's worth is available again


class RateLimiter:
    """One tenant's limits, enforced across all routers that share the record, and this router's own totals."""

    def __init__(self, tenant: str, limits: TenantLimits, record: UsageRecord | None = None) -> None:
        self.tenant = tenant
        self.running = 0  #: requests running at this router
        self.requests = 0
        self.prompt_tokens = 0
        self.generated_tokens = 0
        self.refusals: Counter[str] = Counter()  #: refused requests by the limit they reached
        self._limits = limits
        self._record = record = UsageRecord() if record is None else record
        self._buckets: dict[str, TokenBucket] = {}
        if limits.requests_per_minute is not None:
            self._buckets["requests"] = TokenBucket(limits.requests_per_minute, record.requests)
        if limits.tokens_per_minute is not None:
            self._buckets["tokens"] = TokenBucket(limits.tokens_per_minute, record.tokens)

    def check(self, prompts: Sequence[int], now: float, *, at_least: bool = False) -> None:
        """Raise RateLimited or PromptOverLimit if a request with prompts of these lengths cannot begin now.

        `at_least`: the lengths are lower bounds.
        """
        limits = self._limits
        if limits.max_prompt_tokens is not None and max(prompts, default=0) > limits.max_prompt_tokens:
            self.refusals["max_prompt_tokens"] += 1
            raise PromptOverLimit(max(prompts), limits.max_prompt_tokens, at_least=at_least)
        if limits.max_running is not None and sum(self._record.running) >= limits.max_running:
            self._refuse("max_running", limits.max_running, RUNNING_RETRY_S)
        for name, bucket in self._buckets.items():
            if wait_s := bucket.wait_s(1 if name == "requests" else max(1, sum(prompts)), now):
                self._refuse(f"{name}_per_minute", bucket.capacity, wait_s)

    def begin(self, prompts: Sequence[int], now: float) -> None:
        """Begin a request; call exactly one of `end` and `refund` later. Raises like `check`, then changes nothing."""
        with self._record.lock:
            self.check(prompts, now)
            self._charge(1, sum(prompts), now)

    def refund(self, prompts: Sequence[int], now: float) -> None:
        """Refund a request that began and was then not accepted."""
        with self._record.lock:
            self._charge(-1, -sum(prompts), now)

    def end(self, generated_tokens: int, now: float) -> None:
        """End a request, whatever its outcome."""
        assert self.running > 0, f"tenant {self.tenant}: more requests end than began"
        self.running -= 1
        self.generated_tokens += generated_tokens
        with self._record.lock:
            self._add_running(-1)
            if bucket := self._buckets.get("tokens"):
                bucket.take(generated_tokens, now)

    def status(self, now: float) -> dict[str, RateStatus]:
        """The states of the tenant's limited rates, by what they limit: `requests`, `tokens`."""
        return {
            name: RateStatus(bucket.capacity, max(0, int(bucket.level(now))), bucket.wait_s(bucket.capacity, now))
            for name, bucket in self._buckets.items()
        }

    def _charge(self, requests: int, prompt_tokens: int, now: float) -> None:
        self.running += requests
        self._add_running(requests)
        self.requests += requests
        self.prompt_tokens += prompt_tokens
        for name, bucket in self._buckets.items():
            bucket.take(requests if name == "requests" else prompt_tokens, now)

    def _add_running(self, requests: int) -> None:
        """Adjust this router's count, not below 0: a successor process may have cleared it already."""
        running, router = self._record.running, self._record.router
        running[router] = max(0.0, running[router] + requests)

    def _refuse(self, limit: str, value: int, retry_after_s: float) -> None:
        self.refusals[limit] += 1
        raise RateLimited(self.tenant, limit, value, retry_after_s)
