"""The faults of `make chaos`, each as an action on a running cluster that is undone afterwards.

A fault is an async context manager: entering injects it and yields its victim, leaving repairs it.
"""

import asyncio
import contextlib
import ctypes
import os
import resource
import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from itertools import count, islice
from queue import Queue

import psutil

from ..e2e.nodes import below, start
from .client import Load, fetch
from .shapes import Cluster, Shape, wait_for
from .tunnel import Fate, Weather, weather_of


@dataclass(slots=True, frozen=True)
class Victim:
    """What a fault has hit: the replica (with its epoch) that must leave routing, a router, or neither."""

    replica: str | None = None
    epoch: int = 0
    url: str | None = None


Inject = Callable[[Cluster, float], AbstractAsyncContextManager[Victim]]
NOBODY = Victim()
#: A slow replica alternately runs and is stopped for these times.
SLOW_RUN_S, SLOW_STOP_S = 0.02, 0.08
#: How many steps of a replica fail for want of memory, and the time between them.
FAILED_STEPS, BETWEEN_STEPS_S = 3, 0.5
#: How long threads' processor times are compared to find the one that computes.
BUSY_S = 0.5
#: From linux/ptrace.h and linux/wait.h.
PTRACE_SEIZE, PTRACE_INTERRUPT, WAIT_ALL = 0x4206, 0x4207, 0x40000000


@dataclass(slots=True, frozen=True)
class Fault:
    """One kind of fault."""

    inject: Inject
    shape: Shape
    lasts_s: float  #: time between injection and repair


@contextlib.asynccontextmanager
async def kill_rank(cluster: Cluster, draw: float, *, rank: int) -> AsyncIterator[Victim]:
    """SIGKILL one process of a replica."""
    replica = await cluster.victim(draw)
    os.kill(replica["pids"][rank], signal.SIGKILL)
    yield Victim(replica["replica_id"], replica["epoch"])


@contextlib.asynccontextmanager
async def kill_ranks(cluster: Cluster, draw: float) -> AsyncIterator[Victim]:
    """SIGKILL all processes of a replica at the same time."""
    replica = await cluster.victim(draw)
    for pid in replica["pids"]:
        os.kill(pid, signal.SIGKILL)
    yield Victim(replica["replica_id"], replica["epoch"])


@contextlib.asynccontextmanager
async def freeze(cluster: Cluster, draw: float, *, first_rank: int = 0) -> AsyncIterator[Victim]:
    """SIGSTOP the processes of a replica from rank `first_rank` on; SIGCONT those that are left."""
    replica = await cluster.victim(draw)
    pids = replica["pids"][first_rank:]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield Victim(replica["replica_id"], replica["epoch"])
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


@contextlib.asynccontextmanager
async def hang(cluster: Cluster, draw: float) -> AsyncIterator[Victim]:
    """Hold the thread that computes a replica's steps: as far as others can see, its step never ends.

    The other threads run on, so that the process still answers, unless the thread holds the interpreter lock.
    """
    replica = await cluster.victim(draw)
    thread = await busiest_thread(replica["pids"][0])
    held = hold_thread(thread)
    yield Victim(replica["replica_id"], replica["epoch"])
    await asyncio.to_thread(held.join)  # until the thread has ended with its process


@contextlib.asynccontextmanager
async def hit_router(cluster: Cluster, draw: float, *, number: signal.Signals) -> AsyncIterator[Victim]:
    """Send a signal, SIGKILL or SIGSTOP, to one of the routers."""
    routers = cluster.routers()
    url = sorted(routers)[int(draw * len(routers))]
    routers[url].send_signal(number)
    yield Victim(url=url)


@contextlib.asynccontextmanager
async def fail_steps(cluster: Cluster, draw: float) -> AsyncIterator[Victim]:
    """Let a replica map no more memory until a step of it has failed, several times. It may die of it.

    Prompts of other lengths than before need new memory.
    """
    name, lengths = (await cluster.victim(draw))["replica_id"], count(1)
    for _ in range(FAILED_STEPS):
        before, limited = (await cluster.view())["counters"]["suspected"], set[int]()

        async def failed(before: int = before, limited: set[int] = limited) -> bool:
            view = await cluster.view()
            limited.update(*(each["pids"] for each in view["replicas"] if each["replica_id"] == name))
            _limit_memory(limited, to_present=True)
            others = ({"prompt": f"{length} and more" + " more" * length, "max_tokens": 1} for length in lengths)
            asked = (fetch(cluster.url, "/v1/completions", body) for body in islice(others, 4))
            await asyncio.gather(*asked, return_exceptions=True)
            return bool(view["counters"]["suspected"] > before)

        await wait_for(failed, f"a step of {name} fails")
        _limit_memory(limited, to_present=False)
        await asyncio.sleep(BETWEEN_STEPS_S)
    yield NOBODY


