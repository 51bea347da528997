"""One readable line per event, for `homing watch`. Pure: values in, text out; the time zone comes in by parameter.

12:01:02.345 r0 #41 stored 63 blocks after 9f3a1c02… (1008 tokens)
"""

from collections.abc import Sequence
from datetime import datetime, tzinfo

from ..wire.dialects import CacheEvent, Cleared, Removed, Stored
from .plain_stream import StreamEvent

_NO_TIME = "--:--:--.---"


def describe(replica: str, item: StreamEvent, zone: tzinfo | None = None) -> str:
    """The line for one event. `zone` None: local time."""
    seq = "#-" if item.seq is None else f"#{item.seq}"
    told_again = " (resync)" if item.resync else ""
    return f"{_time(item.ts, zone)} {replica} {seq} {_event(item.event)}{told_again}"


def _time(ts: float | None, zone: tzinfo | None) -> str:
    if ts is None:
        return _NO_TIME
    return datetime.fromtimestamp(ts, zone).strftime("%H:%M:%S.%f")[:-3]


def _event(event: CacheEvent) -> str:
    match event:
        case Stored():
            where = "at the start of a prompt" if event.parent is None else f"after {_short(event.parent)}"
            return f"stored {_blocks(event.hashes)} {where}{_tokens(event)}"
        case Removed():
            return f"removed {_blocks(event.hashes)}: {_list(event.hashes)}"
        case Cleared():
            return "cleared"


def _blocks(hashes: Sequence[int]) -> str:
    return "1 block" if len(hashes) == 1 else f"{len(hashes)} blocks"


def _tokens(event: Stored) -> str:
    count = len(event.token_ids) or len(event.hashes) * event.block_size
    return f" ({count} tokens)" if count else ""


def _list(hashes: Sequence[int]) -> str:
    more = ", …" if len(hashes) > 3 else ""
    return ", ".join(_short(block) for block in hashes[:3]) + more


def _short(block: int) -> str:
    return f"{block:016x}"[:8] + "…"
