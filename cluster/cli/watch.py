"""`homing watch`: the cache events of all replicas as lines, for a person or (`--json`) for a program.

Follows replicas as they come and go (`ClusterFeed`), so what is printed has no hole in it: after a gap comes all that
is held. Printing only; a tree is somebody else's business. JSON lines are those of recordings (`events.record`).
"""

import asyncio
import contextlib
import itertools
import re
import signal
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol, TextIO

import msgspec

from ...events import (
    BadKeys,
    BadRecord,
    CacheEvent,
    Cleared,
    ClusterFeed,
    ClusterUnreachable,
    EventError,
    EventFeed,
    FeedStatus,
    KeyPair,
    KeysRefused,
    Recorded,
    Removed,
    Source,
    Stored,
    StreamEvent,
    describe,
    read_lines,
    remark,
    to_line,
)
from ...events.follow.subscription import Apply, Reset
from ...events.sdk.plain_stream import stream_events
from ...events.security.curve_keys import reader_keys
from ..config import Settings, nearest
from ..errors import ClusterError, SettingsError
from .client import cluster_url, get_json
from .event_rates import Tally

#: What `--event` may name.
KINDS = ("stored", "removed", "cleared", "reset", "joined", "gone", "status", "malformed", "refused")
_HASH_DIGITS = re.compile(r"[0-9a-f]{0,16}")

Write = Callable[[str], None]


@dataclass(slots=True, frozen=True, kw_only=True)
class Wanted:
    """What is to be shown; empty: everything."""

    replicas: frozenset[str] = frozenset()
    kinds: frozenset[str] = frozenset()  #: of `KINDS`
    hash_prefix: str = ""  #: first hex digits of a block's name

    def shows(self, *kinds: str) -> bool:
        """Whether one of these kinds is wanted."""
        return not self.kinds or not self.kinds.isdisjoint(kinds)

    def select(self, item: StreamEvent) -> StreamEvent | None:
        """The event, with the blocks that are wanted; None when nothing of it is."""
        if not self.shows(type(item.event).__name__.lower(), *(["reset"] if item.resync else [])):
            return None
        event = self._with_hashes(item.event)
        return None if event is None else msgspec.structs.replace(item, event=event)

    def _with_hashes(self, event: CacheEvent) -> CacheEvent | None:
        if not self.hash_prefix or isinstance(event, Cleared):
            return event
        kept = [block for block in event.hashes if f"{block:016x}".startswith(self.hash_prefix)]
        if isinstance(event, Stored) and len(kept) < len(event.hashes):
            # A part of a chain is no chain: it has neither that parent nor those tokens.
            return msgspec.structs.replace(event, hashes=kept, parent=None, token_ids=()) if kept else None
        return msgspec.structs.replace(event, hashes=kept) if kept else None


def wanted(replicas: Collection[str], kinds: Collection[str], hash_prefix: str) -> Wanted:
    """What the flags of the command ask for. Raises SettingsError."""
    for kind in sorted(set(kinds) - set(KINDS)):
        raise SettingsError(f"--event {kind}: no such event{nearest(kind, KINDS)} (there are: {', '.join(KINDS)})")
    prefix = hash_prefix.lower()
    if not _HASH_DIGITS.fullmatch(prefix):
        raise SettingsError(f"--hash {hash_prefix}: a hash is up to 16 hex digits, 0-9 and a-f; give its first ones")
    return Wanted(replicas=frozenset(replicas), kinds=frozenset(kinds), hash_prefix=prefix)


@dataclass(slots=True, frozen=True, kw_only=True)
class Viewing:
    """How `homing watch` was asked."""

    wanted: Wanted = Wanted()
    as_json: bool = False
    rates_s: float | None = None  #: a summary so often instead of events
    record: Path | None = None  #: every event of the replicas that are followed goes into this file, shown or not


def watch(settings: Settings, out: TextIO, viewing: Viewing, *, url: str | None) -> int:
    """Print until interrupted; returns the exit code. Raises ClusterError when the cluster is gone."""
    found = f"{cluster_url(settings, url)}/cluster"
    check_replicas(viewing.wanted.replicas, listed(get_json(found)), "the cluster")
    try:
        own = reader_keys(settings.events)
    except BadKeys as error:
        raise SettingsError(f"setting events_curve_keys: {error}") from error
    with _recording(viewing.record) as recording:
        try:
            asyncio.run(_follow(lambda: _ask(found), Watching(viewing, _writer(out), recording), own))
        except ClusterUnreachable as error:
            raise ClusterError(str(error)) from error
    return 0


