"""Ray for one `homing serve`: a local cluster of our own, taken down without a trace, or another one that is joined.

A local Ray keeps everything in one short temporary folder (a Unix socket's path ends at 107 bytes) and binds to
loopback. The only module that starts or stops Ray.
"""

import contextlib
import ctypes
import logging
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from .config import Settings
from .errors import ClusterError, DoesNotFit
from .host import DEFAULT_TOKEN
from .registry import wait_gone

#: Ray's own least; nothing of ours goes through its object store.
OBJECT_STORE_BYTES = 80 * 1024 * 1024
#: For a TCP connection to a head, which is near.
CONNECT_TIMEOUT_S = 10.0
PR_SET_CHILD_SUBREAPER = 36
#: For Ray and its children only: no statistics to its makers, loopback only, CUDA_VISIBLE_DEVICES left alone.
RAY_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_LOG_TO_DRIVER_EVENT_LEVEL": "ERROR",
    "TOKENIZERS_PARALLELISM": "false",
}


def run_folder() -> Path:
    """A new short folder for the sockets and files of one local cluster, which nobody else may enter.

    Ray opens its own folder, inside, and the sockets in it to everybody.
    """
    base = "/tmp" if Path("/tmp").is_dir() else None
    return Path(tempfile.mkdtemp(prefix="homing-", dir=base))


def sockets_folder(folder: Path) -> Path:
    """Where routers and ranks put sockets and shared files. It is made for all of them, as any may be the first."""
    sockets = folder / "s"
    sockets.mkdir(mode=0o700, exist_ok=True)
    return sockets


def start_local(settings: Settings, folder: Path) -> None:
    """Start a Ray of our own in `folder`. Logical CPUs are as many as our ranks want: they only steer placement."""
    os.environ.update(RAY_ENVIRONMENT)
    _outlive_the_raylet()
    _adopt_orphans()
    import ray

    cluster, ranks = settings.cluster, sum(each.ranks for each in settings.each_model)
    cpus = sum(each.ranks * each.cluster.cpus_per_rank for each in settings.each_model)
    with _groups_of_their_own():
        ray.init(
            num_cpus=max(os.cpu_count() or 1, int(cpus + 0.999) + 1),
            include_dashboard=False,
            object_store_memory=OBJECT_STORE_BYTES,
            log_to_driver=cluster.log_level == "debug",
            logging_level=logging.ERROR,
            namespace=f"homing-{cluster.name}",
            _temp_dir=str(folder / "ray"),
        )
    guard(DEFAULT_TOKEN)
    wanted = sum(each.ranks * each.cluster.gpus_per_rank for each in settings.each_model)
    there = ray.cluster_resources().get("GPU", 0.0)
    if wanted > there:
        raise DoesNotFit(f"{ranks} ranks want {wanted:g} GPUs together; here are {there:g}")


def join(settings: Settings) -> None:
    """Join the Ray cluster at `ray_address`. Raises ClusterError when nobody answers there or the token is refused."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    _outlive_the_raylet()
    import ray

    cluster = settings.cluster
    _check_answers(cluster.ray_address)
    try:
        ray.init(
            address=cluster.ray_address,
            log_to_driver=cluster.log_level == "debug",
            logging_level=logging.ERROR,
            namespace=f"homing-{cluster.name}",
        )
    except (ConnectionError, RuntimeError, ValueError, ray.exceptions.AuthenticationError) as error:
        raise ClusterError(f"cannot join the Ray cluster at {cluster.ray_address}: {_reason(error)}") from error


@contextlib.contextmanager
def visit(ray_address: str, name: str, *, ours: bool, token: bool) -> Iterator[None]:
    """Be a driver of a Ray cluster for a moment, to talk to what runs there: `ours` that of a local `homing serve`.

    `token`: it wants one. Raises ClusterError. Ray must not have been imported: it reads these variables then.
    """
    os.environ.update(RAY_ENVIRONMENT if ours else {"RAY_USAGE_STATS_ENABLED": "0"})
    if token:  # Ray shows one by itself where it starts a cluster or finds it, and not at an address
        os.environ.setdefault("RAY_AUTH_MODE", "token")
    import ray

    _check_answers(ray_address)
    # Ray prints to `sys.stdout` whatever its settings say.
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        try:
            ray.init(
                address=ray_address, log_to_driver=False, logging_level=logging.CRITICAL, namespace=f"homing-{name}"
            )
        except (ConnectionError, RuntimeError, ValueError, ray.exceptions.AuthenticationError) as error:
            raise ClusterError(f"cannot reach the Ray cluster at {ray_address}: {_reason(error)}") from error
        try:
            yield
        finally:
            ray.shutdown()


def wants_token() -> bool:
    """Whether the Ray cluster that this process is part of does: Ray notes it here when it finds a token by itself."""
    return os.environ.get("RAY_AUTH_MODE", "").lower() == "token"


def _reason(error: Exception) -> str:
    """Ray's words on one line. Where no token was shown it does not say that one may be missing."""
    words = " ".join(str(error).split())
    return words if wants_token() else f"{words}; if it wants a token: RAY_AUTH_MODE=token"


