"""`homing serve`: starts everything, prints the progress, runs until a signal arrives and leaves nothing behind.

The process is Ray's driver: everything that it started ends with it. The controller makes all decisions about replicas.
"""

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, NoReturn, TextIO

import msgspec
import psutil

from ...replica.disk.folder import cluster_seed
from ...replica.errors import DiskTierUnusable
from .. import local_ray
from ..client import get_json, is_ready
from ..config import Settings, state_folder
from ..control.autoscale import max_ranks
from ..control.compiled_kernels import start_compilation
from ..control.control_messages import CONTROLLER, SUPERVISOR, ClusterModel, ClusterStatus
from ..devices import resolve_devices
from ..errors import ClusterError, RayLost, SettingsError, StartFailed
from ..flags import NOTHING, AllSettings, Background, Detach, Out, Quiet, Words, option, settings_of
from ..host import check_extra, gpu_bytes, gpu_capability, visible_gpus
from ..logs import REQUESTS, LogTail
from ..model_source import find_model, has_chat_template, text_folder
from ..preflight import check_bounds, check_folder, check_front, check_gpus, check_keys, prepare
from ..registry import ClusterRegistry, ProcessMark, RegistryEntry, is_alive, kill, own_entry, wait_gone
from .console import Console, model_label, program
from .daemon import detach as start_in_background

POLL_S = 0.2
#: Interval of status queries to the controller while serving; each costs both processes milliseconds of CPU.
ASK_S = 1.0
#: Time for routers to end their streams with an error.
LAST_WORDS_S = 1.5
STATUS_TIMEOUT_S = 60.0


def serve(
    model: Annotated[
        str | None, option("Hugging Face name or local folder (default: the demo model that ships with the package)")
    ] = None,
    /,
    *,
    flags: AllSettings = NOTHING,
    out: Out,
    words: Words,
    detach: Detach = False,
    quiet: Quiet = False,
    background: Background = False,
) -> int:
    """Serve replicas, or route to the engines listed in the settings."""
    settings = settings_of(flags, model)
    if not (settings.router.backend or settings.router.engines):
        check_extra()
    if detach and not background:
        return start_in_background(settings, words, out)
    if settings.router.backend or settings.router.engines:
        from .route import route_to

        return route_to(settings, out, detached=background, quiet=quiet)
    return serve_replicas(settings, out, detached=background, quiet=quiet)


def serve_replicas(settings: Settings, out: TextIO, *, detached: bool, quiet: bool) -> int:
    """Serve until a signal arrives; returns the exit code. Raises ClusterError if it cannot start.

    `quiet`: do not print requests. In the background they are only logged, because the output file is not bounded.
    """
    settings = prepare(settings)
    if not settings.cluster.ray_address:
        settings = resolve_devices(settings, (float(visible_gpus()),))
    for each in settings.each_model:
        check_bounds(each, f"model {each.served_name}: " if settings.models else "")
    console = Console(out, program=program())
    console.print_opening(settings)
    registry, name = ClusterRegistry(state_folder(settings)), settings.cluster.name
    log = str(registry.log_path(name)) if detached else None
    models = ", ".join(model_label(each.served_name, each.replica.model) for each in settings.each_model)
    entry = own_entry(name, models, log)
    with registry.claim(entry):
        check_front(settings.router)
        local = not settings.cluster.ray_address  # otherwise each node locates the models
        folders = [_local_model(each) if local else None for each in settings.each_model]
        # Ray 2.60 prints a paragraph to `sys.stdout` for every killed worker, and no setting disables that.
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
            return ServeRun(settings, console, registry, entry).run(folders, detached=detached, quiet=quiet)


def _local_model(settings: Settings) -> Path:
    check_keys(settings.events)
    folder = find_model(settings.replica)
    check_folder(folder, settings)
    tool = shutil.which("nvidia-smi")
    check_gpus(folder, settings, gpu_bytes(tool), gpu_capability(tool))
    return folder


