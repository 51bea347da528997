"""Ray for one `homing serve`: a local cluster that is removed without a trace, or an existing cluster that is joined.

A local Ray keeps everything in one short temporary folder (a Unix socket's path is limited to 107 bytes) and binds to
loopback. The only module that starts or stops Ray.
"""

import contextlib
import ctypes
import logging
import os
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

#: The smallest that Ray accepts; homing sends nothing through the object store.
OBJECT_STORE_BYTES = 80 * 1024 * 1024
#: For a TCP connection to the head.
CONNECT_TIMEOUT_S = 10.0
#: For each of Ray's own processes. Ray's default, 30 s, is not enough on two cores at a load average of 15.
RAY_START_TIMEOUT_S = 120.0
PR_SET_CHILD_SUBREAPER = 36
#: For Ray and its children only: no usage statistics, loopback only, CUDA_VISIBLE_DEVICES left alone.
RAY_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_LOG_TO_DRIVER_EVENT_LEVEL": "ERROR",
    "TOKENIZERS_PARALLELISM": "false",
}
#: For Ray on every machine, unless the operator has set them: what happens when memory runs out, and its priority.
#:
#: Ray 2.60's memory monitor looks at the whole machine. From 95 % on it kills actors until enough memory would be free:
#: first those that Ray can restart, which are our controller and supervisor of 0.05 GB each, then the newest. When
#: another program took the memory, the whole cluster ended. So it is off, and the kernel decides when memory has really
#: run out. Ray also asks the kernel to take workers before every other process of the machine; without that, the
#: largest process ends, ours or not. Of ours that is a rank, and a replica is rebuilt.
#:
#: Ray starts workers at niceness 15: beside a busy process of usual priority, a rank would get 3 % of a core.
NODE_ENVIRONMENT = {
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_worker_oom_score_adjustment": "0",
    "RAY_worker_niceness": "0",
}
#: For a local Ray, unless the operator has set it.
PATIENCE_ENVIRONMENT = {"RAY_gcs_server_port_wait_time_s": f"{RAY_START_TIMEOUT_S:.0f}"}


def run_folder() -> Path:
    """A new short, private folder for the sockets and files of one local cluster.

    Ray makes its own folder inside, and the sockets in it, accessible to everybody.
    """
    base = "/tmp" if Path("/tmp").is_dir() else None
    return Path(tempfile.mkdtemp(prefix=RUN_FOLDER_PREFIX, dir=base))


def sockets_folder(folder: Path) -> Path:
    """The folder for sockets and shared files of routers and ranks, created before any of them starts."""
    sockets = folder / "s"
    sockets.mkdir(mode=0o700, exist_ok=True)
    return sockets


def set_local_environment(environ: MutableMapping[str, str]) -> None:
    """Set what a local Ray reads when it is imported; an operator's own values of those that have a default stay."""
    for name, value in (NODE_ENVIRONMENT | PATIENCE_ENVIRONMENT).items():
        environ.setdefault(name, value)
    environ.update(RAY_ENVIRONMENT)


def start_local(settings: Settings, folder: Path) -> None:
    """Start a local Ray in `folder`. Logical CPUs are as many as the ranks need: they only steer placement.

    Raises DoesNotFit, and StartFailed when Ray's processes end or do not start in time, twice.
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
    """The GPUs of each machine of the Ray cluster that is connected."""
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
    """Connect to a Ray cluster while the body runs; `ours`: one that a local `homing serve` started.

    `token`: the Ray cluster requires one. Raises ClusterError. Ray must not have been imported before: it reads these
    variables at import.
    """
    os.environ.update(RAY_ENVIRONMENT if ours else {"RAY_USAGE_STATS_ENABLED": "0"})
    if token:  # Ray sends one by itself where it starts or finds a cluster, but not to a given address
        os.environ.setdefault("RAY_AUTH_MODE", "token")
    # Ray prints to `sys.stdout` whatever its settings say.
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
    """Whether the Ray cluster of this process requires a token: Ray sets the variable when it finds one by itself."""
    return os.environ.get("RAY_AUTH_MODE", "").lower() == "token"


def make_token_private(token: Path) -> None:
    """Remove others' rights to the token file; Ray creates it readable by everybody."""
    if token.is_file() and token.stat().st_uid == os.getuid():
        token.chmod(token.stat().st_mode & 0o700)


def address() -> str:
    import ray

    found: str = ray.get_runtime_context().gcs_address
    return found


def local_processes() -> dict[str, psutil.Process]:
    """By Ray's names (raylet, gcs_server), the processes of the local Ray that `start_local` has started."""
    from ray._private import worker

    node = worker._global_node
    found = {} if node is None else node.all_processes
    return {name: psutil.Process(each[0].process.pid) for name, each in found.items() if each}


