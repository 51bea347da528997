"""One publisher's stream as a plain sequence of events, including resyncs: the form that the SDK yields and records.

Pure. A resync (late join, restart, or a gap that replay cannot close) becomes a `Cleared` followed by the `Stored` of
all held blocks, marked `resync`, so that consumers that apply events need no special case.
"""

import contextlib
from collections.abc import Iterator, Sequence
from datetime import datetime, tzinfo
from typing import assert_never

import msgspec

from ..follow.subscription import Apply, Reset
from ..wire.cache_events import CacheEvent, Cleared, Removed, Stored, wire_hash
from ..wire.messages import COMPUTE_MEDIUM, SnapshotBlock


class StreamEvent(msgspec.Struct, frozen=True):
    """An event with its position in the stream."""

    seq: int | None  #: batch number; in a resync, the last number it includes (None: before the first batch)
    ts: float | None  #: the publisher's time in seconds since 1970; None in a resync
    event: CacheEvent
    resync: bool = False


def stream_events(instruction: Apply | Reset) -> Iterator[StreamEvent]:
    """Yield the events of one instruction of a subscription."""
    match instruction:
        case Apply(seq, ts, events):
            for event in events:
                yield StreamEvent(seq, ts, event)
        case Reset(_, seq, blocks, tiers):
            yield StreamEvent(seq, None, Cleared(), resync=True)
            for event in chains(blocks):
                yield StreamEvent(seq, None, event, resync=True)
            for medium, held in tiers.items():
                for event in chains(held):
                    yield StreamEvent(seq, None, msgspec.structs.replace(event, medium=medium), resync=True)
        case _:
            assert_never(instruction)


def chains(blocks: Sequence[SnapshotBlock]) -> Iterator[Stored]:
    """Convert a snapshot to `Stored` events, one for each run of consecutive blocks of a chain."""
    run: list[SnapshotBlock] = []
    for block in blocks:
        if run and block.parent != run[-1].block_hash:
            yield _chain(run)
            run = []
        run.append(block)
    if run:
        yield _chain(run)


def _chain(run: Sequence[SnapshotBlock]) -> Stored:
    first = run[0]
    return Stored(
        None if first.parent is None else wire_hash(first.parent),
        [wire_hash(block.block_hash) for block in run],
        [token for block in run for token in block.token_ids],
        len(first.token_ids),
        extra_keys=[[first.cache_salt]] if first.cache_salt else None,
    )


def describe(replica: str, item: StreamEvent, zone: tzinfo | None = None) -> str:
    """Format as a line: `12:01:02.345 r0 #41 stored 2 blocks after 9f3a1c02… (32 tokens)`. `zone` None: local time."""
    time = "--:--:--.---"
    if item.ts is not None:
        with contextlib.suppress(OverflowError, ValueError, OSError):  # a publisher may send any number as its time
            time = datetime.fromtimestamp(item.ts, zone).strftime("%H:%M:%S.%f")[:-3]
    seq = "#-" if item.seq is None else f"#{item.seq}"
    return f"{time} {replica} {seq} {_describe_event(item.event)}{' (resync)' if item.resync else ''}"


def _describe_event(event: CacheEvent) -> str:
    match event:
        case Stored():
            where = "at the start of a prompt" if event.parent is None else f"after {_short(event.parent)}"
            count = len(event.token_ids) or len(event.hashes) * event.block_size
            stored = f"stored {_blocks(event.hashes)}{_in_tier(event.medium)} {where}"
            return stored + (f" ({count} tokens)" if count else "")
        case Removed():
            names = ", ".join(map(_short, event.hashes[:3])) + (", …" if len(event.hashes) > 3 else "")
            return f"removed {_blocks(event.hashes)}{_in_tier(event.medium)}: {names}"
        case Cleared():
            return "cleared"
        case _:
            assert_never(event)


def _in_tier(medium: str | None) -> str:
    return "" if medium is None or medium == COMPUTE_MEDIUM else f" in {medium}"


def _blocks(hashes: Sequence[int]) -> str:
    return "1 block" if len(hashes) == 1 else f"{len(hashes)} blocks"


def _short(block: int) -> str:
    return f"{block:016x}"[:8] + "…"
