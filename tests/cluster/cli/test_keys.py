"""`homing keys`, and how `homing serve` reports unusable keys."""

import io
from pathlib import Path

import pytest

from homing.cluster.cli.main import run
from homing.cluster.errors import SettingsError
from homing.cluster.preflight import check_keys
from homing.events import load_pair
from homing.events.config import EventsSettings
from homing.events.security.curve_keys import new_pair


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Keys as written by the command."""
    assert run(["keys", str(tmp_path / "keys")], io.StringIO()) == 0
    return tmp_path / "keys"


def test_the_commands_keys_are_accepted_and_its_words_lead_on(tmp_path: Path) -> None:
    """The output contains the next command to run."""
    out = io.StringIO()

    assert run(["keys", str(tmp_path / "keys")], out) == 0

    assert f"--events-curve-keys {tmp_path / 'keys'}" in out.getvalue()
    check_keys(EventsSettings(events_curve_keys=str(tmp_path / "keys")))


def test_a_further_client_gets_a_file_of_its_own(folder: Path) -> None:
    """The command prints the file's path, but not the key."""
    out = io.StringIO()

    assert run(["keys", str(folder), "--client", "lmcache"], out) == 0

    assert str(folder / "lmcache.key_secret") in out.getvalue()
    assert load_pair(folder / "lmcache.key_secret").secret.decode() not in out.getvalue()


def test_a_second_run_changes_nothing_and_says_so(folder: Path) -> None:
    """Keys in use must survive a repeated command."""
    with pytest.raises(SettingsError, match="never overwritten"):
        run(["keys", str(folder)], io.StringIO())


def test_keys_that_would_lock_the_router_out_are_told_before_anything_starts(folder: Path) -> None:
    """Otherwise, the cluster would start, refuse its own router and never become ready."""
    (folder / "clients" / "reader.key").write_text(f'curve\n    public-key = "{new_pair().public.decode()}"\n')

    with pytest.raises(SettingsError, match="events_curve_keys"):
        check_keys(EventsSettings(events_curve_keys=str(folder)))
    with pytest.raises(SettingsError, match="homing keys"):
        check_keys(EventsSettings(events_curve_keys=str(folder / "missing")))
