"""Compares a router's index with what the replicas themselves hold, from their own event streams.

Follows every replica as the router does, remembers the digest of its blocks after each batch, and compares it with the
one that `/cluster` names for the same batch, so that it works under load, too.
"""

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..events import EventError, EventFeed, KeyPair, KeysRefused
from ..events.errors import ClusterUnreachable
from ..events.follow.block_set import Digest, TieredMirror
from ..events.follow.cluster_feed import ClusterFeed, Source
from ..events.follow.subscription import Apply, FeedStatus, Reset
from ..events.sdk.plain_stream import stream_events
from .errors import ClusterError

#: Batches of which digests are remembered: a busy replica publishes some hundred per second.
MAX_BATCHES = 10_000
#: How long to wait for replicas that do not answer.
PATIENCE_S = 10.0
POLL_S = 0.1


class Contents(NamedTuple):
    """The digests of what a replica holds."""

    pool: Digest
    tiers: Mapping[str, Digest]  #: of those that hold blocks, by medium


@dataclass(slots=True)
class _Followed:
    held: TieredMirror = field(default_factory=TieredMirror)
    digests: OrderedDict[int, "Contents"] = field(default_factory=OrderedDict)  #: by the next batch


class Digests:
    """The digests of all followed replicas; a `ClusterSink`."""

    def __init__(self) -> None:
        self._followed: dict[Source, _Followed] = {}
        self.problems: dict[str, str] = {}  #: by replica

    def of(self, source: Source) -> Mapping[int, Contents]:
        """The digests of a replica's blocks by the number of the next batch."""
        return self._followed[source].digests if source in self._followed else {}

    def joined(self, source: Source, feed: EventFeed) -> None:  # noqa: ARG002 - see `ClusterSink`
        self._followed[source] = _Followed()

    def left(self, source: Source) -> None:
        self._followed.pop(source, None)

    def blocks_changed(self, source: Source, instruction: Apply | Reset) -> None:
        followed = self._followed[source]
        if isinstance(instruction, Reset):
            followed.digests.clear()
        for item in stream_events(instruction):
            followed.held.apply(item.event)
        held = Contents(followed.held.pool.digest, followed.held.digests)
        followed.digests[0 if instruction.seq is None else instruction.seq + 1] = held
        if len(followed.digests) > MAX_BATCHES:
            followed.digests.popitem(last=False)

    def status(self, source: Source, status: FeedStatus) -> None: ...
    def malformed(self, source: Source, error: EventError) -> None: ...

    def refused(self, source: Source, error: KeysRefused) -> None:
        self.problems[source.replica] = str(error)


@dataclass(slots=True, frozen=True)
class Verdict:
    """What the comparison of one replica found."""

    replica: str
    exact: bool | None  #: None: it could not be compared
    text: str


def judge(replica: Mapping[str, Any], digests: Digests) -> Verdict:
    """Compare one replica of a `/cluster` response. `exact` is also None if its batch has not arrived here yet."""
    name = replica["replica_id"]
    if replica["url"] is not None:
        return Verdict(name, None, "not compared: an external engine names its blocks in its own way")
    if name in digests.problems:
        return Verdict(name, None, f"not compared: {digests.problems[name]}")
    if replica["feed"] != "live":
        return Verdict(name, None, f"not compared: the router's events are {replica['feed']}")
    known = digests.of(Source(name, replica["epoch"])).get(replica["events_seq"])
    if known is None:
        return Verdict(name, None, "not compared: its events did not arrive here")
    tiers = {medium: _indexed(tier) for medium, tier in replica.get("tiers", {}).items()}
    router = Contents(_indexed(replica), {medium: digest for medium, digest in tiers.items() if digest.blocks})
    at = f"after batch {replica['events_seq'] - 1}" if replica["events_seq"] else "before the first batch"
    if router == known:
        return Verdict(name, True, f"exact: {_counts(known)} {at}")
    return Verdict(name, False, f"differs: {_counts(router)} in the index, {_counts(known)} on the replica {at}")


def _indexed(view: Mapping[str, Any]) -> Digest:
    return Digest(view["indexed_blocks"], int(view["index_digest"], 16))


def _counts(held: Contents) -> str:
    return f"{held.pool.blocks} blocks" + "".join(f", {each.blocks} in {name}" for name, each in held.tiers.items())


def compare_index(
    ask: Callable[[], Any], *, keys: KeyPair | None, heartbeat_interval_s: float, patience_s: float = PATIENCE_S
) -> list[Verdict]:
    """Compare all replicas that a router lists. `ask` returns its `/cluster`; it may block or raise ClusterError."""
    return asyncio.run(_compare(ask, keys, heartbeat_interval_s, patience_s))


async def _compare(
    ask: Callable[[], Any], keys: KeyPair | None, heartbeat_interval_s: float, patience_s: float
) -> list[Verdict]:
    digests, found = Digests(), dict[str, Verdict]()

    def listed() -> Any:
        try:
            return ask()
        except ClusterError as error:
            raise ClusterUnreachable(str(error)) from error

    feed = ClusterFeed(listed, digests, tiers=True, keys=keys, heartbeat_interval_s=heartbeat_interval_s)
    following = asyncio.ensure_future(feed.run())
    waited = 0.0
    try:
        while True:
            view = await asyncio.to_thread(ask)
            await asyncio.sleep(POLL_S)  # the batches that the router knew may still be under way to us
            for replica in view["replicas"]:
                verdict = judge(replica, digests)
                if verdict.exact is not None or found.get(verdict.replica, verdict).exact is None:
                    found[verdict.replica] = verdict
            left = [each for each in found.values() if each.exact is None and "did not arrive" in each.text]
            if not left or waited >= patience_s:
                return list(found.values())
            waited += POLL_S
    finally:
        following.cancel()
        with contextlib.suppress(asyncio.CancelledError, EventError):
            await following