def guard(token: Path) -> None:
    """Let nobody else read the token that Ray makes, by default for everybody."""
    if token.is_file() and token.stat().st_uid == os.getuid():
        token.chmod(token.stat().st_mode & 0o700)


def address() -> str:
    """Where the Ray cluster is reached that this process is part of."""
    import ray

    found: str = ray.get_runtime_context().gcs_address
    return found


def leave(timeout_s: float) -> None:
    """Disconnect; a local Ray ends with us, and every process below this one is waited for, then killed."""
    import ray

    ours = children()
    ray.shutdown()
    wait_gone(ours, timeout_s)
    kill_children()


def children() -> list[psutil.Process]:
    """All processes below this one: orphans come to us, so nothing hides."""
    return psutil.Process().children(recursive=True)


def kill_children() -> None:
    """End whatever is still below this process."""
    for _ in range(20):  # a process that is killed may just have started another
        below = children()
        if not below:
            return
        for process in below:
            _kill(process)
        psutil.wait_procs(below, timeout=1)


def remove(folder: Path) -> None:
    """Remove the run folder; a file that another process removes at the same time is no error."""
    shutil.rmtree(folder, ignore_errors=True)


def _check_answers(address: str) -> None:
    """Ray itself takes over a minute to say that nobody is there. What is no host and port (auto) is left to it."""
    host, _, port = address.rpartition(":")
    if not port.isdigit() or "/" in host:
        return
    try:
        with socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_S):
            return
    except OSError as error:
        raise ClusterError(
            f"no Ray cluster answers at {address}: {error.strerror or error}; start one there with: ray start --head"
        ) from error


@contextlib.contextmanager
def _groups_of_their_own() -> Iterator[None]:
    """What Ray starts meanwhile is in process groups of its own: a signal to ours must not end it under the replicas.

    `timeout`, supervisors and shells signal whole groups. Ray 2.60 has no setting for it, so the class by which it
    starts processes is replaced for the time.
    """
    from ray._private import services

    before = services.ConsolePopen

    class Apart(before):  # type: ignore[misc, valid-type]
        def __init__(self, *words: Any, **how: Any) -> None:
            super().__init__(*words, **how, process_group=0)

    services.ConsolePopen = Apart
    try:
        yield
    finally:
        services.ConsolePopen = before


def _kill(process: psutil.Process) -> None:
    try:
        process.kill()
    except psutil.NoSuchProcess:
        return


def _outlive_the_raylet() -> None:
    """Let a broken connection to the raylet not end this process on the spot. Before Ray is imported.

    Ray 2.60 ends a process whose raylet is gone; whether it is, it tells in a driver by the parent process, and that of
    a detached `homing serve` is gone indeed: one in three ended while it shut down, and left Ray's helpers and folder.
    """
    os.environ["RAY_RAYLET_PID"] = str(os.getpid())


def _adopt_orphans() -> None:
    """Let Ray's workers fall to us when their raylet dies, so that they can be found and waited for (Linux only)."""
    libc = ctypes.CDLL(None, use_errno=True)
    if hasattr(libc, "prctl"):
        libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