def _labels(status: ClusterStatus) -> str:
    return ", ".join(model_label(each.name, each.source) for each in status.models)


def _sources(status: ClusterStatus) -> tuple[tuple[str, str], ...]:
    return tuple((each.name, each.source) for each in status.models)


class Interrupted(KeyboardInterrupt):
    """A stop signal arrived while Ray was starting, when a graceful shutdown is not possible."""


class StopSignals:
    """Treats SIGINT, SIGTERM and a closed terminal (SIGHUP) as requests to stop.

    The handler runs in the main thread between any two of its instructions. It must not take a lock, as
    `threading.Event` does, because its own thread may hold it.
    """

    def __init__(self, first: Callable[[], None], second: Callable[[], object]) -> None:
        """The handler calls `first` for the first request and `second` for later ones."""
        self.number = 0  #: number of the first signal; 0: none has arrived
        self._first, self._second = first, second

    def catch(self) -> None:
        """Install the handlers. Call it in the main thread, and again after a library has replaced one of them."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            # Under nohup, closing the terminal has no effect. SIGINT is handled even if it was ignored, because shells
            # ignore it for background processes.
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._on_signal)

    def wait(self, seconds: float) -> bool:
        """Sleep, unless a signal has already arrived; returns whether one has."""
        if not self.number:
            time.sleep(seconds)
        return bool(self.number)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002 - the signature of a handler
        if self.number:
            self._second()
            return
        self.number = number
        self._first()


class ServeRun:
    """One run of `homing serve`: starts Ray, the supervisor and the controller, which start everything else."""

    def __init__(self, settings: Settings, console: Console, registry: ClusterRegistry, entry: RegistryEntry) -> None:
        self._settings = settings
        self._console = console
        self._registry = registry
        self._folder = None if settings.cluster.ray_address else local_ray.run_folder()
        self._entry = msgspec.structs.replace(entry, run_dir=str(self._folder) if self._folder else None)
        self._ray: dict[str, psutil.Process] = {}  #: essential processes of a local Ray, by name
        self._starting_ray = False
        self._compilers: list[subprocess.Popen[bytes] | None] = []
        self._signals = StopSignals(self._asked_to_stop, self._kill_all)

    def run(self, folders: Sequence[Path | None], *, detached: bool, quiet: bool) -> int:
        """Serve the models in these folders until a signal arrives; returns the exit code."""
        self._register()
        self._signals.catch()
        try:
            models = zip(self._settings.each_model, folders, strict=True)
            self._compilers = [start_compilation(each, folder) for each, folder in models if folder is not None]
            self._start_ray()
            self._start(folders)
            first = self._settings.each_model[0].replica
            chats = folders[0] is None or has_chat_template(text_folder(first, folders[0]))
            code = self._serve(detached=detached, quiet=quiet, chats=chats)
        except Interrupted:
            self._end_now(128 + self._signals.number)
        except RayLost as error:
            print(f"homing: {error}", file=sys.stderr)
            self._end_now(error.exit_code)
        except BaseException:
            self._shut_down_ray()
            raise
        self._shut_down_ray()
        return code

    def _register(self, **changes: Any) -> None:
        """Change the cluster's registry entry and write it."""
        self._entry = msgspec.structs.replace(self._entry, **changes)
        self._registry.write(self._entry)

    def _end_now(self, code: int) -> NoReturn:
        """Exit without Ray's own shutdown, which hangs or crashes if one of its processes is missing."""
        self._console.close()
        self._end_compilers()
        wait_gone(local_ray.children(), LAST_WORDS_S if self._ray else 0)
        local_ray.kill_children()
        self._registry.remove(self._entry.name)  # also removes the run folder
        sys.stderr.flush()
        os._exit(code)

    def _start_ray(self) -> None:
        address = self._settings.cluster.ray_address
        self._console.step("ray", f"joining {address}" if address else "starting a local cluster")
        self._starting_ray = True
        local_ray.start_local(self._settings, self._folder) if self._folder else local_ray.join(self._settings)
        self._starting_ray = False
        self._signals.catch()  # Ray takes over SIGTERM when it starts
        if self._signals.number:  # Ray may have swallowed the exception raised by the handler
            raise Interrupted
        if self._folder:
            self._ray = local_ray.local_processes()
        else:
            self._settings = resolve_devices(self._settings, local_ray.gpus_by_machine())
        self._register(
            ray_address=local_ray.address(),
            ray_token=local_ray.requires_token(),
            ray=tuple(ProcessMark.of(process) for process in self._ray.values()),
        )
        self._console.step("ray", "ready")

    def _shut_down_ray(self) -> None:
        try:
            with contextlib.suppress(BrokenPipeError):
                self._console.close()
            self._end_compilers()
            local_ray.leave(self._settings.cluster.stop_timeout_s / 4)
        finally:
            if self._folder:
                shutil.rmtree(self._folder, ignore_errors=True)  # Ray may still remove files in it

    def _end_compilers(self) -> None:
        """Kill the compilers: kernels that are not compiled yet are no longer needed."""
        for process in filter(None, self._compilers):
            process.kill()
            process.wait()

    def _asked_to_stop(self) -> None:
        if self._starting_ray:
            self._console.print_shutdown("stopping: Ray was still starting")
            raise Interrupted

    def _kill_all(self) -> NoReturn:
        local_ray.kill_children()
        self._registry.remove(self._entry.name)
        print("killed", file=sys.stderr)
        os._exit(130)

    def _serve(self, *, detached: bool, quiet: bool, chats: bool) -> int:
        try:
            status = self._until_ready()
            if status is None:
                return 128 + self._signals.number
            self._register(
                phase="ready", url=status.url or "", router_urls=status.router_urls, sources=_sources(status)
            )
            self._console.last_notice = max((notice.seq for notice in status.notices), default=0)
            self._console.banner(status, self._settings, detached=detached, chats=chats)
            requests = LogTail(self._registry.log_folder(self._entry.name)) if self._folder else None
            asked_at = time.monotonic()
            while not self._signals.wait(POLL_S):
                self._check_ray()
                if self._ray:
                    local_ray.reap_orphans({process.pid for process in self._ray.values()})
                if requests is not None and not (detached or quiet):
                    self._console.print_requests(requests.read(REQUESTS))
                if time.monotonic() < asked_at + ASK_S:
                    continue
                asked_at = time.monotonic()
                if status := self._status():
                    self._console.print_notices(status.notices)
                    if _sources(status) != self._entry.sources:  # an update has changed the models under these names
                        self._register(model=_labels(status), sources=_sources(status))
            return 0
        finally:
            self._register(phase="stopping")
            self._stop()

    def _start(self, folders: Sequence[Path | None]) -> None:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        from ..control.assembly import make_rank, make_router, prepare_rank, prepare_router
        from ..control.controller import Controller
        from ..control.supervisor import Supervisor

        node = ray.get_runtime_context().get_node_id()
        sockets = str(local_ray.sockets_folder(self._folder)) if self._folder else None
        seed, host = self._seed(), "127.0.0.1" if self._folder else None
        log_dir = str(self._registry.log_folder(self._entry.name)) if self._folder else None
        ranks = sum(max_ranks(each) for each in self._settings.each_model)
        models = tuple(
            ClusterModel(
                settings=each,
                seed=seed,
                model_dir=str(folder) if folder else None,
                run_dir=sockets,
                host=host,
                log_dir=log_dir,
                all_ranks=ranks,
            )
            for each, folder in zip(self._settings.each_model, folders, strict=True)
        )
        options = {
            "num_cpus": 0,
            "max_restarts": -1,
            "max_task_retries": -1,
            # On another node, the loss of that node would end the cluster.
            "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False),
        }
        supervisor = ray.remote(Supervisor).options(name=SUPERVISOR, **options)
        self._supervisor = supervisor.remote(make_rank, make_router, node, prepare_rank, prepare_router)
        # The supervisor is not passed as an argument: Ray cannot restart a controller that holds its handle.
        controller = ray.remote(Controller).options(name=CONTROLLER, max_concurrency=100, **options)
        self._controller = controller.remote(models)
        self._running = self._controller.run.remote()

    def _seed(self) -> int:
        """The seed of all block hashes. With blocks on disk it must be that of earlier starts, so it is kept there."""
        folders = [each.kvcache.disk_kv for each in self._settings.each_model if each.kvcache.disk_kv]
        try:
            return cluster_seed(*folders) if folders else secrets.randbits(64)
        except DiskTierUnusable as error:
            raise SettingsError(str(error)) from error

    def _until_ready(self) -> ClusterStatus | None:
        """Wait until all replicas serve and the router listens; None if stopped before. Raises StartFailed."""
        while not self._signals.wait(POLL_S):
            status = self._status()
            if status is None:
                break
            self._console.progress(status)
            for replica in status.replicas:
                if replica.failures:
                    raise StartFailed(f"replica {replica.replica_id} could not start: {replica.last_error}")
            if status.router_error:
                raise StartFailed(f"the router could not start: {status.router_error}")
            if status.url and status.settled and self._all_routed(status, status.url):
                return status
        return None

    def _all_routed(self, status: ClusterStatus, url: str) -> bool:
        """Whether requests and events flow between the router and every replica. Raises StartFailed.

        There may be no replica: an autoscaler with short delays removes replicas that get no requests.
        """
        view = get_json(f"{url}/cluster")
        if view["refused"]:
            raise StartFailed(f"the router refused a replica: {view['refused'][0]['message']}")
        feed = "live" if self._settings.events.publish_events else None
        joined = [r for r in view["replicas"] if r["state"] == "serving" and feed in (None, r["feed"])]
        wanted = sum(model.wanted for model in status.models)
        return len(joined) == wanted and (not wanted or is_ready(url))

    def _status(self) -> ClusterStatus | None:
        """Ask the controller for its status; None if stopped before it answers.

        Raises ClusterError if the controller has ended or does not answer, and RayLost.
        """
        import ray

        try:
            ended, _ = ray.wait([self._running], timeout=0)
            if ended:
                ray.get(ended[0])
            asked = self._controller.status.remote(self._console.last_notice)
            deadline = time.monotonic() + STATUS_TIMEOUT_S
            while not ray.wait([asked], timeout=POLL_S)[0]:
                self._check_ray()
                if self._signals.number:
                    return None
                if time.monotonic() > deadline:
                    raise ClusterError(f"the controller has not answered for {STATUS_TIMEOUT_S:g} s")
            status: ClusterStatus = ray.get(asked)
        except ray.exceptions.RayError as error:
            self._check_ray()
            reason = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            raise ClusterError(f"the controller has ended: {reason}") from error
        self._check_ray()
        return status

    def _check_ray(self) -> None:
        """Raise RayLost if a process of the local Ray has exited: Ray restarts none and needs all of them."""
        if lost := self._lost():
            raise RayLost(f"Ray's {lost[0]} (pid {self._ray[lost[0]].pid}) has exited, which ends this cluster")

    def _lost(self) -> list[str]:
        return [name for name, process in self._ray.items() if not is_alive(process)]

    def _stop(self) -> None:
        """Stop everything gracefully; remaining processes are killed when Ray shuts down."""
        import ray

        self._console.print_shutdown("stopping")
        if self._settings.cluster.log_level != "debug":
            local_ray.silence_native_stderr()
        if self._lost():  # Ray can make no calls now; without the raylet all others end, and routers end their streams
            kill([process for name, process in self._ray.items() if name == "raylet"])
            return
        try:
            ray.get(self._controller.stop.remote(), timeout=self._settings.cluster.stop_timeout_s * 3 / 4)
        except ray.exceptions.RayError as error:
            self._console.print_shutdown(f"  graceful stop failed: {type(error).__name__}; killing what remains")