def replay(path: Path, out: TextIO, viewing: Viewing) -> int:
    """Print a recorded file; returns the exit code. Raises SettingsError for a file that is none."""
    write, only, seen = _writer(out), viewing.wanted.replicas, set()
    try:
        with path.open("rb") as lines:
            for record in read_lines(lines):
                seen.add(record.replica)
                item = viewing.wanted.select(record.item)
                if item is None or (only and record.replica not in only):
                    continue
                shown = record._replace(item=item)
                write(to_line(shown).decode() if viewing.as_json else describe(record.replica, item))
    except BrokenPipeError:
        raise
    except (OSError, BadRecord) as error:
        raise SettingsError(f"cannot replay {path}: {error}") from error
    check_replicas(only, seen, str(path))
    return 0


def listed(view: Any) -> set[str]:
    """All replicas of which /cluster knows."""
    return {replica["replica_id"] for kind in ("replicas", "absent", "refused") for replica in view.get(kind, ())}


def check_replicas(named: Collection[str], known: Collection[str], where: str) -> None:
    """Raises SettingsError for a replica that is not there."""
    for name in sorted(set(named) - set(known)):
        raise SettingsError(f"--replica {name}: {where} has no such replica (there are: {', '.join(sorted(known))})")


def _ask(url: str) -> Any:
    try:
        return get_json(url)
    except ClusterError as error:
        raise ClusterUnreachable(str(error)) from error


def _writer(out: TextIO) -> Write:
    return lambda line: print(line, file=out, flush=True)


@contextlib.contextmanager
def _recording(path: Path | None) -> Iterator[BinaryIO | None]:
    if path is None:
        yield None
        return
    try:
        file = path.open("ab")
    except OSError as error:
        raise SettingsError(f"cannot record to {path}: {error.strerror}") from error
    with file:
        yield file


class Printer(Protocol):
    """Makes lines."""

    def told(self, source: Source, instruction: Apply | Reset) -> None:
        """What was stored, removed or cleared, or all that is held."""

    def remark(self, source: Source, kind: str, words: str = "") -> None:
        """What happened to the stream itself."""

    def rates(self, source: Source, seconds: float, tally: Tally, feed: EventFeed) -> None:
        """A summary of the last seconds."""


class JsonPrinter:
    """Lines for programs, as recordings have them."""

    def __init__(self, write: Write, wanted: Wanted) -> None:
        self._write, self._wanted = write, wanted

    def told(self, source: Source, instruction: Apply | Reset) -> None:
        """A line for each event; what is held is told as a `cleared` and the chains that are there, all `resync`."""
        for item in stream_events(instruction):
            if (kept := self._wanted.select(item)) is not None:
                self._write(to_line(Recorded(source.replica, kept, source.epoch)).decode())

    def remark(self, source: Source, kind: str, words: str = "") -> None:
        """See `Printer`."""
        if self._wanted.shows(kind):
            fields = {"status" if kind == "status" else "message": words} if words else {}
            self._write(remark(source.replica, source.epoch, kind, **fields).decode())

    def rates(self, source: Source, seconds: float, tally: Tally, feed: EventFeed) -> None:
        """See `Printer`."""
        reader = feed.subscription
        rates = tally.take(seconds, reader.digest.blocks, reader.counters)
        self._write(
            remark(source.replica, source.epoch, "rates", ts=time.time(), **msgspec.to_builtins(rates)).decode()
        )


class ReadablePrinter:
    """Lines for a person; a run of like events in a batch is one."""

    def __init__(self, write: Write, wanted: Wanted) -> None:
        self._write, self._wanted = write, wanted

    def told(self, source: Source, instruction: Apply | Reset) -> None:
        """See `Printer`."""
        if isinstance(instruction, Reset):
            self.remark(source, "reset", f"holds {_blocks(len(instruction.blocks))}")
            return
        kept = [left.event for item in stream_events(instruction) if (left := self._wanted.select(item)) is not None]
        for kind, run in itertools.groupby(kept, type):
            self._line(source, kind.__name__.lower(), _words(list(run)))

    def remark(self, source: Source, kind: str, words: str = "") -> None:
        """See `Printer`."""
        if self._wanted.shows(kind):
            self._line(source, kind, words)

    def rates(self, source: Source, seconds: float, tally: Tally, feed: EventFeed) -> None:
        """See `Printer`."""
        reader = feed.subscription
        self._line(source, "", tally.take(seconds, reader.digest.blocks, reader.counters).words())

    def _line(self, source: Source, kind: str, words: str) -> None:
        kind = f"{kind:<8} " if kind else ""
        self._write(f"{time.strftime('%H:%M:%S')}  {source.replica:<5} {kind}{words}".rstrip())


