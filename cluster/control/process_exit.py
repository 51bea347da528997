"""To be told at once when another process has ended, however it did. Knows nothing of who that is, nor what follows."""

import logging
import os
import select
import threading
from collections.abc import Callable

log = logging.getLogger(__name__)


def when_ended(pid: int, act: Callable[[], None]) -> None:
    """Call `act` in a thread of its own when this process has ended; never where the system has no such news."""
    try:
        ended = os.pidfd_open(pid)
    except ProcessLookupError:
        act()
        return
    except (AttributeError, OSError) as error:  # no Linux, or one that is old or shielded
        log.info("process_not_watched pid=%d reason=%r", pid, str(error))
        return
    threading.Thread(target=_wait, args=(ended, act), name=f"end of {pid}", daemon=True).start()


def _wait(ended: int, act: Callable[[], None]) -> None:
    watched = select.poll()
    watched.register(ended, select.POLLIN)
    try:
        watched.poll()
    finally:
        os.close(ended)
    act()
