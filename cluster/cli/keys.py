"""`homing keys`: CURVE keys for a cluster, and for further clients of its event streams."""

from pathlib import Path
from typing import TextIO

from ...events.errors import BadKeys
from ...events.security.curve_keys import add_client, make_folder
from ..errors import SettingsError


def keys(folder: Path, client: str | None, out: TextIO) -> int:
    """Create a folder of keys, or one more client in it; returns the exit code. Raises SettingsError."""
    try:
        if client is None:
            make_folder(folder)
            print(f"keys are in {folder}; start replicas with: homing serve --events-curve-keys {folder}", file=out)
            return 0
        made = add_client(folder, client)
    except BadKeys as error:
        raise SettingsError(str(error)) from error
    print(f"move {made} to the client, which loads it with homing.events.load_pair", file=out)
    print(f"replicas accept it from now on; to revoke it: rm {folder / 'clients' / made.stem}.key", file=out)
    return 0
