"""Which names reach the server, and which pages may change it."""

import pytest

from homing.router.errors import ForeignHost, ForeignOrigin
from homing.router.http.protocol.origins import OriginPolicy, is_loopback


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        *((host, True) for host in ("localhost", "LocalHost.", "a.localhost", "127.0.0.1", "127.9.8.7", "::1")),
        *((host, False) for host in ("", "0.0.0.0", "10.0.0.1", "127.0.0.1.evil.test", "localhost.evil.test", "::2")),
    ],
)
def test_only_names_of_the_loopback_are_its(host: str, loopback: bool) -> None:
    """Anybody can register a name that begins or looks like one."""
    assert is_loopback(host) is loopback


LOCAL = ("localhost:8000", "LOCALHOST", "127.0.0.1:9", "[::1]:8000", "homing.localhost")
FOREIGN = ("evil.test", "evil.test:8000", "127.0.0.1.evil.test", "10.0.0.1:8000", "localhost@evil.test", "", "[::1")


@pytest.mark.parametrize(
    ("bound", "allowed", "accepted", "refused"),
    [
        ("127.0.0.1", "", LOCAL, FOREIGN),
        ("::1", "", LOCAL, FOREIGN),
        ("localhost", "Box.Test, box", (*LOCAL, "box.test:8000", "BOX"), FOREIGN),
        ("127.0.0.1", "*", (*LOCAL, *FOREIGN), ()),
        ("0.0.0.0", "", (*LOCAL, *FOREIGN), ()),
        ("0.0.0.0", "box.test", (*LOCAL, "box.test"), FOREIGN),
    ],
)
def test_a_host_is_accepted_if_the_server_has_that_name(
    bound: str, allowed: str, accepted: tuple[str, ...], refused: tuple[str, ...]
) -> None:
    """A page that reaches the loopback by DNS rebinding names its own host."""
    policy = OriginPolicy(bound, allowed, "")

    for host in accepted * 2:
        policy.check_host({"host": host})
    for host in refused:
        with pytest.raises(ForeignHost):
            policy.check_host({"host": host})
    policy.check_host({})  # no browser


def test_pages_of_others_may_change_nothing_unless_they_are_named() -> None:
    """A star lets every page read; it does not make every page an operator."""
    policy = OriginPolicy("127.0.0.1", "", "*, https://box.test")
    headers = {"host": "localhost:8000"}

    for origin in (None, "http://localhost:8000", "https://box.test"):
        policy.check_origin(headers if origin is None else headers | {"origin": origin})
    for origin in ("null", "http://evil.test", "http://localhost:9000", "http://box.test"):
        with pytest.raises(ForeignOrigin):
            policy.check_origin(headers | {"origin": origin})
