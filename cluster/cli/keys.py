"""`homing keys`: creates keys that encrypt traffic between replicas, routers and subscribers. Also `homing version`."""

from pathlib import Path
from typing import Annotated

from ... import __version__
from ...events.errors import BadKeys
from ...events.security.curve_keys import add_client, make_folder
from ..errors import SettingsError
from ..flags import Out, option


def keys(
    folder: Annotated[Path, option("folder to create for the keys", "DIR")],
    /,
    *,
    out: Out,
    client: Annotated[
        str | None, option("add keys for one more subscriber to an existing folder", metavar="NAME")
    ] = None,
) -> int:
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


def version(*, out: Out) -> int:
    print(f"homing {__version__}", file=out)
    return 0