def leave(timeout_s: float) -> None:
    """Disconnect. A local Ray ends with this process: wait for all processes below, then kill them."""
    import ray

    ours = children()
    ray.shutdown()
    wait_gone(ours, timeout_s)
    kill_children()


def silence_native_stderr() -> None:
    """Discard what libraries write to the descriptor of standard error from now on; Python's own `sys.stderr` stays.

    At its end Ray's C++ part writes lines there, about calls that nobody waits for any more.
    """
    sys.stderr.flush()
    kept = os.dup(2)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    sys.stderr = open(kept, "w", buffering=1)  # noqa: SIM115 - for the rest of the process


def reap_orphans(ours: Collection[int]) -> None:
    """Take note of processes that have ended after their parent had, and became children of this one.

    `ours`: ids of those that others wait for; while one of these is ended, nothing else is reaped.
    """
    with contextlib.suppress(ChildProcessError):
        while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            if ended.si_pid in ours:
                return
            os.waitpid(ended.si_pid, os.WNOHANG)


def children() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


def kill_children() -> None:
    for _ in range(20):  # a process that is killed may just have started another
        below = children()
        if not below:
            return
        for process in below:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(below, timeout=1)


def _check_answers(address: str) -> None:
    """Fail at once where Ray would retry for over a minute. An address that is not host:port (auto) is not checked."""
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
def _replaced(owner: Any, **attributes: Any) -> Iterator[None]:
    """Give attributes of Ray's own other values while the body runs, for what Ray 2.60 has no setting for."""
    originals = {name: getattr(owner, name) for name in attributes}
    for name, value in attributes.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(owner, name, original)


def _start_ray(folder: Path, options: dict[str, Any], *, follow_logs: bool) -> None:
    """Raises StartFailed with what the raylet wrote last; then nothing of this start is left but its folder."""
    import ray

    started: list[subprocess.Popen[bytes]] = []
    try:
        with _own_process_groups(started), _without_unused_processes(follow_logs=follow_logs), patient_start(started):
            ray.init(**options, _temp_dir=str(folder))
    except StartFailed as error:
        told = _last_lines(folder / "session_latest" / "logs" / "raylet.out")
        _end(started)
        ray.shutdown()
        raise StartFailed(f"{error}; {told}") from error


def _last_lines(log_file: Path, count: int = 3) -> str:
    try:
        return " | ".join(log_file.read_text(errors="replace").splitlines()[-count:]) or "its raylet wrote nothing"
    except OSError as error:
        return f"its raylet left no log: {error.strerror}"


def _end(processes: Collection["subprocess.Popen[bytes]"]) -> None:
    """Kill what a failed start has left; Ray does not."""
    for process in processes:
        below = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        process.kill()
        process.wait()
        for each in below:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()


def _own_process_groups(started: list["subprocess.Popen[bytes]"]) -> AbstractContextManager[None]:
    """Start Ray's processes in process groups of their own: a signal to our group must not end them under the replicas.

    `timeout`, supervisors and shells signal whole groups. `started`: receives the processes.
    """
    from ray._private import services

    class OwnGroup(services.ConsolePopen):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs, process_group=0)
            started.append(self)

    return _replaced(services, ConsolePopen=OwnGroup)


def patient_start(
    started: Collection["subprocess.Popen[bytes]"] = (), timeout_s: float = RAY_START_TIMEOUT_S
) -> AbstractContextManager[None]:
    """Let the raylet take `timeout_s` to start, in place of 30 s. Raises StartFailed after it.

    Also raised as soon as one of `started`, Ray's processes, has ended.
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
                    raise StartFailed(f"Ray's {name} ended with exit code {ended[0].returncode}") from error
                if time.monotonic() > deadline:
                    raise StartFailed(f"Ray's processes have not started within {timeout_s:g} s") from error
                time.sleep(0.1)

    return _replaced(services, get_node=wait_for_node)


def _without_unused_processes(*, follow_logs: bool) -> AbstractContextManager[None]:
    """Start neither Ray's autoscaler nor its dashboard, nor what follows log files unless they are followed.

    They take a second of CPU each while a cluster starts. The dashboard's process is started also with
    `include_dashboard=False`.
    """
    from ray._private.node import Node

    names = ["start_monitor", "start_api_server", *([] if follow_logs else ["start_log_monitor"])]
    return _replaced(Node, **dict.fromkeys(names, lambda _node, **_options: None))


def _survive_raylet_exit() -> None:
    """Keep Ray from ending this process as soon as its connection to the raylet breaks. Call before importing Ray.

    Ray 2.60 ends a process whose raylet has ended; a driver checks that by its parent process, and the parent of a
    detached `homing serve` has ended: one in three was killed while it shut down, and left Ray's helpers and folder.
    """
    os.environ["RAY_RAYLET_PID"] = str(os.getpid())


def _adopt_orphans() -> None:
    """Become the parent of Ray's workers when their raylet dies, so that they can be waited for."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
