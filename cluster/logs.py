"""Where log lines go and what they look like; set up once per process. Knows nothing of who logs.

Messages are events with fields (`replica_joined replica=r0 blocks=8192`); this adds time and level and keeps the
libraries below quiet.
"""

import logging
import sys

FORMAT = "%(asctime)s %(levelname)-7s %(message)s"


def set_up_logging(level: str) -> None:
    """Log lines of homing from `level` on, and warnings of everything else, to standard error."""
    logging.basicConfig(level=logging.WARNING, format=FORMAT, datefmt="%H:%M:%S", stream=sys.stderr, force=True)
    logging.getLogger("homing").setLevel(level.upper())
