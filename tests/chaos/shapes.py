"""Clusters under test: `homing serve` as a process, in the configurations (shapes) that the faults need."""

import asyncio
import contextlib
import os
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, Literal

import httpx
import psutil

from ..e2e.nodes import Nodes, below, two_nodes
from ..e2e.running import Serving, serving
from ..router.replicas.external.fakes import FakeEngine, backend_flags, demo_engine, engines_in_a_thread
from .client import Load, fetch
from .log import SPARE_PROCESS, Books, Census, Sighting
from .tunnel import Fate, Tunnel

Shape = Literal["pair", "ranks", "routers", "tunnels", "tiny", "nodes", "backends", "small", "watched"]

REPLICAS = 2
FLAGS: dict[Shape, tuple[str, ...]] = {
    "pair": (),
    "ranks": ("--tensor-parallel-size", "2"),
    "routers": ("--routers", "2"),
    "tunnels": (),
    "tiny": ("--num-kv-blocks", "64"),
    "nodes": (),
    "backends": (),
    # Less than a soak's questions fill, so that blocks are evicted all the time.
    "small": ("--num-kv-blocks", "512"),
    "watched": ("--step-timeout-s", "5", "--health-timeout-s", "5"),
}
#: Time per token of a fake external engine, long enough that streams can be interrupted.
FOREIGN_TOKEN_S = 0.005
#: How long recovery from a fault may take: a rebuild takes seconds, on a busy machine much longer.
PATIENCE_S = 180.0
#: How long a cluster may take to start on a busy machine.
START_PATIENCE_S = 300.0
POLL_S = 0.025
#: Actors with spare processes.
WITH_SPARES = ("ray::ReplicaRank", "ray::RouterProcess")
#: Per fate, a pattern for names of the sockets that it affects: those for events, or all of a replica's.
SOCKETS = {"cut": r"-(events|state)$", "delay": r"-(events|state)$", "drop": r"-(events|state)$", "split": r"-\w+$"}


@dataclass
class Cluster:
    """A running cluster, seen from outside."""

    serving: Serving
    shape: Shape
    load: Load | None = None
    tunnels: dict[str, list[Tunnel]] = field(default_factory=dict)  #: by replica id
    tunnel_paths: dict[str, list[str]] = field(default_factory=dict)
    nodes: Nodes | None = None
    engines: tuple[FakeEngine, ...] = ()
    engine_loop: asyncio.AbstractEventLoop | None = None

    @property
    def url(self) -> str:
        """The URL shared by all routers."""
        return self.serving.url

    def urls(self) -> tuple[str, ...]:
        """Each router's own URL, so that clients know which router they use."""
        return tuple(self.serving.note().get("router_urls") or ()) or (self.url,)

    async def view(self, url: str = "") -> dict[str, Any]:
        """The response of /cluster."""
        found: dict[str, Any] = await fetch(url or self.url, "/cluster")
        return found

    async def victim(self, draw: float) -> dict[str, Any]:
        """The entry in /cluster of the replica that `draw` selects."""
        replicas = sorted((await self.view())["replicas"], key=lambda each: str(each["replica_id"]))
        found: dict[str, Any] = replicas[int(draw * len(replicas))]
        return found

    def actors(self, title: str) -> list[psutil.Process]:
        """Processes of Ray actors of this class."""
        elsewhere = [each for node in (self.nodes.processes if self.nodes else ()) for each in below(node)]
        family = {each.pid: each for each in (*self.serving.family(), *elsewhere)}
        return [process for process in family.values() if _title(process) == f"ray::{title}"]

    def routers(self) -> dict[str, psutil.Process]:
        """The processes of routers that listen, by their own URL; the spare one does not."""
        found = {}
        for process in self.actors("RouterProcess"):
            ports = {each.laddr.port for each in process.net_connections("tcp") if each.status == psutil.CONN_LISTEN}
            found.update({url: process for url in self.urls() if int(url.rpartition(":")[2]) in ports})
        return found

    async def books(self) -> list[Books]:
        """Block counts of all replicas while idle. For external engines, cached blocks are read from the fakes."""
        replicas = (await self.view())["replicas"]
        if self.engines:
            truth = {f"b{number}": len(engine.cached) for number, engine in enumerate(self.engines)}
            return [Books(r["replica_id"], 0, 1, truth[r["replica_id"]], r["indexed_blocks"]) for r in replicas]
        return [
            Books(r["replica_id"], r["free_blocks"], r["num_blocks"], r["cached_free_blocks"], r["indexed_blocks"])
            for r in replicas
        ]

    def census(self) -> list[Census]:
        """Resources held by our processes. Ray's own processes are not included: they come and go."""
        found = []
        used = {process.pid for process in self.routers().values()}
        with contextlib.suppress(httpx.HTTPError):
            used.update(pid for replica in self.serving.replicas().values() for pid in replica.get("pids", ()))
        for process in self.serving.family():
            with contextlib.suppress(psutil.Error), process.oneshot():
                title = _title(process)
                # IDLE is what Ray calls the next spare process until its actor is created.
                if title == "ray::IDLE" or (title in WITH_SPARES and process.pid not in used):
                    title = SPARE_PROCESS
                if title.startswith("ray::") or process.pid == self.serving.pid:
                    rss = process.memory_info().rss // 1024
                    links = _links(process.pid)
                    sockets = sum(link.startswith("socket:") for link in links)
                    found.append(Census(process.pid, title, len(links), rss, process.num_threads(), sockets))
        return found

    async def sightings(self, now_s: float) -> list[Sighting]:
        """The state of every replica that a router lists."""
        return [
            Sighting(now_s, each["replica_id"], each["epoch"], each["state"], each["feed"])
            for each in (await self.view())["replicas"]
        ]

    async def tunnelled(self, rng: Random) -> None:
        """Put a tunnel in front of every replica socket, and restart the router so that it connects through them."""
        for replica in (await self.view())["replicas"]:
            name, ends = replica["replica_id"], replica["event_endpoints"]
            folder = Path(ends["events"].removeprefix("ipc://")).parent
            paths = [path for path in folder.iterdir() if path.is_socket()]
            self.tunnel_paths[name] = [path.name for path in paths]
            self.tunnels[name] = [Tunnel(path, rng) for path in paths]
            for tunnel in self.tunnels[name]:
                await tunnel.open()
        (router,) = self.routers().values()
        router.kill()
        await wait_for(lambda: self.whole(), "the router is back and connected through the tunnels")

    def befallen(self, replica: str, fate: Fate) -> list[Tunnel]:
        """The tunnels of one replica that a fate affects."""
        pairs = zip(self.tunnels[replica], self.tunnel_paths[replica], strict=True)
        return [tunnel for tunnel, path in pairs if re.search(SOCKETS[fate], path)]

    async def serves(self) -> bool:
        """Whether every router has all replicas serving, with live feeds."""
        try:
            views = [await self.view(url) for url in self.urls()]
        except (OSError, EOFError):
            return False
        return all(
            sum(each["state"] == "serving" and each["feed"] == "live" for each in view["replicas"]) == REPLICAS
            for view in views
        )

    async def whole(self) -> bool:
        """Whether the cluster serves and is idle: nothing runs or waits anywhere."""
        if not await self.serves():
            return False
        view = await self.view()
        busy = [r for r in view["replicas"] if r["running"] or r["waiting"] or r["in_flight"] or r["expected_blocks"]]
        return not busy and not view["in_flight"] and not view["waiting"]


