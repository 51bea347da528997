"""The channel on which rank 0 sends plans to its replica's other ranks (workers). Independent of the plans' contents.

Rank 0 has a ROUTER and each worker a DEALER (PUB would lose messages sent before a rank has subscribed). Workers send
[HELLO, process id] once; after that rank 0 sends [kind, payload], one message per step and rank. Both sides know a
secret from which rank 0's CURVE keys are derived. The public key is never sent, and without it a client fails the
handshake, so another process on the host can neither pose as a rank, nor read plans, nor fill rank 0's memory.
"""

import logging
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import zmq
from zmq.utils import z85

from ...events.endpoint import tcp_address
from ...events.security.curve_keys import KeyPair, new_pair, protect_client
from ..errors import RankLost, StartupError

log = logging.getLogger(__name__)

HELLO, ALLOCATE, READ, STEP, LAUNCH, STOP = b"hello", b"allocate", b"read", b"step", b"launch", b"stop"
ALLOCATE_HOST, MOVE = b"allocate host", b"move"
SECRET_BYTES = 32
#: How long ranks wait for each other, as each loads the model at its own pace.
JOIN_TIMEOUT_S = 300.0
#: How long `close` waits for the last messages to be sent, and for the ZeroMQ context to terminate.
LINGER_MS, CLOSE_TIMEOUT_S = 1000, 5.0
#: A rank whose connection is silent this long is lost. ZeroMQ's own threads send heartbeats even during a long step.
SILENCE_S = 10
#: Workers only send a hello; a larger frame closes its connection.
MAX_HELLO_BYTES = 1024
#: Maximum number of unread messages per connection.
MAX_HELLOS = 4


@dataclass(slots=True, frozen=True, kw_only=True)
class RankPlace:
    """One rank's place in its replica. All ranks meet at `host`:`port`, where rank 0 listens."""

    rank: int
    size: int
    host: str
    port: int
    #: SECRET_BYTES that only these ranks know.
    secret: bytes = field(repr=False)


def read_hello(frames: Sequence[bytes], size: int) -> tuple[int, int]:
    """Rank and process id from one worker's hello. Raises ValueError or MsgspecError for any other frames."""
    if len(frames) != 3 or frames[1] != HELLO:
        raise ValueError(f"{len(frames)} frames instead of a hello")
    rank = next((rank for rank in range(1, size) if frames[0] == _identity(rank)), None)
    if rank is None:
        raise ValueError(f"unknown rank {frames[0][:16]!r} among {size}")
    return rank, msgspec.msgpack.decode(frames[2], type=int)


def rank_0_keys(secret: bytes) -> KeyPair:
    """Rank 0's CURVE keys, derived from the ranks' secret."""
    assert len(secret) == SECRET_BYTES, f"the secret has {len(secret)} bytes"
    words = z85.encode(secret)
    return KeyPair(zmq.curve_public(words), words)


class StepBroadcast:
    """Rank 0's end of the channel, with one connection per worker."""

    def __init__(self, place: RankPlace) -> None:
        self._size = place.size
        self._ranks: tuple[int, ...] = ()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        _keep_alive(self._socket)
        keys = rank_0_keys(place.secret)
        self._socket.curve_server = True
        self._socket.curve_publickey, self._socket.curve_secretkey = keys.public, keys.secret
        self._socket.router_mandatory = True
        self._socket.maxmsgsize = MAX_HELLO_BYTES
        self._socket.rcvhwm = MAX_HELLOS
        self._socket.bind(tcp_address(place.host))
        self.endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def wait_for_workers(self, timeout_s: float = JOIN_TIMEOUT_S) -> tuple[int, ...]:
        """Process ids of all workers in rank order, once all have loaded. Raises StartupError."""
        pids: dict[int, int] = {}
        deadline = time.monotonic() + timeout_s
        while len(pids) < self._size - 1:
            if not self._socket.poll(max(0, int((deadline - time.monotonic()) * 1000))):
                raise StartupError(f"{len(pids)} of {self._size - 1} workers connected within {timeout_s:.0f} s")
            frames = self._socket.recv_multipart()
            try:
                rank, pid = read_hello(frames, self._size)
            except (ValueError, msgspec.MsgspecError) as error:
                log.warning("hello_dropped reason=%s", error)
                continue
            pids[rank] = pid
        self._ranks = tuple(sorted(pids))
        return tuple(pids[rank] for rank in self._ranks)

    def send(self, kind: bytes, payload: bytes = b"") -> None:
        for rank in self._ranks:
            try:
                self._socket.send_multipart([_identity(rank), kind, payload], zmq.NOBLOCK)
            except zmq.ZMQError as error:
                raise RankLost(f"rank {rank} of {self._size} is lost: {error}") from error

    def close(self) -> None:
        try:
            self.send(STOP)
        except RankLost as error:
            log.warning("worker_gone error=%s", error)
        self._socket.close(linger=LINGER_MS)
        _end_context(self._context)


class WorkerLink:
    """A worker's connection to rank 0, with a monitor that detects when it breaks."""

    def __init__(self, endpoint: str, place: RankPlace) -> None:
        """Connect and send the hello."""
        self._rank = place.rank
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        _keep_alive(self._socket)
        protect_client(self._socket, new_pair(), rank_0_keys(place.secret).public)
        self._socket.identity = _identity(place.rank)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._socket.connect(endpoint)
        self._socket.send_multipart([HELLO, msgspec.msgpack.encode(os.getpid())])
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)

    def receive(self, timeout_s: float) -> tuple[bytes, bytes] | None:
        """The next message; None after the timeout. Raises RankLost if the connection broke and no message is left."""
        ready = dict(self._poller.poll(int(timeout_s * 1000)))
        if self._socket in ready:
            kind, payload = self._socket.recv_multipart()
            return kind, payload
        if self._monitor in ready:
            raise RankLost(f"rank 0 is lost: its connection to rank {self._rank} broke")
        return None

    def close(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=0)
        _end_context(self._context)


def _end_context(context: "zmq.Context[zmq.Socket[bytes]]") -> None:
    """Terminate the context, which waits for unsent messages, but give up after CLOSE_TIMEOUT_S.

    `term` has no timeout, and libzmq 4.3.5 has been seen to hang in it for minutes. The waiting thread is a daemon, so
    it does not keep the process alive.
    """
    ending = threading.Thread(target=context.term, name="context-end", daemon=True)
    ending.start()
    ending.join(CLOSE_TIMEOUT_S)
    if ending.is_alive():
        log.warning("context_left_open after_s=%g", CLOSE_TIMEOUT_S)


def _identity(rank: int) -> bytes:
    return str(rank).encode()


def _keep_alive(socket: "zmq.Socket[bytes]") -> None:
    socket.set_hwm(0)  # nothing may be dropped; rank 0 waits for each step's result, so no queue builds up
    socket.heartbeat_ivl = 1000
    socket.heartbeat_timeout = SILENCE_S * 1000
