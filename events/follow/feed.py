"""Runs one `Subscription` in an event loop: its sockets, and the callbacks to its `FeedSink`.

Makes no decisions: messages go into the state machine, and its instructions become requests and callbacks. Everything
runs in the loop's thread. Tens of feeds share one loop and one ZeroMQ context.
"""

import asyncio
import functools
import logging
from collections.abc import Callable
from dataclasses import replace
from math import inf
from typing import Protocol, TypeVar

import msgspec
import zmq
from msgspec import structs

from ..errors import EndpointUnusable, EventError, KeysRefused, MalformedFrame
from ..security.curve_keys import KeyPair, new_pair, protect_client
from ..wire.dialects import BatchDecoder, DecodedBatch
from ..wire.frames import EventFrame, read_event, read_replay, replay_request
from ..wire.messages import (
    EVENTS_TOPIC,
    HEARTBEAT_TOPIC,
    LOAD_TOPIC,
    EventEndpoints,
    Heartbeat,
    LoadReport,
    SnapshotChunk,
    SnapshotRequest,
)
from .block_set import CacheMirror
from .handshake import WATCHED, Connection, Handshakes
from .residency import CountedResidency, Residency, ResidentBlocks, SetResidency
from .socket_reader import Message, SocketReader
from .subscription import (
    Apply,
    DigestMismatch,
    FeedOptions,
    FeedStatus,
    ForwardLoad,
    Instruction,
    RequestReplay,
    RequestSnapshot,
    Reset,
    SetStatus,
    Subscription,
)

log = logging.getLogger(__name__)

Struct = TypeVar("Struct", bound=msgspec.Struct)

_EVENTS_HIGH_WATER_MARK = 100_000
#: A larger frame closes the connection, as publishers may be other programs. Ours send snapshot chunks of 200 KiB, and
#: at most a few megabytes of events per step.
_MAX_FRAME_BYTES = 256 * 1024 * 1024
#: Added to a refusal's reason when we connected with a generated key.
_NO_KEYS = "no key was given, so a new, unlisted one was used: provide keys (homing watch: --events-curve-keys DIR)"


def _options(ends: EventEndpoints) -> FeedOptions:
    options = FeedOptions(replay=bool(ends.replay), snapshot=bool(ends.snapshot), heartbeats=bool(ends.state))
    if ends.state:
        return options
    # Ticks are twice as long, because each poll costs both sides more than a heartbeat.
    return replace(options, silent_ticks=5, poll_ticks=2, answer_ticks=5)


class FeedSink(Protocol):
    """The user of a publisher's stream. All calls come from the loop's thread."""

    def blocks_changed(self, instruction: Apply | Reset) -> None:
        """Receives the next batch, without a gap before it, or the whole set of held blocks."""

    def status(self, status: FeedStatus) -> None: ...
    def load(self, report: LoadReport) -> None: ...
    def malformed(self, error: EventError) -> None:
        """A message was dropped."""

    def refused(self, error: KeysRefused) -> None:
        """The publisher does not accept our keys; an operator must correct them."""


