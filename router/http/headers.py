"""What headers say about the caller, and what ours say about the answer. Pure."""

import re
from collections.abc import Callable, Iterable, Mapping
from hashlib import sha256

import msgspec

from ..tenants.api_keys import Tenant

REQUEST_ID = "x-request-id"
SESSION_HEADERS = ("x-session-affinity", "x-correlation-id")
#: Tens of thousands of sessions are remembered (policy.py), and a head may have 64 KB.
MAX_SESSION_CHARS = 64
_PRINTABLE = re.compile(r"[\x21-\x7e]{1,256}")


class Caller(msgspec.Struct, frozen=True, gc=False):
    """Who asks."""

    request_id: str
    session: str | None
    salt: bytes
    tenant: Tenant


def request_id(given: str | None, random_bits: Callable[[int], int]) -> str:
    """The client's id, or a new one where it gave none that can stand in a header and a log line."""
    return given if given and _PRINTABLE.fullmatch(given) else f"{random_bits(64):016x}"


def session(headers: Mapping[str, str]) -> str | None:
    """The conversation that the request belongs to, where the client tells; a digest where its name is long."""
    for name in SESSION_HEADERS:
        if value := headers.get(name):
            return value if len(value) <= MAX_SESSION_CHARS else sha256(value.encode()).hexdigest()
    return None


def answer_headers(replicas: str, cached_tokens: int, pinned_tokens: int | None) -> Iterable[tuple[str, object]]:
    """Where the answer comes from, what was cached there and, if it was asked for, what is kept there."""
    headers: list[tuple[str, object]] = [("x-homing-cached-tokens", cached_tokens)]
    if pinned_tokens is not None:
        headers.append(("x-homing-pinned-tokens", pinned_tokens))
    if replicas:
        headers.append(("x-homing-replica", replicas))
    return headers
