"""Ray for one `homing serve`: starts a local cluster and removes every trace of it, or joins an existing cluster.

A local Ray keeps everything in one temporary folder with a short path (socket paths are limited to 107 bytes) and binds
to loopback. This is the only module that starts or stops Ray.
"""

import contextlib
import ctypes
import logging
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, MutableMapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import psutil

from .config import Settings
from .errors import ClusterError, DoesNotFit, StartFailed
from .host import DEFAULT_TOKEN
from .registry import RUN_FOLDER_PREFIX, wait_gone

log = logging.getLogger(__name__)

#: The smallest size that Ray accepts; homing sends nothing through the object store.
OBJECT_STORE_BYTES = 80 * 1024 * 1024
#: Begins the stack trace in a log of Ray's.
STACK_TRACE = "*** StackTrace Information ***"
#: Timeout of a TCP connection to the head node.
CONNECT_TIMEOUT_S = 10.0
#: Start timeout of each of Ray's processes. Ray's default, 30 s, is too short on two cores at a load average of 15.
RAY_START_TIMEOUT_S = 120.0
PR_SET_CHILD_SUBREAPER = 36
#: The raylet's options with the commands of its agents, and the names of the ports that these listen on.
AGENT_COMMANDS = ("--dashboard_agent_command=", "--runtime_env_agent_command=")
AGENT_PORTS = ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port", "runtime_env_agent_port")
#: Set for Ray and its children only: no usage statistics, loopback only, CUDA_VISIBLE_DEVICES unchanged.
RAY_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_LOG_TO_DRIVER_EVENT_LEVEL": "ERROR",
    "TOKENIZERS_PARALLELISM": "false",
}
#: Out-of-memory behaviour and priority of Ray's processes on every machine, unless the operator has set them.
#:
#: Ray 2.60's memory monitor measures the whole machine. Above 95 % it kills actors until enough memory would be free:
#: first those that Ray can restart, which are our controller and supervisor of 0.05 GB each, then the newest. When
#: another program used up the memory, this ended the whole cluster. The monitor is therefore off, and the kernel acts
#: when memory really runs out. Ray also makes the kernel kill workers before any other process; with that off, the
#: kernel kills the largest process, ours or not. Our largest is a rank, in which case the replica is restarted.
#:
#: Ray starts workers at niceness 15; next to a busy process of normal priority, a rank would get 3 % of a core.
NODE_ENVIRONMENT = {
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_worker_oom_score_adjustment": "0",
    "RAY_worker_niceness": "0",
}
#: Set for a local Ray, unless the operator has set it.
PATIENCE_ENVIRONMENT = {"RAY_gcs_server_port_wait_time_s": f"{RAY_START_TIMEOUT_S:.0f}"}


def run_folder() -> Path:
    """Create a private folder with a short path for the sockets and files of one local cluster.

    Privacy matters because Ray makes its own folder inside it, with its sockets, accessible to every user.
    """
    base = "/tmp" if Path("/tmp").is_dir() else None
    return Path(tempfile.mkdtemp(prefix=RUN_FOLDER_PREFIX, dir=base))


def sockets_folder(folder: Path) -> Path:
    """Create the folder for the sockets and shared files of routers and ranks, before any of them starts."""
    sockets = folder / "s"
    sockets.mkdir(mode=0o700, exist_ok=True)
    return sockets


def set_local_environment(environ: MutableMapping[str, str]) -> None:
    """Set the variables that a local Ray reads at import. An operator's values for our defaults are kept."""
    for name, value in (NODE_ENVIRONMENT | PATIENCE_ENVIRONMENT).items():
        environ.setdefault(name, value)
    environ.update(RAY_ENVIRONMENT)


def start_local(settings: Settings, folder: Path) -> None:
    """Start a local Ray in `folder`, with at least as many logical CPUs as the ranks need; they affect placement only.

    Raises DoesNotFit, and StartFailed when Ray's processes exit or do not start in time twice in a row.
    """
    set_local_environment(os.environ)
    _survive_raylet_exit()
    _adopt_orphans()
    import ray

    ranks = sum(each.ranks for each in settings.each_model)
    cpus = sum(each.ranks * each.cluster.cpus_per_rank for each in settings.each_model)
    debug = settings.cluster.log_level == "debug"
    options = {
        "num_cpus": max(os.cpu_count() or 1, int(cpus + 0.999) + 1),
        "include_dashboard": False,
        "object_store_memory": OBJECT_STORE_BYTES,
        "log_to_driver": debug,
        "logging_level": logging.ERROR,
        "namespace": f"homing-{settings.cluster.name}",
    }
    try:
        _start_ray(folder / "ray", options, follow_logs=debug)
    except StartFailed as error:
        log.warning("ray_starts_again reason=%r", str(error))
        _start_ray(folder / "ray", options, follow_logs=debug)
    make_token_private(DEFAULT_TOKEN)
    needed = sum(each.ranks * each.cluster.gpus_per_rank for each in settings.each_model)
    available = ray.cluster_resources().get("GPU", 0.0)
    if needed > available:
        raise DoesNotFit(f"{ranks} ranks need {needed:g} GPUs; this machine has {available:g}")


