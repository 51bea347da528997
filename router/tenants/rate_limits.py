"""What a tenant may use and has used: its limits, and the usage of its requests and tokens.

Pure: the time is an argument, and so is the record with the numbers, which several routers may share
(`shared_usage.py`).

A prompt is charged when its request begins, generated tokens when the request ends, because their number is not known
before. That may overdraw a rate; the tenant's next request then waits until the debt is repaid. So nobody exceeds the
rate in the long run, and in one minute a tenant gets at most two minutes' worth plus what its running requests
generate.
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
#: In tokens: a client that waits as long as told must not fail because of a float's last digit.
ROUNDING = 1e-6
#: When to try again if too many requests run; nobody knows when one will end.
RUNNING_RETRY_S = 1.0


class TenantLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one tenant of the keys file may use; None: no limit."""

    requests_per_minute: Positive | None = None
    tokens_per_minute: Positive | None = None  #: of prompts, cached or not, and generated
    max_running: Positive | None = None  #: concurrent requests, waiting ones included
    max_prompt_tokens: Positive | None = None  #: of each prompt
    global_priority: bool = False  #: a priority below 0 also puts its requests before those of other tenants
    weight: Annotated[float, Meta(gt=0)] = 1.0  #: share of the replicas relative to other tenants when requests wait


#: A few numbers in local or shared memory.
Floats: TypeAlias = "list[float] | memoryview[float]"


@dataclass(slots=True, frozen=True)
class UsageRecord:
    """The numbers of one tenant, all of them initially 0. Changed only under the lock."""

    requests: Floats = field(default_factory=lambda: [0.0, 0.0])  #: see `TokenBucket`
    tokens: Floats = field(default_factory=lambda: [0.0, 0.0])
    running: Floats = field(default_factory=lambda: [0.0])  #: running requests of each router
    router: int = 0  #: index of this router in `running`
    lock: AbstractContextManager[None] = field(default_factory=nullcontext)  #: can be entered repeatedly


class TokenBucket:
    """Holds up to a minute's worth, fills steadily, and may be overdrawn."""

    __slots__ = ("_numbers", "capacity")

    def __init__(self, per_minute: int, numbers: Floats) -> None:
        """`numbers`: how much is missing from a full bucket, and since when (monotonic seconds)."""
        self.capacity = per_minute
        self._numbers = numbers

    def level(self, now: float) -> float:
        """What can be taken now; negative: a debt."""
        return self.capacity - self._missing(now)

    def take(self, amount: float, now: float) -> None:
        """Take it, even if the bucket holds less; a negative amount is returned to it."""
        numbers = self._numbers
        numbers[0] = max(0.0, self._missing(now) + amount)
        numbers[1] = max(now, numbers[1])

    def wait_s(self, amount: float, now: float) -> float:
        """Time until the bucket holds this much or, for more than its capacity, until it is full."""
        missing = min(amount, self.capacity) - self.level(now)
        return 0.0 if missing < ROUNDING else missing * 60 / self.capacity

    def _missing(self, now: float) -> float:
        missing, since = self._numbers
        return max(0.0, missing - max(0.0, now - since) * self.capacity / 60)


@dataclass(slots=True, frozen=True)
class RateStatus:
    """The current state of one rate of a tenant."""

    per_minute: int
    remaining: int
    reset_s: float  #: until a full minute's worth is available again


class RateLimiter:
    """Limits and totals of one tenant. The limits hold for all routers that share the record; the totals are ours."""

    def __init__(self, tenant: str, limits: TenantLimits, record: UsageRecord | None = None) -> None:
        self.tenant = tenant
        self.running = 0  #: requests that this router runs
        self.requests = 0
        self.prompt_tokens = 0
        self.generated_tokens = 0
        self.refusals: Counter[str] = Counter()  #: by the limit that was reached
        self._limits = limits
        self._record = record = UsageRecord() if record is None else record
        self._buckets: dict[str, TokenBucket] = {}
        if limits.requests_per_minute is not None:
            self._buckets["requests"] = TokenBucket(limits.requests_per_minute, record.requests)
        if limits.tokens_per_minute is not None:
            self._buckets["tokens"] = TokenBucket(limits.tokens_per_minute, record.tokens)

    def check(self, prompts: Sequence[int], now: float, *, at_least: bool = False) -> None:
        """Raise RateLimited or PromptOverLimit if a request with prompts of these lengths could not begin now.

        `at_least`: they may turn out to be longer.
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
        """Begin a request; exactly one of `end` and `undo` follows. Raises as `check` does, without a change."""
        with self._record.lock:
            self.check(prompts, now)
            self._charge(1, sum(prompts), now)

    def undo(self, prompts: Sequence[int], now: float) -> None:
        """Refund a request that was not accepted."""
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
        """The tenant's rates by what they limit: requests, tokens."""
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
        """Not below 0: a successor of this router may already have cleared the number."""
        running, router = self._record.running, self._record.router
        running[router] = max(0.0, running[router] + requests)

    def _refuse(self, limit: str, value: int, retry_after_s: float) -> None:
        self.refusals[limit] += 1
        raise RateLimited(self.tenant, limit, value, retry_after_s)
