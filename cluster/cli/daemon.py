"""`homing serve --detach`: the same command again as a process of its own, and a wait until it serves.

Shows the daemon's own progress while waiting, so that a failure reads as it would in the foreground.
"""

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from ..config import Settings, state_folder
from ..errors import AlreadyRunning
from ..registry import ClusterRegistry

POLL_S = 0.1


def detach(settings: Settings, words: Sequence[str], out: TextIO) -> int:
    """Start `homing` with these words in the background; returns 0 once it serves, else what it ended with."""
    registry = ClusterRegistry(state_folder(settings))
    name = settings.cluster.name
    registry.make_folder()
    entry = registry.read(name)
    if entry is not None and entry.process() is not None:
        raise AlreadyRunning(f"cluster {name!r} is running already (pid {entry.pid}); end it with homing stop")
    log = registry.log_path(name)
    daemon = _spawn(words, log)
    try:
        return _follow(daemon, registry, name, log, out)
    except KeyboardInterrupt:
        daemon.terminate()
        daemon.wait()
        raise


def _spawn(words: Sequence[str], log: Path) -> "subprocess.Popen[bytes]":
    # -P: a file in the current folder must not stand in for a module of the daemon's.
    command = [sys.executable, "-P", "-m", "homing.cluster.cli.main", *words, "--background"]
    with log.open("wb") as output:
        log.chmod(0o600)
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )


def _follow(daemon: "subprocess.Popen[bytes]", registry: ClusterRegistry, name: str, log: Path, out: TextIO) -> int:
    with log.open() as lines:
        while True:
            code = daemon.poll()
            entry = registry.read(name)
            ready = entry is not None and entry.pid == daemon.pid and entry.phase == "ready"
            if ready or code is not None:
                time.sleep(POLL_S)  # the banner follows the entry
            print(lines.read(), end="", file=out, flush=True)
            if ready:
                print(f"running in the background, pid {daemon.pid}; its output goes to {log}", file=out)
                daemon.returncode = 0  # it outlives us on purpose: Popen must not warn about it
                return 0
            if code is not None:
                return code or 1
            time.sleep(POLL_S)