async def wait_for(holds: Callable[[], Awaitable[bool]], what: str) -> None:
    """Poll until a condition holds. Raises TimeoutError with `what` after PATIENCE_S."""
    try:
        async with asyncio.timeout(PATIENCE_S):
            while not await holds():  # noqa: ASYNC110 - the state of other processes can only be polled
                await asyncio.sleep(POLL_S)
    except TimeoutError:
        raise TimeoutError(f"timed out after {PATIENCE_S:g} s waiting for: {what}") from None


@contextlib.contextmanager
def cluster(shape: Shape, state: Path) -> Iterator[Cluster]:
    """Run a cluster of two replicas in this shape until the block ends."""
    with contextlib.ExitStack() as stack:
        flags = ["--access-log", str(state / "access.log"), *FLAGS[shape]]
        nodes = stack.enter_context(_joinable()) if shape == "nodes" else None
        engines, loop = stack.enter_context(_engines()) if shape == "backends" else ((), None)
        if engines:
            flags += backend_flags(*engines)
        else:
            flags += ["--replicas", str(REPLICAS), "--spare-process"]
        if nodes is not None:
            flags += ["--ray-address", nodes.address]
        running = stack.enter_context(serving(state, *flags, patience_s=START_PATIENCE_S))
        yield Cluster(running, shape, nodes=nodes, engines=engines, engine_loop=loop)


@contextlib.contextmanager
def _joinable() -> Iterator[Nodes]:
    """Start two Ray nodes and put their token into the environment until the block ends."""
    with two_nodes() as nodes:
        before = {name: os.environ.get(name) for name in nodes.environment}
        os.environ.update(nodes.environment)
        try:
            yield nodes
        finally:
            for name, value in before.items():
                os.environ.pop(name) if value is None else os.environ.update({name: value})


@contextlib.contextmanager
def _engines() -> Iterator[tuple[tuple[FakeEngine, ...], asyncio.AbstractEventLoop]]:
    engines = demo_engine(), demo_engine()
    for engine in engines:
        engine.behaves.token_s = FOREIGN_TOKEN_S
    with engines_in_a_thread(*engines) as loop:
        yield engines, loop


@contextlib.asynccontextmanager
async def prepared(found: Cluster, rng: Random) -> AsyncIterator[Cluster]:
    """Set up the shape's tunnels in this event loop, and remove them when the block ends."""
    if found.shape == "tunnels":
        await found.tunnelled(rng)
    try:
        yield found
    finally:
        for tunnel in (tunnel for tunnels in found.tunnels.values() for tunnel in tunnels):
            await tunnel.close()


def _links(pid: int) -> list[str]:
    """Targets of a process's open descriptors; descriptors closed meanwhile are skipped."""
    found = []
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found.append(str(path.readlink()))
    return found


def _title(process: psutil.Process) -> str:
    """A process's name; for a Ray actor its class (`ray::Class`), without the running method."""
    try:
        words = process.cmdline()
    except psutil.Error:
        return ""
    return words[0].split(".")[0] if words and words[0].startswith("ray::") else process.name()
