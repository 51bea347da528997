"""A replica as a process: sockets and threads around the engine. Does not schedule requests or depend on Ray.

The thread that calls `run` is the engine's thread: it owns the request socket, reads it before each step, polls it when
idle, and sends one `TokenBatch` per step and router. Other threads reach the engine only through a command queue.
`EventPublisher` sends events from its own thread. Neither routers nor subscribers can delay the engine.
"""

import logging
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from queue import SimpleQueue
from secrets import randbits
from typing import TypeVar, assert_never

import torch
import zmq
from msgspec import structs

from ..events.config import EventsSettings
from ..events.load_report import TierLoad
from ..events.publish.publisher import EventPublisher, Waker
from ..events.security.curve_keys import ServerKeys
from ..events.wire.messages import EventEndpoints, LoadReport
from ..kvcache.block_index import CachedBlock, CacheListener, LowerTier
from ..kvcache.config import KvCacheSettings
from ..kvcache.hashing import TOKEN_BYTES, BlockHasher, token_array
from ..kvcache.host_tier import HostTier
from ..kvcache.pins import PinLimits
from ..kvcache.prefix_cache import PrefixCache
from .attention.paged import KvPool
from .config import ReplicaSettings
from .disk.disk_file import DiskFailure, DiskFile
from .disk.file_format import Identity
from .disk.folder import check_settings, open_in_time, open_rank_file
from .disk.keeper import BUSY_BLOCKS, IDLE_BLOCKS, DiskKeeper
from .engine.answers import StepResult
from .engine.engine import Engine
from .engine.host_blocks import HostBlocks
from .engine.overlapped import OverlappedEngine
from .engine.prompt_lookup import CPU_STEP_TOKENS, CUDA_STEP_TOKENS, PromptLookup
from .engine.request import RequestKey
from .engine.scheduler import SchedulerLimits
from .engine.throughput import SmoothedRates
from .errors import EngineBroken, ReplicaError, RequestError
from .execute.gpu_runner import GpuRunner, RunnerLoader, load_runner
from .execute.runner import ModelRunner
from .kernels.choice import choose_kernels
from .load.cpu_threads import ThreadTuner, thread_choice
from .load.fingerprint import cache_identity, parity
from .load.free_memory import free_memory_bytes
from .load.preflight import check_vocabulary_size, host_slots
from .load.startup import measure_move, measure_rates, number_of_blocks, resolve_limits
from .messages import (
    MAX_NEXT_EVICTIONS,
    Abort,
    AskNextEvictions,
    CacheReset,
    FailedStep,
    Generate,
    ModelLimits,
    NextEvictions,
    Parity,
    Refused,
    ReplicaDescription,
    Reply,
    Request,
    ResetCache,
    TokenBatch,
)
from .models.spec import ModelSpec
from .parallel.step_broadcast import RankPlace
from .parallel.worker import RankGroupExecutor, load_rank_0
from .progress import report
from .rank_server import RankServer
from .request_socket import RequestSocket, SendResult
from .structured.guide import Guide, GuideCompiler

log = logging.getLogger(__name__)

#: One bad request fails one step; three failed steps without a success in between are not one bad request.
MAX_FAILURES = 3

#: Pause between steps in which nothing can run although there are requests.
STUCK_POLL_MS = 1
#: Longest wait of an idle engine while blocks are written to disk: the disk's queue then takes more.
KEEPING_MS = 20
#: Longest delay in seconds of the report on steps that only decoded.
QUIET_S = 0.05
#: A step waits for constraints that arrived just before it: so long at most, and a share of what the last step took.
#: Typical ones compile in 1 ms; without the wait, their requests would miss the step.
COMPILE_WAIT_S, COMPILE_WAIT_SHARE = 0.01, 0.1

T = TypeVar("T")


