"""`homing watch`: the cache events of all replicas as lines, for a person or (`--json`) for a program.

Follows replicas as they come and go; each is read through an `EventFeed`, so what is printed has no hole in it: after a
gap comes a `reset` with all that is held. Printing only; a tree is somebody else's business.
"""

import asyncio
import contextlib
import functools
import itertools
import json
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TextIO

import msgspec

from ..events import (
    BadKeys,
    BadRecord,
    CacheEvent,
    Cleared,
    EventEndpoints,
    EventError,
    EventFeed,
    FeedStatus,
    KeyPair,
    KeysRefused,
    LoadReport,
    Recorded,
    Removed,
    SnapshotBlock,
    Stored,
    describe,
    read_lines,
    to_line,
    wire_name,
)
from ..events.keys import reader_keys
from ..events.messages import EVENTS_TOPIC
from ..events.stream import told
from ..events.subscription import Apply, Reset
from .client import cluster_url, get_json
from .config import Settings
from .errors import ClusterError, SettingsError
from .tally import Tally

REFRESH_S = 0.5
#: A cluster that cannot be asked so often in a row is gone.
PATIENCE = 6
#: What `--event` may name.
KINDS = ("stored", "removed", "cleared", "reset", "status", "malformed", "refused")

Write = Callable[[str], None]


@dataclass(slots=True, frozen=True)
class Source:
    """One incarnation of a replica."""

    replica_id: str
    epoch: int


@dataclass(slots=True, frozen=True, kw_only=True)
class Wanted:
    """What is to be shown; empty: everything."""

    replicas: frozenset[str] = frozenset()
    kinds: frozenset[str] = frozenset()  #: of `KINDS`
    hash_prefix: str = ""  #: first hex digits of a block's name

    def select(self, event: CacheEvent) -> CacheEvent | None:
        """The event, with the blocks that are wanted; None when nothing of it is."""
        if self.kinds and type(event).__name__.lower() not in self.kinds:
            return None
        if not self.hash_prefix or isinstance(event, Cleared):
            return event
        kept = [block for block in event.hashes if f"{block:016x}".startswith(self.hash_prefix)]
        if isinstance(event, Stored) and len(kept) < len(event.hashes):
            # A part of a chain is no chain: it has neither that parent nor those tokens.
            return msgspec.structs.replace(event, hashes=kept, parent=None, token_ids=()) if kept else None
        return msgspec.structs.replace(event, hashes=kept) if kept else None


@dataclass(slots=True, frozen=True, kw_only=True)
class Viewing:
    """How `homing watch` was asked."""

    wanted: Wanted = Wanted()
    as_json: bool = False
    rates_s: float | None = None  #: a summary so often instead of events
    record: Path | None = None  #: every event of these replicas goes into this file, too, whatever is shown


def watch(settings: Settings, out: TextIO, viewing: Viewing, *, url: str | None) -> int:
    """Print until interrupted; returns the exit code. Raises ClusterError when the cluster is gone."""
    found = cluster_url(settings, url)
    try:
        own = reader_keys(settings.events)
    except BadKeys as error:
        raise SettingsError(f"setting events_curve_keys: {error}") from error
    with _recording(viewing.record) as recording:
        asyncio.run(Watching(found, viewing, _writer(out), own, recording).run())
    return 0


def replay(path: Path, out: TextIO, viewing: Viewing) -> int:
    """Print a recorded file; returns the exit code. Raises SettingsError for a file that is none."""
    write, wanted = _writer(out), viewing.wanted
    try:
        with path.open("rb") as lines:
            for replica, item in read_lines(lines):
                event = wanted.select(item.event)
                if event is None or (wanted.replicas and replica not in wanted.replicas):
                    continue
                shown = msgspec.structs.replace(item, event=event)
                write(to_line(Recorded(replica, shown)).decode() if viewing.as_json else describe(replica, shown))
    except (OSError, BadRecord) as error:
        raise SettingsError(f"cannot replay {path}: {error}") from error
    return 0


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


