"""A Ray cluster of two nodes on this machine, started independently of homing, for `homing serve --ray-address`."""

import contextlib
import os
import random
import secrets
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import ray

from homing.cluster.local_ray import NODE_ENVIRONMENT
from homing.cluster.registry import wait_gone

from .parent_death import end_with_us
from .running import until

RAY = [sys.executable, "-P", "-c", "from ray.scripts.scripts import main; main()"]


@dataclass
class Nodes:
    """A Ray cluster of two nodes on this machine, with token authentication."""

    address: str
    environment: dict[str, str]
    processes: list["subprocess.Popen[bytes]"]

    def alive(self) -> int:
        """Number of alive nodes in Ray's control store, queried by a new process; 0 when the query fails."""
        ask = "import ray, sys; ray.init(sys.argv[1]); print(sum(node['Alive'] for node in ray.nodes()))"
        command = [sys.executable, "-P", "-c", ask, self.address]
        try:
            done = subprocess.run(
                command, env=os.environ | self.environment, capture_output=True, text=True, timeout=60
            )
        except subprocess.TimeoutExpired:
            return 0
        ended = [process.returncode for process in self.processes if process.poll() is not None]
        assert not ended, f"ray start exited with {ended}"
        return int(done.stdout) if done.returncode == 0 else 0


@contextlib.contextmanager
def two_nodes() -> Iterator[Nodes]:
    """Start a head and a worker node with room for one replica each, and stop them by process id at the end.

    `ray stop` would stop every Ray on the machine. Ray 2.60 has two nodes on loopback only if the driver is told, too.
    """
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as folder, contextlib.ExitStack() as stack:
        token = Path(folder, "token")
        token.write_text(secrets.token_hex(16))
        told = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
        environment = NODE_ENVIRONMENT | told
        found = Nodes(f"{ray.util.get_node_ip_address()}:{free_port()}", environment, [])
        stack.callback(end, found.processes)
        port = found.address.split(":")[1]
        start(found, "--head", f"--port={port}", "--include-dashboard=false", f"--temp-dir={folder}/head")
        until(lambda: found.alive() == 1 or None, "the head")
        start(found, f"--address={found.address}")
        until(lambda: found.alive() == 2 or None, "two nodes")
        yield found


def start(nodes: Nodes, *flags: str) -> None:
    """Start one node in the foreground; it stops with its process."""
    common = ["start", "--block", "--num-cpus=1", "--object-store-memory=80000000"]
    nodes.processes.append(
        subprocess.Popen(
            [*RAY, *common, *flags],
            env=os.environ | nodes.environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=end_with_us,
        )
    )


def end(processes: list["subprocess.Popen[bytes]"]) -> None:
    """Stop the nodes, the worker first, and then all their descendants."""
    family = [child for process in processes for child in below(process)]
    for process in reversed(processes):
        process.terminate()
    for process in processes:
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    for left in wait_gone(family, 30):
        with contextlib.suppress(psutil.NoSuchProcess):
            left.kill()


def below(process: "subprocess.Popen[bytes]") -> list[psutil.Process]:
    """All descendants of a node's process; empty when the process is gone."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(process.pid).children(recursive=True)
    return []


def free_port() -> int:
    """A free port below the kernel's ephemeral range and above the ports of Ray's workers."""
    for port in random.sample(range(20_000, 32_000), 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((ray.util.get_node_ip_address(), port))
            return port
    raise AssertionError("no port is free")