def start_replica(
    settings: ReplicaSettings,
    kvcache: KvCacheSettings,
    events: EventsSettings,
    *,
    model_dir: Path,
    replica_id: str,
    cluster_seed: int,
    host: str = "127.0.0.1",
    ipc_dir: Path | None = None,
    place: RankPlace | None = None,
    node: str = "",
    model_name: str = "",
    keys: ServerKeys | None = None,
    load_runner: RunnerLoader = load_runner,
) -> "ReplicaServer":
    """Load the model, allocate the KV pool, measure the speed and bind the sockets; blocks until all is ready.

    `ipc_dir`: a private folder for sockets if all the replica's peers are on its node; None: TCP on `host`.
    `place`: rank 0's place among several ranks; None: a single rank. `model_name`: as served, for topics of events.
    `keys`: encrypt traffic with routers and subscribers. Raises StartupError, PoolTooSmall, RankLost or
    EndpointUnusable and then leaves nothing behind.
    """
    epoch, block_size = randbits(63), kvcache.block_size
    with ExitStack() as stack:
        threads = ThreadTuner(thread_choice(settings), torch.set_num_threads)
        model = _load_model(settings, kvcache, model_dir, place, load_runner, threads, stack)
        publisher = EventPublisher(
            events,
            host=host,
            block_size=block_size,
            epoch=epoch,
            model=model_name or settings.model,
            replica=replica_id,
            ipc_dir=ipc_dir,
            keys=keys,
            tiers=kvcache.host_kv_memory > 0,
        )
        stack.callback(publisher.close)
        event_endpoints = publisher.start()
        hasher = BlockHasher(block_size, cluster_seed, kvcache.hash_algorithm)
        hashes_like = _parity(settings, kvcache, model_dir, model.spec, hasher)
        tier_failures = Counter[str]()
        keeper = _disk_keeper(kvcache, model, hashes_like, cluster_seed, publisher, tier_failures)
        listener = publisher if keeper is None else keeper
        lower = _host_blocks(kvcache, model, listener, tier_failures)
        cache = _prefix_cache(kvcache, model.num_blocks, listener, lower)
        if keeper is not None:
            stack.callback(keeper.close)
            report("reading blocks from disk")
            keeper.restore(cache, model.pool.copy_in, compute_s=block_size / model.rates.prefill_tokens_per_s)
        engine = _engine(model, cache, hasher, epoch, settings.num_speculative_tokens, publisher.flush, lower)
        requests = RequestSocket(host, ipc_dir, epoch, keys)
        stack.callback(requests.close)
        description = _describe(
            model,
            replica_id=replica_id,
            epoch=epoch,
            request_endpoint=requests.endpoint,
            event_endpoints=event_endpoints,
            parity=hashes_like,
            model_limits=_model_limits(settings, model_dir, model),
            node=node,
        )
        publisher.report(engine.load())
        log.info("replica_ready replica=%s blocks=%d", replica_id, model.num_blocks)
        idle_ms = int(events.heartbeat_interval_s * 1000)
        return ReplicaServer(
            description,
            engine,
            cache,
            publisher,
            requests,
            threads,
            model.guides,
            idle_ms,
            stack.pop_all(),
            keeper,
            tier_failures,
        )


@dataclass(slots=True, frozen=True)
class _LoadedModel:
    """A model loaded on all its ranks, with its KV blocks allocated and its speed measured."""

    runner: ModelRunner  #: rank 0's
    executor: ModelRunner | RankGroupExecutor
    worker_pids: tuple[int, ...]
    num_blocks: int
    limits: SchedulerLimits
    rates: SmoothedRates
    guides: GuideCompiler

    @property
    def spec(self) -> ModelSpec:
        return self.runner.spec

    @property
    def pool(self) -> KvPool:
        assert self.runner.pool is not None, "the KV pool is allocated while the model is loaded"
        return self.runner.pool


def _describe(
    model: _LoadedModel,
    *,
    replica_id: str,
    epoch: int,
    request_endpoint: str,
    event_endpoints: EventEndpoints,
    parity: Parity,
    model_limits: ModelLimits,
    node: str,
) -> ReplicaDescription:
    return ReplicaDescription(
        replica_id=replica_id,
        epoch=epoch,
        request_endpoint=request_endpoint,
        event_endpoints=event_endpoints,
        parity=parity,
        model=model_limits,
        num_blocks=model.num_blocks,
        max_running_requests=model.limits.max_running_requests,
        max_batched_tokens=model.limits.max_batched_tokens,
        tensor_parallel_size=1 + len(model.worker_pids),
        prefill_tokens_per_s=model.rates.prefill_tokens_per_s,
        decode_step_s=model.rates.decode_step_s,
        node=node,
        pids=(os.getpid(), *model.worker_pids),
    )


