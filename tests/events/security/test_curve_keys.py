"""Key files: keys are read back as written, secrets stay private, and errors name the file."""

from pathlib import Path

import pytest

from homing.events import KeyPair
from homing.events.config import EventsSettings
from homing.events.errors import BadKeys
from homing.events.security.curve_keys import (
    add_client,
    load_pair,
    load_public,
    make_folder,
    new_pair,
    reader_keys,
    server_keys,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a cluster's keys."""
    make_folder(tmp_path / "keys")
    return tmp_path / "keys"


def settings(folder: Path, clients: str = "listed") -> EventsSettings:
    """Settings that use the keys of this folder."""
    return EventsSettings(events_curve_keys=str(folder), events_curve_clients=clients)


def test_a_new_folder_lets_the_clusters_own_readers_in_and_nobody_else(folder: Path) -> None:
    """`homing serve` and `homing watch` work with a new folder without further changes."""
    server, reader = server_keys(settings(folder)), reader_keys(settings(folder))

    assert server.allowed() == {reader.public}
    assert load_public(folder / "server.key") == server.pair.public
    assert len({server.pair.secret, server.pair.public, reader.secret, reader.public}) == 4


def test_a_client_is_let_in_and_locked_out_while_replicas_run(folder: Path) -> None:
    """Adding or removing a subscriber must not require a restart of all replicas."""
    server = server_keys(settings(folder))

    pair = load_pair(add_client(folder, "lmcache"))
    assert pair.public in server.allowed()
    (folder / "clients" / "lmcache.key").unlink()

    assert pair.public not in server.allowed()


def test_without_a_folder_nothing_is_encrypted() -> None:
    """Encryption is off by default."""
    assert server_keys(EventsSettings()) is None
    assert reader_keys(EventsSettings()) is None


def test_any_client_may_be_let_in(folder: Path) -> None:
    """Encryption without a list of clients, for networks that are protected otherwise."""
    assert server_keys(settings(folder, "any")).allowed is None


def test_secrets_are_readable_to_their_owner_only_and_in_no_repr(folder: Path) -> None:
    """Objects may be printed in logs, tracebacks and dashboards."""
    pair = reader_keys(settings(folder))

    assert {path.stat().st_mode & 0o777 for path in folder.glob("*.key_secret")} == {0o600}
    assert pair.secret.decode() not in repr(pair) + str(server_keys(settings(folder)))
    assert b"secret-key" not in (folder / "server.key").read_bytes()
    assert all(b"secret-key" not in path.read_bytes() for path in (folder / "clients").iterdir())


def test_keys_are_never_overwritten(folder: Path) -> None:
    """Others hold the matching public keys; overwriting the pair would lock all of them out."""
    before = load_pair(folder / "server.key_secret")

    with pytest.raises(BadKeys, match=r"server\.key_secret: it already exists"):
        make_folder(folder)
    with pytest.raises(BadKeys, match=r"reader\.key_secret: it already exists"):
        add_client(folder, "reader")

    assert load_pair(folder / "server.key_secret") == before


def test_a_client_that_cannot_be_added_gets_no_keys(folder: Path, tmp_path: Path) -> None:
    """It would be given a pair that no replica accepts."""
    add_client(folder, "lmcache").unlink()  # moved to the client

    with pytest.raises(BadKeys, match=r"clients/lmcache\.key: it already exists"):
        add_client(folder, "lmcache")
    with pytest.raises(BadKeys, match="no keys of a cluster"):
        add_client(tmp_path / "misspelled", "lmcache")

    assert not (folder / "lmcache.key_secret").exists()
    assert not (tmp_path / "misspelled").exists()


def test_a_public_key_without_its_secret_gets_no_other_secret(folder: Path) -> None:
    """Subscribers pin the public key; the pair of another one would lock them out."""
    (folder / "server.key_secret").unlink()

    with pytest.raises(BadKeys, match=r"server\.key: it already exists"):
        make_folder(folder)

    assert not (folder / "server.key_secret").exists()


@pytest.mark.parametrize("name", ["", "../x", "a b", ".hidden", "x/y"])
def test_a_clients_name_is_no_path(folder: Path, name: str) -> None:
    """The name becomes part of a file name."""
    with pytest.raises(BadKeys, match="name"):
        add_client(folder, name)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (None, "No such file|does not exist"),
        ("metadata\ncurve\n", "contains no key"),
        ('curve\n    public-key = "short"\n    secret-key = "short"\n', "not 40 characters"),
        (f'curve\n    public-key = "{"~" * 40}"\n', "not 40 characters"),
        (f'curve\n    public-key = "{new_pair().public.decode()}"\n', "contains no secret key"),
    ],
    ids=["missing", "no key", "too short", "no Z85", "public only"],
)
def test_a_file_that_is_no_key_pair_is_told_by_name_and_not_by_content(
    tmp_path: Path, content: str | None, told: str
) -> None:
    """The message says what to do, without showing the key."""
    path = tmp_path / "broken.key_secret"
    if content is not None:
        path.write_text(content)

    with pytest.raises(BadKeys, match=told) as caught:
        load_pair(path)

    assert str(path) in str(caught.value)
    assert "short" not in str(caught.value)


def test_pairs_compare_by_value() -> None:
    """A file read twice gives equal pairs."""
    pair = new_pair()

    assert pair == KeyPair(pair.public, pair.secret)
