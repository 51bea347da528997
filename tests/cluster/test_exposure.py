"""Who opens a cluster is told to whom."""

import io

import pytest

from homing.cluster.cli.console import Console
from homing.cluster.config import Settings
from homing.cluster.exposure import exposures
from homing.router.config import RouterSettings


def words(**router: str) -> str:
    return "\n".join(exposures(Settings(router=RouterSettings(**router))))


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.9", "::1", "localhost"])
def test_on_loopback_there_is_nothing_to_say(host: str) -> None:
    """The default must not cry wolf."""
    assert words(host=host) == ""


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "10.0.0.5", "gateway.example"])
def test_open_without_keys_is_a_warning_with_its_remedy(host: str) -> None:
    """An empty host is every address; a name may lead anywhere."""
    assert "--api-keys-file" in words(host=host)


def test_keys_in_clear_text_are_a_warning_and_encrypted_ones_are_none() -> None:
    """A key that is read on its way opens what it should have kept shut."""
    assert "--tls-cert-file" in words(host="0.0.0.0", api_keys_file="keys.yaml")
    assert words(host="0.0.0.0", api_keys_file="keys.yaml", tls_cert_file="cert.pem") == ""


def test_the_warning_is_among_the_first_lines() -> None:
    """Before anything listens."""
    out = io.StringIO()

    Console(out).opening(Settings(router=RouterSettings(host="0.0.0.0")))

    assert "warning" in out.getvalue()
    assert "--api-keys-file" in out.getvalue()