class EventFeed:
    """Follows one publisher. An empty endpoint means that the publisher lacks this socket, as other engines' may."""

    def __init__(
        self,
        endpoints: EventEndpoints,
        sink: FeedSink,
        *,
        context: zmq.Context["zmq.Socket[bytes]"] | None = None,
        heartbeat_interval_s: float = 0.2,
        token_ids: bool = False,
        counted: bool = False,
        tiers: bool = False,
        blocks: ResidentBlocks | None = None,
        tier: Callable[[str], ResidentBlocks] | None = None,
        residency: Residency | None = None,
        topic: bytes = EVENTS_TOPIC,
        options: FeedOptions | None = None,
        keys: KeyPair | None = None,
        ipv6: bool = False,
    ) -> None:
        """`counted`: the publisher announces every copy (vLLM). `token_ids`: deliver them, in snapshots too. `blocks`:
        where held blocks are stored, unless `counted`; updated before the sink is called; by default, a set owned by
        the feed. `residency` replaces both. `tiers`: also follow the blocks in tiers, which `tier` stores, by medium.

        `topic` is a prefix; empty matches everything. The caller keeps ownership of `context`. `keys`: used if the
        publisher encrypts; by default, a new pair, which a publisher that accepts only listed clients refuses. `ipv6`:
        names in the addresses need it (`needs_ipv6`); addresses in brackets always do.
        """
        if tiers and endpoints.tiered_events:
            endpoints = structs.replace(endpoints, events=endpoints.tiered_events, replay=endpoints.tiered_replay)
        self._endpoints = endpoints
        self._sink = sink
        self._keyless = keys is None
        self._keys = keys or (new_pair() if endpoints.curve_key else None)
        self._handshakes = Handshakes()
        self._own_context = context is None
        self._context = context
        #: Seconds between two ticks of the subscription.
        self.tick_s = heartbeat_interval_s / (2 if endpoints.state else 1)
        self._token_ids = token_ids
        self._topic = topic
        self._ipv6 = ipv6
        self.decoder = BatchDecoder(token_ids=token_ids)
        if residency is None:
            mirror = CacheMirror() if blocks is None else blocks
            if tiers and tier is None:
                tier = _new_mirror
            if counted:
                residency = CountedResidency(by_medium=tiers)
            else:
                residency = SetResidency(mirror, tier=tier, reports=blocks is None)
        #: The state machine, for its counters, cursor and digest.
        self.subscription = Subscription(options or _options(endpoints), residency)
        self._loop: asyncio.AbstractEventLoop | None = None
        #: The first is the events socket, which is monitored.
        self._sockets: list[zmq.Socket[bytes]] = []
        self._readers: list[SocketReader] = []
        self._replay: SocketReader | None = None
        self._snapshot: SocketReader | None = None
        self._timer: asyncio.TimerHandle | None = None

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Connect and request the state. Call it once, in the loop's thread. Raises EndpointUnusable."""
        assert self._loop is None, "a feed starts once"
        if self._keys is not None and not self._endpoints.curve_key:
            raise EndpointUnusable(f"keys were given for {self._endpoints.events}, which has no CURVE key")
        self._loop = loop
        self._context = self._context or zmq.Context()
        try:
            self._connect(self._context, loop)
        except EndpointUnusable:
            self.close()
            raise
        self._run(self.subscription.start())
        self._tick_later(loop)

    def resync(self) -> None:
        """Request the full state again, after the feed's user lost messages."""
        self._run(self.subscription.start())

    def drain_soon(self) -> None:
        """Handle what has arrived in the loop's next iteration."""
        for reader in self._readers:
            reader.drain_soon()

    def close(self) -> None:
        """Release everything; no callback follows. May be repeated, or called before `start`."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._readers:
            self._readers.pop().close()
        if self._sockets:
            self._sockets[0].disable_monitor()
        while self._sockets:
            self._sockets.pop().close(0)
        self._replay = self._snapshot = None
        if self._own_context and self._context is not None:
            self._context.term()
            self._context = None

    def _connect(self, context: zmq.Context["zmq.Socket[bytes]"], loop: asyncio.AbstractEventLoop) -> None:
        ends = self._endpoints
        events, state = self._socket(context, zmq.SUB), self._socket(context, zmq.SUB)
        replay, snapshot = self._socket(context, zmq.DEALER), self._socket(context, zmq.DEALER)
        events.subscribe(self._topic)
        state.subscribe(HEARTBEAT_TOPIC)
        state.subscribe(LOAD_TOPIC)
        events.set_hwm(_EVENTS_HIGH_WATER_MARK)
        # Monitor before connecting: a refusal is reported only once.
        monitor = events.get_monitor_socket(WATCHED)
        self._sockets.append(monitor)
        self._open(loop, events, ends.events, self._on_event)
        self._replay = self._open(loop, replay, ends.replay, self._on_replay)
        self._open(loop, state, ends.state, self._on_state)
        self._snapshot = self._open(loop, snapshot, ends.snapshot, self._on_chunk)
        self._readers.append(SocketReader(loop, monitor, self._on_monitor))

    def _socket(self, context: zmq.Context["zmq.Socket[bytes]"], kind: int) -> "zmq.Socket[bytes]":
        sock: zmq.Socket[bytes] = context.socket(kind)
        sock.maxmsgsize = _MAX_FRAME_BYTES
        self._sockets.append(sock)
        sock.linger = 0
        sock.reconnect_ivl = 50
        sock.reconnect_ivl_max = 1000
        if self._keys is not None:
            protect_client(sock, self._keys, self._endpoints.curve_key.encode())
        return sock

    def _open(
        self,
        loop: asyncio.AbstractEventLoop,
        sock: "zmq.Socket[bytes]",
        endpoint: str,
        handle: Callable[[Message], None],
    ) -> SocketReader | None:
        """Connect and read. Returns None if the publisher has no such socket."""
        if not endpoint:
            return None
        sock.ipv6 = self._ipv6 or endpoint.startswith("tcp://[")
        try:
            sock.connect(endpoint)
        except zmq.ZMQError as error:
            raise EndpointUnusable(f"cannot connect to {endpoint!r}: {error}") from error
        self._readers.append(SocketReader(loop, sock, functools.partial(self._guard, handle)))
        return self._readers[-1]

    def _guard(self, handle: Callable[[Message], None], frames: Message) -> None:
        try:
            handle(frames)
        except MalformedFrame as error:
            self._malformed(error)

    def _malformed(self, error: MalformedFrame) -> None:
        log.warning("event_message_malformed endpoint=%s error=%s", self._endpoints.events, error)
        self._sink.malformed(error)

    def _on_event(self, frames: Message) -> None:
        frame = read_event(frames)
        if (batch := self._decoded(frame)) is not None:
            self._run(self.subscription.on_batch(frame.epoch, frame.seq, batch))

    def _on_replay(self, frames: Message) -> None:
        frame = read_replay(frames)
        if frame is None:
            self._run(self.subscription.on_replay_end())
            return
        if (batch := self._decoded(frame)) is not None:
            self._run(self.subscription.on_replayed(frame.epoch, frame.seq, batch))

    def _decoded(self, frame: EventFrame) -> DecodedBatch | None:
        try:
            batch = self.decoder.decode(frame.payload)
        except MalformedFrame as error:
            self._malformed(error)
            self._run(self.subscription.on_unreadable(frame.epoch, frame.seq))
            return None
        for each in batch.unreadable:
            self._malformed(each)
        return batch

    def _on_state(self, frames: Message) -> None:
        if len(frames) != 2:
            raise MalformedFrame("state message", f"{len(frames)} frames instead of topic, payload")
        if frames[0] == HEARTBEAT_TOPIC:
            self._run(self.subscription.on_heartbeat(_read(frames[1], Heartbeat)))
        elif frames[0] == LOAD_TOPIC:
            self._run(self.subscription.on_load(_read(frames[1], LoadReport)))

    def _on_chunk(self, frames: Message) -> None:
        self._run(self.subscription.on_chunk(_read(frames[-1], SnapshotChunk)))

    def _on_monitor(self, frames: Message) -> None:
        if self._handshakes.observe(frames) is not Connection.LOST:
            return
        # Handle messages received before the disconnect first: they must not count as received after it.
        for reader in self._readers[:-1]:
            reader.drain(inf)
        self._run(self.subscription.on_disconnect())
        if self._handshakes.refusal is not None and self._readers:
            why = self._handshakes.refusal
            error = KeysRefused(self._endpoints.events, f"{why}; {_NO_KEYS}" if self._keyless else why)
            log.warning("event_stream_refused error=%s", error)
            self._sink.refused(error)

    def _on_tick(self) -> None:
        assert self._loop is not None, "ticks come after the start"
        self._tick_later(self._loop)
        self._run(self.subscription.on_tick())

    def _tick_later(self, loop: asyncio.AbstractEventLoop) -> None:
        # At multiples of the interval: all feeds of an idle loop then share one wake-up, which costs more than a tick.
        # Rounded, because a timer may fire a little before its time.
        self._timer = loop.call_at((round(loop.time() / self.tick_s) + 1) * self.tick_s, self._on_tick)

    def _run(self, instructions: list[Instruction]) -> None:
        for instruction in instructions:
            if self._timer is None and not self._readers:
                return  # closed by a callback
            match instruction:
                case Apply() | Reset():
                    self._sink.blocks_changed(instruction)
                case SetStatus(status):
                    self._sink.status(status)
                case ForwardLoad(report):
                    self._sink.load(report)
                case DigestMismatch(in_a_row, pause_ticks):
                    log.warning(
                        "event_stream_disproved endpoint=%s in_a_row=%d pause_s=%g",
                        self._endpoints.events,
                        in_a_row,
                        pause_ticks * self.tick_s,
                    )
                case RequestReplay(since):
                    self._ask(self._replay, replay_request(since))
                case RequestSnapshot():
                    request = SnapshotRequest(token_ids=self._token_ids)
                    self._ask(self._snapshot, [b"", msgspec.msgpack.encode(request)])

    def _ask(self, reader: SocketReader | None, frames: Message) -> None:
        """Send a request. One that cannot be sent counts as lost; the state machine repeats it."""
        if reader is not None and not reader.send(frames):
            log.debug("event_request_unsent endpoint=%s", self._endpoints.events)


def _new_mirror(medium: str) -> CacheMirror:
    del medium
    return CacheMirror()


def _read(payload: bytes, kind: type[Struct]) -> Struct:
    try:
        return msgspec.msgpack.decode(payload, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedFrame(kind.__name__, str(error)) from error
