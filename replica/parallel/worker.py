"""Joint work of one replica's ranks: rank 0 sends each step's plan to the others, and all run it.

Plans are sent through `StepBroadcast`, tensors through the `RankGroup`. No rank can continue without the others, so
every failure of a step raises RankLost.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec
import torch

from ...kvcache.sizing import MemoryReading
from ..config import ReplicaSettings
from ..engine.overlapped import DrawTerms
from ..engine.step_plan import Load, Move, Save, StepPlan
from ..errors import RankLost, StartupError
from ..execute.gpu_runner import DrawnTokens, GpuRunner, RunnerLoader, load_runner
from ..execute.runner import ModelRunner, resolve_device
from ..load.cpu_threads import ThreadTuner, thread_choice
from ..rank_server import RankServer
from .plan_wire import PlanDecoder, PlanEncoder
from .rank_group import RankGroup
from .step_broadcast import (
    ALLOCATE,
    ALLOCATE_HOST,
    JOIN_TIMEOUT_S,
    LAUNCH,
    MOVE,
    READ,
    STEP,
    STOP,
    RankPlace,
    StepBroadcast,
    WorkerLink,
)

log = logging.getLogger(__name__)

_ENDPOINT_BYTES = 256

T = TypeVar("T")


def join_ranks(place: RankPlace, settings: ReplicaSettings, endpoint: str = "") -> tuple[RankGroup, str]:
    """Meet the other ranks. Returns the group and rank 0's endpoint, which rank 0 passes in. Raises StartupError."""
    device = resolve_device(settings)
    try:
        group = RankGroup.join(
            place.rank,
            place.size,
            host=place.host,
            port=place.port,
            backend="gloo" if device.type == "cpu" else "nccl",
            timeout_s=JOIN_TIMEOUT_S,
        )
    except RankLost as error:
        raise StartupError(
            f"rank {place.rank} of {place.size} met no other rank at {place.host}:{place.port}: {error}"
        ) from error
    # The endpoint is shared as a sum to which only rank 0 contributes; this avoids a second meeting point.
    data = endpoint.encode()
    assert len(data) <= _ENDPOINT_BYTES, f"endpoint of {len(data)} bytes: {endpoint}"
    padded = torch.tensor(list(data.ljust(_ENDPOINT_BYTES, b"\0")), dtype=torch.int32)
    return group, bytes(group.all_reduce(padded.to(device)).tolist()).rstrip(b"\0").decode()


class RankGroupExecutor:
    """Runs plans on all ranks: sends each to the workers, then runs it on rank 0."""

    def __init__(self, runner: ModelRunner, broadcast: StepBroadcast) -> None:
        self._runner = runner
        self._broadcast = broadcast
        self._plans = PlanEncoder()

    def allocate_kv(self, num_blocks: int) -> None:
        self._broadcast.send(ALLOCATE, msgspec.msgpack.encode(num_blocks))
        self._runner.allocate_kv(num_blocks)

    def readings(self) -> list[MemoryReading]:
        self._broadcast.send(READ)
        return self._runner.readings()

    def allocate_host(self, slots: int) -> None:
        self._broadcast.send(ALLOCATE_HOST, msgspec.msgpack.encode(slots))
        self._runner.allocate_host(slots)

    def move(self, saves: Sequence[Save], loads: Sequence[Load]) -> list[str | None]:
        """Move blocks on all ranks. Raises RankLost for any failure but that of a load."""
        self._broadcast.send(MOVE, msgspec.msgpack.encode(Move([*saves], [*loads])))
        return _run_move(self._runner, saves, loads, rank=0)

    def forward(self, plan: StepPlan) -> torch.Tensor | None:
        """Run one step. Raises RankLost for any failure: after a partial step, the ranks' states differ permanently."""
        self._broadcast.send(STEP, self._plans.encode(plan))
        return _run_step(self._runner.forward, plan, rank=0)

    def forward_hidden(self, plan: StepPlan, hidden_at: Sequence[int]) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Like `forward`, plus hidden states. Every rank has these, so the others run a plain step. Raises RankLost."""
        self._broadcast.send(STEP, self._plans.encode(plan))
        return _run_step(lambda plan: self._runner.forward_hidden(plan, hidden_at), plan, rank=0)

    def launch(self, plan: StepPlan) -> DrawnTokens | None:
        assert isinstance(self._runner, GpuRunner), type(self._runner)
        self._broadcast.send(LAUNCH, self._plans.encode(plan))
        return _run_step(self._runner.launch, plan, rank=0)

    def draw(self, terms: DrawTerms) -> DrawnTokens:
        """Draw on rank 0; other ranks need no terms. Raises RankLost for any failure, as they wait for the tokens."""
        assert isinstance(self._runner, GpuRunner), type(self._runner)
        try:
            return self._runner.draw(terms)
        except Exception as error:
            raise RankLost(f"rank 0 could not draw: {error}") from error

    def close(self) -> None:
        self._broadcast.close()
        self._runner.close()


def load_rank_0(
    settings: ReplicaSettings, model_dir: Path, block_size: int, place: RankPlace | None, load_runner: RunnerLoader
) -> tuple[ModelRunner, ModelRunner | RankGroupExecutor, tuple[int, ...]]:
    """Load rank 0's runner and wait for all workers. Returns it, the executor over all ranks, and the workers' pids."""
    if place is None or place.size == 1:
        runner = load_runner(settings, model_dir, block_size, None)
        return runner, runner, ()
    broadcast = StepBroadcast(place)
    try:
        group, _ = join_ranks(place, settings, broadcast.endpoint)
        runner = load_runner(settings, model_dir, block_size, group)
        pids = broadcast.wait_for_workers()
    except BaseException:
        broadcast.close()
        raise
    return runner, RankGroupExecutor(runner, broadcast), pids


def start_worker(
    settings: ReplicaSettings,
    *,
    block_size: int,
    model_dir: Path,
    place: RankPlace,
    load_runner: RunnerLoader = load_runner,
) -> "RankWorker":
    """Join the other ranks, then load this rank's share of the weights. Blocks until all ranks have joined."""
    assert 0 < place.rank < place.size, f"rank {place.rank} of {place.size} is not a worker"
    threads = ThreadTuner(thread_choice(settings), torch.set_num_threads)
    threads.apply()
    group, endpoint = join_ranks(place, settings)
    runner = load_runner(settings, model_dir, block_size, group)
    link = WorkerLink(endpoint, place)
    log.info("worker_ready rank=%d endpoint=%s", place.rank, endpoint)
    return RankWorker(place.rank, runner, link, threads)


