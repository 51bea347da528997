"""`homing serve` refuses bad settings before starting Ray: one line with the setting or file, and the remedy."""

import io
import shutil
import socket
from pathlib import Path

import msgspec
import pytest

from homing.cluster.cli.console import Console
from homing.cluster.config import Settings
from homing.cluster.errors import ModelUnavailable, PortTaken, SettingsError
from homing.cluster.preflight import check_folder, check_front, check_port, exposures
from homing.replica.config import ReplicaSettings
from homing.replica.demo import demo_model_path
from homing.router.config import RouterSettings


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the demo model."""
    return Path(shutil.copytree(demo_model_path(), tmp_path / "model"))


def test_the_demo_model_passes() -> None:
    """The first command that a new user runs must work."""
    check_folder(demo_model_path(), Settings())
    check_front(msgspec.structs.replace(RouterSettings(), port=0))


@pytest.mark.parametrize("left", [None, "", '{"model": '])
def test_a_folder_without_a_whole_tokenizer_is_refused(folder: Path, left: str | None) -> None:
    """transformers would create one that knows no word, and every answer would be empty."""
    path = folder / "tokenizer.json"
    path.unlink() if left is None else path.write_text(left)

    with pytest.raises(ModelUnavailable, match=r"tokenizer\.json"):
        check_folder(folder, Settings())


def test_weights_and_settings_are_told_apart(folder: Path) -> None:
    """The first needs another download, the second another flag."""
    settings = msgspec.structs.replace(Settings(), replica=ReplicaSettings(tensor_parallel_size=3))

    with pytest.raises(SettingsError, match="tensor_parallel_size 3: 8 attention heads do not divide"):
        check_folder(folder, settings)
    (folder / "model.safetensors").write_bytes(b"torn")
    with pytest.raises(ModelUnavailable, match=r"model\.safetensors is incomplete"):
        check_folder(folder, Settings())


def test_a_taken_port_and_a_foreign_address_have_different_remedies() -> None:
    """Another port does not help if the address is not on this machine."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(PortTaken, match=f"127.0.0.1:{port}.*--port"):
            check_port("127.0.0.1", port)

    with pytest.raises(PortTaken, match="--host"):
        check_port("192.0.2.1", 0)


@pytest.mark.parametrize(
    ("router", "told"),
    [
        ({"tls_key_file": "key.pem"}, "tls_key_file is set without"),
        ({"tls_cert_file": "/nowhere.pem"}, "tls_cert_file '/nowhere.pem'"),
        ({"access_log": "/nowhere/log"}, "access_log: folder /nowhere does not exist"),
    ],
)
def test_files_of_the_router_are_checked(router: dict[str, str], told: str) -> None:
    """The router process would fail on them only after the replicas have loaded."""
    with pytest.raises(SettingsError, match=told):
        check_front(RouterSettings(port=0, **router))


def words(**router: str) -> str:
    return "\n".join(exposures(Settings(router=RouterSettings(**router))))


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.9", "::1", "localhost"])
def test_on_loopback_there_is_nothing_to_say(host: str) -> None:
    """The default must not raise false alarms."""
    assert words(host=host) == ""


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "10.0.0.5", "gateway.example"])
def test_open_without_keys_is_a_warning_with_its_remedy(host: str) -> None:
    """An empty host means every address, and a name may resolve to any."""
    assert "--api-keys-file" in words(host=host)


def test_keys_in_clear_text_are_a_warning_and_encrypted_ones_are_none() -> None:
    """A key that is intercepted on its way gives access to everything it protects."""
    assert "--tls-cert-file" in words(host="0.0.0.0", api_keys_file="keys.yaml")
    assert words(host="0.0.0.0", api_keys_file="keys.yaml", tls_cert_file="cert.pem") == ""
    assert "--tls-cert-file" in words(host="0.0.0.0", api_key="k")


def test_the_warning_is_among_the_first_lines() -> None:
    """It must appear before anything listens."""
    out = io.StringIO()

    Console(out).print_opening(Settings(router=RouterSettings(host="0.0.0.0")))

    assert "warning" in out.getvalue()
    assert "--api-keys-file" in out.getvalue()


@pytest.mark.parametrize("template", ["{% for m in messages %}", "{{ messages[0].contnet.strip() }}"])
def test_a_template_that_renders_no_chat_is_refused(folder: Path, template: str) -> None:
    """The cluster said that it was ready, and then blamed every client."""
    (folder / "chat_template.jinja").write_text(template)

    with pytest.raises(ModelUnavailable, match=r"chat_template\.jinja"):
        check_folder(folder, Settings())
