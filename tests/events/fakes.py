"""Fakes and small builders for the tests of events."""

import asyncio
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import zmq

from homing.events import CacheEvent, CacheMirror, EventError, KeysRefused
from homing.events.config import EventsSettings
from homing.events.follow.subscription import Apply, FeedStatus, Reset
from homing.events.publish.publisher import EventPublisher
from homing.events.security.curve_keys import ServerKeys
from homing.events.wire.dialects import snapshot_pairs
from homing.events.wire.frames import END_SEQ, encode_seq
from homing.events.wire.messages import CacheCounters, LoadReport

BLOCK_SIZE = 4


def block(number: int) -> bytes:
    """A 16-byte hash whose wire hash is `number`."""
    return bytes(8) + struct.pack(">Q", number)


def tokens(*blocks: int) -> bytes:
    """Token bytes of these blocks: each block's number, `BLOCK_SIZE` times."""
    return b"".join(struct.pack("<I", number) * BLOCK_SIZE for number in blocks)


def store(publisher: EventPublisher, *blocks: int, parent: int | None = None) -> None:
    """Announce a chain of blocks."""
    publisher.stored(None if parent is None else block(parent), [block(n) for n in blocks], tokens(*blocks))


def new_publisher(
    settings: EventsSettings | None = None,
    *,
    epoch: int = 7,
    ipc_dir: Path | None = None,
    keys: ServerKeys | None = None,
    **options: Any,
) -> EventPublisher:
    """A publisher on the loopback address with a fast heartbeat."""
    return EventPublisher(
        settings or EventsSettings(heartbeat_interval_s=0.05),
        host="127.0.0.1",
        block_size=BLOCK_SIZE,
        epoch=epoch,
        ipc_dir=ipc_dir,
        keys=keys,
        **options,
    )


def load_report(step: int, epoch: int = 7) -> LoadReport:
    """A load report that is identified by its step."""
    return LoadReport(
        epoch=epoch,
        step=step,
        ts=1.0,
        running=1,
        waiting=0,
        queued_prefill_tokens=0,
        decode_context_tokens=0,
        free_blocks=8,
        cached_free_blocks=0,
        total_blocks=8,
        prefill_tokens_per_s=1.0,
        decode_step_s=1.0,
        counters=CacheCounters(),
    )


class FoldingSink:
    """A sink that applies a feed's events to a mirror and records all calls."""

    def __init__(self) -> None:
        self.mirror = CacheMirror()
        self.events: list[CacheEvent] = []
        self.statuses: list[FeedStatus] = []
        self.loads: list[LoadReport] = []
        self.errors: list[EventError] = []
        self.refusals: list[KeysRefused] = []
        self.resets = 0

    @property
    def live(self) -> bool:
        return bool(self.statuses) and self.statuses[-1] is FeedStatus.LIVE

    def blocks_changed(self, instruction: Apply | Reset) -> None:
        if isinstance(instruction, Reset):
            self.resets += 1
            self.mirror.replace(snapshot_pairs(instruction.blocks))
            return
        self.events.extend(instruction.events)
        for event in instruction.events:
            self.mirror.apply(event)

    def status(self, status: FeedStatus) -> None:
        self.statuses.append(status)

    def load(self, report: LoadReport) -> None:
        self.loads.append(report)

    def malformed(self, error: EventError) -> None:
        self.errors.append(error)

    def refused(self, error: KeysRefused) -> None:
        self.refusals.append(error)


async def until(condition: Callable[[], object], timeout_s: float = 120.0) -> None:
    """Wait until the condition is true. The timeout only catches hangs."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        await asyncio.sleep(0.002)


class ForeignPublisher:
    """A publisher like vLLM 0.23's: PUB and ROUTER on fixed addresses, positional arrays, no topic."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", events: str, replay: str, *, first_ts: float) -> None:
        self._pub, self._router = context.socket(zmq.PUB), context.socket(zmq.ROUTER)
        self._pub.bind(events)
        self._router.bind(replay)
        self._history: list[bytes] = []
        self._ts = first_ts

    def publish(self, *events: list[object], heard: bool = True) -> None:
        """Number and keep a batch, and send it if `heard`."""
        self._ts += 1.0
        self._history.append(msgspec.msgpack.encode([self._ts, list(events)]))
        if heard:
            self._pub.send_multipart([b"", encode_seq(len(self._history) - 1), self._history[-1]])

    def serve(self) -> None:
        """Answer all pending replay requests, in the form without a topic."""
        while self._router.poll(0):
            identity, _, since = self._router.recv_multipart()
            for seq in range(int.from_bytes(since, "big"), len(self._history)):
                self._router.send_multipart([identity, b"", encode_seq(seq), self._history[seq]])
            self._router.send_multipart([identity, b"", END_SEQ, b""])

    def close(self) -> None:
        """Close the sockets at once, as when the process dies."""
        self._pub.close(0)
        self._router.close(0)
