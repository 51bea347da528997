"""A replica as a process: sockets and threads around the engine. Decides nothing about requests; knows no Ray.

The thread that calls `run` is the engine's thread: it owns the request socket, drains it before each step, polls it
when idle, and sends one `TokenBatch` per step and router. Others reach the engine through a queue of commands only.
Events go to `EventPublisher`, whose own thread sends them. No router and no subscriber can make the engine wait.
"""

import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from secrets import randbits
from typing import TypeVar

import zmq

from ..events.config import EventsSettings
from ..events.publish.publisher import EventPublisher, Waker
from ..events.security.curve_keys import ServerKeys
from ..kvcache.config import KvCacheSettings
from ..kvcache.eviction import eviction_policy
from ..kvcache.hashing import BlockHasher
from ..kvcache.pins import PinLimits
from ..kvcache.prefix_cache import CachedBlock, PrefixCache
from .config import ReplicaSettings
from .engine.engine import Engine, EngineModel, StepResult
from .engine.overlapped import OverlappedEngine
from .engine.report_throttle import News
from .engine.scheduler import Limits
from .engine.throughput import Rates
from .errors import EngineBroken, ReplicaError, RequestError
from .execute.gpu_runner import ResidentRunner, RunnerLoader, load_runner
from .execute.runner import ModelRunner, thread_keeper
from .load.fingerprint import cache_identity, parity
from .load.startup import measure_rates, number_of_blocks, resolve_limits
from .messages import (
    CacheReset,
    Generate,
    ModelLimits,
    Parity,
    Refused,
    ReplicaDescription,
    Reply,
    Request,
    ResetCache,
    TokenBatch,
)
from .parallel.rank_spec import GangSpec
from .parallel.step_broadcast import PlanChannel
from .parallel.worker import GangExecutor, LocalExecutor, join_gang, share_endpoint
from .request_socket import Delivery, RequestPort

log = logging.getLogger(__name__)

#: One bad request costs one step; steps that fail three times in a row, without one success between, are no accident.
MAX_FAILURES = 3

T = TypeVar("T")


@dataclass(slots=True, frozen=True)
class Model:
    """The loaded model and what drives it."""

    runner: ModelRunner
    executor: LocalExecutor | GangExecutor
    num_blocks: int
    limits: Limits
    rates: Rates
    pids: tuple[int, ...]


