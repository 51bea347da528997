"""What headers say about the caller, and what ours say about the answer. Pure."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from ..tenants import Tenant

REQUEST_ID = "x-request-id"
SESSION_HEADERS = ("x-session-affinity", "x-correlation-id")
_PRINTABLE = re.compile(r"[\x21-\x7e]{1,256}")


@dataclass(slots=True, frozen=True)
class Caller:
    """Who asks."""

    request_id: str
    session: str | None
    salt: bytes
    tenant: Tenant


def request_id(given: str | None, make: str) -> str:
    """The client's id, or `make` where it gave none that can stand in a header and a log line."""
    return given if given and _PRINTABLE.fullmatch(given) else make


def session(headers: Mapping[str, str]) -> str | None:
    """The conversation that the request belongs to, where the client tells."""
    return next((value for name in SESSION_HEADERS if (value := headers.get(name))), None)


def answer_headers(replicas: list[str], cached_tokens: int, pinned_tokens: int | None) -> dict[str, str]:
    """Where the answer comes from, what was cached there and, if it was asked for, what is kept there."""
    headers = {"x-homing-cached-tokens": str(cached_tokens)}
    if pinned_tokens is not None:
        headers["x-homing-pinned-tokens"] = str(pinned_tokens)
    if replicas:
        headers["x-homing-replica"] = ",".join(replicas)
    return headers
