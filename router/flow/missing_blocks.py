"""Why the cached prefix of a prompt ends where it does. Pure; for people only, no decision depends on it."""

from collections.abc import Callable, Sequence

from ..backend import NEW, Missing
from ..routing.block_history import BlockHistory
from ..routing.policy.base import STALE, Candidate, Prompt


def missing_of(
    prompt: Prompt,
    keys: Sequence[int],
    candidates: Sequence[Candidate],
    chosen: Candidate,
    past: BlockHistory,
    shared_with: Callable[[int], bytes | None],
) -> Missing | None:
    """Why `chosen` has no more of the prompt's full blocks, `keys`. None: it has all that a cache may serve.

    `shared_with`: the tenant that has the same tokens cached, given the number of the first missing block; None: none.
    """
    usable = (prompt.tokens - 1) // prompt.block_size
    cached = 0 if chosen.feed is STALE else min(chosen.expected_blocks, usable)
    if cached >= usable:
        short = f"a prompt of {prompt.tokens} tokens fills no block of {prompt.block_size} before its last token"
        return None if usable else Missing(token=0, reason="short", why=short)
    token = cached * prompt.block_size
    if len(keys) and not len(prompt.hashes):
        return Missing(token=0, reason="scored", why="every prompt token must be computed, to be scored or pooled")
    if chosen.feed is STALE:
        why = f"what {chosen.replica_id} has cached is unknown: its events are not received"
        return Missing(token=0, reason="unknown", replica=chosen.replica_id, why=why)
    best = max(candidates, key=lambda each: 0 if each.feed is STALE else each.held_blocks)
    if best.feed is not STALE and best.held_blocks > cached:
        why = f"{best.replica_id} holds more of it, but was not chosen"
        return Missing(token=token, reason="elsewhere", replica=best.replica_id, why=why)
    return evicted(keys[cached], token, past) or _never_cached(keys[cached], cached, token, past, shared_with)


def evicted(block: int, token: int, past: BlockHistory) -> Missing | None:
    """The eviction of the block that begins with prompt token `token`; None if none is known."""
    event = past.evicted.find(block)
    if event is None:
        return None
    why = f"{event.replica} evicted it"
    return Missing(
        token=token, reason="evicted", replica=event.replica, at=event.at, request=event.request or None, why=why
    )


def _never_cached(
    block: int, cached: int, token: int, past: BlockHistory, shared_with: Callable[[int], bytes | None]
) -> Missing:
    event = past.computed.find(block)
    if event is not None:
        lost_at = past.loss_of(event.replica, event.at)
        if lost_at is not None:
            why = f"it was computed on {event.replica}, which has left or dropped its cache since"
        else:
            why = f"{event.replica} was to compute it and has not announced it"
        at = event.at if lost_at is None else lost_at
        return Missing(token=token, reason="lost", replica=event.replica, at=at, request=event.request or None, why=why)
    tenant = shared_with(cached)
    if tenant is not None:
        why = "another tenant has the same tokens cached; tenants share no blocks"
        return Missing(token=token, reason="other tenant", tenant=tenant.hex()[:8], why=why)
    return Missing(token=token, reason="new", why=NEW)
