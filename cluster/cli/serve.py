"""`homing serve`: build everything, tell how it goes, stay until told to stop, and leave nothing behind.

The process is Ray's driver: whatever it started ends with it. Decides nothing about replicas; the controller does.
"""

import contextlib
import os
import secrets
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

import msgspec

from ...router.errors import KeysFileInvalid
from ...router.tenants.api_keys import read_tenants
from .. import local_ray
from ..config import Settings, state_folder
from ..control.control_messages import CONTROLLER, SUPERVISOR, ClusterSpec, ClusterStatus, ModelSpec
from ..errors import ClusterError, SettingsError, StartFailed
from ..model_source import find_model
from ..preflight import check_bounds, check_folder, check_front
from ..registry import ClusterRegistry, RegistryEntry, own_entry
from .client import get_json, is_ready
from .console import Console, program
from .keys import check_keys

POLL_S = 0.2


class Stopper:
    """Turns SIGINT and SIGTERM into a wish to stop; the second one does not wait for anybody."""

    def __init__(self, at_once: Any) -> None:
        """`at_once` is called by the second signal and does not return."""
        self._wish = threading.Event()
        self._at_once = at_once

    def install(self) -> None:
        """Take over both signals. Ray takes SIGTERM when it starts, so this is called again afterwards."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)

    def wait(self, seconds: float) -> bool:
        """Whether to stop, within so many seconds."""
        return self._wish.wait(seconds)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002 - the signature of signal
        if self._wish.is_set():
            self._at_once()
        self._wish.set()


@dataclass(slots=True)
class Run:
    """One `homing serve` while it runs."""

    settings: Settings
    console: Console
    stopper: Stopper
    registry: ClusterRegistry
    entry: RegistryEntry
    folder: Path | None  #: of a local Ray
    detached: bool
    controller: Any = None
    supervisor: Any = None


def serve(settings: Settings, out: TextIO, *, detached: bool = False) -> int:
    """Serve until a signal; returns the exit code. Raises ClusterError when it cannot start."""
    settings = prepared(settings)
    for each in settings.each_model:
        check_bounds(each, f"model {each.served_name}: " if settings.models else "")
    console = Console(out, program=program())
    console.opening(settings)
    registry = ClusterRegistry(state_folder(settings))
    name = settings.cluster.name
    log = str(registry.log_path(name)) if detached else None
    entry = own_entry(name, ", ".join(each.replica.model for each in settings.each_model), log)
    with registry.claim(entry):
        check_front(settings.router)
        here = not settings.cluster.ray_address
        folders = [_local_model(each) if here else None for each in settings.each_model]
        with _silenced(), _ray(settings, console, registry, entry, detached) as run:
            return _serve(run, folders)


def _local_model(settings: Settings) -> Path:
    """The model's folder, where this node is all there is: each node of a joined cluster finds its own."""
    check_keys(settings.events)
    folder = find_model(settings.replica)
    check_folder(folder, settings)
    return folder


@contextlib.contextmanager
def _silenced() -> Iterator[None]:
    """Ray 2.60 prints a paragraph to `sys.stdout` about every killed worker, whatever its settings say."""
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        yield


@contextlib.contextmanager
def _ray(
    settings: Settings, console: Console, registry: ClusterRegistry, entry: RegistryEntry, detached: bool
) -> Iterator[Run]:
    address = settings.cluster.ray_address
    folder = None if address else local_ray.run_folder()
    entry = msgspec.structs.replace(entry, run_dir=str(folder) if folder else None)
    registry.write(entry)
    stopper = Stopper(lambda: _abandon(registry, entry))
    stopper.install()
    try:
        console.step("ray", f"joining {address}" if address else "starting a local cluster")
        local_ray.join(settings) if address else local_ray.start_local(settings, _present(folder))
        stopper.install()
        entry = msgspec.structs.replace(entry, ray_address=local_ray.address(), ray_token=local_ray.wants_token())
        console.step("ray", "ready")
        yield Run(settings, console, stopper, registry, entry, folder, detached)
    finally:
        local_ray.leave(settings.cluster.stop_timeout_s)
        if folder:
            local_ray.remove(folder)


def _serve(run: Run, folders: Sequence[Path | None]) -> int:
    run.controller, running = _start_controller(run, folders)
    try:
        status = _until_ready(run, running)
        if status is None:
            return 0
        url = status.url or ""
        run.entry = msgspec.structs.replace(run.entry, phase="ready", url=url, router_urls=status.router_urls)
        run.registry.write(run.entry)
        run.console.last_notice = max((notice.seq for notice in status.notices), default=0)
        run.console.banner(status, run.settings, detached=run.detached)
        return _stay(run, running)
    finally:
        run.registry.write(msgspec.structs.replace(run.entry, phase="stopping"))
        _take_down(run)


def prepared(settings: Settings) -> Settings:
    """Settings as all parts of a cluster can take them: each model has a name. Raises SettingsError."""
    models = tuple(with_api_keys(each) for each in settings.models)
    return msgspec.structs.replace(with_api_keys(named(settings)), models=models)


