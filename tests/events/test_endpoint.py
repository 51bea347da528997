"""The addresses on which a publisher may listen."""

import asyncio
import socket
from pathlib import Path

import pytest

from homing.events import EndpointUnusable
from homing.events.endpoint import ipc_address, needs_ipv6, tcp_address


def test_addresses_are_of_one_host_with_a_random_port() -> None:
    """Host names must be resolved first, because ZeroMQ binds only to addresses."""
    assert tcp_address("127.0.0.1") == "tcp://127.0.0.1:*"
    assert tcp_address("::1") == "tcp://[::1]:*"


@pytest.mark.parametrize("host", ["", "*", "0.0.0.0", "::", "0", "::ffff:0.0.0.0"])
def test_every_spelling_of_all_interfaces_is_refused(host: str) -> None:
    """By default, the stream is not protected."""
    with pytest.raises(EndpointUnusable, match="all interfaces"):
        tcp_address(host)


def test_a_host_that_does_not_exist_is_named() -> None:
    """The error names the host. `.invalid` never resolves (RFC 2606)."""
    with pytest.raises(EndpointUnusable, match=r"nobody\.invalid"):
        tcp_address("nobody.invalid")


def test_two_incarnations_never_share_a_file() -> None:
    """A killed process leaves its socket files behind; a new epoch must not reuse them."""
    folder = Path("run")

    assert ipc_address(folder, 1, "events") != ipc_address(folder, 2, "events")
    assert ipc_address(folder, 1, "events") != ipc_address(folder, 1, "replay")


@pytest.mark.parametrize(
    ("endpoint", "found", "needed"),
    [
        ("tcp://[::1]:5557", [], True),
        ("tcp://10.0.0.1:5557", [socket.AF_INET], False),
        ("tcp://engine:5557", [socket.AF_INET6], True),
        ("tcp://engine:5557", [socket.AF_INET6, socket.AF_INET], False),
        ("tcp://engine:5557", [], False),
        ("ipc:///tmp/engine", [socket.AF_INET6], False),
        ("", [], False),
    ],
)
async def test_names_that_have_only_ipv6_are_told(
    monkeypatch: pytest.MonkeyPatch, endpoint: str, found: list[int], needed: bool
) -> None:
    """In clusters of IPv6 alone, engines are listed by such names; their events would never arrive."""

    async def getaddrinfo(*_args: object, **_fields: object) -> list[tuple[int, str]]:
        if not found:
            raise socket.gaierror("unknown")
        return [(family, "") for family in found]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo, raising=False)

    assert await needs_ipv6(endpoint) is needed