class Watching:
    """The `ClusterSink` of one `homing watch`."""

    def __init__(self, viewing: Viewing, write: Write, recording: BinaryIO | None) -> None:
        self._viewing = viewing
        self._write = write
        self._recording = recording
        printer = JsonPrinter if viewing.as_json else ReadablePrinter
        self._printer: Printer = printer(self._print, viewing.wanted)
        self._tallies: dict[Source, tuple[Tally, EventFeed]] = {}
        self._events_shown = viewing.rates_s is None
        self._ended = asyncio.Event()
        self._broken: OSError | None = None

    @property
    def only(self) -> frozenset[str]:
        """Replicas to follow; empty: all."""
        return self._viewing.wanted.replicas

    def stop(self) -> None:
        """Wait no more."""
        self._ended.set()

    async def until_stopped(self) -> None:
        """Returns after `stop`; meanwhile rates are told, where they are wanted. Raises BrokenPipeError."""
        reported = time.monotonic()
        while not await self._stopped_within(self._viewing.rates_s):
            now = time.monotonic()
            for source, (tally, feed) in self._tallies.items():
                self._printer.rates(source, now - reported, tally, feed)
            reported = now
        if self._broken is not None:
            raise self._broken

    async def _stopped_within(self, seconds: float | None) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._ended.wait()
        return self._ended.is_set()

    def joined(self, source: Source, feed: EventFeed) -> None:
        """See `ClusterSink`."""
        self._tallies[source] = Tally(), feed
        self._printer.remark(source, "joined")

    def gone(self, source: Source) -> None:
        """See `ClusterSink`."""
        del self._tallies[source]
        self._printer.remark(source, "gone")

    def told(self, source: Source, instruction: Apply | Reset) -> None:
        """See `ClusterSink`."""
        self._tallies[source][0].add(instruction, time.time())
        if self._recording is not None:
            for item in stream_events(instruction):
                self._recording.write(to_line(Recorded(source.replica, item, source.epoch)) + b"\n")
            self._recording.flush()
        if self._events_shown:
            self._printer.told(source, instruction)

    def status(self, source: Source, status: FeedStatus) -> None:
        """See `ClusterSink`."""
        if self._events_shown:
            self._printer.remark(source, "status", status.name.lower())

    def malformed(self, source: Source, error: EventError) -> None:
        """See `ClusterSink`."""
        if self._events_shown:
            self._printer.remark(source, "malformed", str(error))

    def refused(self, source: Source, error: KeysRefused) -> None:
        """See `ClusterSink`."""
        self._printer.remark(source, "refused", str(error))

    def _print(self, line: str) -> None:
        """A reader that went away (`| head`) ends the command; here, in a callback of the loop, nobody could."""
        if self._broken is not None:
            return
        try:
            self._write(line)
        except BrokenPipeError as error:
            self._broken = error
            self.stop()


async def _follow(ask: Callable[[], Any], watching: Watching, keys: KeyPair | None) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, watching.stop)
    feed = ClusterFeed(ask, watching, only=watching.only, keys=keys)
    following = asyncio.ensure_future(feed.run())
    following.add_done_callback(lambda _: watching.stop())
    try:
        await watching.until_stopped()
    finally:
        following.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await following


def _words(events: Sequence[CacheEvent]) -> str:
    """What a run of events of one kind is about."""
    blocks = sum(len(event.hashes) for event in events if not isinstance(event, Cleared))
    match events:
        case [Stored(parent, hashes)]:
            after = "the root" if parent is None else f"{parent:016x}"
            return f"{_blocks(blocks)} after {after}, the last is {hashes[-1]:016x}"
        case [Removed(hashes)]:
            return f"{_blocks(blocks)}: {' '.join(f'{name:016x}' for name in hashes[:4])}{' …' * (blocks > 4)}"
        case [Cleared()]:
            return ""
        case [Cleared(), *_]:
            return f"{len(events)} times"
        case _:
            return f"{_blocks(blocks)} in {len(events)} {'chains' if isinstance(events[0], Stored) else 'parts'}"


def _blocks(count: int) -> str:
    return f"{count} block" if count == 1 else f"{count} blocks"
