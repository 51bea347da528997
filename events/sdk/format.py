"""One readable line per event. Pure: the time zone comes in by parameter.

12:01:02.345 r0 #41 stored 63 blocks after 9f3a1c02… (1008 tokens)
"""

from datetime import datetime, tzinfo

from ..wire.cache_events import describe_event
from .plain_stream import StreamEvent


def describe(replica: str, item: StreamEvent, zone: tzinfo | None = None) -> str:
    """The line for one event. `zone` None: local time."""
    time = "--:--:--.---"
    if item.ts is not None:
        time = datetime.fromtimestamp(item.ts, zone).strftime("%H:%M:%S.%f")[:-3]
    seq = "#-" if item.seq is None else f"#{item.seq}"
    return f"{time} {replica} {seq} {describe_event(item.event)}{' (resync)' if item.resync else ''}"