def _load_model(
    settings: ReplicaSettings,
    kvcache: KvCacheSettings,
    model_dir: Path,
    place: RankPlace | None,
    load_runner: RunnerLoader,
    threads: ThreadTuner,
    stack: ExitStack,
) -> _LoadedModel:
    """Load the model, allocate its KV blocks and measure its speed. `stack` closes what this opens."""
    block_size = kvcache.block_size
    threads.apply()
    threads.update()
    runner, executor, worker_pids = load_rank_0(settings, model_dir, block_size, place, load_runner)
    stack.callback(executor.close)
    threads.update()
    spec, device = runner.spec, runner.device
    num_blocks = number_of_blocks(kvcache, settings, spec, executor, device)
    limits = resolve_limits(settings, spec, device, num_blocks=num_blocks, block_size=block_size)
    if settings.tokenizer:
        check_vocabulary_size(Path(settings.tokenizer), spec.vocab_size)
    guides = GuideCompiler(_text_dir(settings, model_dir), spec.vocab_size, spec.eos_token_ids)  # loads in a thread
    stack.callback(guides.close)
    executor.allocate_kv(num_blocks)
    rates = measure_rates(executor, limits, block_size)
    return _LoadedModel(runner, executor, worker_pids, num_blocks, limits, rates, guides)


def _text_dir(settings: ReplicaSettings, model_dir: Path) -> Path:
    """The folder with the tokenizer."""
    return Path(settings.tokenizer or model_dir)


def _host_blocks(
    kvcache: KvCacheSettings, model: _LoadedModel, listener: CacheListener, failures: Counter[str]
) -> HostBlocks | None:
    """Allocate the host tier and measure it; None without one, or if computing a block is faster than loading it.

    Raises StartupError if the memory is too little, or more than the machine has left.
    """
    if not kvcache.host_kv_memory:
        return None
    report("allocating host memory for KV")
    ranks = 1 + len(model.worker_pids)
    block_bytes = ranks * model.pool.block_bytes
    # A CPU's pool takes its memory from the system only when blocks are written.
    unwritten = model.num_blocks * block_bytes if model.runner.device.type == "cpu" else 0
    slots = host_slots(kvcache.host_kv_memory, block_bytes, free_memory_bytes() - unwritten)
    model.executor.allocate_host(slots)
    block_s = measure_move(model.executor)
    compute_s = kvcache.block_size / model.rates.prefill_tokens_per_s
    if block_s >= compute_s:
        log.warning("host_kv_off load_us=%.0f compute_us=%.0f: computing is faster", block_s * 1e6, compute_s * 1e6)
        model.executor.allocate_host(0)
        return None
    log.info("host_kv_ready blocks=%d load_us=%.0f compute_us=%.0f", slots, block_s * 1e6, compute_s * 1e6)
    tier = HostTier(slots, listener)
    return HostBlocks(tier, model.executor.move, time.perf_counter, block_s=block_s, failures=failures)


def _prefix_cache(
    kvcache: KvCacheSettings, num_blocks: int, listener: CacheListener, lower: LowerTier | None
) -> PrefixCache:
    return PrefixCache(
        num_blocks,
        kvcache.block_size,
        listener=listener,
        enabled=kvcache.prefix_caching,
        partial_block_reuse=kvcache.partial_block_reuse,
        pin_limits=PinLimits(kvcache.pin_tenant_share, kvcache.pin_total_share),
        lower=lower,
    )


