"""Reports at once when another process has ended, however it ended."""

import logging
import os
import select
import threading
from collections.abc import Callable

log = logging.getLogger(__name__)


def on_process_exit(pid: int, act: Callable[[], None]) -> None:
    """Call `act` in a thread of its own when this process has ended; never on systems without pidfd_open."""
    try:
        exited = os.pidfd_open(pid)
    except ProcessLookupError:
        act()
        return
    except (AttributeError, OSError) as error:  # not Linux, or an old or restricted one
        log.info("process_not_watched pid=%d reason=%r", pid, str(error))
        return

    def wait() -> None:
        poll = select.poll()
        poll.register(exited, select.POLLIN)
        try:
            poll.poll()
        finally:
            os.close(exited)
        act()

    threading.Thread(target=wait, name=f"end of {pid}", daemon=True).start()
