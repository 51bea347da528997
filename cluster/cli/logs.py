"""`homing logs`: prints the logs of a cluster's parts, while it runs and afterwards."""

import time
from collections.abc import Callable
from typing import Annotated, TextIO

from cyclopts import Parameter

from ..config import Settings, nearest, state_folder
from ..errors import NoSuchLog, SettingsError
from ..flags import NOTHING, FindCluster, Out, option, settings_of
from ..logs import LogLine, LogTail, belongs, parts, read_log
from ..registry import ClusterRegistry

POLL_S = 0.2


def logs(
    part: Annotated[str | None, option("a replica such as r0, router, requests or controller (default: all)")] = None,
    /,
    *,
    flags: FindCluster = NOTHING,
    out: Out,
    lines: Annotated[int, option("print only the last N lines; 0: all that are kept", metavar="N")] = 200,
    follow: Annotated[bool, option("keep printing new lines until interrupted", "--follow", "-f")] = False,
    pause: Annotated[Callable[[float], None], Parameter(parse=False)] = time.sleep,
) -> int:
    """Print the logs of one part or of all. Raises NoSuchLog and SettingsError."""
    if lines < 0:
        raise SettingsError(f"logs: --lines {lines}: give a number of lines, or 0 for all")
    settings = settings_of(flags)
    folder = ClusterRegistry(state_folder(settings)).log_folder(settings.cluster.name)
    known = parts(folder)
    selected = [each for each in known if part is None or belongs(each, part)]
    if not selected and not (follow and part is None):
        raise NoSuchLog(_missing(settings, part, known))
    tail = LogTail(folder)
    several = part is None or len(selected) > 1
    for line in read_log(folder, selected)[-lines:]:
        _print(line, out, several=several)
    while follow:
        pause(POLL_S)
        for line in tail.read(part):
            _print(line, out, several=several)
    return 0


def _missing(settings: Settings, part: str | None, known: list[str]) -> str:
    if known:
        return f"no log of {part!r}{nearest(part or '', known)} (there are: {', '.join(known)})"
    name = settings.cluster.name
    return f"cluster {name!r} has logged nothing here; a joined Ray cluster keeps its logs itself: ray logs"


def _print(line: LogLine, out: TextIO, *, several: bool) -> None:
    print(f"{line.part:<10} {line.text}" if several else line.text, file=out, flush=True)
