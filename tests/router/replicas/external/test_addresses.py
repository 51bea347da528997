"""Settings that list engines."""

import pytest

from homing.events.wire.messages import EventEndpoints
from homing.router.config import RouterSettings
from homing.router.errors import BackendsInvalid
from homing.router.replicas.external.addresses import describe, replica_addresses

from ...fakes import LIMITS, parity_of


def test_lists_are_paired_by_their_order() -> None:
    """An empty entry means an engine without events."""
    settings = RouterSettings(backend="http://a:1/v1/, https://b", events=",tcp://b:5", replay="")

    first, second = replica_addresses(settings)

    assert (first.replica_id, first.address.url, first.address.port, first.events) == ("b0", "http://a:1", 1, "")
    assert (second.replica_id, second.address.port, second.address.tls, second.events) == ("b1", 443, True, "tcp://b:5")
    assert first.replay == second.replay == ""


def test_an_engine_is_described_as_a_replica() -> None:
    """The description has the engine's event sockets, and leaves the ones that it lacks empty."""
    (backend,) = replica_addresses(RouterSettings(backend="a:8000", events="tcp://a:5", replay="tcp://a:6"))

    about = describe(backend, parity_of(), LIMITS, max_running_requests=9)

    assert (about.external, about.request_endpoint, about.max_running_requests) == (True, "http://a:8000", 9)
    assert about.event_endpoints == EventEndpoints(events="tcp://a:5", replay="tcp://a:6", state="", snapshot="")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"backend": "ftp://a"}, "is not the URL of a server"),
        ({"backend": "http://a:port"}, "http://a:port"),
        ({"backend": "http://a,,http://b"}, "between two commas"),
        ({"backend": "http://a,http://a/v1"}, "named twice"),
        ({"backend": "http://a", "events": "tcp://a:1,tcp://b:1"}, "2 addresses for 1 backends"),
        ({"backend": "http://a", "events": "a:5557"}, "not a ZeroMQ address"),
        ({"backend": "http://a", "replay": "tcp://*:5557"}, "where the engine binds"),
    ],
)
def test_what_does_not_fit_is_named(settings: dict[str, str], message: str) -> None:
    """The error comes before anything is started."""
    with pytest.raises(BackendsInvalid, match=message.replace("*", r"\*")):
        replica_addresses(RouterSettings(**settings))
