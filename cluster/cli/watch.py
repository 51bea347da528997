"""`homing watch`: prints all replicas' cache events as lines, for a person or (`--json`) for a program.

Follows replicas as they come and go (`ClusterFeed`). The output has no gaps: after lost messages, a `reset` repeats all
held blocks. JSON lines have the format of recordings (`events.record`).
"""

import asyncio
import contextlib
import itertools
import math
import re
import signal
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, BinaryIO, TextIO

import msgspec

from ...events import (
    BadRecord,
    CacheEvent,
    Cleared,
    ClusterUnreachable,
    EventError,
    EventFeed,
    KeyPair,
    KeysRefused,
    Recorded,
    Removed,
    Stored,
    StreamEvent,
    read_lines,
    to_line,
)
from ...events.errors import BadKeys
from ...events.follow.block_set import TieredMirror
from ...events.follow.cluster_feed import ClusterFeed, Source
from ...events.follow.subscription import Apply, Counters, FeedStatus, Reset
from ...events.sdk.plain_stream import stream_events
from ...events.sdk.record import remark
from ...events.security.curve_keys import reader_keys
from ...events.wire.cache_events import EVENT_NAMES
from ..client import get_json, router_urls
from ..config import Settings, nearest
from ..errors import ClusterError, SettingsError
from ..flags import NOTHING, FollowEvents, Out, Url, option, settings_of
from ..output import count

#: Values of `--event`.
KINDS = (*EVENT_NAMES, "reset", "joined", "gone", "status", "malformed", "refused")

Write = Callable[[str], None]
#: Returns seconds since 1970; None if unknown.
Clock = Callable[[], float | None]


@dataclass(slots=True, frozen=True, kw_only=True)
class EventFilter:
    """Which events are printed; an empty field selects all."""

    replicas: frozenset[str] = frozenset()
    kinds: frozenset[str] = frozenset()  #: values of `KINDS`
    hash_prefix: str = ""  #: first hex digits of the block hash

    @classmethod
    def of(cls, replicas: Collection[str], kinds: Collection[str], hash_prefix: str) -> "EventFilter":
        for kind in sorted(set(kinds) - set(KINDS)):
            raise SettingsError(f"--event {kind}: no such event{nearest(kind, KINDS)} (there are: {', '.join(KINDS)})")
        prefix = hash_prefix.lower()
        if not re.fullmatch(r"[0-9a-f]{0,16}", prefix):
            raise SettingsError(f"--hash {hash_prefix}: a hash is up to 16 hex digits (0-9, a-f); give its first ones")
        return cls(replicas=frozenset(replicas), kinds=frozenset(kinds), hash_prefix=prefix)

    def shows(self, *kinds: str) -> bool:
        return not self.kinds or not self.kinds.isdisjoint(kinds)

    def select(self, item: StreamEvent) -> StreamEvent | None:
        """The event with only the selected blocks; None if none of them is selected."""
        event = item.event
        if not self.shows(type(event).__name__.lower(), *(["reset"] if item.resync else [])):
            return None
        if not self.hash_prefix or isinstance(event, Cleared):
            return item
        kept = [block for block in event.hashes if f"{block:016x}".startswith(self.hash_prefix)]
        if not kept:
            return None
        selected = msgspec.structs.replace(event, hashes=kept)
        if isinstance(selected, Stored) and len(kept) < len(event.hashes):
            # The remaining blocks need not be a chain: the event's parent and tokens do not apply to them.
            selected = msgspec.structs.replace(selected, parent=None, token_ids=())
        return msgspec.structs.replace(item, event=selected)


@dataclass(slots=True, frozen=True, kw_only=True)
class WatchOptions:
    shown: EventFilter = EventFilter()
    as_json: bool = False
    rates_s: float | None = None  #: print rates at this interval instead of events
    record: Path | None = None  #: append every event of the followed replicas to this file, shown or not


@dataclass(slots=True)
class EventRates:
    """Counts of one replica's events since the last report."""

    stored: int = 0
    removed: int = 0
    batches: int = 0
    lag_s: float | None = None  #: delay of the newest batch, from the publisher's clock to ours

    def add(self, instruction: Apply | Reset, now_s: float) -> None:
        """Count a batch, but not a resync, which only repeats held blocks. `now_s`: seconds since 1970."""
        if isinstance(instruction, Reset):
            return
        self.batches += 1
        self.lag_s = now_s - instruction.ts
        for event in instruction.events:
            if isinstance(event, Stored):
                self.stored += len(event.hashes)
            elif isinstance(event, Removed):
                self.removed += len(event.hashes)

    def take(self, seconds: float, held: int, counters: Counters) -> dict[str, float | None]:
        """The rates over the last `seconds`; resets the counts. `lag_s` is None if there was no batch."""
        report = {
            "seconds": seconds,
            "stored_per_s": self.stored / seconds,  # blocks
            "removed_per_s": self.removed / seconds,  # blocks
            "batches_per_s": self.batches / seconds,
            "lag_s": self.lag_s,
            "held_blocks": held,
            "gaps": counters.gaps,  # since the replica was first followed
            "resyncs": max(0, counters.snapshots - 1),  # likewise, without the initial one
        }
        self.stored = self.removed = self.batches = 0
        self.lag_s = None
        return report


