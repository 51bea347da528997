"""The way that plans take: a ROUTER on rank 0, a DEALER on every other rank (PUB would lose what is sent too early).

Workers say [HELLO, process id] once, rank 0 sends [kind, payload] from then on, one message per step and rank. Both
sides know the gang's secret, from which rank 0's CURVE keys are made: its public key is on no wire, and who does not
know it gets no further than the handshake. So a stranger on the same host can neither pass for a rank, nor read
plans, nor fill rank 0's memory. Knows nothing of what plans say.
"""

import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import zmq
from zmq.utils import z85

from ...events.endpoint import tcp_address
from ...events.security.curve_keys import KeyPair, new_pair, protect_client
from ..errors import RankLost, StartupError
from .rank_spec import JOIN_TIMEOUT_S, SECRET_BYTES, GangSpec

log = logging.getLogger(__name__)

HELLO, ALLOCATE, READ, STEP, LAUNCH, STOP = b"hello", b"allocate", b"read", b"step", b"launch", b"stop"
#: A rank whose connection is silent for so long is gone; heartbeats come from ZeroMQ's own threads, so that a long
#: step is no silence.
SILENCE_S = 10
#: Workers say hello and no more; a larger frame ends the connection that it comes on.
MAX_HELLO_BYTES = 1024
#: Of one connection, that rank 0 has not read.
MAX_HELLOS = 4


@dataclass(slots=True, frozen=True)
class Hello:
    """A worker that has loaded."""

    rank: int
    pid: int


def read_hello(frames: Sequence[bytes], size: int) -> Hello:
    """What a worker of a gang of `size` says. Raises ValueError for what none would."""
    if len(frames) != 3 or frames[1] != HELLO:
        raise ValueError(f"{len(frames)} frames that are no hello")
    rank = next((rank for rank in range(1, size) if frames[0] == _identity(rank)), None)
    if rank is None:
        raise ValueError(f"there is no rank {frames[0][:16]!r} among {size}")
    return Hello(rank, msgspec.msgpack.decode(frames[2], type=int))


def gang_keys(secret: bytes) -> KeyPair:
    """Rank 0's keys."""
    assert len(secret) == SECRET_BYTES, f"a secret of {len(secret)} bytes"
    words = z85.encode(secret)
    return KeyPair(zmq.curve_public(words), words)


class PlanChannel:
    """Rank 0's end, with a peer per worker."""

    def __init__(self, gang: GangSpec) -> None:
        self._size = gang.size
        self._ranks: tuple[int, ...] = ()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        _keep_alive(self._socket)
        keys = gang_keys(gang.secret)
        self._socket.curve_server = True
        self._socket.curve_publickey, self._socket.curve_secretkey = keys.public, keys.secret
        self._socket.router_mandatory = True
        self._socket.maxmsgsize = MAX_HELLO_BYTES
        self._socket.rcvhwm = MAX_HELLOS
        self._socket.bind(tcp_address(gang.host))
        self.endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def wait_for_workers(self, timeout_s: float = JOIN_TIMEOUT_S) -> tuple[int, ...]:
        """Process ids of all workers in the order of ranks, once they have loaded. Raises StartupError."""
        pids: dict[int, int] = {}
        deadline = time.monotonic() + timeout_s
        while len(pids) < self._size - 1:
            if not self._socket.poll(max(0, int((deadline - time.monotonic()) * 1000))):
                raise StartupError(f"{len(pids)} of {self._size - 1} workers came within {timeout_s:.0f} s")
            frames = self._socket.recv_multipart()
            try:
                hello = read_hello(frames, self._size)
            except (ValueError, msgspec.MsgspecError) as error:
                log.warning("hello_dropped reason=%s", error)
                continue
            pids[hello.rank] = hello.pid
        self._ranks = tuple(sorted(pids))
        return tuple(pids[rank] for rank in self._ranks)

    def send(self, kind: bytes, payload: bytes = b"") -> None:
        """To all workers. Raises RankLost for one whose connection is gone."""
        for rank in self._ranks:
            try:
                self._socket.send_multipart([_identity(rank), kind, payload], zmq.NOBLOCK)
            except zmq.ZMQError as error:
                raise RankLost(f"rank {rank} of {self._size} is gone: {error}") from error

    def close(self) -> None:
        """Tell the workers to end, those that are left."""
        try:
            self.send(STOP)
        except RankLost as error:
            log.warning("worker_gone error=%s", error)
        self._socket.close(linger=1000)
        self._context.term()


class WorkerLink:
    """A worker's connection to rank 0, and the monitor that tells when it breaks."""

    def __init__(self, endpoint: str, gang: GangSpec) -> None:
        """Says hello at once."""
        self._rank = gang.rank
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        _keep_alive(self._socket)
        protect_client(self._socket, new_pair(), gang_keys(gang.secret).public)
        self._socket.identity = _identity(gang.rank)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._socket.connect(endpoint)
        self._socket.send_multipart([HELLO, msgspec.msgpack.encode(os.getpid())])
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)

    def receive(self, timeout_s: float) -> tuple[bytes, bytes] | None:
        """The next order; None after the timeout. Raises RankLost when the connection broke and nothing is left."""
        ready = dict(self._poller.poll(int(timeout_s * 1000)))
        if self._socket in ready:
            kind, payload = self._socket.recv_multipart()
            return kind, payload
        if self._monitor in ready:
            raise RankLost(f"rank 0 is gone: its connection to rank {self._rank} broke")
        return None

    def close(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=0)
        self._context.term()


def _identity(rank: int) -> bytes:
    return str(rank).encode()


def _keep_alive(socket: "zmq.Socket[bytes]") -> None:
    socket.set_hwm(0)  # nothing may be dropped; rank 0 waits for each step's result, so nothing piles up
    socket.heartbeat_ivl = 1000
    socket.heartbeat_timeout = SILENCE_S * 1000
