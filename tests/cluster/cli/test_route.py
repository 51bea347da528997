"""Settings that `homing serve --backend` resolves before it serves."""

import msgspec

from homing.cluster.cli.main import parse
from homing.cluster.cli.route import FleetRouter, model_names
from homing.cluster.config import Settings
from homing.replica.config import ReplicaSettings
from homing.router.config import RouterSettings
from homing.router.replicas.external.discovery import EngineAddress
from homing.router.replicas.external.fleet import API_SOURCE, EngineFleet


def settings_for(model: str, **router: str) -> Settings:
    replica = ReplicaSettings(model=model)
    return msgspec.structs.replace(Settings(), replica=replica, router=RouterSettings(**router))


def test_flags_may_be_given_again() -> None:
    """One pair of flags per server is easier to read than two lists."""
    words = ["serve", "m", "--backend", "http://a", "--events", "tcp://a:1", "--backend", "http://b,http://c"]

    settings = parse(words).settings

    assert settings.router.backend == "http://a,http://b,http://c"
    assert settings.router.events == "tcp://a:1"


def test_the_model_goes_by_the_name_that_was_given_or_set() -> None:
    """A server may use the model's full name or its last part."""
    assert model_names(settings_for("org/m", served_model_name="fox")) == ("org/m", "fox", "m")
    assert model_names(settings_for("org/m", backend_model="other")) == ("other",)


async def test_the_key_goes_only_to_servers_that_the_operator_lists() -> None:
    """Whoever may add an engine over the API could otherwise have the key sent to a server of their own."""
    fleet = EngineFleet()
    fleet.add(EngineAddress("http://10.0.0.1:8000/v1/"), "flags")
    fleet.add(EngineAddress("http://10.0.0.2:8000"), "engines.yaml")
    fleet.add(EngineAddress("http://10.0.0.3:8000"), API_SOURCE)
    router = FleetRouter(Settings(), fleet, [], "secret", None, None, None)  # type: ignore[arg-type]

    keys = [router._key_of(f"http://10.0.0.{number}:8000") for number in (1, 2, 3, 4)]

    assert keys == ["secret", "secret", "", ""]
