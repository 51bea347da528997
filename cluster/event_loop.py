"""The event loop of whoever serves: the fastest that is installed."""

import asyncio


def fast_loop() -> asyncio.AbstractEventLoop:
    """uvloop where there is one."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop
