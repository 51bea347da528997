"""`homing serve --detach` and `homing stop`: a cluster in the background, and its end.

`--detach` runs the same command as a process of its own and shows its output until it serves, so that a failure reads
as it would in the foreground.
"""

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, TextIO

import psutil

from ..config import Settings, state_folder
from ..errors import AlreadyRunning, StopFailed
from ..flags import NOTHING, FindCluster, Out, option, settings_of
from ..registry import ClusterRegistry, RegistryEntry, describe_running, kill, wait_gone

POLL_S = 0.1
#: Beyond the time that the serving process allows itself for an orderly end.
GRACE_S = 1.0
#: From SIGKILL until a process has freed its memory.
KILL_TIMEOUT_S = 5.0


def detach(settings: Settings, words: Sequence[str], out: TextIO) -> int:
    """Start `homing` with these words in the background; returns 0 once it serves, else its exit code."""
    registry, name = ClusterRegistry(state_folder(settings)), settings.cluster.name
    registry.make_folder()
    if entry := registry.live(name):
        raise AlreadyRunning(f"cluster {name!r} is running already (pid {entry.pid}); end it with homing stop")
    log = registry.log_path(name)
    own_words = [word for word in words if word != "--detach"]
    # -P: a file in the current folder must not replace a module of the daemon's.
    command = [sys.executable, "-P", "-m", "homing.cluster.cli.main", *own_words, "--background"]
    # Ours alone: a link in a folder that others can write must not choose which file is emptied.
    with open(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600), "wb") as output:
        os.fchmod(output.fileno(), 0o600)
        daemon = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        return _follow(daemon, registry, name, log, out)
    except KeyboardInterrupt:
        daemon.terminate()
        daemon.wait()
        raise


def _follow(daemon: "subprocess.Popen[bytes]", registry: ClusterRegistry, name: str, log: Path, out: TextIO) -> int:
    with log.open() as lines:
        while True:
            code = daemon.poll()
            entry = registry.read(name)
            ready = entry is not None and entry.pid == daemon.pid and entry.phase == "ready"
            if ready or code is not None:
                time.sleep(POLL_S)  # the banner follows the registry entry
            print(lines.read(), end="", file=out, flush=True)
            if ready:
                print(f"running in the background, pid {daemon.pid}; its output goes to {log}", file=out)
                daemon.returncode = 0  # it outlives us on purpose: Popen must not warn about it
                return 0
            if code is not None:
                return code or 1
            time.sleep(POLL_S)


def stop(
    *,
    given: FindCluster = NOTHING,
    out: Out,
    force: Annotated[bool, option("kill it at once, without an orderly end")] = False,
) -> int:
    """End a cluster; what has not ended in time is killed. Raises NotRunning."""
    settings = settings_of(given)
    registry, name = ClusterRegistry(state_folder(settings)), settings.cluster.name
    entry = registry.running(name)
    began = time.monotonic()
    # A second signal would kill it at once, so one that is stopping already is only waited for.
    ask, timeout_s = entry.phase != "stopping", settings.cluster.stop_timeout_s + GRACE_S
    killed = _end(entry, ask=ask and not force, timeout_s=0 if force else timeout_s)
    registry.remove(name)
    how = f"; killed {killed} processes that had not ended" if killed else ""
    print(f"stopped {name} (pid {entry.pid}) in {time.monotonic() - began:.1f} s{how}", file=out)
    if others := registry.others(name):
        print(f"still running: {describe_running(others)}", file=out)
    return 0


def _end(entry: RegistryEntry, *, ask: bool, timeout_s: float) -> int:
    """Returns how many processes were killed. Raises StopFailed for those that even that does not end."""
    process = entry.process()
    if process is None:
        return 0
    try:
        family = [process, *process.children(recursive=True)]
        if ask:
            process.terminate()
    except psutil.NoSuchProcess:
        return 0
    family += [each for mark in entry.ray if (each := mark.process()) is not None and each not in family]
    left = wait_gone(family, timeout_s)
    kill(left)
    if alive := wait_gone(left, KILL_TIMEOUT_S):
        raise StopFailed(f"these processes cannot be killed: pids {', '.join(str(each.pid) for each in alive)}")
    return len(left)
