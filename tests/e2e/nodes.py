"""A Ray of two nodes on this machine that somebody else started: what `homing serve --ray-address` joins."""

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

from homing.cluster.registry import wait_gone

from .parent_death import end_with_us
from .running import until

RAY = [sys.executable, "-P", "-c", "from ray.scripts.scripts import main; main()"]


@dataclass
class Nodes:
    """Ray on two nodes of this machine, with token authentication."""

    address: str
    environment: dict[str, str]
    processes: list["subprocess.Popen[bytes]"]

    def alive(self) -> int:
        """Nodes that Ray's control store knows, asked anew by a process of its own."""
        ask = "import ray, sys; ray.init(sys.argv[1]); print(sum(node['Alive'] for node in ray.nodes()))"
        command = [sys.executable, "-P", "-c", ask, self.address]
        try:
            done = subprocess.run(
                command, env=os.environ | self.environment, capture_output=True, text=True, timeout=60
            )
        except subprocess.TimeoutExpired:
            return 0
        ended = [process.returncode for process in self.processes if process.poll() is not None]
        assert not ended, f"ray start ended with {ended}"
        return int(done.stdout) if done.returncode == 0 else 0


@contextlib.contextmanager
def two_nodes() -> Iterator[Nodes]:
    """A head and a worker with room for one replica each. Ended by their process ids: `ray stop` would end every Ray.

    On the machine's own address: Ray 2.60 has two nodes on loopback only if the driver is told so, too.
    """
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as folder, contextlib.ExitStack() as stack:
        token = Path(folder, "token")
        token.write_text(secrets.token_hex(16))
        environment = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
        found = Nodes(f"{ray.util.get_node_ip_address()}:{free_port()}", environment, [])
        stack.callback(end, found.processes)
        port = found.address.split(":")[1]
        start(found, "--head", f"--port={port}", "--include-dashboard=false", f"--temp-dir={folder}/head")
        until(lambda: found.alive() == 1 or None, "the head")
        start(found, f"--address={found.address}")
        until(lambda: found.alive() == 2 or None, "two nodes")
        yield found


def start(nodes: Nodes, *flags: str) -> None:
    """One node, which ends with its process."""
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
    """The nodes and everything below them, the worker first."""
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
    """Everything that a node has started; nothing when it is gone already."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(process.pid).children(recursive=True)
    return []


def free_port() -> int:
    """Below those that the kernel gives to anybody who asks for any, and above those of Ray's workers."""
    for port in random.sample(range(20_000, 32_000), 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((ray.util.get_node_ip_address(), port))
            return port
    raise AssertionError("no port is free")
