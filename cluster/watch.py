"""`homing watch`: the cache events of all replicas as lines, for a person or (`--json`) for a program.

Follows replicas as they come and go; each is read through an `EventFeed`, so what is printed has no hole in it: after a
gap comes a `reset` with all that is held. Printing only; a tree is somebody else's business.
"""

import asyncio
import json
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

import msgspec

from ..events import (
    BadKeys,
    CacheEvent,
    Cleared,
    EventEndpoints,
    EventError,
    EventFeed,
    FeedStatus,
    KeyPair,
    KeysRefused,
    LoadReport,
    Removed,
    SnapshotBlock,
    Stored,
    wire_name,
)
from ..events.keys import reader_keys
from .client import cluster_url, get_json
from .config import Settings
from .errors import ClusterError, SettingsError

REFRESH_S = 0.5
#: A cluster that cannot be asked so often in a row is gone.
PATIENCE = 6

Write = Callable[[str], None]


@dataclass(slots=True, frozen=True)
class Source:
    """One incarnation of a replica."""

    replica_id: str
    epoch: int


def watch(settings: Settings, out: TextIO, *, url: str | None, replicas: Sequence[str] | None, as_json: bool) -> int:
    """Print until interrupted; returns the exit code. Raises ClusterError when the cluster is gone."""
    found = cluster_url(settings, url)
    printer = json_lines if as_json else readable_lines

    def write(line: str) -> None:
        print(line, file=out, flush=True)

    try:
        own = reader_keys(settings.events)
    except BadKeys as error:
        raise SettingsError(f"setting events_curve_keys: {error}") from error
    asyncio.run(_follow(found, write, printer, frozenset(replicas or ()), own))
    return 0


Lines = Callable[[Source, str, Any], list[str]]


def json_lines(source: Source, kind: str, what: Any) -> list[str]:
    """One object per event: `replica`, `epoch`, `event`, and the event's own fields; hashes are unsigned ints."""
    head = {"replica": source.replica_id, "epoch": source.epoch, "event": kind}
    return [json.dumps(head | _fields(what), separators=(",", ":"))]


def readable_lines(source: Source, kind: str, what: Any) -> list[str]:
    """One short line per event."""
    return [f"{time.strftime('%H:%M:%S')}  {source.replica_id:<5} {kind:<8} {_words(what)}".rstrip()]


class PrintingSink:
    """Turns what an `EventFeed` hands out into lines."""

    def __init__(self, source: Source, write: Write, lines: Lines) -> None:
        self._source, self._write, self._lines = source, write, lines

    def apply(self, events: Sequence[CacheEvent]) -> None:
        """What was stored, removed or cleared."""
        for event in events:
            self._print(type(event).__name__.lower(), event)

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
        for line in self._lines(self._source, kind, what):
            self._write(line)


async def _follow(url: str, write: Write, lines: Lines, only: frozenset[str], keys: KeyPair | None) -> None:
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, ended.set)
    feeds: dict[Source, EventFeed] = {}
    misses = 0
    try:
        while not ended.is_set():
            try:
                view = await asyncio.to_thread(get_json, f"{url}/cluster")
                misses = 0
                _adjust(feeds, _sources(view, only), write, lines, keys)
            except ClusterError:
                misses += 1
                if misses >= PATIENCE or not feeds:
                    raise
            await _pause(ended)
    finally:
        for feed in feeds.values():
            feed.close()


async def _pause(ended: asyncio.Event) -> None:
    try:
        await asyncio.wait_for(ended.wait(), REFRESH_S)
    except TimeoutError:
        return


def _sources(view: dict[str, Any], only: frozenset[str]) -> dict[Source, EventEndpoints]:
    return {
        Source(replica["replica_id"], replica["epoch"]): msgspec.convert(replica["event_endpoints"], EventEndpoints)
        for replica in view["replicas"]
        if replica.get("event_endpoints") and (not only or replica["replica_id"] in only)
    }


def _adjust(
    feeds: dict[Source, EventFeed],
    wanted: dict[Source, EventEndpoints],
    write: Write,
    lines: Lines,
    keys: KeyPair | None,
) -> None:
    for source in feeds.keys() - wanted.keys():
        feeds.pop(source).close()
        for line in lines(source, "gone", None):
            write(line)
    for source in wanted.keys() - feeds.keys():
        for line in lines(source, "joined", None):
            write(line)
        feed = feeds[source] = EventFeed(wanted[source], PrintingSink(source, write, lines), token_ids=True, keys=keys)
        feed.start(asyncio.get_running_loop())


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
        case FeedStatus():
            return what.name.lower()
        case Cleared() | None:
            return ""
        case _:
            return str(what)


def _blocks(count: int) -> str:
    return f"{count} block" if count == 1 else f"{count} blocks"
