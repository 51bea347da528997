"""The publishing side of the stream: one thread and its sockets around an `EventLog`.

The engine's thread submits changes and load reports and never waits: a full mailbox becomes a numbered gap
(step_changes.py), and a new load report replaces an unsent one. Everything else runs on the publisher's thread, which
polls its sockets and a wake-up pipe.

event_log.py determines order, sequence numbers and residency.
"""

import logging
import os
import select
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path

import msgspec
import zmq
from msgspec.structs import replace

from ..config import EventsSettings
from ..endpoint import SOCKET_NAMES, TIERED_SOCKET_NAMES, ipc_address, tcp_address
from ..errors import EndpointUnusable, MalformedFrame
from ..security.curve_authenticator import CurveAuthenticator
from ..security.curve_keys import ServerKeys, protect_server
from ..wire.frames import END_SEQ, decode_seq, encode_seq, events_topic, read_request
from ..wire.messages import HEARTBEAT_TOPIC, LOAD_TOPIC, EventEndpoints, LoadReport, SnapshotRequest
from .answer_sender import AnswerSender
from .event_log import EventLog, SentBatch
from .fixed_stream import MAX_PLACES, FixedStream, Publisher, fixed_stream
from .step_changes import AllCleared, LostSteps, Mailbox, RemovedBlocks, Step, StoredBlocks

log = logging.getLogger(__name__)

#: Subscribers send subscriptions and short requests; a larger frame closes its connection.
MAX_FRAME_BYTES = 64 * 1024
#: Interval of retrying to send an answer while a slow reader's queue is full.
_RETRY_S = 0.005
#: Batches queued for the thread before some are lost, and messages queued for each subscriber.
QUEUED_BATCHES, QUEUED_MESSAGES = 10_000, 100_000
#: Snapshot chunks queued per reader; a chunk with token ids has about 200 KiB.
_SNAPSHOT_PARTS_QUEUED = 32
#: Mailbox entries sent before requests and heartbeats are handled.
_ENTRIES_PER_TURN = 256


class Waker:
    """Wakes a thread that polls: a pipe, written to at most once per wake-up."""

    __slots__ = ("_lock", "_open", "_woken", "_write", "read")

    def __init__(self) -> None:
        self.read, self._write = os.pipe()
        os.set_blocking(self.read, False)
        os.set_blocking(self._write, False)
        self._woken = False
        self._open = True
        self._lock = threading.Lock()

    def wake(self) -> None:
        """Wake the thread. May be called from any thread, even after `close`."""
        if self._woken:
            return
        # The lock keeps a late `wake` from writing to a descriptor that was closed and reused.
        with self._lock:
            if self._open:
                self._woken = True
                os.write(self._write, b"\0")

    def clear(self) -> bool:
        """Reset the waker. The woken thread calls this before it looks for work, so that a later `wake` works again.

        Returns False if nobody called `wake`.
        """
        if not self._woken:
            return False
        with self._lock:  # `wake` holds it while writing, so the byte has been written
            self._woken = False
            os.read(self.read, 64)
        return True

    def wait(self, seconds: float) -> bool:
        """Wait for a call of `wake` at most so long, then `clear`."""
        poll = select.poll()
        poll.register(self.read, select.POLLIN)
        poll.poll(seconds * 1000)
        return self.clear()

    def close(self) -> None:
        with self._lock:
            self._open = False
        os.close(self.read)
        os.close(self._write)


