"""What every process of a cluster sets up once: its event loop, its log lines, its garbage collector."""

import asyncio
import gc
import logging
import sys


def fast_loop() -> asyncio.AbstractEventLoop:
    """A new uvloop event loop; asyncio's own where uvloop is not installed."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


def set_up_logging(level: str) -> None:
    """Write log lines of homing from `level` on, and warnings of all libraries, to standard error."""
    form = "%(asctime)s %(levelname)-7s %(message)s"
    logging.basicConfig(level=logging.WARNING, format=form, datefmt="%H:%M:%S", stream=sys.stderr, force=True)
    logging.getLogger("homing").setLevel(level.upper())


def freeze_loaded_objects() -> None:
    """Exclude all objects that exist now from garbage collection: walking 400,000 of them takes 205 to 240 ms."""
    gc.collect()
    gc.freeze()
