"""The ranks of one replica at work together: rank 0 tells the others each step's plan, they run it beside it.

Plans travel through the `PlanChannel`, the tensors between ranks through their `RankGroup`. No rank can go on without
the others, so every failure here is a `RankLost`.
"""

import logging
import threading
from pathlib import Path

import msgspec
import torch

from ...kvcache.prefix_cache import CachedBlock
from ...kvcache.sizing import MemoryReading
from ..config import ReplicaSettings
from ..engine.step_plan import StepPlan
from ..errors import RankLost, StartupError
from ..execute.gpu_runner import Drawn, ResidentRunner, RunnerLoader, load_runner
from ..execute.runner import ModelRunner, resolve_device, thread_keeper
from .rank_group import Backend, RankGroup
from .rank_spec import JOIN_TIMEOUT_S, GangSpec
from .step_broadcast import ALLOCATE, LAUNCH, READ, STEP, STOP, PlanChannel, WorkerLink

log = logging.getLogger(__name__)

_ENDPOINT_CHARS = 256


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

    def __init__(self, runner: ModelRunner, channel: PlanChannel) -> None:
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
        self._link: WorkerLink | None = None

    def start(self) -> None:
        """Join the gang, load, say hello. Blocks until all ranks have met."""
        self._threads.begin()
        group = join_gang(self._gang, self._settings)
        endpoint = share_endpoint(group, "", self._settings)
        self._runner = self._load_runner(self._settings, self._model_dir, self._block_size, group)
        self._link = WorkerLink(endpoint, self._gang)
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
        assert kind in (STEP, LAUNCH), f"an order of no known kind: {kind!r}"
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