class EventPublisher:
    """Publishes one replica's cache events, heartbeats and load. `stored` … `report` never block.

    Only one thread (the engine's) may call `stored`, `removed`, `cleared` or `flush`; any may call `report` or `close`.
    """

    def __init__(
        self,
        settings: EventsSettings,
        *,
        host: str,
        block_size: int,
        epoch: int,
        model: str = "",
        replica: str = "",
        ipc_dir: Path | None = None,
        keys: ServerKeys | None = None,
        tiers: bool = False,
        clock: Callable[[], float] = time.time,
        queued_batches: int = QUEUED_BATCHES,
        queued_messages: int = QUEUED_MESSAGES,
    ) -> None:
        """`tiers`: blocks in media below the pool may be announced, on sockets of their own."""
        self._settings = settings
        self._host = host
        self._epoch = epoch
        self._ipc_dir = ipc_dir
        self._keys = keys
        self._names = (*SOCKET_NAMES, *TIERED_SOCKET_NAMES) if tiers else SOCKET_NAMES
        self._clock = clock
        self._step: Step = []
        self._queued_batches, self._queued_messages = queued_batches, queued_messages
        self._mailbox = Mailbox(queued_batches)
        self._log = EventLog(settings, epoch=epoch, block_size=block_size)
        self._fixed = fixed_stream(settings, Publisher(epoch, host, model, replica))
        self._load: LoadReport | None = None
        self._new_load = False
        self._waker: Waker | None = None
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()
        self._sockets: _Sockets | None = None
        #: Why the thread has ended by itself; None: it has not. The owner must then end, too: nobody hears from it.
        self.error: Exception | None = None
        self._turn_since: float | None = None

    def start(self) -> EventEndpoints:
        """Bind, start the thread and return the addresses. May be called only once. Raises EndpointUnusable."""
        assert self._sockets is None, "a publisher starts once"
        if self._ipc_dir is None:
            addresses = dict.fromkeys(self._names, tcp_address(self._host))
        else:
            addresses = {name: ipc_address(self._ipc_dir, self._epoch, name) for name in self._names}
        sockets = self._sockets = _Sockets(self._queued_messages, addresses, events_topic(self._epoch), self._keys)
        if self._fixed is not None:
            try:
                sockets.add_fixed(self._host, self._fixed, self._queued_messages)
            except EndpointUnusable:
                sockets.close()
                raise
        self._waker = Waker()
        self._thread = threading.Thread(target=self._run, args=(sockets,), name="homing-events", daemon=True)
        self._thread.start()
        return sockets.endpoints

    def stored(
        self, parent: bytes | None, hashes: Sequence[bytes], tokens: bytes, salt: str = "", medium: str = "GPU"
    ) -> None:
        """Consecutive blocks became resident in a medium. `parent` is None if the first of them starts a prompt; `salt`
        then distinguishes it from other tenants' blocks of the same tokens.
        """
        assert len(tokens) % (4 * len(hashes) or 4) == 0, f"{len(tokens)} token bytes for {len(hashes)} blocks"
        if self._settings.publish_events and hashes:
            self._step.append(StoredBlocks(parent, tuple(hashes), bytes(tokens), salt, medium))

    def removed(self, hashes: Sequence[bytes], medium: str = "GPU") -> None:
        """The last copies of these blocks in a medium were evicted."""
        if self._settings.publish_events and hashes:
            self._step.append(RemovedBlocks(tuple(hashes), medium))

    def cleared(self) -> None:
        """The cache was emptied. Sent at once, because an idle engine has no steps that would flush it."""
        if self._settings.publish_events:
            self._step.append(AllCleared())
            self.flush()

    def flush(self) -> None:
        """Send the changes collected since the last flush, if any, as one batch. Call it around each step."""
        if not self._step:
            return
        step, self._step = self._step, []
        if not self._mailbox.put(step) and (lost := self._mailbox.lost_batches).bit_count() == 1:  # 1, 2, 4, 8, ...
            log.warning("events_lost epoch=%x batches=%d queue=%d", self._epoch, lost, self._queued_batches)
        self._wake()

    def report(self, load: LoadReport) -> None:
        """Send this load report now, and again with each heartbeat until the next report."""
        self._load = load
        self._new_load = True
        self._wake()

    def close(self) -> None:
        """Send what was flushed, stop the thread, and release sockets and files. May be repeated."""
        thread, self._thread = self._thread, None
        if thread is None or self._waker is None:
            return
        self._closing.set()
        self._waker.wake()
        thread.join()
        self._waker.close()
        self._waker = None

    def turn_s(self) -> float:
        """Seconds since the thread began its current turn; 0 while it waits. A turn that does not end hangs."""
        since = self._turn_since
        return 0.0 if since is None else time.monotonic() - since

    def _wake(self) -> None:
        waker = self._waker
        if waker is not None:
            waker.wake()

    # The methods below run on the publisher's thread.

    def _run(self, sockets: "_Sockets") -> None:
        assert self._waker is not None, "the thread starts after its waker"
        waker, interval = self._waker, self._settings.heartbeat_interval_s
        sockets.poller.register(waker.read, zmq.POLLIN)
        next_beat = time.monotonic()
        try:
            while not self._closing.is_set():
                self._turn_since = time.monotonic()
                waker.clear()
                busy = self._send_batches(sockets)
                if self._new_load:
                    self._new_load = False
                    sockets.send_state(LOAD_TOPIC, self._load)
                self._answer(sockets)
                if sockets.authenticator is not None:
                    sockets.authenticator.answer()
                if time.monotonic() >= next_beat:
                    self._send_heartbeat(sockets)
                    next_beat = time.monotonic() + interval
                self._turn_since = None
                sockets.wait(0.0 if busy else next_beat - time.monotonic())
            while self._send_batches(sockets):
                pass
            self._send_heartbeat(sockets)
        except Exception as error:
            log.exception("publisher_failed epoch=%x", self._epoch)
            self.error = error
        finally:
            sockets.close()

    def _send_batches(self, sockets: "_Sockets") -> bool:
        """Send the waiting batches. Returns True when more may be waiting."""
        for _ in range(_ENTRIES_PER_TURN):
            entry = self._mailbox.take()
            if entry is None:
                return False
            if isinstance(entry, LostSteps):
                self._log.record_loss(entry)
                continue
            sent = self._log.commit(entry, self._clock())
            # A PUB never blocks: it drops messages to readers above their high-water mark, and they see the gap.
            for stream in sockets.streams:
                stream.pub.send_multipart([stream.topic, encode_seq(sent.seq), stream.payload(sent)], copy=False)
        return True

    def _send_heartbeat(self, sockets: "_Sockets") -> None:
        sockets.send_state(HEARTBEAT_TOPIC, self._log.heartbeat(self._clock()))
        if self._load is not None:
            sockets.send_state(LOAD_TOPIC, self._load)

    def _answer(self, sockets: "_Sockets") -> None:
        """Accept requests and continue sending answers."""
        answers: list[tuple[AnswerSender, Callable[[bytes], Iterator[list[bytes]]]]] = [
            (each.replays, partial(self._replay, each)) for each in sockets.streams if each.replays is not None
        ]
        for sender, answer in (*answers, (sockets.snapshots, self._snapshot)):
            for frames in sender.requests():
                try:
                    identity, body = read_request(frames)
                    sender.start(identity, answer(body))
                except MalformedFrame as error:
                    log.warning("request_malformed epoch=%x error=%s", self._epoch, error)
            sender.advance(time.monotonic())

    def _replay(self, stream: "_Stream", body: bytes) -> Iterator[list[bytes]]:
        batches = self._log.replay(decode_seq(body))
        frames = ([b"", stream.topic, encode_seq(sent.seq), stream.payload(sent)] for sent in batches)
        return chain(frames, [[b"", stream.topic, END_SEQ, b""]])

    def _snapshot(self, body: bytes) -> Iterator[list[bytes]]:
        try:
            request = msgspec.msgpack.decode(body, type=SnapshotRequest)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise MalformedFrame("snapshot request", str(error)) from error
        chunks = self._log.snapshot(token_ids=request.token_ids)
        return ([b"", msgspec.msgpack.encode(chunk)] for chunk in chunks)