def gpus_by_machine() -> tuple[float, ...]:
    """Return the number of GPUs of each machine in the connected Ray cluster."""
    import ray

    return tuple(node["Resources"].get("GPU", 0.0) for node in ray.nodes() if node["Alive"])


def join(settings: Settings) -> None:
    """Join the Ray cluster at `ray_address`. Raises ClusterError when it does not answer or refuses the token."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    _survive_raylet_exit()
    cluster = settings.cluster
    _connect(cluster.ray_address, cluster.name, "join", debug=cluster.log_level == "debug", level=logging.ERROR)


@contextlib.contextmanager
def visit(ray_address: str, name: str, *, ours: bool, token: bool) -> Iterator[None]:
    """Connect to a Ray cluster while the body runs. `ours`: a local `homing serve` started it.

    `token`: the Ray cluster requires one. Ray must not have been imported before, as it reads the environment variables
    at import. Raises ClusterError.
    """
    os.environ.update(RAY_ENVIRONMENT if ours else {"RAY_USAGE_STATS_ENABLED": "0"})
    if token:  # Ray sends a token to a cluster that it started or found, but not to a given address
        os.environ.setdefault("RAY_AUTH_MODE", "token")
    # Ray prints to `sys.stdout` regardless of its settings.
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        _connect(ray_address, name, "reach", debug=False, level=logging.CRITICAL)
        import ray

        try:
            yield
        finally:
            ray.shutdown()


def _connect(address: str, name: str, verb: str, *, debug: bool, level: int) -> None:
    import ray

    _check_answers(address)
    try:
        ray.init(address=address, log_to_driver=debug, logging_level=level, namespace=f"homing-{name}")
    except (ConnectionError, RuntimeError, ValueError, ray.exceptions.AuthenticationError) as error:
        reason = " ".join(str(error).split())
        hint = "" if requires_token() else "; if it requires a token: RAY_AUTH_MODE=token"
        raise ClusterError(f"cannot {verb} the Ray cluster at {address}: {reason}{hint}") from error


def requires_token() -> bool:
    """Return whether this process's Ray cluster requires a token: Ray sets the variable when it finds a token file."""
    return os.environ.get("RAY_AUTH_MODE", "").lower() == "token"


def make_token_private(token: Path) -> None:
    """Remove other users' access to the token file, which Ray creates world-readable."""
    if token.is_file() and token.stat().st_uid == os.getuid():
        token.chmod(token.stat().st_mode & 0o700)


def address() -> str:
    import ray

    found: str = ray.get_runtime_context().gcs_address
    return found


def local_processes() -> dict[str, psutil.Process]:
    """Return the processes of the local Ray that `start_local` started, by Ray's names (raylet, gcs_server)."""
    from ray._private import worker

    node = worker._global_node
    found = {} if node is None else node.all_processes
    return {name: psutil.Process(each[0].process.pid) for name, each in found.items() if each}


def leave(timeout_s: float) -> None:
    """Disconnect. A local Ray ends with this process: wait for all descendants, then kill the remaining ones."""
    import ray

    ours = children()
    try:
        ray.shutdown()
    finally:  # with the log level `debug`, Ray prints as it ends, which fails if the terminal has been closed
        wait_gone(ours, timeout_s)
        kill_children()


def silence_native_stderr() -> None:
    """Discard what native code writes to standard error from now on; Python's `sys.stderr` still works.

    When it exits, Ray's C++ part writes messages there about calls that are no longer awaited.
    """
    sys.stderr.flush()
    kept = os.dup(2)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    sys.stderr = open(kept, "w", buffering=1)  # noqa: SIM115 - used until the process exits


def reap_orphans(ours: Collection[int]) -> None:
    """Reap ended processes whose parents ended before them, so that this process adopted them.

    `ours`: ids of processes for which other code waits; while one of these has ended unreaped, nothing else is reaped.
    """
    with contextlib.suppress(ChildProcessError):
        while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            if ended.si_pid in ours:
                return
            os.waitpid(ended.si_pid, os.WNOHANG)


def children() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


def kill_children() -> None:
    for _ in range(20):  # a process may start another one just before it is killed
        below = children()
        if not below:
            return
        for process in below:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(below, timeout=1)


def _check_answers(address: str) -> None:
    """Fail at once, where Ray would retry for over a minute. Addresses other than host:port (auto) are not checked."""
    host, _, port = address.rpartition(":")
    if not port.isdigit() or "/" in host:
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_S).close()
    except OSError as error:
        raise ClusterError(
            f"no Ray cluster answers at {address}: {error.strerror or error}; start one there with: ray start --head"
        ) from error


@contextlib.contextmanager
def _patched(owner: Any, **attributes: Any) -> Iterator[None]:
    """Patch attributes of Ray's modules while the body runs, for behaviour that Ray 2.60 has no setting for."""
    originals = {name: getattr(owner, name) for name in attributes}
    for name, value in attributes.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(owner, name, original)