def watch(
    *,
    flags: FollowEvents = NOTHING,
    out: Out,
    url: Url = None,
    replica: Annotated[tuple[str, ...], option("follow only this replica; may be repeated", metavar="ID")] = (),
    event: Annotated[tuple[str, ...], option("only events of this kind; may be repeated", metavar="KIND")] = (),
    hash_prefix: Annotated[
        str, option("only blocks whose hash begins with these hex digits", "--hash", metavar="PREFIX")
    ] = "",
    rates: Annotated[float | None, option("print rates every S seconds instead of events", metavar="S")] = None,
    record: Annotated[
        Path | None,
        option("append every event of the followed replicas to this file, shown or not", metavar="FILE"),
    ] = None,
    replay: Annotated[
        Path | None, option("print a recorded file instead of following a cluster", metavar="FILE")
    ] = None,
    as_json: Annotated[bool, option("print one JSON object per event, for programs", "--json")] = False,
) -> int:
    """Print the events of a cluster or a recording."""
    if rates is not None and not 0 < rates < math.inf:
        raise SettingsError(f"--rates {rates:g}: give seconds above 0")
    shown = EventFilter.of(replica, event, hash_prefix)
    options = WatchOptions(shown=shown, as_json=as_json, rates_s=rates, record=record)
    return show_recording(replay, out, options) if replay else follow(settings_of(flags), out, options, url=url)


def follow(settings: Settings, out: TextIO, options: WatchOptions, *, url: str | None) -> int:
    """Print events until interrupted; returns the exit code. Raises ClusterError if the cluster ends."""
    address = f"{router_urls(settings, url)[0]}/cluster"
    check_replicas(options.shown.replicas, listed_replicas(get_json(address)), "the cluster")
    try:
        keys = reader_keys(settings.events)
    except BadKeys as error:
        raise SettingsError(f"setting events_curve_keys: {error}") from error
    try:
        with options.record.open("ab") if options.record else contextlib.nullcontext() as recording:
            session = WatchSession(options, partial(print, file=out, flush=True), recording)
            interval_s = settings.events.heartbeat_interval_s
            asyncio.run(_follow(address, session, options.shown.replicas, keys, interval_s))
    except EventError as error:
        raise ClusterError(str(error)) from error
    except BrokenPipeError:
        raise
    except OSError as error:
        where = f"record to {options.record}" if options.record else "print events"
        raise SettingsError(f"cannot {where}: {error.strerror}") from error
    return 0


def show_recording(path: Path, out: TextIO, options: WatchOptions) -> int:
    """Print a recording as `follow` would have printed it; returns the exit code.

    Raises SettingsError for a file that is not a recording.
    """
    session = ReplaySession(options, partial(print, file=out, flush=True))
    seen = set()
    try:
        with path.open("rb") as lines:
            for place, batch in itertools.groupby(read_lines(lines), _place):
                seen.add(place[0])
                if not options.shown.replicas or place[0] in options.shown.replicas:
                    session.batch(list(batch))
    except BrokenPipeError:
        raise
    except (OSError, BadRecord) as error:
        raise SettingsError(f"cannot replay {path}: {error}") from error
    session.close()
    check_replicas(options.shown.replicas, seen, str(path))
    return 0


def _place(record: Recorded) -> tuple[str, int | None, int | None, bool]:
    """A key that is the same for all events of one batch."""
    return record.replica, record.epoch, record.item.seq, record.item.resync


def listed_replicas(view: Any) -> set[str]:
    return {replica["replica_id"] for kind in ("replicas", "absent", "refused") for replica in view.get(kind, ())}


def check_replicas(named: Collection[str], known: Collection[str], where: str) -> None:
    for name in sorted(set(named) - set(known)):
        raise SettingsError(f"--replica {name}: {where} has no such replica (there are: {', '.join(sorted(known))})")


