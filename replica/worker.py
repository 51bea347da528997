"""The ranks of one replica at work together: rank 0 tells the others each step's plan, they run it beside it.

One ZeroMQ message per step and rank, ROUTER on rank 0 to a DEALER per worker (PUB would lose what is sent before a
subscription). Frames: [kind, payload]. The tensors between ranks travel through their `RankGroup`; here only plans do.
No rank can go on without the others, so every failure here is a `RankLost`.
"""

import logging
import os
import threading
from pathlib import Path

import msgspec
import torch
import zmq

from ..events.binding import tcp_address
from ..kvcache.cache import CachedBlock
from ..kvcache.sizing import MemoryReading
from .config import ReplicaSettings
from .errors import RankLost, StartupError
from .plan import StepPlan
from .ranks import Backend, RankGroup
from .resident.runner import Drawn, ResidentRunner, RunnerLoader, load_runner
from .runner import ModelRunner, resolve_device, thread_keeper

log = logging.getLogger(__name__)

HELLO, ALLOCATE, READ, STEP, LAUNCH, STOP = b"hello", b"allocate", b"read", b"step", b"launch", b"stop"
#: A rank whose connection is silent for so long is gone; heartbeats come from ZeroMQ's own threads, so that a long
#: step is no silence.
SILENCE_S = 10
#: How long rank 0 waits for workers that load the model at their own pace.
JOIN_TIMEOUT_S = 300.0
_ENDPOINT_CHARS = 256
#: Workers say hello and no more; a larger frame ends the connection that it comes on.
MAX_HELLO_BYTES = 1024


class GangSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's place among those of its replica; all meet at `host`:`port`, where rank 0 listens."""

    rank: int
    size: int
    host: str
    port: int


def join_gang(gang: GangSpec, settings: ReplicaSettings) -> RankGroup:
    """Meet the other ranks. Raises StartupError when they do not come."""
    backend: Backend = "gloo" if resolve_device(settings).type == "cpu" else "nccl"
    try:
        return RankGroup.join(
            gang.rank, gang.size, host=gang.host, port=gang.port, backend=backend, timeout_s=JOIN_TIMEOUT_S
        )
    except RankLost as error:
        raise StartupError(
            f"rank {gang.rank} of {gang.size} met no other at {gang.host}:{gang.port}: {error}"
        ) from error


def share_endpoint(group: RankGroup, endpoint: str, settings: ReplicaSettings) -> str:
    """Rank 0's endpoint, on all ranks: a sum in which the others add nothing. Saves a second place to meet."""
    letters = torch.zeros(_ENDPOINT_CHARS, dtype=torch.int32)
    if group.rank == 0:
        data = endpoint.encode()
        assert len(data) <= _ENDPOINT_CHARS, f"endpoint of {len(data)} bytes: {endpoint}"
        letters[: len(data)] = torch.tensor(list(data), dtype=torch.int32)
    summed = group.all_reduce(letters.to(resolve_device(settings))).tolist()
    return bytes(letter for letter in summed if letter).decode()


class LocalExecutor:
    """Runs plans on the only rank."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner

    def allocate(self, num_blocks: int) -> None:
        self._runner.allocate_kv(num_blocks)

    def readings(self) -> list[MemoryReading]:
        return self._runner.readings()

    def execute(self, plan: StepPlan) -> torch.Tensor:
        logits = self._runner.forward(plan)
        assert logits is not None, "rank 0 has the logits"
        return logits

    def launch(self, plan: StepPlan) -> Drawn:
        """As `ResidentRunner.launch`, which the runner must be."""
        assert isinstance(self._runner, ResidentRunner), type(self._runner)
        return self._runner.launch(plan)

    def close(self) -> None:
        self._runner.close()


class GangExecutor:
    """Rank 0 of several: sends a plan to the others, then runs it, too."""

    def __init__(self, runner: ModelRunner, channel: "PlanChannel") -> None:
        self._runner = runner
        self._channel = channel

    def allocate(self, num_blocks: int) -> None:
        self._channel.send(ALLOCATE, msgspec.msgpack.encode(num_blocks))
        self._runner.allocate_kv(num_blocks)

    def readings(self) -> list[MemoryReading]:
        """Of all ranks."""
        self._channel.send(READ)
        return self._runner.readings()

    def execute(self, plan: StepPlan) -> torch.Tensor:
        """Raises RankLost for whatever goes wrong: after half a step the ranks are out of step for good."""
        self._channel.send(STEP, msgspec.msgpack.encode(plan))
        try:
            logits = self._runner.forward(plan)
        except Exception as error:
            raise RankLost(f"step {plan.step} broke off on rank 0: {error}") from error
        assert logits is not None, "rank 0 has the logits"
        return logits

    def launch(self, plan: StepPlan) -> Drawn:
        """As `execute`, without waiting."""
        assert isinstance(self._runner, ResidentRunner), type(self._runner)
        self._channel.send(LAUNCH, msgspec.msgpack.encode(plan))
        try:
            return self._runner.launch(plan)
        except Exception as error:
            raise RankLost(f"step {plan.step} broke off on rank 0: {error}") from error

    def close(self) -> None:
        self._channel.close()
        self._runner.close()


class PlanChannel:
    """Rank 0's end: one ROUTER socket, a peer per worker."""

    def __init__(self, workers: int, host: str) -> None:
        self._workers = workers
        self._peers: list[bytes] = []
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        _keep_alive(self._socket)
        self._socket.router_mandatory = True
        self._socket.maxmsgsize = MAX_HELLO_BYTES
        self._socket.bind(tcp_address(host))
        self.endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def wait_for_workers(self) -> tuple[int, ...]:
        """Process ids of all workers, once they have loaded. Raises StartupError."""
        pids: dict[bytes, int] = {}
        while len(pids) < self._workers:
            if not self._socket.poll(int(JOIN_TIMEOUT_S * 1000)):
                raise StartupError(f"{len(pids)} of {self._workers} workers came within {JOIN_TIMEOUT_S:.0f} s")
            identity, _, payload = self._socket.recv_multipart()
            pids[identity] = msgspec.msgpack.decode(payload, type=int)
        self._peers = sorted(pids)
        return tuple(pids[peer] for peer in self._peers)

    def send(self, kind: bytes, payload: bytes = b"") -> None:
        """To all workers. Raises RankLost for one whose connection is gone."""
        for peer in self._peers:
            try:
                self._socket.send_multipart([peer, kind, payload], zmq.NOBLOCK)
            except zmq.ZMQError as error:
                raise RankLost(f"worker {peer.decode()} of {self._workers} is gone: {error}") from error

    def close(self) -> None:
        """Tell the workers to end, those that are left."""
        try:
            self.send(STOP)
        except RankLost as error:
            log.warning("worker_gone error=%s", error)
        self._socket.close(linger=1000)
        self._context.term()