def with_api_keys(settings: Settings) -> Settings:
    """The keys file by its whole path, as the router may run in another folder. Raises SettingsError."""
    path = settings.router.api_keys_file
    if not path:
        return settings
    try:
        read_tenants(path)
    except KeysFileInvalid as error:
        raise SettingsError(f"api_keys_file: {error.message}") from error
    router = msgspec.structs.replace(settings.router, api_keys_file=str(Path(path).expanduser().absolute()))
    return msgspec.structs.replace(settings, router=router)


def named(settings: Settings) -> Settings:
    """Settings in which the model has the name that requests use: by default, of a folder, its last part."""
    if settings.served_name or settings.models:
        return settings
    folder = Path(settings.replica.model).expanduser()
    name = folder.resolve().name if folder.is_dir() else settings.replica.model
    router = msgspec.structs.replace(settings.router, served_model_name=name)
    return msgspec.structs.replace(settings, router=router)


def _start_controller(run: Run, folders: Sequence[Path | None]) -> tuple[Any, Any]:
    """The supervisor and the controller; what keeps the cluster running, which never ends while all is well."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from ..control.assembly import make_rank, make_router
    from ..control.controller import Controller
    from ..control.supervisor import Supervisor

    node = ray.get_runtime_context().get_node_id()
    sockets = local_ray.sockets_folder(run.folder) if run.folder else None
    seed = secrets.randbits(64)
    models = [
        ModelSpec(
            settings=settings,
            seed=seed,
            model_dir=str(folder) if folder else None,
            run_dir=str(sockets) if sockets else None,
            host="127.0.0.1" if run.folder else None,
        )
        for settings, folder in zip(run.settings.each_model, folders, strict=True)
    ]
    here = NodeAffinitySchedulingStrategy(node, soft=False)  # elsewhere the end of that node would end all
    supervisor = ray.remote(Supervisor).options(
        name=SUPERVISOR, num_cpus=0, max_restarts=-1, max_task_retries=-1, scheduling_strategy=here
    )
    run.supervisor = supervisor.remote(make_rank, make_router, node)
    controller = ray.remote(Controller).options(
        name=CONTROLLER,
        num_cpus=0,
        max_concurrency=100,
        max_restarts=-1,
        max_task_retries=-1,
        scheduling_strategy=here,
    )
    # Without the supervisor's handle among the arguments: Ray could not start a controller anew that has one.
    run.controller = controller.remote(ClusterSpec(tuple(models)))
    return run.controller, run.controller.run.remote()


def _until_ready(run: Run, running: Any) -> ClusterStatus | None:
    """Wait until every replica serves and the router listens; None: told to stop. Raises StartFailed."""
    while not run.stopper.wait(POLL_S):
        status = _status(run, running)
        run.console.progress(status)
        for group in status.replicas:
            if group.failures:
                raise StartFailed(f"replica {group.replica_id} could not start: {group.last_error}")
        if status.router_error:
            raise StartFailed(f"the router could not start: {status.router_error}")
        if status.url and status.settled and _all_routed(run, status, status.url):
            return status
    return None


def _all_routed(run: Run, status: ClusterStatus, url: str) -> bool:
    """Whether requests and events flow between the router and every replica, and the router can read requests.

    There may be none: an autoscaler that is quick to go down takes away what nobody asks for.
    """
    view = get_json(f"{url}/cluster")
    if view["refused"]:
        raise StartFailed(f"the router refused a replica: {view['refused'][0]['message']}")
    feed = "live" if run.settings.events.publish_events else None
    joined = [r for r in view["replicas"] if r["state"] == "serving" and feed in (None, r["feed"])]
    wanted = sum(model.wanted for model in status.models)
    return len(joined) == wanted and (not wanted or is_ready(url))


def _stay(run: Run, running: Any) -> int:
    while not run.stopper.wait(POLL_S):
        run.console.happened(_status(run, running).notices)
    return 0


def _status(run: Run, running: Any) -> ClusterStatus:
    """Ask the controller. Raises ClusterError when it is gone: nothing can be kept alive without it."""
    import ray

    try:
        ended, _ = ray.wait([running], timeout=0)
        if ended:
            ray.get(ended[0])
        status: ClusterStatus = ray.get(run.controller.status.remote(run.console.last_notice), timeout=60)
    except ray.exceptions.RayError as error:
        raise ClusterError(f"the controller is gone: {type(error).__name__}: {str(error).splitlines()[0]}") from error
    return status


def _take_down(run: Run) -> None:
    import ray

    run.console.farewell("stopping")
    try:
        ray.get(run.controller.stop.remote(), timeout=run.settings.cluster.stop_timeout_s)
    except ray.exceptions.RayError as error:
        run.console.farewell(f"  not in good order: {type(error).__name__}; killing what is left")


def _abandon(registry: ClusterRegistry, entry: RegistryEntry) -> None:
    """The second Ctrl-C: nobody is asked, nothing is left."""
    local_ray.kill_children()
    registry.sweep(entry.name)
    print("killed", file=sys.stderr)
    os._exit(130)


def _present(folder: Path | None) -> Path:
    assert folder is not None, "a local Ray without a folder"
    return folder
