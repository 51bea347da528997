"""Set-up of every process of a cluster: event loop, logging, resource limits and garbage collector."""

import asyncio
import contextlib
import gc
import logging
import os
import resource
import subprocess
import sys

log = logging.getLogger(__name__)

#: More than a router's clients and replicas need. The hard limit may be a billion, which some libraries iterate over.
OPEN_FILES = 65_536
#: Limits below this are reported: two files for each of many clients, and some for replicas, logs and Ray.
FEW_OPEN_FILES = 4096


def fast_loop() -> asyncio.AbstractEventLoop:
    """Return a new uvloop event loop."""
    import uvloop

    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


def set_up_logging(level: str) -> None:
    """Log homing's messages from `level` up, and warnings of all libraries, to standard error."""
    form = "%(asctime)s %(levelname)-7s %(message)s"
    logging.basicConfig(level=logging.WARNING, format=form, datefmt="%H:%M:%S", stream=sys.stderr, force=True)
    logging.getLogger("homing").setLevel(level.upper())


def raise_open_files_limit() -> None:
    """Raise this process's soft limit on open files to OPEN_FILES, or to the hard limit if that is lower.

    Each connection is a file; with the usual soft limit, 1,024, one client's idle connections lock out all others.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    if wanted < FEW_OPEN_FILES:
        log.warning("few_open_files limit=%d remedy='ulimit -Hn 65536 before homing serve, or LimitNOFILE='", wanted)


def leave_process_group() -> None:
    """Move this process into a process group of its own that others do not know: they cannot signal it by its old one.

    A group's leader can only move to an existing group, so a short-lived child makes one. Does nothing where a process
    may not leave its group.
    """
    with (
        contextlib.suppress(OSError),
        subprocess.Popen(["cat"], stdin=subprocess.PIPE, process_group=0) as leader,
    ):
        os.setpgid(0, leader.pid)


def freeze_loaded_objects() -> None:
    """Exclude all existing objects from garbage collection: traversing 400,000 of them takes 205 to 240 ms."""
    gc.collect()
    gc.freeze()