class ReplicaServer:
    """Rank 0 of one replica. `start`, then `run`, best in one thread (threads.py says why); `stop` from anywhere."""

    def __init__(
        self,
        settings: ReplicaSettings,
        kvcache: KvCacheSettings,
        events: EventsSettings,
        *,
        model_dir: Path,
        replica_id: str,
        cluster_seed: int,
        host: str = "127.0.0.1",
        ipc_dir: Path | None = None,
        gang: GangSpec | None = None,
        node: str = "",
        keys: ServerKeys | None = None,
        load_runner: RunnerLoader = load_runner,
    ) -> None:
        """Nothing happens before `start`.

        `ipc_dir`: a private folder for sockets, when all who talk to the replica are on its node; None: TCP on `host`.
        `gang`: rank 0's place among several ranks; None: one rank. `keys`: encrypt what routers and subscribers get.
        """
        self._settings, self._kvcache, self._events = settings, kvcache, events
        self._model_dir = model_dir
        self._replica_id = replica_id
        self._host, self._ipc_dir, self._node = host, ipc_dir, node
        self._gang = gang
        self._keys = keys
        self._load_runner = load_runner
        self._threads = thread_keeper(settings)
        self._hasher = BlockHasher(kvcache.block_size, cluster_seed, kvcache.hash_algorithm)
        self._epoch = randbits(63)
        self._news = News()
        self._commands: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._stopping = threading.Event()
        self._waker = Waker()
        #: Guards `_waker` and `_commands` against use after `run` ended.
        self._lock = threading.Lock()
        self._closed = False
        self._closers: list[Callable[[], None]] = []

    def start(self) -> ReplicaDescription:
        """Load the model, measure it, make room for KV, bind the sockets. Blocks; raises StartupError and the like."""
        try:
            return self._start()
        except BaseException:
            self._close()
            raise

    def run(self) -> None:
        """Serve until `stop`. Raises EngineBroken or RankLost when the replica has to be rebuilt."""
        self._threads.begin()  # a count of threads belongs to its thread, and `start` may have run in another
        error: ReplicaError | None = None
        try:
            while not self._stopping.is_set():
                self._turn()
        except ReplicaError as broken:
            error = broken
            raise
        finally:
            self._send_away(error)
            self._close()

    def stop(self) -> None:
        """From any thread: `run` returns after the step that is under way."""
        self._stopping.set()
        with self._lock:
            if not self._closed:
                self._waker.poke()

    def drain(self) -> None:
        """From any thread: take nothing new and finish what is here; the load report tells when it is done."""
        self._ask(self._engine.drain)

    def idle(self) -> bool:
        """From any thread while `run` runs: whether no request is here."""
        return self._ask(lambda: not self._engine.has_work)

    def residents(self) -> list[CachedBlock]:
        """From any thread while `run` runs: what the cache really holds, between two steps."""
        return self._ask(lambda: list(self._cache.residents()))

    @property
    def malformed_requests(self) -> int:
        """Frames that could not be read and were dropped."""
        return self._port.malformed

    def check(self) -> None:
        """From any thread while `run` runs: assert the engine's invariants between two steps."""
        self._ask(self._engine.scheduler.check)

    def reset_cache(self) -> bool:
        """From any thread: forget all cached blocks; False while any is in use."""
        return self._ask(self._cache.reset)

    # Starting.

    def _start(self) -> ReplicaDescription:
        model = self._load()
        self._publisher = EventPublisher(
            self._events,
            host=self._host,
            block_size=self._kvcache.block_size,
            epoch=self._epoch,
            medium="GPU" if model.runner.device.type == "cuda" else "CPU",
            ipc_dir=self._ipc_dir,
            keys=self._keys,
        )
        self._closers.append(self._publisher.close)
        event_endpoints = self._publisher.start()
        self._cache = PrefixCache(
            model.num_blocks,
            self._kvcache.block_size,
            policy=eviction_policy(self._kvcache.eviction),
            listener=self._publisher,
            enabled=self._kvcache.prefix_caching,
            partial_block_reuse=self._kvcache.partial_block_reuse,
            pin_limits=PinLimits(self._kvcache.pin_tenant_share, self._kvcache.pin_total_share),
        )
        self._engine = self._make_engine(model)
        self._port = RequestPort(self._host, self._ipc_dir, self._epoch, self._keys)
        self._closers.append(self._port.close)
        self._poller = zmq.Poller()
        for sock in self._port.sockets:
            self._poller.register(sock, zmq.POLLIN)
        self._poller.register(self._waker.read, zmq.POLLIN)
        self._publisher.report(self._engine.load())
        log.info("replica_ready replica=%s blocks=%d", self._replica_id, model.num_blocks)
        return ReplicaDescription(
            replica_id=self._replica_id,
            epoch=self._epoch,
            request_endpoint=self._port.endpoint,
            event_endpoints=event_endpoints,
            parity=self._parity(model.runner.spec.dtype),
            model=self._model_limits(model),
            num_blocks=model.num_blocks,
            max_running_requests=self._settings.max_running_requests,
            max_batched_tokens=self._settings.max_batched_tokens,
            tensor_parallel_size=len(model.pids),
            prefill_tokens_per_s=model.rates.prefill_tokens_per_s,
            decode_step_s=model.rates.decode_step_s,
            node=self._node,
            pids=model.pids,
        )

    def _load(self) -> Model:
        self._threads.begin()
        self._threads.look()
        runner, executor, workers = self._join_and_load()
        self._threads.look()
        self._closers.append(executor.close)
        size = self._kvcache.block_size
        num_blocks = number_of_blocks(self._kvcache, self._settings, runner.spec, executor, runner.device)
        limits = resolve_limits(self._settings, runner.spec, runner.device, num_blocks=num_blocks, block_size=size)
        executor.allocate(num_blocks)
        rates = measure_rates(executor, limits, size)
        return Model(runner, executor, num_blocks, limits, rates, (os.getpid(), *workers))

    def _join_and_load(self) -> tuple[ModelRunner, LocalExecutor | GangExecutor, tuple[int, ...]]:
        size = self._kvcache.block_size
        if self._gang is None or self._gang.size == 1:
            runner = self._load_runner(self._settings, self._model_dir, size, None)
            return runner, LocalExecutor(runner), ()
        group = join_gang(self._gang, self._settings)
        channel = PlanChannel(self._gang)
        try:
            share_endpoint(group, channel.endpoint, self._settings)
            runner = self._load_runner(self._settings, self._model_dir, size, group)
            workers = channel.wait_for_workers()
        except BaseException:
            channel.close()
            raise
        return runner, GangExecutor(runner, channel), workers

    def _make_engine(self, model: Model) -> Engine:
        spec = model.runner.spec
        engine = OverlappedEngine if isinstance(model.runner, ResidentRunner) else Engine
        return engine(
            limits=model.limits,
            model=EngineModel(spec.vocab_size, spec.eos_token_ids),
            cache=self._cache,
            hasher=self._hasher,
            executor=model.executor,
            rates=model.rates,
            epoch=self._epoch,
        )

    def _parity(self, dtype: str) -> Parity:
        # KV that was computed in 8 bits is other KV.
        computed = dtype if self._settings.quantization == "none" else f"{dtype} {self._settings.quantization}"
        return parity(self._model_dir, cache_identity(self._model_dir, computed, self._kvcache), self._hasher)

    def _model_limits(self, model: Model) -> ModelLimits:
        spec = model.runner.spec
        return ModelLimits(
            name=self._settings.model,
            path=str(self._model_dir),
            vocab_size=spec.vocab_size,
            max_model_len=model.limits.max_model_len,
            eos_token_ids=spec.eos_token_ids,
        )

    # The engine's thread from here on.

    def _turn(self) -> None:
        """Take in what came, then one step; without work, wait for some."""
        if self._waker.clear():
            self._run_commands()
        for source, request in self._port.receive():
            self._take(source, request)
        if not self._engine.has_work:
            self._engine.expire_pins()
            self._publisher.flush()
            self._publisher.report(self._engine.load())
            self._poller.poll(int(self._events.heartbeat_interval_s * 1000))
            return
        self._threads.look()
        result = self._engine.step()
        self._publish(result)
        if self._engine.failures_in_a_row >= MAX_FAILURES:
            raise EngineBroken(f"{MAX_FAILURES} steps in a row failed, last: {result.error}")

    def _take(self, source: str, request: Request) -> None:
        match request:
            case Generate():
                self._add(source, request)
            case ResetCache(ask_id=ask_id):
                self._send(source, CacheReset(ask_id=ask_id, done=self._cache.reset()))
            case _:
                self._engine.abort(source, request.request_ids)

    def _add(self, source: str, request: Generate) -> None:
        try:
            self._engine.add(source, request)
        except RequestError as error:
            refused = Refused(request_id=request.request_id, reason=error.reason, message=str(error), retry=error.retry)
            log.info("request_refused router=%s trace=%s error=%s", source, request.trace_id, error)
            self._send(source, refused)

    def _publish(self, result: StepResult) -> None:
        """Events first: a router that sees a request end should soon see its blocks, too."""
        load = self._engine.load()
        tell = self._news.worth_telling(load, time.monotonic())
        if tell:
            self._publisher.flush()
        for source, outputs in result.outputs.items():
            self._send(source, TokenBatch(step=result.step, outputs=outputs))
        for source, refusals in result.refused.items():
            for refused in refusals:
                self._send(source, refused)
        if tell:
            self._publisher.report(load)

    def _send(self, source: str, reply: Reply) -> None:
        """A router that is gone or stopped reading has lost tokens: its requests end here."""
        delivery = self._port.send(source, reply)
        if delivery is Delivery.SENT:
            return
        ended = self._engine.forget(source)
        log.warning("router_lost router=%s delivery=%s requests=%d", source, delivery.value, ended)

    def _send_away(self, error: ReplicaError | None) -> None:
        """The replica ends: whoever still waits here may go on elsewhere at once."""
        message = f"replica {self._replica_id} ends: {error or 'it was stopped'}"
        for request in list(self._engine.scheduler.requests()):
            source, request_id = request.key
            reason = Refused(request_id=request_id, reason="draining", message=message, retry=True)
            self._port.send(source, reason)

    def _run_commands(self) -> None:
        while True:
            try:
                command = self._commands.get_nowait()
            except Empty:
                return
            command()

    def _ask(self, question: Callable[[], T]) -> T:
        """Have the engine's thread answer between two steps."""
        answer: Future[T] = Future()

        def command() -> None:
            try:
                answer.set_result(question())
            except BaseException as error:  # it belongs to the one who asked
                answer.set_exception(error)

        with self._lock:
            if self._closed:
                raise ReplicaError(f"replica {self._replica_id} has ended")
            self._commands.put(command)
            self._waker.poke()
        return answer.result()

    def _close(self) -> None:
        """Give everything back, last first; answer who still asks."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._waker.close()
        self._run_commands()
        while self._closers:
            self._closers.pop()()
        log.info("replica_ended replica=%s", self._replica_id)