Lines = Callable[[Source, str, Any], list[str]]


def json_lines(source: Source, kind: str, what: Any) -> list[str]:
    """One object per event: `replica`, `epoch`, `event`, and the event's own fields; hashes are unsigned ints."""
    head = {"replica": source.replica_id, "epoch": source.epoch, "event": kind}
    return [json.dumps(head | _fields(what), separators=(",", ":"))]


def readable_lines(source: Source, kind: str, what: Any) -> list[str]:
    """One short line per event."""
    return [f"{time.strftime('%H:%M:%S')}  {source.replica_id:<5} {kind:<8} {_words(what)}".rstrip()]


def folded(events: Sequence[CacheEvent]) -> list[CacheEvent | tuple[CacheEvent, ...]]:
    """Runs of one kind as a tuple: for eyes, a batch of many chains is one thing."""
    runs = [tuple(run) for _, run in itertools.groupby(events, type)]
    return [run if len(run) > 1 else run[0] for run in runs]


class PrintingSink:
    """Turns what an `EventFeed` hands out into lines."""

    def __init__(self, source: Source, write: Write, *, as_json: bool, wanted: Wanted | None = None) -> None:
        self._source, self._write = source, write
        self._fold = not as_json
        self._lines: Lines = json_lines if as_json else readable_lines
        self._wanted = wanted or Wanted()

    def apply(self, events: Sequence[CacheEvent]) -> None:
        """What was stored, removed or cleared."""
        kept = [left for event in events if (left := self._wanted.select(event)) is not None]
        for shown in folded(kept) if self._fold else kept:
            first = shown[0] if isinstance(shown, tuple) else shown
            self._print(type(first).__name__.lower(), shown)

    def reset(self, blocks: Sequence[SnapshotBlock]) -> None:
        """All that is held: at the beginning, and after a gap."""
        self._print("reset", list(blocks))

    def status(self, status: FeedStatus) -> None:
        """Whether what was printed so far is exact."""
        self._print("status", status)

    def load(self, report: LoadReport) -> None:
        """Load reports come many times a second; `homing status` shows them."""

    def malformed(self, error: EventError) -> None:
        """A message that could not be read."""
        self._print("malformed", str(error))

    def refused(self, error: KeysRefused) -> None:
        """The replica does not accept our keys."""
        self._print("refused", str(error))

    def _print(self, kind: str, what: Any) -> None:
        if self._wanted.kinds and kind not in self._wanted.kinds:
            return
        for line in self._lines(self._source, kind, what):
            self._write(line)


