"""The Ray actors that run replicas' ranks and routers, each in a thread of its process.

Each actor has a `watch` call that returns when its rank or router has stopped working. If the process is killed, the
same call fails at once, so a single open call detects every kind of death.
"""

import asyncio
import contextlib
import logging
import math
import os
import secrets
import socket
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

import psutil
import ray
from ray.exceptions import OutOfMemoryError, RayActorError, RayError

from ...kvcache.block_index import CachedBlock
from ...replica.messages import ReplicaDescription
from ...replica.parallel.step_broadcast import SECRET_BYTES
from ...replica.progress import current
from ...replica.rank_server import RankServer
from ...router.control import Answer, AnyQuestion, SetMembership
from ..config import ClusterSettings
from ..logs import log_to_file
from ..registry import ProcessMark
from ..runtime import fast_loop, raise_open_files_limit, set_up_logging
from .control_messages import HEALTH_INTERVAL_S, ClusterModel, Failed, Listening, Models, RankSpec, Rendezvous, Started
from .stopped_process import until_stopped

log = logging.getLogger(__name__)

T = TypeVar("T")
#: Longest duration of a `watch` call, because the call occupies a thread even after its caller has died.
WATCH_S = 10.0
#: Interval at which it looks at a rank's step.
STEP_LOOK_S = 0.5
SPARE_NICENESS = 10
#: Pause before work is begun again that ended with an error.
RETRY_S = 1.0
#: A step may take this many times its duration at the measured speed: other work and long contexts slow it down.
MAX_STEP_SLOWDOWN = 10.0


class Router(Protocol):
    """A running router, on the event loop of its process."""

    @property
    def listening(self) -> Listening: ...

    async def ask(self, question: AnyQuestion) -> Answer: ...

    async def stop(self) -> None: ...


#: Starts a router, which knows the contents of the members' caches before it listens. Arguments: the models, the
#: wanted ports, the members, the seat, and what was prepared, if anything was.
MakeRouter = Callable[[Models, Listening, SetMembership, int, Any], Coroutine[Any, Any, Router]]
#: Loads what a router of these models will need.
PrepareRouter = Callable[[Models], Coroutine[Any, Any, Any]]


def node_address() -> str:
    address: str = ray.util.get_node_ip_address()
    return address


def step_limit_s(timeout_s: float, description: ReplicaDescription | None) -> float:
    """Seconds until a step counts as hung. A large model's full step takes minutes on a CPU, longer on a busy one."""
    if description is None:  # workers do not time their steps
        return timeout_s
    return max(timeout_s, MAX_STEP_SLOWDOWN * description.max_batched_tokens / description.prefill_tokens_per_s)


