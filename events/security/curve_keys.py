"""CURVE key pairs in files and the list of accepted clients: encryption and authentication of the ZeroMQ sockets.

    FOLDER/server.key           public key of the replicas: for subscribers that pin it
    FOLDER/server.key_secret    key pair of the replicas
    FOLDER/reader.key_secret    key pair of the cluster's own readers: routers, `homing watch`
    FOLDER/clients/NAME.key     public keys of clients that may connect
    FOLDER/NAME.key_secret      key pairs of further clients, to be handed to them and removed here

Files are CZMQ certificates, which other ZeroMQ tools read, too. Secrets stay in files and in the sockets: they are in
no setting, no command line, no log, and in no `repr`. Touches only the sockets' key options;
curve_authenticator.py decides over clients.
"""

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import zmq
from zmq.auth import load_certificate
from zmq.utils import z85

from ..config import EventsSettings
from ..errors import BadKeys

SERVER, READER = "server", "reader"
_CLIENTS = "clients"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}")
_TEXT_BYTES = 40  # Z85 of 32


@dataclass(slots=True, frozen=True)
class KeyPair:
    """One party's keys, 40 characters of Z85 each."""

    public: bytes
    secret: bytes = field(repr=False)


@dataclass(slots=True, frozen=True)
class ServerKeys:
    """What a replica needs: its own pair, and the clients that may connect."""

    pair: KeyPair
    #: public keys of accepted clients, called at each handshake; None: every client is accepted
    allowed: Callable[[], frozenset[bytes]] | None


def new_pair() -> KeyPair:
    return KeyPair(*zmq.curve_keypair())


def make_folder(folder: Path) -> None:
    """Keys for a whole cluster. Raises BadKeys when there are some already: clients hold their other halves."""
    pair = new_pair()
    _write(folder / f"{SERVER}.key_secret", _certificate(pair.public, pair.secret), 0o600)
    _write(folder / f"{SERVER}.key", _certificate(pair.public), 0o644)
    add_client(folder, READER)


def add_client(folder: Path, name: str) -> Path:
    """A further client that may connect; returns the file that is for it. Raises BadKeys when the name is taken."""
    path, pair = folder / f"{name}.key_secret", new_pair()
    if not _NAME.fullmatch(name):
        raise BadKeys(path, "a client's name is letters, digits, dots, dashes and underscores")
    _write(path, _certificate(pair.public, pair.secret), 0o600)
    _write(folder / _CLIENTS / f"{name}.key", _certificate(pair.public), 0o644)
    return path


def load_pair(path: Path) -> KeyPair:
    """Both keys of a `.key_secret` file. Raises BadKeys."""
    public, secret = _load(path)
    if secret is None:
        raise BadKeys(path, "it holds no secret key: give the file that ends in .key_secret")
    return KeyPair(public, secret)


def load_public(path: Path) -> bytes:
    """The public key of a `.key` or `.key_secret` file. Raises BadKeys."""
    return _load(path)[0]


def server_keys(settings: EventsSettings) -> ServerKeys | None:
    """What a replica needs; None: nothing is encrypted. Raises BadKeys."""
    if not settings.events_curve_keys:
        return None
    folder = Path(settings.events_curve_keys).expanduser()
    pair = load_pair(folder / f"{SERVER}.key_secret")
    if settings.events_curve_clients == "any":
        return ServerKeys(pair, None)
    allowed_clients(folder)  # an unreadable file is reported at the start, not at the first handshake
    return ServerKeys(pair, lambda: allowed_clients(folder))


def reader_keys(settings: EventsSettings) -> KeyPair | None:
    """What the cluster's own readers show; None: nothing is encrypted. Raises BadKeys."""
    if not settings.events_curve_keys:
        return None
    return load_pair(Path(settings.events_curve_keys).expanduser() / f"{READER}.key_secret")


def allowed_clients(folder: Path) -> frozenset[bytes]:
    """Public keys in `clients/` as they are now. Raises BadKeys."""
    return frozenset(load_public(path) for path in sorted((folder / _CLIENTS).glob("*.key")))


def protect_server(sock: "zmq.Socket[bytes]", keys: ServerKeys) -> None:
    """Before `bind`."""
    sock.curve_server = True
    sock.curve_publickey = keys.pair.public
    sock.curve_secretkey = keys.pair.secret
    sock.zap_domain = b"homing"


def protect_client(sock: "zmq.Socket[bytes]", pair: KeyPair, server: bytes) -> None:
    """Before `connect`. `server`: public key of the other side."""
    sock.curve_serverkey = server
    sock.curve_publickey = pair.public
    sock.curve_secretkey = pair.secret


def _load(path: Path) -> tuple[bytes, bytes | None]:
    try:
        public, secret = load_certificate(path)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "no such file, or no key in it"
        raise BadKeys(path, f"{reason} (homing keys makes a folder of keys)") from error
    try:
        whole = all(
            len(key) == _TEXT_BYTES and len(z85.decode(key)) == 32 for key in (public, secret) if key is not None
        )
    except (KeyError, ValueError, OverflowError):
        whole = False
    if not whole:
        raise BadKeys(path, "a key in it is not 40 characters of Z85")
    return public, secret


def _certificate(public: bytes, secret: bytes | None = None) -> str:
    kind = "public key" if secret is None else "SECRET key pair: keep it to its owner"
    lines = [f"#   CURVE {kind}", "metadata", "curve", f'    public-key = "{public.decode()}"']
    if secret is not None:
        lines.append(f'    secret-key = "{secret.decode()}"')
    return "\n".join(lines) + "\n"


def _write(path: Path, text: str, mode: int) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        # The mode from the beginning: a secret must not be readable to others for a moment.
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    except FileExistsError as error:
        raise BadKeys(path, "it exists already, and keys are never overwritten") from error
    except OSError as error:
        raise BadKeys(path, f"it cannot be written: {error.strerror}") from error
    with os.fdopen(handle, "w") as file:
        file.write(text)
