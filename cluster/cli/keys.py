"""`homing keys`: CURVE keys for a cluster, and for further clients of its event streams."""

from pathlib import Path
from typing import TextIO

from ...events.config import EventsSettings
from ...events.errors import BadKeys
from ...events.security.curve_keys import add_client, make_folder, reader_keys, server_keys
from ..errors import SettingsError


def keys(folder: Path, client: str | None, out: TextIO) -> int:
    """Make a folder of keys, or one more client in it; returns the exit code. Raises SettingsError."""
    try:
        if client is None:
            make_folder(folder)
            print(f"keys are in {folder}; start replicas with: homing serve --events-curve-keys {folder}", file=out)
            return 0
        made = add_client(folder, client)
    except BadKeys as error:
        raise SettingsError(str(error)) from error
    print(f"move {made} to the client: homing.events.load_pair reads it", file=out)
    print(f"replicas let it in from now on; to lock it out: rm {folder / 'clients' / made.stem}.key", file=out)
    return 0


def check_keys(settings: EventsSettings) -> None:
    """Raises SettingsError for keys with which the cluster's own router would stay outside: better now than later."""
    try:
        server, reader = server_keys(settings), reader_keys(settings)
        if server is None or server.allowed is None or reader is None:
            return
        if reader.public not in server.allowed():
            raise BadKeys(Path(settings.events_curve_keys), "clients/ lacks the public half of reader.key_secret")
    except BadKeys as error:
        raise SettingsError(f"setting events_curve_keys: {error}") from error
