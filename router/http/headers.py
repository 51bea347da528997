"""What headers say about the caller, and what ours say about the answer. Pure."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256

from ...kvcache.hashing import canonical

REQUEST_ID = "x-request-id"
SESSION_HEADERS = ("x-session-affinity", "x-correlation-id")
_PRINTABLE = re.compile(r"[\x21-\x7e]{1,256}")
SALT_BYTES = 16


@dataclass(slots=True, frozen=True)
class Caller:
    """Who asks."""

    request_id: str
    session: str | None
    salt: bytes


def request_id(given: str | None, make: str) -> str:
    """The client's id, or `make` where it gave none that can stand in a header and a log line."""
    return given if given and _PRINTABLE.fullmatch(given) else make


def session(headers: Mapping[str, str]) -> str | None:
    """The conversation that the request belongs to, where the client tells."""
    return next((value for name in SESSION_HEADERS if (value := headers.get(name))), None)


def cache_salt(authorization: str | None, narrowed_by: str | None) -> bytes:
    """Requests share cached blocks only under equal salts: it derives from the API key, and from `cache_salt`.

    Without either it is empty: anonymous callers share.
    """
    key = (authorization or "").removeprefix("Bearer ").strip()
    if not key and not narrowed_by:
        return b""
    named = canonical(b"homing-salt", key.encode(), (narrowed_by or "").encode())
    return sha256(named).digest()[:SALT_BYTES]


def answer_headers(replicas: list[str], cached_tokens: int) -> dict[str, str]:
    """Where the answer comes from and what was cached there."""
    headers = {"x-homing-cached-tokens": str(cached_tokens)}
    if replicas:
        headers["x-homing-replica"] = ",".join(replicas)
    return headers