class ReplicaRank:
    """Ray actor: one rank of a replica. Its calls run concurrently, because `watch` blocks."""

    def __init__(
        self,
        make: Callable[[RankSpec], RankServer],
        log_level: str = "warning",
        after_loading: Callable[[], None] = lambda: None,
    ) -> None:
        """`after_loading` is called whenever something has been loaded that stays."""
        set_up_logging(log_level)
        self._make = make
        self._after_loading = after_loading
        self._server: RankServer | None = None
        self._started: Started | Failed | None = None
        self._stopping = threading.Event()
        self._ended = threading.Event()
        self._reason = "stopped"
        self._step_timeout_s = math.inf
        #: Held while a thread imports what a rank needs. At the end of its import, transformers replaces its module; a
        #: second thread that waits for the import gets the replaced module, which lacks `AutoConfig`.
        self._loading = threading.Lock()
        self._preparer: int | None = None  #: native id of the thread that prepares, while it does

    def mark(self) -> ProcessMark:
        return ProcessMark.of(psutil.Process())

    def rendezvous(self, host: str | None) -> Rendezvous:
        """A free address on this node for rank 0 to listen for the other ranks, and a secret to authenticate them."""
        host = host or node_address()
        with socket.socket() as probe:
            probe.bind((host, 0))
            return Rendezvous(host, probe.getsockname()[1], secrets.token_bytes(SECRET_BYTES))

    def prepare(self, prepare: Callable[[ClusterModel], None], spec: ClusterModel) -> None:
        """Start loading what `start` will need, in a spare process and at low priority."""

        def run() -> None:
            if not self._loading.acquire(blocking=False):
                return  # `start` was faster
            self._preparer = threading.get_native_id()
            try:
                with contextlib.suppress(OSError):
                    os.setpriority(os.PRIO_PROCESS, self._preparer, SPARE_NICENESS)
                prepare(spec)
                self._after_loading()
            finally:
                self._preparer = None
                self._loading.release()

        # A new thread: on Linux each has its own niceness, and an unprivileged one cannot lower it again.
        threading.Thread(target=run, name="prepare", daemon=True).start()

    def start(self, spec: RankSpec) -> Started | Failed:
        """Load the model and serve. A failure is returned, not raised: users need its message, not Ray's traceback."""
        log_to_file(
            spec.model.log_dir,
            f"{spec.replica_id}.{spec.rank}" if spec.rank else spec.replica_id,
            spec.model.log_format,
        )
        if (preparer := self._preparer) is not None:  # requests wait for this rank now
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, preparer, os.getpriority(os.PRIO_PROCESS, 0))
        outcome: Future[Started | Failed] = Future()
        threading.Thread(target=self._load_and_run, args=(spec, outcome), name="rank", daemon=True).start()
        self._started = outcome.result()
        if isinstance(self._started, Started):
            self._step_timeout_s = step_limit_s(spec.model.settings.cluster.step_timeout_s, self._started.description)
        return self._started

    def started(self) -> Started | Failed | None:
        return self._started

    def progress(self) -> str:
        """What the rank is doing while it starts; empty if nothing was reported."""
        return current()

    def watch(self) -> Failed | None:
        """Wait until the rank stops serving or its step hangs; None if it still serves after WATCH_S.

        If another rank's device hangs, a step never ends, because NCCL raises no error.
        """
        for _ in range(math.ceil(WATCH_S / STEP_LOOK_S)):
            if self._ended.wait(STEP_LOOK_S):
                return Failed(self._reason)
            if self._server is not None and self._server.step_s() > self._step_timeout_s:
                return Failed(
                    f"a step has not ended after {self._step_timeout_s:g} s (step_timeout_s): "
                    "a rank or its device hangs"
                )
        return None

    def drain(self) -> None:
        assert self._server is not None, "drain before start"
        self._server.drain()

    def idle(self) -> bool:
        return self._server is None or self._server.idle()

    def ping(self) -> None:
        pass

    def residents(self) -> list[CachedBlock]:
        return self._server.residents() if self._server is not None else []

    def stop(self) -> None:
        self._stopping.set()
        if self._server is not None:
            self._server.stop()
            self._ended.wait(5)

    def _load_and_run(self, spec: RankSpec, outcome: "Future[Started | Failed]") -> None:
        """Load and run in one thread; replica/load/cpu_threads.py states the cost of using two."""
        try:
            with self._loading:
                server = self._server = self._make(spec)
            if self._stopping.is_set():  # `stop` was called while it was loading
                server.stop()
            self._after_loading()
            started = Started(os.getpid(), node_address(), server.description)
        except BaseException as error:  # a Rust library's panic is not an Exception, and `start` waits for a result
            log.exception("rank_failed_to_start replica=%s rank=%d", spec.replica_id, spec.rank)
            outcome.set_result(Failed(describe(error)))
            return
        outcome.set_result(started)
        try:
            server.run()
        except BaseException as error:
            log.exception("rank_failed")
            self._reason = describe(error)
        finally:
            self._ended.set()