class JsonPrinter:
    """Prints lines for programs, in the format of recordings."""

    def __init__(self, write: Write, shown: EventFilter, clock: Clock = time.time) -> None:
        self._write, self._shown, self._clock = write, shown, clock

    def batch(self, records: Sequence[Recorded]) -> None:
        """Print a line for each event. A reset is a `cleared` followed by all held chains, marked `resync`."""
        for record in records:
            if (kept := self._shown.select(record.item)) is not None:
                self._write(to_line(record._replace(item=kept)).decode())

    def remark(self, source: Source, kind: str, text: str = "") -> None:
        if self._shown.shows(kind):
            fields = {"status" if kind == "status" else "message": text} if text else {}
            self._write(remark(source.replica, source.epoch, kind, **fields).decode())

    def rates(self, source: Source, report: Mapping[str, float | None]) -> None:
        self._write(remark(source.replica, source.epoch, "rates", ts=self._clock(), **report).decode())


class TextPrinter:
    """Prints lines for a person; consecutive events of one kind in a batch share a line."""

    def __init__(self, write: Write, shown: EventFilter, clock: Clock = time.time) -> None:
        self._write, self._shown, self._clock = write, shown, clock

    def batch(self, records: Sequence[Recorded]) -> None:
        """Print what was stored, removed or cleared; for a reset, the number of held blocks."""
        source = _source(records)
        if records[0].item.resync:
            held = sum(len(each.item.event.hashes) for each in records if isinstance(each.item.event, Stored))
            self.remark(source, "reset", f"holds {count(held, 'block')}")
            return
        kept = [item.event for each in records if (item := self._shown.select(each.item)) is not None]
        for kind, run in itertools.groupby(kept, type):
            self._line(source, f"{kind.__name__.lower():<8} {_summary(list(run))}")

    def remark(self, source: Source, kind: str, text: str = "") -> None:
        if self._shown.shows(kind):
            self._line(source, f"{kind:<8} {text}")

    def rates(self, source: Source, report: Mapping[str, float | None]) -> None:
        lag = "-" if report["lag_s"] is None else f"{report['lag_s'] * 1000:.0f} ms"
        self._line(
            source,
            f"stored {report['stored_per_s']:7.1f}/s  removed {report['removed_per_s']:7.1f}/s  "
            f"batches {report['batches_per_s']:6.1f}/s  lag {lag:>7}  "
            f"holds {report['held_blocks']} blocks  gaps {report['gaps']}  resyncs {report['resyncs']}",
        )

    def _line(self, source: Source, text: str) -> None:
        now_s = self._clock()
        clock = "--:--:--"
        with contextlib.suppress(OverflowError, ValueError, OSError):  # a publisher may send any number as its time
            clock = clock if now_s is None else time.strftime("%H:%M:%S", time.localtime(now_s))
        self._write(f"{clock}  {source.replica:<5} {text}".rstrip())


@dataclass(slots=True)
class _ReplayedReplica:
    """The state of one replica at the current position of a recording."""

    rates: EventRates = field(default_factory=EventRates)
    held: TieredMirror = field(default_factory=TieredMirror)
    counters: Counters = field(default_factory=Counters)
    seq: int | None = None


class ReplaySession:
    """Prints a recording batch by batch, with the recorded timestamps as its clock."""

    def __init__(self, options: WatchOptions, write: Write) -> None:
        self._options = options
        self._printer = (JsonPrinter if options.as_json else TextPrinter)(write, options.shown, lambda: self._now_s)
        self._now_s: float | None = None
        self._replicas: dict[Source, _ReplayedReplica] = {}
        self._reported_s: float | None = None

    def batch(self, records: Sequence[Recorded]) -> None:
        """Process the events of one batch or resync of one replica."""
        first, source = records[0].item, _source(records)
        replica = self._replicas.setdefault(source, _ReplayedReplica())
        if first.ts is not None:
            self._now_s = max(first.ts, self._now_s or first.ts)
            self._report(self._now_s)
        events = [record.item.event for record in records]
        for event in events:
            replica.held.apply(event)
        if first.resync:
            replica.counters.snapshots += 1
        elif first.seq is not None and first.ts is not None:
            replica.counters.gaps += replica.seq is not None and first.seq > replica.seq + 1
            replica.rates.add(Apply(first.seq, first.ts, events), first.ts)
        replica.seq = first.seq
        if self._options.rates_s is None:
            self._printer.batch(records)

    def close(self) -> None:
        """Report the rates since the last report."""
        if self._now_s is not None and self._reported_s is not None and self._now_s > self._reported_s:
            self._rates(self._now_s - self._reported_s)

    def _report(self, now_s: float) -> None:
        if (interval_s := self._options.rates_s) is None:
            return
        if self._reported_s is None:
            self._reported_s = now_s
        if now_s - self._reported_s < interval_s:
            return
        self._rates(interval_s)
        self._reported_s += interval_s
        # One line for all intervals without events: a set clock, or a second recording in the file, may skip years.
        if idle_s := (now_s - self._reported_s) // interval_s * interval_s:
            self._rates(idle_s)
            self._reported_s += idle_s

    def _rates(self, seconds: float) -> None:
        for source, replica in self._replicas.items():
            report = replica.rates.take(seconds, len(replica.held.pool), replica.counters)
            self._printer.rates(source, report | {"lag_s": None})  # recordings have no arrival times