class RankWorker:
    """A rank above 0: loads its share of the weights and runs what rank 0 sends, until told to stop."""

    def __init__(
        self,
        settings: ReplicaSettings,
        *,
        block_size: int,
        model_dir: Path,
        gang: GangSpec,
        load_runner: RunnerLoader = load_runner,
    ) -> None:
        assert 0 < gang.rank < gang.size, f"rank {gang.rank} of {gang.size} is no worker"
        self._settings = settings
        self._block_size = block_size
        self._model_dir = model_dir
        self._gang = gang
        self._load_runner = load_runner
        self._stopping = threading.Event()
        self._threads = thread_keeper(settings)
        self._runner: ModelRunner | None = None
        self._link: _WorkerLink | None = None

    def start(self) -> None:
        """Join the gang, load, say hello. Blocks until all ranks have met."""
        self._threads.begin()
        group = join_gang(self._gang, self._settings)
        endpoint = share_endpoint(group, "", self._settings)
        self._runner = self._load_runner(self._settings, self._model_dir, self._block_size, group)
        self._link = _WorkerLink(endpoint, self._gang.rank)
        log.info("worker_ready rank=%d endpoint=%s", self._gang.rank, endpoint)

    def run(self) -> None:
        """Run plans until rank 0 or `stop` says so. Raises RankLost when rank 0 is gone."""
        assert self._link is not None, "run before start"
        assert self._runner is not None, "run before start"
        self._threads.begin()  # a count of threads belongs to its thread, and `start` may have run in another
        try:
            while not self._stopping.is_set():
                self._threads.look()
                frames = self._link.receive(timeout_s=0.2)
                if frames and not self._obey(self._runner, *frames):
                    return
        finally:
            self._link.close()
            self._runner.close()
            self._runner = None

    def stop(self) -> None:
        """From any thread: `run` returns within a moment, unless it waits for other ranks in a step."""
        self._stopping.set()

    def drain(self) -> None:
        """Rank 0 takes the requests."""

    def idle(self) -> bool:
        """Rank 0 knows of the requests."""
        return True

    def residents(self) -> list[CachedBlock]:
        """None: rank 0 keeps the gang's cache."""
        return []

    def _obey(self, runner: ModelRunner, kind: bytes, payload: bytes) -> bool:
        """False: there is nothing more to do."""
        if kind == STOP:
            return False
        if kind == ALLOCATE:
            runner.allocate_kv(msgspec.msgpack.decode(payload, type=int))
            return True
        if kind == READ:
            runner.readings()
            return True
        plan = msgspec.msgpack.decode(payload, type=StepPlan)
        try:
            if kind == STEP:
                runner.forward(plan)
            else:
                assert isinstance(runner, ResidentRunner), type(runner)
                runner.launch(plan)
        except Exception as error:
            raise RankLost(f"step {plan.step} broke off on rank {self._gang.rank}: {error}") from error
        return True


class _WorkerLink:
    """A worker's connection to rank 0, and the monitor that tells when it breaks."""

    def __init__(self, endpoint: str, rank: int) -> None:
        self._rank = rank
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        _keep_alive(self._socket)
        self._socket.identity = str(rank).encode()
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


def _keep_alive(socket: "zmq.Socket[bytes]") -> None:
    socket.set_hwm(0)  # nothing may be dropped; rank 0 waits for each step's result, so nothing piles up
    socket.heartbeat_ivl = 1000
    socket.heartbeat_timeout = SILENCE_S * 1000