def _disk_keeper(
    kvcache: KvCacheSettings,
    model: _LoadedModel,
    parity: Parity,
    cluster_seed: int,
    publisher: EventPublisher,
    failures: Counter[str],
) -> DiskKeeper | None:
    """Open the replica's file of blocks; None without one, or if the disk is broken, which `failures` then counts.

    Raises DiskTierUnusable if the settings are to blame.
    """
    if not kvcache.disk_kv:
        return None
    spec, pool = model.spec, model.pool
    identity = Identity(
        model=parity.model_root.hex(),
        root=parity.model_root.hex(),
        seed=sha256(cluster_seed.to_bytes(8, "little")).hexdigest()[:32],
        layout=f"{spec.kv_dtype or spec.dtype} {spec.kv_shapes} {model.runner.device.type} {sys.byteorder}",
        block_size=kvcache.block_size,
        block_bytes=pool.block_bytes,
    )
    ranks, size = 1 + len(model.worker_pids), kvcache.disk_kv_size

    def opening() -> DiskFile:
        check_settings(kvcache.disk_kv, size, prefix_caching=kvcache.prefix_caching, ranks=ranks)
        return open_rank_file(kvcache.disk_kv, size, identity)[0]

    try:
        file = open_in_time(opening)
    except DiskFailure as error:
        log.error("disk_kv_off kind=%s error=%s: blocks are not kept on disk", error.kind, error)
        failures[error.kind] += 1
        return None
    log.info("disk_kv_opened file=%s blocks=%d held=%d", file.path, file.slots, len(file.entries))
    return DiskKeeper(file, publisher, pool.copy_out, failures)


def _engine(
    model: _LoadedModel,
    cache: PrefixCache,
    hasher: BlockHasher,
    epoch: int,
    max_drafts: int,
    evicted: Callable[[], None],
    host: HostBlocks | None,
) -> Engine:
    """Create the engine. `max_drafts`: most tokens proposed for one request in one step; 0: none."""
    device, spec = model.runner.device, model.spec
    kind: type[Engine] = OverlappedEngine if isinstance(model.runner, GpuRunner) else Engine
    drafted = CUDA_STEP_TOKENS if device.type == "cuda" else CPU_STEP_TOKENS
    return kind(
        limits=replace(model.limits, drafted_step_tokens=drafted),
        vocab_size=spec.vocab_size,
        eos_token_ids=spec.eos_token_ids,
        cache=cache,
        hasher=hasher,
        executor=model.executor,
        rates=model.rates,
        epoch=epoch,
        drafter=PromptLookup(max_drafts) if max_drafts else None,
        mask=mask_of(device),
        evicted=evicted,
        host=host,
    )


def _parity(
    settings: ReplicaSettings, kvcache: KvCacheSettings, model_dir: Path, spec: ModelSpec, hasher: BlockHasher
) -> Parity:
    # KV computed or stored in 8 bits must not be mixed with other KV of the same dtype. FP8 weights do not count:
    # whether their products are in 8 bits depends on the GPU, and a cluster may have several kinds.
    kinds = (spec.dtype, settings.quantization.replace("none", ""), spec.kv_dtype)
    kv_dtype = " ".join(filter(None, kinds))
    return parity(_text_dir(settings, model_dir), cache_identity(model_dir, kv_dtype, kvcache), hasher)


def _model_limits(settings: ReplicaSettings, model_dir: Path, model: _LoadedModel) -> ModelLimits:
    spec = model.spec
    return ModelLimits(
        name=settings.model,
        path=str(model_dir),
        vocab_size=spec.vocab_size,
        max_model_len=model.limits.max_model_len,
        eos_token_ids=spec.eos_token_ids,
        embedding_size=spec.hidden_size,
        tokenizer=settings.tokenizer,
    )


def mask_of(device: torch.device) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]:
    """The function that masks logits on this device, compiled now so that no request waits for it."""
    mask = choose_kernels(device, torch.float32).mask
    mask(*(torch.zeros(1, *shape, dtype=dtype, device=device) for shape, dtype in _MASKED))
    return mask


#: Shapes and dtypes of one row of logits, its row number and its mask.
_MASKED = (((32,), torch.float32), ((), torch.int64), ((1,), torch.int32))


