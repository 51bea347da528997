"""Tenants' limits at the HTTP front: asks the meter whether a request may begin, and tells clients how they stand."""

from collections.abc import Iterable, Sequence

from ..meter import Meter
from .exchange import Exchange
from .front import Front


def check(front: Front, exchange: Exchange, meter: Meter, prompts: Sequence[int] = ()) -> None:
    """Whether the tenant may begin a request with prompts of so many tokens. Raises RateLimited and PromptOverLimit."""
    now = front.monotonic()
    exchange.notes = limit_headers(meter, now)
    meter.check(prompts, now)


def begin(front: Front, exchange: Exchange, meter: Meter, prompt_tokens: int) -> None:
    """A request that was checked begins."""
    now = front.monotonic()
    meter.begin(prompt_tokens, now)
    exchange.notes = limit_headers(meter, now)


def limit_headers(meter: Meter, now: float) -> Iterable[tuple[str, str]]:
    """How the tenant stands, in OpenAI's words."""
    headers = []
    for name, standing in meter.standing(now).items():
        headers += [
            (f"x-ratelimit-limit-{name}", str(standing.per_minute)),
            (f"x-ratelimit-remaining-{name}", str(standing.remaining)),
            (f"x-ratelimit-reset-{name}", f"{standing.reset_s:.3f}s"),
        ]
    return headers
