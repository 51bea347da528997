"""CURVE key files and the list of accepted clients, for encrypting and authenticating the ZeroMQ sockets.

    FOLDER/server.key           public key of the replicas, for subscribers that pin it
    FOLDER/server.key_secret    key pair of the replicas
    FOLDER/reader.key_secret    key pair of the cluster's own readers: routers, `homing watch`
    FOLDER/clients/NAME.key     public keys of clients that may connect
    FOLDER/NAME.key_secret      key pairs of further clients, to be given to them and removed here

The files are CZMQ certificates, which other ZeroMQ tools can read, too. Secrets stay in files and sockets: no setting,
command line, log or `repr` contains them. This module only sets the sockets' key options; curve_authenticator.py
decides which clients are accepted.
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
    """A replica's key pair and the clients that may connect to it."""

    pair: KeyPair
    #: returns the public keys of accepted clients, called at each handshake; None accepts every client
    allowed: Callable[[], frozenset[bytes]] | None


def new_pair() -> KeyPair:
    return KeyPair(*zmq.curve_keypair())


def make_folder(folder: Path) -> None:
    """Create the keys of a cluster. Raises BadKeys when keys exist, as clients rely on them."""
    _write_pair(folder / f"{SERVER}.key_secret", folder / f"{SERVER}.key")
    add_client(folder, READER)


def add_client(folder: Path, name: str) -> Path:
    """Create keys for another accepted client. Returns the file to give to it.

    Raises BadKeys if the name is taken or the folder has no keys of a cluster.
    """
    path = folder / f"{name}.key_secret"
    if not _NAME.fullmatch(name):
        raise BadKeys(path, "a client's name may contain only letters, digits, dots, dashes and underscores")
    if not (folder / f"{SERVER}.key").is_file():
        raise BadKeys(folder, "it contains no keys of a cluster (`homing keys DIR` creates them)")
    _write_pair(path, folder / _CLIENTS / f"{name}.key")
    return path


def load_pair(path: Path) -> KeyPair:
    """Read both keys of a `.key_secret` file. Raises BadKeys."""
    public, secret = _load(path)
    if secret is None:
        raise BadKeys(path, "it contains no secret key: use the file that ends in .key_secret")
    return KeyPair(public, secret)


def load_public(path: Path) -> bytes:
    """Read the public key of a `.key` or `.key_secret` file. Raises BadKeys."""
    return _load(path)[0]


def server_keys(settings: EventsSettings) -> ServerKeys | None:
    """Load the keys of a replica; None if encryption is off. Raises BadKeys."""
    if not settings.events_curve_keys:
        return None
    folder = Path(settings.events_curve_keys).expanduser()
    pair = load_pair(folder / f"{SERVER}.key_secret")
    if settings.events_curve_clients == "any":
        return ServerKeys(pair, None)
    allowed_clients(folder)  # an unreadable file is reported at the start, not at the first handshake
    return ServerKeys(pair, lambda: allowed_clients(folder))


def reader_keys(settings: EventsSettings) -> KeyPair | None:
    """Load the key pair of the cluster's own readers; None if encryption is off. Raises BadKeys."""
    if not settings.events_curve_keys:
        return None
    return load_pair(Path(settings.events_curve_keys).expanduser() / f"{READER}.key_secret")


def allowed_clients(folder: Path) -> frozenset[bytes]:
    """Read the public keys that are now in `clients/`. Raises BadKeys."""
    return frozenset(load_public(path) for path in sorted((folder / _CLIENTS).glob("*.key")))


def protect_server(sock: "zmq.Socket[bytes]", keys: ServerKeys) -> None:
    """Encrypt a server socket. Call it before `bind`."""
    sock.curve_server = True
    sock.curve_publickey = keys.pair.public
    sock.curve_secretkey = keys.pair.secret
    sock.zap_domain = b"homing"


def protect_client(sock: "zmq.Socket[bytes]", pair: KeyPair, server: bytes) -> None:
    """Encrypt a client socket. Call it before `connect`. `server` is the public key of the other side."""
    sock.curve_serverkey = server
    sock.curve_publickey = pair.public
    sock.curve_secretkey = pair.secret


def _load(path: Path) -> tuple[bytes, bytes | None]:
    try:
        public, secret = load_certificate(path)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "the file does not exist or contains no key"
        raise BadKeys(path, f"{reason} (`homing keys DIR` creates a folder of keys)") from error
    try:
        whole = all(
            len(key) == _TEXT_BYTES and len(z85.decode(key)) == 32 for key in (public, secret) if key is not None
        )
    except (KeyError, ValueError, OverflowError):
        whole = False
    if not whole:
        raise BadKeys(path, "it contains a key that is not 40 characters of Z85")
    return public, secret


def _write_pair(secret: Path, public: Path) -> None:
    """Write a new pair and its public key. Raises BadKeys, with no effect, if one of the files exists."""
    pair = new_pair()
    _write(secret, _certificate(pair.public, pair.secret), 0o600)
    try:
        _write(public, _certificate(pair.public), 0o644)
    except BadKeys:  # such as that of a client whose pair was moved to it, as it should be
        secret.unlink()
        raise


def _certificate(public: bytes, secret: bytes | None = None) -> str:
    kind = "public key" if secret is None else "SECRET key pair: keep it to its owner"
    lines = [f"#   CURVE {kind}", "metadata", "curve", f'    public-key = "{public.decode()}"']
    if secret is not None:
        lines.append(f'    secret-key = "{secret.decode()}"')
    return "\n".join(lines) + "\n"


def _write(path: Path, text: str, mode: int) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        # Set the mode on creation: a secret must never be readable by others, not even briefly.
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    except FileExistsError as error:
        raise BadKeys(path, "it already exists, and keys are never overwritten") from error
    except OSError as error:
        raise BadKeys(path, f"it cannot be written: {error.strerror}") from error
    with os.fdopen(handle, "w") as file:
        file.write(text)