def recorded(source: Source, instruction: Apply | Reset) -> list[Recorded]:
    return [Recorded(source.replica, item, source.epoch) for item in stream_events(instruction)]


def _source(batch: Sequence[Recorded]) -> Source:
    return Source(batch[0].replica, batch[0].epoch or 0)


class WatchSession:
    """The `ClusterSink` of one `homing watch`."""

    def __init__(self, options: WatchOptions, write: Write, recording: BinaryIO | None) -> None:
        self._write = write
        self._recording = recording
        self._printer = (JsonPrinter if options.as_json else TextPrinter)(self._print, options.shown)
        self._followed: dict[Source, tuple[EventRates, EventFeed]] = {}
        self._rates_s = options.rates_s  #: None: print events
        self._ended = asyncio.Event()
        self._broken: OSError | None = None

    def stop(self) -> None:
        self._ended.set()

    async def until_stopped(self) -> None:
        """Wait for `stop`, printing rates meanwhile if requested. Raises OSError if the output or recording fails."""
        reported = time.monotonic()
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._rates_s):
                    await self._ended.wait()
            if self._ended.is_set():
                break
            now = time.monotonic()
            for source, (rates, feed) in self._followed.items():
                reader = feed.subscription
                self._printer.rates(source, rates.take(now - reported, reader.digest.blocks, reader.counters))
            reported = now
        if self._broken is not None:
            raise self._broken

    def joined(self, source: Source, feed: EventFeed) -> None:
        self._followed[source] = EventRates(), feed
        self._printer.remark(source, "joined")

    def left(self, source: Source) -> None:
        del self._followed[source]
        self._printer.remark(source, "gone")

    def blocks_changed(self, source: Source, instruction: Apply | Reset) -> None:
        self._followed[source][0].add(instruction, time.time())
        batch = [] if self._recording is None and self._rates_s is not None else recorded(source, instruction)
        if self._recording is not None and self._broken is None:
            with self._ending():
                self._recording.writelines(to_line(record) + b"\n" for record in batch)
                self._recording.flush()
        if batch and self._rates_s is None:
            self._printer.batch(batch)

    def status(self, source: Source, status: FeedStatus) -> None:
        if self._rates_s is None:
            self._printer.remark(source, "status", status.name.lower())

    def malformed(self, source: Source, error: EventError) -> None:
        if self._rates_s is None:
            self._printer.remark(source, "malformed", str(error))

    def refused(self, source: Source, error: KeysRefused) -> None:
        self._printer.remark(source, "refused", str(error))

    def _print(self, line: str) -> None:
        if self._broken is None:
            with self._ending():
                self._write(line)

    @contextlib.contextmanager
    def _ending(self) -> Iterator[None]:
        """End the command if writing fails (`| head`, a full disk), which an error in a callback would not."""
        try:
            yield
        except OSError as error:
            self._broken = error
            self.stop()


async def _follow(
    url: str, session: WatchSession, only: frozenset[str], keys: KeyPair | None, heartbeat_interval_s: float
) -> None:
    def ask() -> Any:
        try:
            return get_json(url)
        except ClusterError as error:
            raise ClusterUnreachable(str(error)) from error

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, session.stop)
    feed = ClusterFeed(ask, session, only=only, tiers=True, keys=keys, heartbeat_interval_s=heartbeat_interval_s)
    following = asyncio.ensure_future(feed.run())
    following.add_done_callback(lambda _: session.stop())
    try:
        await session.until_stopped()
    finally:
        following.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await following


def _summary(events: Sequence[CacheEvent]) -> str:
    blocks = sum(len(event.hashes) for event in events if not isinstance(event, Cleared))
    match events:
        case [Stored(parent, hashes)] if hashes:
            after = "the root" if parent is None else f"{parent:016x}"
            return f"{count(blocks, 'block')} after {after}, the last is {hashes[-1]:016x}"
        case [Removed(hashes)]:
            return f"{count(blocks, 'block')}: {' '.join(f'{name:016x}' for name in hashes[:4])}{' …' * (blocks > 4)}"
        case [Cleared()]:
            return ""
        case [Cleared(), *_]:
            return f"{len(events)} times"
        case _:
            kind = "chains" if isinstance(events[0], Stored) else "parts"
            return f"{count(blocks, 'block')} in {len(events)} {kind}"