@dataclass(slots=True, frozen=True)
class _Stream:
    """The sockets of one address of the events."""

    topic: bytes
    pub: "zmq.Socket[bytes]"
    replays: AnswerSender | None
    tiers: bool  #: whether its batches include the blocks in tiers

    def payload(self, sent: SentBatch) -> bytes:
        return sent.tiered if self.tiers else sent.payload


class _Sockets:
    """The publisher's sockets, on a separate context: closing it removes all its sockets, threads and files."""

    def __init__(
        self, queued_messages: int, addresses: Mapping[str, str], topic: bytes, keys: ServerKeys | None
    ) -> None:
        """`addresses` by the name of the socket."""
        self._context = zmq.Context()
        self._keys = keys
        #: None when encryption is off or every client is accepted
        self.authenticator = (
            CurveAuthenticator(self._context, keys.allowed) if keys is not None and keys.allowed is not None else None
        )
        # libzmq leaves the files of a closed context, but an address must not outlive its publisher.
        self._files = [Path(a.removeprefix("ipc://")) for a in addresses.values() if a.startswith("ipc://")]
        pub = self._socket(zmq.PUB, queued_messages)
        self._state = self._socket(zmq.PUB, 1000)
        replay, snapshot = self._socket(zmq.ROUTER, 1000), self._socket(zmq.ROUTER, _SNAPSHOT_PARTS_QUEUED)
        self._sockets = [pub, replay, self._state, snapshot]
        tiered = len(addresses) > len(self._sockets)
        if tiered:
            self._sockets += [self._socket(zmq.PUB, queued_messages), self._socket(zmq.ROUTER, 1000)]
        try:
            bound = {
                name: _bind(sock, address)
                for sock, (name, address) in zip(self._sockets, addresses.items(), strict=True)
            }
        except EndpointUnusable:
            self.close()
            raise
        curve_key = "" if keys is None else keys.pair.public.decode()
        self.endpoints = EventEndpoints(**bound, curve_key=curve_key)
        replays, self.snapshots = AnswerSender(replay), AnswerSender(snapshot)
        self.streams = [_Stream(topic, pub, replays, tiers=False)]
        self._senders = {replay: replays, snapshot: self.snapshots}
        if tiered:
            pub, replay = self._sockets[-2:]
            replays = self._senders[replay] = AnswerSender(replay)
            self.streams.append(_Stream(topic, pub, replays, tiers=True))
        self.poller = zmq.Poller()
        if self.authenticator is not None:
            self.poller.register(self.authenticator.socket, zmq.POLLIN)
        self._encode = msgspec.msgpack.Encoder().encode

    def add_fixed(self, host: str, stream: FixedStream, high_water_mark: int) -> None:
        """Bind the sockets of the fixed address. Raises EndpointUnusable if no place is free."""
        pattern = tcp_address(host).removesuffix("*")
        pub, replay = self._socket(zmq.PUB, high_water_mark), self._socket(zmq.ROUTER, 1000)
        self._sockets += [pub, replay]
        for port, replay_port in stream.places():
            try:
                events = _bind(pub, f"{pattern}{port}")
            except EndpointUnusable:
                continue
            try:
                replayed = _bind(replay, f"{pattern}{replay_port}") if replay_port else ""
                break
            except EndpointUnusable:
                pub.unbind(events)
        else:
            raise EndpointUnusable(f"none of {MAX_PLACES} ports from {stream.port} on is free on {host}")
        replays = None
        if replayed:
            replays = self._senders[replay] = AnswerSender(replay)
        self.streams.append(_Stream(stream.topic, pub, replays, stream.tiers))
        self.endpoints = replace(self.endpoints, fixed_events=events, fixed_replay=replayed)

    def _socket(self, kind: int, high_water_mark: int) -> "zmq.Socket[bytes]":
        sock: zmq.Socket[bytes] = self._context.socket(kind)
        sock.set_hwm(high_water_mark)
        sock.maxmsgsize = MAX_FRAME_BYTES
        sock.linger = 0
        if self._keys is not None:
            protect_server(sock, self._keys)
        return sock

    def wait(self, timeout_s: float) -> None:
        """Wait for a request, the waker or the timeout; only briefly while an answer is unsent."""
        if any(self._senders.values()):
            timeout_s = min(timeout_s, _RETRY_S)
        for sock, sender in self._senders.items():
            self.poller.register(sock, sender.interest)
        self.poller.poll(max(0, int(timeout_s * 1000 + 0.999)))

    def send_state(self, topic: bytes, message: msgspec.Struct | None) -> None:
        self._state.send_multipart([topic, self._encode(message)])

    def close(self) -> None:
        for sock in self._sockets:
            sock.close()
        if self.authenticator is not None:
            self.authenticator.close()
        self._context.term()
        for path in self._files:
            path.unlink(missing_ok=True)


def _bind(sock: "zmq.Socket[bytes]", address: str) -> str:
    sock.ipv6 = address.startswith("tcp://[")
    try:
        sock.bind(address)
    except zmq.ZMQError as error:
        raise EndpointUnusable(f"cannot bind {address}: {error}") from error
    return sock.getsockopt_string(zmq.LAST_ENDPOINT)
