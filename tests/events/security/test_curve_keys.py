"""Key files: what is written is what is read, secrets stay with their owner, and mistakes are told by file."""

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
    """A cluster's keys."""
    make_folder(tmp_path / "keys")
    return tmp_path / "keys"


def settings(folder: Path, clients: str = "listed") -> EventsSettings:
    """Settings that use these keys."""
    return EventsSettings(events_curve_keys=str(folder), events_curve_clients=clients)


def test_a_new_folder_lets_the_clusters_own_readers_in_and_nobody_else(folder: Path) -> None:
    """`homing serve` and `homing watch` work with it as it is."""
    server, reader = server_keys(settings(folder)), reader_keys(settings(folder))

    assert server.allowed() == {reader.public}
    assert load_public(folder / "server.key") == server.pair.public
    assert len({server.pair.secret, server.pair.public, reader.secret, reader.public}) == 4


def test_a_client_is_let_in_and_locked_out_while_replicas_run(folder: Path) -> None:
    """A restart of all replicas would be a high price for one more subscriber, and for one less."""
    server = server_keys(settings(folder))

    pair = load_pair(add_client(folder, "lmcache"))
    assert pair.public in server.allowed()
    (folder / "clients" / "lmcache.key").unlink()

    assert pair.public not in server.allowed()


def test_without_a_folder_nothing_is_encrypted() -> None:
    """The default."""
    assert server_keys(EventsSettings()) is None
    assert reader_keys(EventsSettings()) is None


def test_any_client_may_be_let_in(folder: Path) -> None:
    """Encryption without a list, for those who guard the network otherwise."""
    assert server_keys(settings(folder, "any")).allowed is None


def test_secrets_are_readable_to_their_owner_only_and_in_no_repr(folder: Path) -> None:
    """Logs, tracebacks and dashboards print objects."""
    pair = reader_keys(settings(folder))

    assert {path.stat().st_mode & 0o777 for path in folder.glob("*.key_secret")} == {0o600}
    assert pair.secret.decode() not in repr(pair) + str(server_keys(settings(folder)))
    assert b"secret-key" not in (folder / "server.key").read_bytes()
    assert all(b"secret-key" not in path.read_bytes() for path in (folder / "clients").iterdir())


def test_keys_are_never_overwritten(folder: Path) -> None:
    """Others hold their other halves: a second `homing keys` would lock everybody out."""
    before = load_pair(folder / "server.key_secret")

    with pytest.raises(BadKeys, match=r"server\.key_secret: it already exists"):
        make_folder(folder)
    with pytest.raises(BadKeys, match=r"reader\.key_secret: it already exists"):
        add_client(folder, "reader")

    assert load_pair(folder / "server.key_secret") == before


@pytest.mark.parametrize("name", ["", "../x", "a b", ".hidden", "x/y"])
def test_a_clients_name_is_no_path(folder: Path, name: str) -> None:
    """It becomes a file's name."""
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
    """The remedy is in the message; the key is not."""
    path = tmp_path / "broken.key_secret"
    if content is not None:
        path.write_text(content)

    with pytest.raises(BadKeys, match=told) as caught:
        load_pair(path)

    assert str(path) in str(caught.value)
    assert "short" not in str(caught.value)


def test_pairs_compare_by_value() -> None:
    """A file read twice is the same pair."""
    pair = new_pair()

    assert pair == KeyPair(pair.public, pair.secret)
