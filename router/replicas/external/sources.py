"""Lists of engines that change while the router runs: a file, and a name in DNS.

`read` blocks, and returns None where nothing has changed since the last call.
"""

import socket
from collections.abc import Callable
from pathlib import Path

import msgspec

from ...errors import BackendsInvalid
from .discovery import EngineAddress
from .http_client import Address

#: Before a URL whose host stands for all the addresses that it has, as that of a headless Service of Kubernetes does.
NAME_PREFIX = "dns+"


def is_name(url: str) -> bool:
    return url.startswith(NAME_PREFIX)


class EngineFile:
    """A YAML list: URLs, or maps with `url`, `events` and `replay`."""

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        self._path = path
        self._seen = b""

    def read(self) -> list[EngineAddress] | None:
        """Raises BackendsInvalid."""
        try:
            content = self._path.read_bytes()
        except OSError as error:
            raise BackendsInvalid(f"engines: {self._path} cannot be read: {error.strerror}") from error
        if content == self._seen:
            return None
        self._seen = content
        try:
            listed = msgspec.yaml.decode(content or b"[]", type=list[str | EngineAddress] | None) or []
        except msgspec.DecodeError as error:
            raise BackendsInvalid(f"engines: {self._path}: {error}") from error
        return [(EngineAddress(each) if isinstance(each, str) else each).check() for each in listed]


def addresses_of(host: str, port: int) -> set[str]:
    """Those of a name in DNS; none if it is unknown."""
    try:
        return {str(each[4][0]) for each in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
    except OSError:
        return set()


class EngineName:
    """One engine at each address of a host name."""

    def __init__(
        self,
        address: Address,
        events: str,
        replay: str,
        resolve: Callable[[str, int], set[str]] = addresses_of,
    ) -> None:
        self._resolve = resolve
        self.name = address.url
        self._address = address
        self._ports = events, replay
        self._seen: list[str] = []

    def read(self) -> list[EngineAddress] | None:
        """A name without an address lists no engines. Where event sockets have its name, each engine's host is put."""
        about = self._address
        hosts = sorted(self._resolve(about.host, about.port))
        if hosts == self._seen:
            return None
        self._seen = hosts
        shown = [f"[{host}]" if ":" in host else host for host in hosts]
        scheme = "https" if about.tls else "http"
        events, replay = self._ports
        return [
            EngineAddress(
                f"{scheme}://{host}:{about.port}{about.path}",
                events.replace(about.host, host),
                replay.replace(about.host, host),
            )
            for host in shown
        ]
