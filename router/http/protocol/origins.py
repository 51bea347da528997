"""Which names a request may call this server, and which web pages may change its state. Pure.

A page whose name resolves to 127.0.0.1 (DNS rebinding) is of the same origin as this server, for the browser: no CORS
rule applies, and without API keys it could do what its visitor can. Only its `Host` and `Origin` give it away.
"""

from collections.abc import Mapping
from ipaddress import ip_address
from urllib.parse import urlsplit

from ...errors import ForeignHost, ForeignOrigin

#: Accepted `Host` values to remember; clients use a few.
MAX_KNOWN = 1024


def is_loopback(host: str) -> bool:
    """Whether a host name or address reaches this machine only."""
    name = host.lower().rstrip(".")
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ip_address(name).is_loopback
    except ValueError:
        return False


class OriginPolicy:
    """The names and origins that requests may have."""

    def __init__(self, bound: str, allowed_hosts: str, cors_origins: str) -> None:
        """`bound`: the address that the server binds. Names and origins are separated by commas."""
        self._names = frozenset(_items(allowed_hosts))
        self._any_host = "*" in self._names or not (self._names or is_loopback(bound))
        self._origins = frozenset(_items(cors_origins))
        self._known: set[str] = set()

    def check_host(self, headers: Mapping[str, str]) -> None:
        """Raise ForeignHost if the request calls the server by a name that it does not have."""
        host = headers.get("host")
        if self._any_host or host is None or host in self._known:  # browsers always send one
            return
        name = _name(f"//{host}")
        if not (is_loopback(name) or name in self._names):
            raise ForeignHost(host)
        if len(self._known) < MAX_KNOWN:
            self._known.add(host)

    def check_origin(self, headers: Mapping[str, str]) -> None:
        """Raise ForeignOrigin if another server's page sent the request. `cors_origins: *` admits no page here."""
        origin = headers.get("origin")
        if origin is None or origin in self._origins:
            return
        if urlsplit(origin).netloc != headers.get("host"):
            raise ForeignOrigin(origin)


def _name(url: str) -> str:
    try:
        return (urlsplit(url).hostname or "").rstrip(".")
    except ValueError:
        return ""


def _items(setting: str) -> list[str]:
    return [each.strip().rstrip("/").lower() for each in setting.split(",") if each.strip()]
