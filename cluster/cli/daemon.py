"""`homing serve --detach` and `homing stop`: start a cluster in the background, and stop a cluster.

`--detach` runs the same command as a separate process and shows its output until it serves, so that a failure looks as
it would in the foreground.
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
#: Added to the time that the serving process allows itself for a graceful shutdown.
GRACE_S = 1.0
#: Longest time from SIGKILL until a process has freed its memory and exited.
KILL_TIMEOUT_S = 5.0


def detach(settings: Settings, words: Sequence[str], out: TextIO) -> int:
    """Start `homing` with these arguments in the background; returns 0 once it serves, else its exit code."""
    registry, name = ClusterRegistry(state_folder(settings)), settings.cluster.name
    registry.make_folder()
    if entry := registry.live(name):
        raise AlreadyRunning(f"cluster {name!r} is running already (pid {entry.pid}); end it with homing stop")
    log = registry.log_path(name)
    # -P: a file in the current folder must not shadow a module that the daemon imports.
    command = [sys.executable, "-P", "-m", "homing.cluster.cli.main", *words, "--background"]
    # O_NOFOLLOW and 0600: in a folder that others can write, a link must not choose which file is truncated.
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
    with log.open(errors="replace") as lines:
        while True:
            code = daemon.poll()
            entry = registry.read(name)
            ready = entry is not None and entry.pid == daemon.pid and entry.phase == "ready"
            if ready or code is not None:
                time.sleep(POLL_S)  # the banner is printed after the registry entry is written
            print(lines.read(), end="", file=out, flush=True)
            if ready:
                print(f"running in the background, pid {daemon.pid}; its output goes to {log}", file=out)
                daemon.returncode = 0  # no warning from Popen: the daemon outlives us on purpose
                return 0
            if code is not None:
                return code or 1
            time.sleep(POLL_S)


def stop(
    *,
    flags: FindCluster = NOTHING,
    out: Out,
    force: Annotated[bool, option("kill it at once instead of shutting down gracefully")] = False,
) -> int:
    """Stop a cluster; processes that do not exit in time are killed. Raises NotRunning and StopFailed."""
    settings = settings_of(flags)
    registry, name = ClusterRegistry(state_folder(settings)), settings.cluster.name
    entry = registry.running(name)
    began = time.monotonic()
    # A second signal would kill it at once, so only wait if it is already stopping.
    ask, timeout_s = entry.phase != "stopping", settings.cluster.stop_timeout_s + GRACE_S
    killed = _stop_processes(entry, ask=ask and not force, timeout_s=0 if force else timeout_s)
    registry.remove(name)
    how = f"; killed {killed} processes that had not exited" if killed else ""
    print(f"stopped {name} (pid {entry.pid}) in {time.monotonic() - began:.1f} s{how}", file=out)
    if others := registry.others(name):
        print(f"still running: {describe_running(others)}", file=out)
    return 0


def _stop_processes(entry: RegistryEntry, *, ask: bool, timeout_s: float) -> int:
    """Stop the processes; returns how many were killed. Raises StopFailed if some survive even that."""
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