class RouterProcess:
    """Ray actor: one router with its HTTP server, on an event loop of its own.

    No method may be a coroutine: a single one would make Ray run all methods on its own event loop, where `watch`
    would block the others.
    """

    def __init__(self, make_router: MakeRouter, log_level: str = "warning") -> None:
        set_up_logging(log_level)
        raise_open_files_limit()
        self._make_router = make_router
        self._preparing: Future[Any] | None = None
        self._router: Router | None = None
        self._stopped = threading.Event()
        self._loop = fast_loop()
        threading.Thread(target=self._loop.run_forever, name="router", daemon=True).start()

    def prepare(self, prepare: PrepareRouter, models: Models) -> None:
        """Start loading what `start` will need, in a spare process."""
        self._preparing = asyncio.run_coroutine_threadsafe(prepare(models), self._loop)

    def start(self, models: Models, wanted: Listening, membership: SetMembership, seat: int) -> Listening | Failed:
        """Listen on these ports (0: any free one) as router number `seat` and route to these replicas."""
        log_to_file(models[0].log_dir, f"router-{seat}", models[0].log_format)
        try:
            self._router = self._run_on_loop(self._make_router(models, wanted, membership, seat, self._prepared()))
            return self._router.listening
        except Exception as error:
            log.exception("router_failed_to_start")
            return Failed(describe(error))

    def _prepared(self) -> Any:
        """What `prepare` returned, once it has ended; None without it, or if it failed: `start` then loads all."""
        if self._preparing is None or self._preparing.exception() is not None:
            return None
        return self._preparing.result()

    def mark(self) -> ProcessMark:
        return ProcessMark.of(psutil.Process())

    def listening(self) -> Listening | None:
        return self._router.listening if self._router is not None else None

    def ask(self, question: AnyQuestion) -> Answer:
        assert self._router is not None, "the router has not been started"
        return self._run_on_loop(self._router.ask(question))

    def watch(self) -> Failed | None:
        """Wait until the router is stopped; None if it still serves after WATCH_S."""
        return Failed("stopped") if self._stopped.wait(WATCH_S) else None

    def ping(self) -> None:
        self._run_on_loop(asyncio.sleep(0))

    def stop(self) -> None:
        if self._router is not None:
            asyncio.run_coroutine_threadsafe(self._router.stop(), self._loop).result(10)
        self._stopped.set()

    def _run_on_loop(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


def describe(error: BaseException) -> str:
    """An error as one line for a user; errors of other libraries are prefixed with their type."""
    words = " ".join(str(error).split())
    named = type(error).__module__.startswith("homing.")
    return words if named and words else f"{type(error).__name__}: {words}".rstrip(": ")


def death(error: BaseException) -> str:
    """The reason for a failed call as one line; Ray reports a dead process in a paragraph."""
    if isinstance(error, OutOfMemoryError) or "low on memory" in str(error):
        return "Ray's memory monitor killed the process, as its node is low on memory (RAY_memory_usage_threshold)"
    return "the process died" if isinstance(error, RayActorError) else describe(error)


async def until_failed(actor: Any) -> str:
    """Wait until an actor stops serving; returns the reason."""
    failed: Failed | None = None
    try:
        while failed is None:
            failed = await actor.watch.remote()
    except Exception as error:
        return death(error)
    return failed.message


async def until_silent(actor: Any, cluster: ClusterSettings, interval_s: float = HEALTH_INTERVAL_S) -> str:
    """Ping an actor until it does not answer in time; returns a message for the user. Raises RayError if it died."""
    try:
        while True:
            await asyncio.sleep(interval_s)
            await asyncio.wait_for(actor.ping.remote(), cluster.health_timeout_s)
    except TimeoutError:
        return f"no answer for {cluster.health_timeout_s:g} s"


async def until_frozen(actor: Any) -> str:
    """Wait until an actor's process on this machine is stopped, and kill it; returns a message for the user.

    Ray would first ask it to exit, and its memory is needed for its successor. Raises RayError if it died.
    """
    process = await until_stopped(await actor.mark.remote())
    process.kill()
    return "the process was stopped (SIGSTOP)"


async def keep_going(work: Callable[[], Awaitable[None]], pause_s: float = RETRY_S) -> None:
    """Do work that never ends, and begin again after an error: without it, a part of the cluster would stand still."""
    while True:
        try:
            await work()
        except Exception:
            log.exception("work_failed again_in_s=%g", pause_s)
        await asyncio.sleep(pause_s)


async def within(seconds: float, call: Awaitable[Any]) -> None:
    """Wait at most this long for a call that may fail or never return; its process is killed afterwards anyway."""
    try:
        await asyncio.wait_for(call, seconds)
    except (TimeoutError, RayError) as error:
        log.info("stop_failed after_s=%g reason=%r", seconds, death(error))
