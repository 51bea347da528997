"""`homing stop`: ask the process that serves to end, and wait until it and all below it are gone."""

import time
from typing import TextIO

import psutil

from ..config import Settings, state_folder
from ..errors import StopFailed
from ..registry import ClusterRegistry, addressed, wait_gone

#: Beyond what the serving process allows itself for an orderly end.
GRACE_S = 15.0


def stop(settings: Settings, out: TextIO, *, force: bool) -> int:
    """End the cluster of this name. Raises NotRunning, or StopFailed when it does not end in time."""
    registry, name = ClusterRegistry(state_folder(settings)), settings.cluster.name
    entry = registry.running(name)
    process = entry.process()
    began = time.monotonic()
    timeout_s = settings.cluster.stop_timeout_s + GRACE_S
    # A second signal means: at once. One that stops already is only waited for.
    alive = _end(process, timeout_s, ask=entry.phase != "stopping", force=force) if process else []
    if alive:
        pids = ", ".join(str(left.pid) for left in alive)
        raise StopFailed(f"cluster {name!r} did not end in time (pids {pids}); kill it with homing stop --force")
    registry.sweep(name)
    print(f"stopped {name} (pid {entry.pid}) in {time.monotonic() - began:.1f} s", file=out)
    if others := registry.others(name):
        print(f"still there {addressed(others)}", file=out)
    return 0


def _end(process: psutil.Process, timeout_s: float, *, ask: bool, force: bool) -> list[psutil.Process]:
    try:
        family = [process, *process.children(recursive=True)]
        if ask:
            process.terminate()
    except psutil.NoSuchProcess:
        return []
    alive = wait_gone(family, timeout_s)
    if alive and force:
        for left in alive:
            _kill(left)
        alive = wait_gone(alive, 5)
    return alive


def _kill(process: psutil.Process) -> None:
    try:
        process.kill()
    except psutil.NoSuchProcess:
        return
