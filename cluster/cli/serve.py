"""`homing serve`: start everything, print the progress, stay until a signal, and leave nothing behind.

The process is Ray's driver: whatever it started ends with it. The controller makes all decisions about replicas.
"""

import contextlib
import os
import secrets
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TextIO

import msgspec

from .. import local_ray
from ..client import get_json, is_ready
from ..config import Settings, state_folder
from ..control.control_messages import CONTROLLER, SUPERVISOR, ClusterSpec, ClusterStatus, ModelSpec
from ..errors import ClusterError, StartFailed
from ..model_source import find_model
from ..preflight import check_bounds, check_folder, check_front, check_keys, prepare
from ..registry import ClusterRegistry, RegistryEntry, own_entry
from .console import Console, program

POLL_S = 0.2


class Stopper:
    """Turns SIGINT and SIGTERM into a request to stop; the second signal calls `at_once`, which must not return."""

    def __init__(self, at_once: Callable[[], None]) -> None:
        self._requested = threading.Event()
        self._at_once = at_once

    def install(self) -> None:
        """Handle both signals. Ray takes over SIGTERM when it starts, so this is called again afterwards."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)

    def wait(self, seconds: float) -> bool:
        """Whether to stop; waits at most this long for a signal."""
        return self._requested.wait(seconds)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002 - the signature of signal
        if self._requested.is_set():
            self._at_once()
        self._requested.set()


@dataclass(slots=True)
class Run:
    """One `homing serve` with Ray started, before its cluster is."""

    settings: Settings
    console: Console
    stopper: Stopper
    registry: ClusterRegistry
    entry: RegistryEntry
    folder: Path | None  #: of a local Ray
    detached: bool


def serve(settings: Settings, out: TextIO, *, detached: bool = False) -> int:
    """Serve until a signal; returns the exit code. Raises ClusterError when it cannot start."""
    settings = prepare(settings)
    for each in settings.each_model:
        check_bounds(each, f"model {each.served_name}: " if settings.models else "")
    console = Console(out, program=program())
    console.opening(settings)
    registry, name = ClusterRegistry(state_folder(settings)), settings.cluster.name
    log = str(registry.log_path(name)) if detached else None
    entry = own_entry(name, ", ".join(each.replica.model for each in settings.each_model), log)
    with registry.claim(entry):
        check_front(settings.router)
        local = not settings.cluster.ray_address  # otherwise each node finds the models by itself
        folders = [_local_model(each) if local else None for each in settings.each_model]
        # Ray 2.60 prints a paragraph to `sys.stdout` about every killed worker, whatever its settings say.
        with (
            open(os.devnull, "w") as nowhere,
            contextlib.redirect_stdout(nowhere),
            _ray(settings, console, registry, entry, detached) as run,
        ):
            return _serve(run, folders)


def _local_model(settings: Settings) -> Path:
    check_keys(settings.events)
    folder = find_model(settings.replica)
    check_folder(folder, settings)
    return folder


@contextlib.contextmanager
def _ray(
    settings: Settings, console: Console, registry: ClusterRegistry, entry: RegistryEntry, detached: bool
) -> Iterator[Run]:
    address = settings.cluster.ray_address
    folder = None if address else local_ray.run_folder()
    entry = msgspec.structs.replace(entry, run_dir=str(folder) if folder else None)
    registry.write(entry)

    def kill() -> None:  # the second Ctrl-C
        local_ray.kill_children()
        registry.remove(entry.name)
        print("killed", file=sys.stderr)
        os._exit(130)

    stopper = Stopper(kill)
    stopper.install()
    try:
        console.step("ray", f"joining {address}" if address else "starting a local cluster")
        local_ray.start_local(settings, folder) if folder else local_ray.join(settings)
        stopper.install()
        token = local_ray.requires_token()
        entry = msgspec.structs.replace(entry, ray_address=local_ray.address(), ray_token=token)
        console.step("ray", "ready")
        yield Run(settings, console, stopper, registry, entry, folder, detached)
    finally:
        local_ray.leave(settings.cluster.stop_timeout_s)
        if folder:
            local_ray.remove(folder)


def _serve(run: Run, folders: Sequence[Path | None]) -> int:
    cluster = StartedCluster(run, folders)
    entry = run.entry
    try:
        status = cluster.until_ready()
        if status is None:
            return 0
        entry = msgspec.structs.replace(entry, phase="ready", url=status.url or "", router_urls=status.router_urls)
        run.registry.write(entry)
        run.console.last_notice = max((notice.seq for notice in status.notices), default=0)
        run.console.banner(status, run.settings, detached=run.detached)
        while not run.stopper.wait(POLL_S):
            run.console.happened(cluster.status().notices)
        return 0
    finally:
        run.registry.write(msgspec.structs.replace(entry, phase="stopping"))
        cluster.stop()


class StartedCluster:
    """The supervisor and the controller, which start everything else."""

    def __init__(self, run: Run, folders: Sequence[Path | None]) -> None:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        from ..control.assembly import make_rank, make_router
        from ..control.controller import Controller
        from ..control.supervisor import Supervisor

        node = ray.get_runtime_context().get_node_id()
        sockets = local_ray.sockets_folder(run.folder) if run.folder else None
        seed = secrets.randbits(64)
        models = tuple(
            ModelSpec(
                settings=settings,
                seed=seed,
                model_dir=str(folder) if folder else None,
                run_dir=str(sockets) if sockets else None,
                host="127.0.0.1" if run.folder else None,
            )
            for settings, folder in zip(run.settings.each_model, folders, strict=True)
        )
        options = {
            "num_cpus": 0,
            "max_restarts": -1,
            "max_task_retries": -1,
            # On another node, the end of that node would end everything.
            "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False),
        }
        self._run = run
        supervisor = ray.remote(Supervisor).options(name=SUPERVISOR, **options)
        self._supervisor = supervisor.remote(make_rank, make_router, node)
        # The supervisor is not an argument: Ray could not restart a controller that holds its handle.
        controller = ray.remote(Controller).options(name=CONTROLLER, max_concurrency=100, **options)
        self._controller = controller.remote(ClusterSpec(models))
        self._running = self._controller.run.remote()

    def until_ready(self) -> ClusterStatus | None:
        """Wait until all replicas serve and the router listens; None: stopped meanwhile. Raises StartFailed."""
        run = self._run
        while not run.stopper.wait(POLL_S):
            status = self.status()
            run.console.progress(status)
            for replica in status.replicas:
                if replica.failures:
                    raise StartFailed(f"replica {replica.replica_id} could not start: {replica.last_error}")
            if status.router_error:
                raise StartFailed(f"the router could not start: {status.router_error}")
            if status.url and status.settled and self._all_routed(status, status.url):
                return status
        return None

    def _all_routed(self, status: ClusterStatus, url: str) -> bool:
        """Whether requests and events flow between the router and every replica.

        There may be none: an autoscaler with short delays removes replicas that get no requests.
        """
        view = get_json(f"{url}/cluster")
        if view["refused"]:
            raise StartFailed(f"the router refused a replica: {view['refused'][0]['message']}")
        feed = "live" if self._run.settings.events.publish_events else None
        joined = [r for r in view["replicas"] if r["state"] == "serving" and feed in (None, r["feed"])]
        wanted = sum(model.wanted for model in status.models)
        return len(joined) == wanted and (not wanted or is_ready(url))

    def status(self) -> ClusterStatus:
        """Ask the controller. Raises ClusterError when it has ended: nothing can be kept running without it."""
        import ray

        try:
            ended, _ = ray.wait([self._running], timeout=0)
            if ended:
                ray.get(ended[0])
            asked = self._controller.status.remote(self._run.console.last_notice)
            status: ClusterStatus = ray.get(asked, timeout=60)
        except ray.exceptions.RayError as error:
            reason = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            raise ClusterError(f"the controller has ended: {reason}") from error
        return status

    def stop(self) -> None:
        """Stop everything in order; what is left is killed when Ray ends."""
        import ray

        console = self._run.console
        console.farewell("stopping")
        try:
            ray.get(self._controller.stop.remote(), timeout=self._run.settings.cluster.stop_timeout_s)
        except ray.exceptions.RayError as error:
            console.farewell(f"  not stopped in order: {type(error).__name__}; killing what is left")