@contextlib.asynccontextmanager
async def kill_controller(cluster: Cluster, draw: float) -> AsyncIterator[Victim]:
    """SIGKILL the controller; the fault is over when a new one runs."""
    (controller,) = cluster.actors("Controller")
    controller.kill()
    yield NOBODY

    async def returned() -> bool:
        return any(each.pid != controller.pid for each in cluster.actors("Controller"))

    await wait_for(returned, "another controller")


@contextlib.asynccontextmanager
async def slow(cluster: Cluster, draw: float) -> AsyncIterator[Victim]:
    """Slow a replica down to a fifth of its speed."""
    replica = await cluster.victim(draw)
    stuttering = asyncio.create_task(_stutter(replica["pids"]))
    try:
        yield NOBODY
    finally:
        stuttering.cancel()
        await asyncio.gather(stuttering, return_exceptions=True)


@contextlib.asynccontextmanager
async def flush(cluster: Cluster, draw: float) -> AsyncIterator[Victim]:
    """Empty all caches, except for blocks in use by running requests."""
    await fetch(cluster.url, "/reset_prefix_cache", {})
    yield NOBODY


@contextlib.asynccontextmanager
async def full_disk(cluster: Cluster, draw: float) -> AsyncIterator[Victim]:
    """Prevent all of our processes from extending a file."""
    ours = [each for title in ("Controller", "RouterProcess", "ReplicaRank") for each in cluster.actors(title)]
    _limit_files(ours, 0)
    try:
        yield NOBODY
    finally:
        _limit_files(ours, resource.RLIM_INFINITY)


@contextlib.asynccontextmanager
async def overload(cluster: Cluster, draw: float, *, times: int) -> AsyncIterator[Victim]:
    """Add bursts of `times` times the load to the existing load until the fault is over."""
    assert cluster.load is not None, "overload needs a running load"
    over = asyncio.Event()
    bursts = asyncio.create_task(_burst(cluster.load, times, over))
    yield NOBODY
    over.set()
    await bursts


@contextlib.asynccontextmanager
async def befall(cluster: Cluster, draw: float, *, fate: Fate) -> AsyncIterator[Victim]:
    """Disturb a replica's connections, or only those that carry events."""
    replica = await cluster.victim(draw)
    tunnels = cluster.befallen(replica["replica_id"], fate)
    for tunnel in tunnels:
        tunnel.weather = weather_of(fate)
        if tunnel.weather.barred:
            tunnel.cut()
    try:
        yield Victim(replica["replica_id"], replica["epoch"]) if fate == "split" else NOBODY
    finally:
        for tunnel in tunnels:
            tunnel.weather = Weather()


@contextlib.asynccontextmanager
async def restart_engine(cluster: Cluster, draw: float) -> AsyncIterator[Victim]:
    """Stop an external engine and restart it with the same addresses, an empty cache and event numbers from 0."""
    loop, number = cluster.engine_loop, int(draw * len(cluster.engines))
    assert loop is not None, "the cluster has no external engines"
    engine, replica = cluster.engines[number], (await cluster.view())["replicas"][number]
    await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(engine.stop(), loop))
    yield Victim(replica["replica_id"], replica["epoch"])
    await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(engine.start(), loop))


@contextlib.asynccontextmanager
async def kill_node(cluster: Cluster, draw: float, *, name: str) -> AsyncIterator[Victim]:
    """SIGKILL the last node's raylet, or an agent with which it ends; another node joins when the fault is over."""
    assert cluster.nodes is not None, "the cluster has no separate nodes"
    family = below(cluster.nodes.processes[-1])
    pids = {process.pid for process in family}
    victim = next(each for each in (await cluster.view())["replicas"] if pids & set(each["pids"]))
    next(process for process in family if name in (process.name(), "".join(process.cmdline()[:1]))).kill()
    yield Victim(victim["replica_id"], victim["epoch"])
    start(cluster.nodes, f"--address={cluster.nodes.address}")


def _with_signal(number: signal.Signals) -> Inject:
    return lambda cluster, draw: hit_router(cluster, draw, number=number)


def _with_process(name: str) -> Inject:
    return lambda cluster, draw: kill_node(cluster, draw, name=name)


def _with_rank(rank: int) -> Inject:
    return lambda cluster, draw: kill_rank(cluster, draw, rank=rank)


def _with_fate(fate: Fate) -> Inject:
    return lambda cluster, draw: befall(cluster, draw, fate=fate)