class Watching:
    """The feeds of one `homing watch`."""

    def __init__(
        self, url: str, viewing: Viewing, write: Write, keys: KeyPair | None, recording: BinaryIO | None
    ) -> None:
        self._url, self._viewing, self._write, self._keys = url, viewing, write, keys
        self._recording = recording
        self._feeds: dict[Source, EventFeed] = {}
        self._tallies: dict[Source, Tally] = {}

    async def run(self) -> None:
        """Follow until a signal; every replica that comes, too."""
        ended = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, ended.set)
        misses, reported = 0, loop.time()
        try:
            while not ended.is_set():
                try:
                    view = await asyncio.to_thread(get_json, f"{self._url}/cluster")
                    misses = 0
                    self.adjust(_sources(view, self._viewing.wanted.replicas))
                except ClusterError:
                    misses += 1
                    if misses >= PATIENCE or not self._feeds:
                        raise
                if self._viewing.rates_s is not None and loop.time() - reported >= self._viewing.rates_s:
                    self._report(loop.time() - reported)
                    reported = loop.time()
                await _pause(ended)
        finally:
            for feed in self._feeds.values():
                feed.close()

    def adjust(self, wanted: dict[Source, EventEndpoints]) -> None:
        """Follow exactly these."""
        for source in self._feeds.keys() - wanted.keys():
            self._feeds.pop(source).close()
            self._tallies.pop(source)
            self._say(source, "gone")
        for source in wanted.keys() - self._feeds.keys():
            self._say(source, "joined")
            self._tallies[source] = Tally()
            sink = PrintingSink(source, self._quiet(), as_json=self._viewing.as_json, wanted=self._viewing.wanted)
            feed = self._feeds[source] = EventFeed(
                wanted[source],
                sink,
                token_ids=True,
                counted=not wanted[source].state,
                topic=EVENTS_TOPIC if wanted[source].state else b"",
                keys=self._keys if wanted[source].curve_key else None,
                tap=functools.partial(self._tap, source),
            )
            feed.start(asyncio.get_running_loop())

    def _quiet(self) -> Write:
        """Where events go: nowhere while only rates are wanted."""
        return self._write if self._viewing.rates_s is None else lambda _: None

    def _say(self, source: Source, kind: str) -> None:
        lines = json_lines if self._viewing.as_json else readable_lines
        for line in lines(source, kind, None):
            self._write(line)

    def _tap(self, source: Source, instruction: Apply | Reset) -> None:
        self._tallies[source].add(instruction, time.time())
        if self._recording is not None:
            for item in told(instruction):
                self._recording.write(to_line(Recorded(source.replica_id, item)) + b"\n")
            self._recording.flush()

    def _report(self, seconds: float) -> None:
        for source, feed in self._feeds.items():
            reader = feed.subscription
            line = self._tallies[source].report(seconds, reader.residents.digest.blocks, reader.counters)
            self._write(f"{time.strftime('%H:%M:%S')}  {source.replica_id:<5} {line}")


async def _pause(ended: asyncio.Event) -> None:
    try:
        await asyncio.wait_for(ended.wait(), REFRESH_S)
    except TimeoutError:
        return


def _sources(view: dict[str, Any], only: frozenset[str]) -> dict[Source, EventEndpoints]:
    return {
        Source(replica["replica_id"], replica["epoch"]): msgspec.convert(replica["event_endpoints"], EventEndpoints)
        for replica in view["replicas"]
        if (replica.get("event_endpoints") or {}).get("events") and (not only or replica["replica_id"] in only)
    }


def _fields(what: Any) -> dict[str, Any]:
    match what:
        case Stored(parent, hashes, token_ids, block_size):
            return {
                "parent": parent,
                "hashes": list(hashes),
                "token_ids": list(token_ids),
                "block_size": block_size,
                "medium": what.medium,
            }
        case Removed(hashes):
            return {"hashes": list(hashes), "medium": what.medium}
        case list():
            return {"blocks": [_block(block) for block in what]}
        case FeedStatus():
            return {"status": what.name.lower()}
        case str():
            return {"message": what}
        case _:
            return {}


def _block(block: SnapshotBlock) -> dict[str, Any]:
    parent = None if block.parent is None else wire_name(block.parent)
    return {"hash": wire_name(block.block_hash), "parent": parent, "token_ids": block.token_ids}


def _words(what: Any) -> str:
    match what:
        case Stored(parent, hashes):
            after = "the root" if parent is None else f"{parent:016x}"
            return f"{_blocks(len(hashes))} after {after}, the last is {hashes[-1]:016x}"
        case Removed(hashes):
            return (
                f"{_blocks(len(hashes))}: {' '.join(f'{name:016x}' for name in hashes[:4])}{' …' * (len(hashes) > 4)}"
            )
        case list():
            return f"holds {_blocks(len(what))}"
        case tuple():
            blocks = sum(len(event.hashes) for event in what if not isinstance(event, Cleared))
            parts = "chains" if isinstance(what[0], Stored) else "parts"
            return f"{_blocks(blocks)} in {len(what)} {parts}" if blocks else f"{len(what)} times"
        case FeedStatus():
            return what.name.lower()
        case Cleared() | None:
            return ""
        case _:
            return str(what)


def _blocks(count: int) -> str:
    return f"{count} block" if count == 1 else f"{count} blocks"
