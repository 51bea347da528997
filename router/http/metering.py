"""Tenants' limits at the HTTP front: asks the meter whether a request may begin, and tells clients how they stand."""

from collections.abc import Iterable, Sequence

from ..tenants.api_keys import Tenant
from ..tenants.rate_limits import Meter
from .front import Front
from .protocol.exchange import Exchange


def check(front: Front, exchange: Exchange, meter: Meter) -> None:
    """Raises RateLimited when the tenant could begin no request now, however small."""
    now = front.monotonic()
    exchange.notes = limit_headers(meter, now)
    meter.check((), now)


def begin(front: Front, exchange: Exchange, meter: Meter, prompts: Sequence[int]) -> None:
    """A request with prompts of so many tokens begins. Raises RateLimited and PromptOverLimit."""
    now = front.monotonic()
    meter.begin(prompts, now)
    exchange.notes = limit_headers(meter, now)


def undo(front: Front, exchange: Exchange, meter: Meter, prompts: Sequence[int]) -> None:
    """The request that began was not taken."""
    now = front.monotonic()
    meter.undo(prompts, now)
    exchange.notes = limit_headers(meter, now)


def charge(front: Front, exchange: Exchange, tenant: Tenant, prompts: Sequence[int]) -> None:
    """A request that generates nothing is over as it begins. Raises RateLimited and PromptOverLimit."""
    meter = front.meters.get(tenant.digest)
    if meter is not None:
        begin(front, exchange, meter, prompts)
        meter.end(0, front.monotonic())


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
