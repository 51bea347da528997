"""What a tenant may use and has used: its limits, and an account of its requests and tokens.

Pure: the time comes in, and so does the place where the numbers stand, which several routers may share (accounts.py).
Knows no keys (tenants.py), no HTTP and no queue.

A prompt is paid for when its request is let in, what is generated when the request is over: nobody knows it before.
That may leave the tenant in debt, which the next request waits for. So in the long run nobody gets more than the rate,
and in a minute at most two minutes' worth and what its running requests generate.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Annotated, Protocol

import msgspec
from msgspec import Meta

from ..errors import PromptOverLimit, RateLimited

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


class Numbers(Protocol):
    """A few floats: of a list, or in memory that is shared."""

    def __getitem__(self, place: int, /) -> float: ...
    def __setitem__(self, place: int, value: float, /) -> None: ...
    def __iter__(self) -> Iterator[float]: ...


def _two_zeros() -> Numbers:
    return [0.0, 0.0]


@dataclass(slots=True, frozen=True)
class Book:
    """Where the numbers of one account stand. All of them are 0 at first; they change under the lock alone."""

    requests: Numbers = field(default_factory=_two_zeros)  #: see `TokenBucket`
    tokens: Numbers = field(default_factory=_two_zeros)
    running: Numbers = field(default_factory=lambda: [0.0])  #: requests under way, by router
    seat: int = 0  #: of this router among them
    lock: AbstractContextManager[None] = field(default_factory=nullcontext)  #: entered again and again


class TokenBucket:
    """Holds up to a minute's worth, fills steadily, and may be overdrawn."""

    __slots__ = ("_numbers", "capacity")

    def __init__(self, per_minute: int, numbers: Numbers | None = None) -> None:
        """`numbers`: what is missing from a full bucket, and at which time."""
        self.capacity = per_minute
        self._numbers = _two_zeros() if numbers is None else numbers

    def level(self, now: float) -> float:
        """What may be taken now; negative: a debt."""
        return self.capacity - self._missing(now)

    def take(self, amount: float, now: float) -> None:
        """Take it, whether it is there or not; a negative amount is given back."""
        numbers = self._numbers
        numbers[0] = max(0.0, self._missing(now) + amount)
        numbers[1] = max(now, numbers[1])

    def wait_s(self, amount: float, now: float) -> float:
        """Until so much is there; of what exceeds the capacity, until the bucket is full."""
        missing = min(amount, self.capacity) - self.level(now)
        return 0.0 if missing < ROUNDING else missing * 60 / self.capacity

    def _missing(self, now: float) -> float:
        missing, since = self._numbers
        return max(0.0, missing - max(0.0, now - since) * self.capacity / 60)


@dataclass(slots=True, frozen=True)
class Standing:
    """How one rate of a tenant stands."""

    per_minute: int
    remaining: int
    reset_s: float  #: until the whole minute's worth is there again


class Meter:
    """The account of one tenant. Its totals are those of this router; its limits hold for all that share its book."""

    def __init__(self, tenant: str, limits: TenantLimits, book: Book | None = None) -> None:
        self.tenant = tenant
        self.limits = limits
        self.requests = 0
        self.prompt_tokens = 0
        self.generated_tokens = 0
        self.refusals: Counter[str] = Counter()  #: by the limit that was met
        self._book = book = Book() if book is None else book
        self._running = 0
        self._requests = _bucket(limits.requests_per_minute, book.requests)
        self._tokens = _bucket(limits.tokens_per_minute, book.tokens)

    @property
    def running(self) -> int:
        """Requests that this router runs."""
        return self._running

    def check(self, prompts: Sequence[int], now: float) -> None:
        """Whether a request with prompts of so many tokens might begin now. Raises RateLimited and PromptOverLimit."""
        limits = self.limits
        if limits.max_prompt_tokens is not None and max(prompts, default=0) > limits.max_prompt_tokens:
            self.refusals["max_prompt_tokens"] += 1
            raise PromptOverLimit(max(prompts), limits.max_prompt_tokens)
        if limits.max_running is not None and sum(self._book.running) >= limits.max_running:
            self._refuse("max_running", limits.max_running, RUNNING_RETRY_S)
        if self._requests is not None and (wait_s := self._requests.wait_s(1, now)):
            self._refuse("requests_per_minute", self._requests.capacity, wait_s)
        if self._tokens is not None and (wait_s := self._tokens.wait_s(max(1, sum(prompts)), now)):
            self._refuse("tokens_per_minute", self._tokens.capacity, wait_s)

    def begin(self, prompts: Sequence[int], now: float) -> None:
        """A request begins; `end` or `undo` follows exactly once. Raises as `check` does, and then nothing began."""
        with self._book.lock:
            self.check(prompts, now)
            self._book_request(1, sum(prompts), now)

    def undo(self, prompts: Sequence[int], now: float) -> None:
        """A request that began was not taken: nothing is paid for it."""
        with self._book.lock:
            self._book_request(-1, -sum(prompts), now)

    def end(self, generated_tokens: int, now: float) -> None:
        """A request is over, however it ended."""
        assert self._running > 0, f"tenant {self.tenant}: more requests end than began"
        self._running -= 1
        self.generated_tokens += generated_tokens
        with self._book.lock:
            self._book_running(-1)
            if self._tokens is not None:
                self._tokens.take(generated_tokens, now)

    def standing(self, now: float) -> dict[str, Standing]:
        """Of the tenant's rates, by what they count: requests, tokens."""
        buckets = {"requests": self._requests, "tokens": self._tokens}
        return {name: _standing(bucket, now) for name, bucket in buckets.items() if bucket is not None}

    def _book_request(self, requests: int, prompt_tokens: int, now: float) -> None:
        self._running += requests
        self._book_running(requests)
        self.requests += requests
        self.prompt_tokens += prompt_tokens
        if self._requests is not None:
            self._requests.take(requests, now)
        if self._tokens is not None:
            self._tokens.take(prompt_tokens, now)

    def _book_running(self, requests: int) -> None:
        """Not below 0: whoever took the seat over meanwhile has declared over what this router still runs."""
        book = self._book
        book.running[book.seat] = max(0.0, book.running[book.seat] + requests)

    def _refuse(self, limit: str, value: int, retry_after_s: float) -> None:
        self.refusals[limit] += 1
        raise RateLimited(self.tenant, limit, value, retry_after_s)


def _bucket(per_minute: int | None, numbers: Numbers) -> TokenBucket | None:
    return None if per_minute is None else TokenBucket(per_minute, numbers)


def _standing(bucket: TokenBucket, now: float) -> Standing:
    return Standing(bucket.capacity, max(0, int(bucket.level(now))), bucket.wait_s(bucket.capacity, now))