def _with_times(times: int) -> Inject:
    return lambda cluster, draw: overload(cluster, draw, times=times)


FAULTS: dict[str, Fault] = {
    "kill-rank-0": Fault(_with_rank(0), "pair", 0.0),
    "freeze": Fault(freeze, "pair", 3.0),
    "slow": Fault(slow, "pair", 5.0),
    "flush": Fault(flush, "pair", 1.0),
    "full-disk": Fault(full_disk, "pair", 3.0),
    "overload": Fault(_with_times(10), "pair", 0.0),
    "kill-rank-1": Fault(_with_rank(1), "ranks", 0.0),
    "kill-ranks": Fault(kill_ranks, "ranks", 0.0),
    "freeze-rank-1": Fault(lambda cluster, draw: freeze(cluster, draw, first_rank=1), "ranks", 3.0),
    "hang": Fault(hang, "watched", 0.0),
    "kill-raylet": Fault(_with_process("raylet"), "nodes", 1.0),
    "kill-agent": Fault(_with_process("ray::DashboardAgent"), "nodes", 1.0),
    "kill-env-agent": Fault(_with_process("ray::RuntimeEnvAgent"), "nodes", 1.0),
    "restart-engine": Fault(restart_engine, "backends", 1.0),
    "kill-router": Fault(_with_signal(signal.SIGKILL), "routers", 0.0),
    "kill-only-router": Fault(_with_signal(signal.SIGKILL), "pair", 0.0),
    "kill-joined-router": Fault(_with_signal(signal.SIGKILL), "nodes", 0.0),
    "freeze-only-router": Fault(_with_signal(signal.SIGSTOP), "pair", 0.0),
    "no-memory": Fault(fail_steps, "pair", 0.0),
    "events-cut": Fault(_with_fate("cut"), "tunnels", 3.0),
    "events-late": Fault(_with_fate("delay"), "tunnels", 5.0),
    "events-lost": Fault(_with_fate("drop"), "tunnels", 5.0),
    "split": Fault(_with_fate("split"), "tunnels", 5.0),
    "starve": Fault(_with_times(5), "tiny", 60.0),
    "kill-controller": Fault(kill_controller, "pair", 0.0),
}


async def _burst(load: Load, times: int, over: asyncio.Event) -> None:
    """Repeat bursts until `over` is set, but at least one."""
    while True:
        await load.burst(times)
        if over.is_set():
            return


async def _stutter(pids: list[int]) -> None:
    processes = [psutil.Process(pid) for pid in pids]
    try:
        while True:
            for process in processes:
                process.suspend()
            await asyncio.sleep(SLOW_STOP_S)
            for process in processes:
                process.resume()
            await asyncio.sleep(SLOW_RUN_S)
    finally:
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()


async def busiest_thread(pid: int) -> int:
    """The thread of a process that computes most just now."""
    process = psutil.Process(pid)
    used: dict[int, float] = {}
    while not any(used.values()):
        before = {each.id: each.user_time for each in process.threads()}
        await asyncio.sleep(BUSY_S)
        used = {each.id: each.user_time - before.get(each.id, 0.0) for each in process.threads()}
    return max(used, key=lambda thread: used[thread])


def hold_thread(thread: int) -> threading.Thread:
    """Stop a single thread for good, as its tracer. Returns a thread of ours that lasts as long as it does."""
    attached, ended = Queue[OSError | None](), threading.Thread(target=lambda: _trace(thread, attached), daemon=True)
    ended.start()
    if (error := attached.get()) is not None:
        raise error
    return ended


def _trace(thread: int, attached: "Queue[OSError | None]") -> None:
    """Seize and interrupt a thread, then wait for its end: without it, its process could not be reaped."""
    libc = ctypes.CDLL(None, use_errno=True)
    for request in (PTRACE_SEIZE, PTRACE_INTERRUPT):
        if libc.ptrace(request, thread, None, None) < 0:
            attached.put(OSError(ctypes.get_errno(), f"this user may not trace thread {thread}"))
            return
    attached.put(None)
    with contextlib.suppress(ChildProcessError):
        while os.WIFSTOPPED(os.waitpid(thread, WAIT_ALL)[1]):
            pass


def _limit_files(processes: list[psutil.Process], size: int) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            _, hard = process.rlimit(psutil.RLIMIT_FSIZE)
            process.rlimit(psutil.RLIMIT_FSIZE, (size, hard))


def _limit_memory(pids: Iterable[int], *, to_present: bool) -> None:
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            soft = process.memory_info().vms if to_present else resource.RLIM_INFINITY
            process.rlimit(psutil.RLIMIT_AS, (soft, resource.RLIM_INFINITY))
