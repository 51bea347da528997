"""A tenant's rate limits: what it may use in any interval, and when it may retry."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from homing.router.errors import PromptOverLimit, RateLimited
from homing.router.tenants.rate_limits import RateLimiter, TenantLimits, TokenBucket, UsageRecord

#: Per request: seconds since the previous one, prompt tokens, generated tokens.
Requests = list[tuple[float, int, int]]
requests = st.lists(st.tuples(st.floats(0, 30, allow_nan=False), st.integers(1, 300), st.integers(0, 100)), max_size=60)


def meter(**limits: int) -> RateLimiter:
    return RateLimiter("acme", TenantLimits(**limits))


def let_in(account: RateLimiter, prompt: int, now: float) -> bool:
    """Return whether a request with such a prompt was admitted."""
    try:
        account.begin([prompt], now)
    except RateLimited:
        return False
    return True


@given(requests)
def test_in_any_time_a_tenant_gets_its_rate_and_one_burst(asked: Requests) -> None:
    """This is exact for requests; for tokens, one request may exceed the bucket's last token."""
    account, now = meter(requests_per_minute=6, tokens_per_minute=600), 0.0
    begun: list[tuple[float, int]] = []
    for pause, prompt, generated in asked:
        now += pause
        if let_in(account, prompt, now):
            account.end(generated, now)
            begun.append((now, prompt + generated))

    for first in range(len(begun)):
        for last in range(first, len(begun)):
            span, part = begun[last][0] - begun[first][0], begun[first : last + 1]
            assert len(part) <= 6 + span / 10 + 1e-6
            assert sum(tokens for _, tokens in part[:-1]) <= 600 + span * 10 + 100 + 1e-6


@given(requests)
def test_who_comes_back_when_told_is_let_in(asked: Requests) -> None:
    """Retry-After is a promise, however large the prompt and the debt."""
    account, now = meter(requests_per_minute=6, tokens_per_minute=200), 0.0
    for pause, prompt, generated in asked:
        now += pause
        for _ in range(2):  # the other limit may delay it once more
            now += wait_s(account, prompt, now)
        account.begin([prompt], now)
        account.end(generated, now)


def wait_s(account: RateLimiter, prompt: int, now: float) -> float:
    """Return how long a request with such a prompt is told to wait."""
    try:
        account.check([prompt], now)
    except RateLimited as refusal:
        return refusal.retry_after_s or 0.0
    return 0.0


def test_a_prompt_larger_than_the_bucket_waits_for_a_full_one() -> None:
    """Otherwise it would never be admitted; the debt must be earned back before the next request."""
    account = meter(tokens_per_minute=60)
    assert let_in(account, 100, now=0.0)
    account.end(20, now=0.0)

    assert not let_in(account, 1, now=60.0)
    assert let_in(account, 1, now=61.0)


def test_running_requests_are_bounded_and_counted_back() -> None:
    """This includes failed requests: each admitted request ends once."""
    account = meter(max_running=2)
    begun = [let_in(account, 5, 0.0) for _ in range(3)]
    account.end(0, 0.0)

    assert begun == [True, True, False]
    assert let_in(account, 5, 0.0)
    assert account.refusals == {"max_running": 1}


def test_each_prompt_is_bounded_by_itself() -> None:
    """Three short prompts in one request are not a long one. It is a caller's mistake, so waiting cannot help."""
    account = meter(max_prompt_tokens=10)
    account.check([10, 10, 10], 0.0)

    with pytest.raises(PromptOverLimit, match="max_prompt_tokens"):
        account.check([3, 11], 0.0)


def test_a_refusal_names_tenant_and_limit_and_takes_nothing() -> None:
    """Refused requests must not count against the tenant."""
    account = meter(requests_per_minute=1)
    assert let_in(account, 5, 0.0)

    for now in (1.0, 30.0, 59.0):
        with pytest.raises(RateLimited, match=r"'acme' .* requests_per_minute of 1; try again in") as refused:
            account.check([5], now)
        assert refused.value.retry_after_s == pytest.approx(60 - now)
    assert let_in(account, 5, 60.0)


def test_the_standing_says_what_is_left_and_when_all_is() -> None:
    """Clients use these numbers to pace themselves."""
    account = meter(requests_per_minute=60, tokens_per_minute=600)
    account.begin([100], 0.0)

    standing = account.status(now=0.0)
    assert (standing["requests"].remaining, standing["requests"].reset_s) == (59, pytest.approx(1.0))
    assert (standing["tokens"].remaining, standing["tokens"].reset_s) == (500, pytest.approx(10.0))


def test_without_limits_only_the_account_is_kept() -> None:
    """No request is refused, and metrics still show each tenant's usage."""
    account = meter()
    for _ in range(1000):
        assert let_in(account, 10_000, 0.0)
    account.end(7, 0.0)

    assert (account.requests, account.prompt_tokens, account.generated_tokens, account.running) == (
        1000,
        10_000_000,
        7,
        999,
    )
    assert account.status(0.0) == {}


def test_a_bucket_never_holds_more_than_a_minute_s_worth() -> None:
    """A quiet night must not allow a burst."""
    bucket = TokenBucket(60, [0.0, 0.0])
    bucket.take(60, 0.0)

    assert [bucket.level(now) for now in (0.0, 1.0, 60.0, 3600.0)] == [0, 1, 60, 60]


def test_a_request_that_was_not_taken_costs_nothing() -> None:
    """A full queue is not the tenant's fault."""
    account = meter(requests_per_minute=1, tokens_per_minute=100, max_running=1)
    account.begin([40, 60], 0.0)

    account.refund([40, 60], 0.0)

    assert (account.requests, account.prompt_tokens, account.running) == (0, 0, 0)
    assert let_in(account, 100, 0.0)


@given(requests, st.lists(st.integers(0, 2), min_size=60, max_size=60))
def test_routers_with_one_book_let_in_what_one_router_would(asked: Requests, dealt: list[int]) -> None:
    """This holds whichever router the kernel gives each connection to."""
    limits = TenantLimits(requests_per_minute=6, tokens_per_minute=600, max_running=2)
    rates, running = UsageRecord(), [0.0, 0.0, 0.0]
    several = [
        RateLimiter("acme", limits, UsageRecord(rates.requests, rates.tokens, running, seat)) for seat in range(3)
    ]
    alone, now, under_way = RateLimiter("acme", limits), 0.0, []
    for (pause, prompt, generated), seat in zip(asked, dealt, strict=False):
        now += pause
        begun = let_in(several[seat], prompt, now)
        assert begun == let_in(alone, prompt, now)
        under_way += [(seat, generated)] * begun
        if len(under_way) == 2:
            seat, generated = under_way.pop(0)
            several[seat].end(generated, now)
            alone.end(generated, now)
        assert sum(account.running for account in several) == alone.running
