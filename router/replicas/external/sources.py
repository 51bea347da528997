"""Engine lists that can change while the router runs: a file and a DNS name.

`read` blocks; it returns None if nothing has changed since the last call.
"""

import socket
from collections.abc import Callable
from pathlib import Path

import msgspec

from ...errors import BackendsInvalid
from ...strict_yaml import InvalidYamlError, parse_yaml
from .discovery import EngineAddress
from .http_client import Address

#: Prefix of a URL that lists an engine at every address of its host, such as that of a headless Kubernetes Service.
DNS_PREFIX = "dns+"
#: The answers of name servers that say for certain that there is no address.
NO_ADDRESS = (socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME))


def is_dns_url(url: str) -> bool:
    return url.startswith(DNS_PREFIX)


class EngineFile:
    """A YAML list: URLs, or maps with `url`, `events` and `replay`."""

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        self._path = path
        self._seen = b""

    def read(self) -> list[EngineAddress] | None:
        """The engines in the file; None: unchanged. Raises BackendsInvalid."""
        try:
            content = self._path.read_bytes()
        except OSError as error:
            raise BackendsInvalid(f"engines: {self._path} cannot be read: {error.strerror}") from error
        if content == self._seen:
            return None
        self._seen = content
        try:
            listed = msgspec.convert(parse_yaml(content), list[str | EngineAddress] | None) or []
        except (InvalidYamlError, msgspec.ValidationError) as error:
            raise BackendsInvalid(f"engines: {self._path}: {error}") from error
        return [(EngineAddress(each) if isinstance(each, str) else each).check() for each in listed]

    def close(self) -> None:
        """There is nothing to release."""


def addresses_of(host: str, port: int) -> set[str]:
    """The IP addresses of a host name; empty if it has none. Raises OSError if the name servers do not tell."""
    try:
        return {str(each[4][0]) for each in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
    except socket.gaierror as error:
        if error.errno in NO_ADDRESS:  # a headless Service without ready endpoints does not exist in DNS
            return set()
        raise


class EngineDnsName:
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
        """One engine per address of the name; None: unchanged. The name in event addresses is replaced likewise.

        Raises BackendsInvalid while the name servers do not answer, so that the known engines are kept.
        """
        about = self._address
        try:
            hosts = sorted(self._resolve(about.host, about.port))
        except OSError as error:
            raise BackendsInvalid(f"{about.host} cannot be resolved: {error.strerror}") from error
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

    def close(self) -> None:
        """There is nothing to release."""