class ReportThrottle:
    """Decides after which steps the load report and events are sent at once, by comparing with the last load sent.

    The publisher's thread competes with the engine's for the interpreter lock: publishing after each step cost 0.3 to
    1 ms of a token's 11 on two cores. A step that only decoded is therefore reported with a later one or a heartbeat.
    """

    def __init__(self) -> None:
        self._sent: tuple[object, ...] | None = None
        self._sent_at = 0.0

    def due(self, load: LoadReport, now: float) -> bool:
        """Whether to send this load and the events since the last report. `now`: seconds, monotonic."""
        # The fields that routing depends on, except decode progress, which routers predict themselves.
        state = (
            load.running,
            load.waiting,
            load.queued_prefill_tokens,
            load.accepted,
            load.draining,
            load.pinned_blocks,
            load.counters.preemptions,
        )
        if state == self._sent and now - self._sent_at < QUIET_S:
            return False
        self._sent, self._sent_at = state, now
        return True


class ReplicaServer(RankServer):
    """Rank 0 of one replica, created by `start_replica`: ready to serve, and serving while `run` runs.

    Call `run` in the thread that called `start_replica` (load/cpu_threads.py says why); all other methods may be called
    from any thread. `residents`, `idle`, `drain` and `check` are executed between two steps of `run`.
    """

    def __init__(
        self,
        description: ReplicaDescription,
        engine: Engine,
        cache: PrefixCache,
        publisher: EventPublisher,
        requests: RequestSocket,
        threads: ThreadTuner,
        guides: GuideCompiler,
        idle_ms: int,
        resources: ExitStack,
        keeper: DiskKeeper | None,
        tier_failures: Counter[str],
    ) -> None:
        """`idle_ms`: longest wait of an idle engine. `resources` are closed when `run` returns."""
        self.description: ReplicaDescription = description
        self._engine, self._cache, self._publisher, self._requests = engine, cache, publisher, requests
        self._threads = threads
        self._guides = guides
        #: Requests whose constraints are being compiled, by router and request id.
        self._compiling: dict[RequestKey, Generate] = {}
        self._idle_ms = idle_ms
        self._resources = resources
        self._keeper, self._tier_failures = keeper, tier_failures
        #: Copying out of a GPU's pool would wait for the step that runs there.
        self._busy_blocks = 0 if isinstance(engine, OverlappedEngine) else BUSY_BLOCKS
        self._throttle = ReportThrottle()
        self._commands: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._stopping = threading.Event()
        self._turn_since: float | None = None
        self._last_step_s = 0.0
        self._waker = Waker()
        #: Guards `_commands` and `_closed`: no command is queued after the last one has run.
        self._lock = threading.Lock()
        self._closed = False
        self._poller = zmq.Poller()
        for sock in requests.sockets:
            self._poller.register(sock, zmq.POLLIN)
        self._poller.register(self._waker.read, zmq.POLLIN)

    def run(self) -> None:
        """Serve until `stop`. Raises EngineBroken or RankLost when the replica must be rebuilt."""
        self._threads.apply()  # a thread count is per thread, and the replica may have started in another one
        error: ReplicaError | None = None
        try:
            while not self._stopping.is_set():
                self._run_once()
        except ReplicaError as broken:
            error = broken
            raise
        finally:
            self._refuse_all(error)
            self._close()

    def stop(self) -> None:
        """Make `run` return after the current step."""
        self._stopping.set()
        self._waker.wake()

    def drain(self) -> None:
        """Refuse new requests and finish the running ones; the load report shows when none remain."""
        self._ask(self._engine.drain)

    def idle(self) -> bool:
        return self._ask(lambda: not self._engine.has_work and not self._compiling)

    def residents(self) -> list[CachedBlock]:
        return self._ask(lambda: list(self._cache.residents()))

    def step_s(self) -> float:
        """Seconds since the engine's thread began its current turn, or since steps have found nothing that can run.

        A turn reads requests, runs a step and sends its outputs; each can hang. 0 while the thread waits for work. Or
        since the publisher's current turn began, if that is longer ago: without reports, the replica counts as silent.
        """
        since = self._turn_since
        return max(0.0 if since is None else time.monotonic() - since, self._publisher.turn_s())

    def check(self) -> None:
        self._ask(self._engine.scheduler.check)
        if self._keeper is not None:
            self._ask(self._keeper.check)

    def _ask(self, question: Callable[[], T]) -> T:
        """Run `question` in the engine's thread between two steps."""
        answer: Future[T] = Future()

        def command() -> None:
            try:
                answer.set_result(question())
            except BaseException as error:  # raised in the caller's thread
                answer.set_exception(error)

        with self._lock:
            if self._closed:
                raise ReplicaError(f"replica {self.description.replica_id} has stopped")
            self._commands.put(command)
        self._waker.wake()
        return answer.result()

    # Everything below runs in the engine's thread.

    def _run_once(self) -> None:
        """Run commands and read requests, then run one step or wait for work."""
        if self._turn_since is None:
            self._turn_since = time.monotonic()
        if self._waker.clear():
            self._run_commands()
        if (error := self._publisher.error) is not None:  # routers would take the replica for silent, for good
            raise EngineBroken(f"the publisher of events and load reports failed: {error}") from error
        compiling = len(self._compiling)
        for source, request in self._requests.receive():
            self._handle(source, request)
        if len(self._compiling) > compiling and self._engine.has_work:
            self._wait_for_guides(compiling)
        if not self._engine.has_work:
            self._engine.expire_pins()
            self._publisher.flush()
            self._publisher.report(self._load())
            wait_ms = self._idle_ms if self._keeper is None else self._keep_blocks(self._keeper)
            self._turn_since = None
            self._poller.poll(wait_ms)
            return
        self._threads.update()
        began = time.monotonic()
        result = self._engine.step()
        self._last_step_s = time.monotonic() - began
        advanced = result.rows or result.outputs or not self._engine.has_work
        if not advanced:  # one such step may follow an overlapped one; if they go on, `step_s` tells
            self._poller.poll(STUCK_POLL_MS)
        self._publish(result)
        if self._keeper is not None:
            self._keeper.work(self._busy_blocks)
        if advanced:
            self._turn_since = None
        if result.error is not None and isinstance(result.error.__cause__, torch.AcceleratorError):
            # After an illegal access, say, a CUDA device fails every later call of this process.
            raise EngineBroken(f"the device failed: {result.error}") from result.error
        if self._engine.failures_in_a_row >= MAX_FAILURES:
            raise EngineBroken(f"{MAX_FAILURES} steps in a row failed, last: {result.error}")

    def _keep_blocks(self, keeper: DiskKeeper) -> int:
        """Have blocks written while the engine is idle. Returns for how many ms it may wait for requests."""
        if keeper.work(IDLE_BLOCKS):
            return 0
        return min(KEEPING_MS, self._idle_ms) if keeper.pending else self._idle_ms

    def _wait_for_guides(self, compiling: int) -> None:
        """Wait for a moment until no more constraints are being compiled than this."""
        now = time.monotonic()
        end = now + min(COMPILE_WAIT_S, COMPILE_WAIT_SHARE * self._last_step_s)
        while len(self._compiling) > compiling and now < end:
            self._waker.wait(end - now)
            self._run_commands()
            now = time.monotonic()

    def _handle(self, source: str, request: Request) -> None:
        match request:
            case Generate(constraint=None):
                self._admit(source, request)
            case Generate():
                self._compile(source, request)
            case ResetCache(ask_id=ask_id):
                self._send(source, CacheReset(ask_id=ask_id, done=self._cache.reset()))
            case AskNextEvictions():
                self._send(source, NextEvictions(hashes=b"".join(self._cache.next_evictions(MAX_NEXT_EVICTIONS))))
            case Abort(request_ids=request_ids):
                for request_id in request_ids:
                    self._compiling.pop(RequestKey(source, request_id), None)
                self._engine.abort(source, request_ids)
            case _:
                assert_never(request)

    def _admit(self, source: str, request: Generate, guide: Guide | None = None) -> None:
        try:
            self._engine.add(source, request, guide)
        except RequestError as error:
            self._refuse(source, request, error)

    def _refuse(self, source: str, request: Generate, error: RequestError) -> None:
        log.info("request_refused router=%s trace=%s error=%s", source, request.trace_id, error)
        refused = Refused(request_id=request.request_id, reason=error.reason, message=str(error), retry=error.retry)
        self._send(source, refused)

    def _compile(self, source: str, request: Generate) -> None:
        """Compile a request's constraint in another thread, then admit the request."""
        assert request.constraint is not None, f"request {request.request_id} has no constraint"
        # A trailing partial id is cut off here; the engine refuses the request when it is admitted.
        whole = len(request.token_ids) // TOKEN_BYTES * TOKEN_BYTES
        generated = token_array(request.token_ids[request.prompt_tokens * TOKEN_BYTES : whole])
        key = RequestKey(source, request.request_id)
        self._compiling[key] = request
        self._engine.arrived(source, request.request_id)

        def compiled(made: "Future[Guide]") -> None:
            with self._lock:
                if self._closed:
                    return
                self._commands.put(lambda: self._compiled(key, request, made))
            self._waker.wake()

        self._guides.start(request.constraint, generated, request.tenant).add_done_callback(compiled)

    def _compiled(self, key: RequestKey, request: Generate, made: "Future[Guide]") -> None:
        if self._compiling.get(key) is not request:  # it was aborted, or its router has disconnected
            return
        del self._compiling[key]
        error = made.exception()
        if error is None:
            self._admit(key.source, request, made.result())
        elif isinstance(error, RequestError):
            self._refuse(key.source, request, error)
        else:
            log.error("constraint_failed trace=%s", request.trace_id, exc_info=error)
            message = f"constraint: {type(error).__name__}: {error}"
            self._send(key.source, Refused(request_id=request.request_id, reason="internal", message=message))

    def _load(self) -> LoadReport:
        """The engine's load; requests whose constraints are being compiled wait, too."""
        load = self._engine.load()
        if (keeper := self._keeper) is not None:
            on_disk = TierLoad("DISK", keeper.tier.slots, len(keeper.tier), keeper.block_s)
            load = structs.replace(load, tiers=(*load.tiers, on_disk))
        if self._tier_failures:
            counters = structs.replace(load.counters, tier_failures=dict(self._tier_failures))
            load = structs.replace(load, counters=counters)
        return structs.replace(load, waiting=load.waiting + len(self._compiling)) if self._compiling else load

    def _publish(self, result: StepResult) -> None:
        """Send a step's results. Events go first: a router that sees a request end should soon see its blocks."""
        load = self._load()
        due = self._throttle.due(load, time.monotonic())
        if due:
            self._publisher.flush()
        for source, outputs in result.outputs.items():
            self._send(source, TokenBatch(step=result.step, outputs=outputs))
        for source, refusals in result.refused.items():
            for refused in refusals:
                self._send(source, refused)
        for source, request_ids in result.failed.items():
            self._send(source, FailedStep(request_ids=request_ids, message=str(result.error)))
        if due:
            self._publisher.report(load)

    def _send(self, source: str, reply: Reply) -> None:
        """Send a reply. A router that is gone or has stopped reading has lost tokens: end all its requests."""
        sent = self._requests.send(source, reply)
        if sent is not SendResult.SENT:
            for key in [each for each in self._compiling if each.source == source]:
                del self._compiling[key]
            ended = self._engine.forget(source)
            log.warning("router_lost router=%s delivery=%s requests=%d", source, sent.value, ended)

    def _refuse_all(self, error: ReplicaError | None) -> None:
        """Hand all requests back to their routers when `run` ends, so that they are retried elsewhere at once."""
        message = f"replica {self.description.replica_id} is shutting down: {error or 'it was stopped'}"
        running = [request.key for request in self._engine.scheduler.requests()]
        for source, request_id in (*running, *self._compiling):
            self._requests.send(source, Refused(request_id=request_id, reason="draining", message=message, retry=True))

    def _run_commands(self) -> None:
        while not self._commands.empty():  # safe: no other thread takes commands
            self._commands.get()()

    def _close(self) -> None:
        """Run the last commands, then close all resources in reverse order."""
        with self._lock:
            self._closed = True
        self._waker.close()
        self._run_commands()
        self._resources.close()
        log.info("replica_ended replica=%s", self.description.replica_id)
