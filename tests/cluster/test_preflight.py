"""What `homing serve` refuses before it starts Ray: one line, the setting or file, and the remedy."""

import shutil
import socket
from pathlib import Path

import msgspec
import pytest

from homing.cluster.config import Settings
from homing.cluster.errors import ModelUnavailable, PortTaken, SettingsError
from homing.cluster.preflight import check_folder, check_front, check_port
from homing.replica.config import ReplicaSettings
from homing.replica.demo import demo_model_path
from homing.router.config import RouterSettings


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the demo model."""
    return Path(shutil.copytree(demo_model_path(), tmp_path / "model"))


def test_the_demo_model_passes() -> None:
    """The first command must work."""
    check_folder(demo_model_path(), Settings())
    check_front(msgspec.structs.replace(RouterSettings(), port=0))


@pytest.mark.parametrize("left", [None, "", '{"model": '])
def test_a_folder_without_a_whole_tokenizer_is_refused(folder: Path, left: str | None) -> None:
    """transformers makes one that knows no word, and every answer would be empty."""
    path = folder / "tokenizer.json"
    path.unlink() if left is None else path.write_text(left)

    with pytest.raises(ModelUnavailable, match=r"tokenizer\.json"):
        check_folder(folder, Settings())


def test_weights_and_settings_are_told_apart(folder: Path) -> None:
    """The one is mended by fetching, the other by a flag."""
    settings = msgspec.structs.replace(Settings(), replica=ReplicaSettings(tensor_parallel_size=3))

    with pytest.raises(SettingsError, match="tensor_parallel_size 3: 8 attention heads do not divide"):
        check_folder(folder, settings)
    (folder / "model.safetensors").write_bytes(b"torn")
    with pytest.raises(ModelUnavailable, match=r"model\.safetensors is incomplete"):
        check_folder(folder, Settings())


def test_a_taken_port_and_a_foreign_address_have_different_remedies() -> None:
    """Another port does not help where the address is not ours."""
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
        ({"access_log": "/nowhere/log"}, "access_log: there is no folder /nowhere"),
    ],
)
def test_files_of_the_front_are_looked_at(router: dict[str, str], told: str) -> None:
    """The router process would fail on them, after the replicas have loaded."""
    with pytest.raises(SettingsError, match=told):
        check_front(RouterSettings(port=0, **router))