def _start_ray(folder: Path, options: dict[str, Any], *, follow_logs: bool) -> None:
    """Start Ray. Raises StartFailed with the raylet's last log lines; only the folder is then left of this start."""
    import ray

    started: list[subprocess.Popen[bytes]] = []
    try:
        with _own_process_groups(started), _without_unused_processes(follow_logs=follow_logs), patient_start(started):
            ray.init(**options, _temp_dir=str(folder))
    except StartFailed as error:
        log_lines = _last_lines(folder / "session_latest" / "logs" / "raylet.out")
        _end(started)
        ray.shutdown()
        raise StartFailed(f"{error}; {log_lines}") from error


def _last_lines(log_file: Path, count: int = 3) -> str:
    """The last lines of a log of Ray's. After a failed check, the cause is followed by a C++ stack trace."""
    try:
        lines = log_file.read_text(errors="replace").partition(STACK_TRACE)[0].splitlines()
    except OSError as error:
        return f"no raylet log: {error.strerror}"
    return " | ".join(lines[-count:]) or "the raylet's log is empty"


def _end(processes: Collection["subprocess.Popen[bytes]"]) -> None:
    """Kill the processes that a failed start left behind; Ray does not."""
    for process in processes:
        below = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        process.kill()
        process.wait()
        for each in below:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()


def _own_process_groups(started: list["subprocess.Popen[bytes]"]) -> AbstractContextManager[None]:
    """Start Ray's processes in separate process groups, so that a signal to ours does not end them before the replicas.

    `timeout`, supervisors and shells signal whole groups. The processes are appended to `started`.
    """
    from ray._private import services

    class OwnGroup(services.ConsolePopen):  # type: ignore[misc]
        def __init__(self, words: list[str], **kwargs: Any) -> None:
            super().__init__(_without_agents(words), **kwargs, process_group=0)
            started.append(self)

    return _patched(services, ConsolePopen=OwnGroup)


def _without_agents(words: list[str]) -> list[str]:
    """Ray's command for a raylet without the programs of its two agents; other commands unchanged.

    When an agent dies, the raylet of Ray 2.60 kills its workers and exits: every stream would break. homing uses
    neither agent (dashboard and metrics; runtime environments), and each takes 90 MB and a second of CPU time. The
    raylet accepts no empty command, so in their place it starts `cat`, which does nothing until the raylet closes its
    standard input. The raylet also waits for the agents' ports; -1 says that a service is not in use.
    """
    idle = shutil.which("cat")
    if idle is None or not any(word.startswith(AGENT_COMMANDS) for word in words):
        return words
    from ray._raylet import persist_port  # type: ignore[attr-defined]  # compiled

    options = dict(word.removeprefix("--").split("=", 1) for word in words if "=" in word)
    for name in AGENT_PORTS:
        persist_port(options["session_dir"], options["node_id"], name, -1)
    return [f"{word.split('=', 1)[0]}={idle}" if word.startswith(AGENT_COMMANDS) else word for word in words]


def patient_start(
    started: Collection["subprocess.Popen[bytes]"] = (), timeout_s: float = RAY_START_TIMEOUT_S
) -> AbstractContextManager[None]:
    """Let the raylet take up to `timeout_s` to start, instead of 30 s.

    Raises StartFailed after that time, or as soon as one of Ray's processes in `started` has exited.
    """
    from ray._private import services

    original = services.get_node
    deadline = time.monotonic() + timeout_s

    def wait_for_node(gcs_address: str, node_id: str) -> dict[str, Any]:
        while True:
            try:
                node: dict[str, Any] = original(gcs_address, node_id)
                return node
            except RuntimeError as error:  # not registered yet
                ended = [process for process in started if process.poll() is not None]
                if ended:
                    words = ended[0].args
                    name = Path(str(words[0] if isinstance(words, list) else words)).name
                    raise StartFailed(f"Ray's {name} exited with code {ended[0].returncode}") from error
                if time.monotonic() > deadline:
                    raise StartFailed(f"Ray's processes did not start within {timeout_s:g} s") from error
                time.sleep(0.1)

    return _patched(services, get_node=wait_for_node)


def _without_unused_processes(*, follow_logs: bool) -> AbstractContextManager[None]:
    """Do not start Ray's autoscaler and dashboard, nor its log monitor unless logs are followed.

    Each takes a second of CPU time while a cluster starts. Ray starts the dashboard's process even with
    `include_dashboard=False`.
    """
    from ray._private.node import Node

    names = ["start_monitor", "start_api_server", *([] if follow_logs else ["start_log_monitor"])]
    return _patched(Node, **dict.fromkeys(names, lambda _node, **_options: None))


def _survive_raylet_exit() -> None:
    """Keep Ray from ending this process as soon as its connection to the raylet breaks. Call it before importing Ray.

    Ray 2.60 ends a process whose raylet has ended; a driver checks its parent process instead, and the parent of a
    detached `homing serve` has ended. One in three was killed during shutdown, leaving Ray's helpers and folder behind.
    """
    os.environ["RAY_RAYLET_PID"] = str(os.getpid())


def _adopt_orphans() -> None:
    """Adopt Ray's workers when their raylet dies, so that this process can wait for them."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