class RankWorker(RankServer):
    """A rank above 0, created by `start_worker`: runs the plans that rank 0 sends until it is stopped."""

    description = None

    def __init__(self, rank: int, runner: ModelRunner, link: WorkerLink, threads: ThreadTuner) -> None:
        self._rank = rank
        self._runner = runner
        self._link = link
        self._threads = threads
        self._plans = PlanDecoder()
        self._stopping = threading.Event()

    def run(self) -> None:
        """Run plans until rank 0 or `stop` ends this. Raises RankLost when rank 0 is lost."""
        self._threads.apply()  # the count is set per thread, and the worker may have been started in another
        try:
            while not self._stopping.is_set():
                self._threads.update()
                message = self._link.receive(timeout_s=0.2)
                if message and not self._handle(*message):
                    return
        finally:
            self._link.close()
            self._runner.close()

    def stop(self) -> None:
        """Make `run` return soon, unless it waits for other ranks in a step. May be called from any thread."""
        self._stopping.set()

    def _handle(self, kind: bytes, payload: bytes) -> bool:
        """Handle one message from rank 0; False if it was the last."""
        if kind == STOP:
            return False
        if kind == ALLOCATE:
            self._runner.allocate_kv(msgspec.msgpack.decode(payload, type=int))
        elif kind == READ:
            self._runner.readings()
        elif kind == ALLOCATE_HOST:
            self._runner.allocate_host(msgspec.msgpack.decode(payload, type=int))
        elif kind == MOVE:
            _run_move(self._runner, *msgspec.msgpack.decode(payload, type=Move), rank=self._rank)
        else:
            assert kind in (STEP, LAUNCH), f"unknown message {kind!r}"
            plan = self._plans.decode(payload)
            if kind == STEP:
                _run_step(self._runner.forward, plan, self._rank)
            else:
                assert isinstance(self._runner, GpuRunner), type(self._runner)
                _run_step(self._runner.launch, plan, self._rank)
        return True


def _run_step(run: Callable[[StepPlan], T], plan: StepPlan, rank: int) -> T:
    try:
        return run(plan)
    except Exception as error:
        raise RankLost(f"step {plan.step} failed on rank {rank}: {error}") from error


def _run_move(runner: ModelRunner, saves: Sequence[Save], loads: Sequence[Load], rank: int) -> list[str | None]:
    try:
        return runner.move(saves, loads)
    except Exception as error:
        raise RankLost(f"blocks could not be moved on rank {rank}: {error}") from error
