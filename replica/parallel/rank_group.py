"""Collective operations over the ranks that share one replica's weights.

Built from an explicit host and port: no environment variables, no torchrun, no process-wide default group. Uses gloo on
CPUs, and nccl on CUDA with the same calls; nccl has not been run on a GPU yet.

In a CUDA graph, nccl's calls become nodes, and their allocations come from the graph's memory. A group's first call
connects the ranks, so it must precede any capture (the warm-up runs of a capture are enough). Graphs must be freed
before their group.
"""

import logging
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal, Self

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from ..errors import RankLost
from .shared_sums import MAX_BYTES, SharedSums

log = logging.getLogger(__name__)

Backend = Literal["gloo", "nccl"]

#: Pause before a rank tries again to connect to rank 0, which does not listen yet.
CONNECT_POLL_S = 0.01


class RankGroup:
    """One rank's handle on its group. All ranks must make the same calls in the same order."""

    def __init__(self, rank: int, size: int, group: Any) -> None:
        """`group` is a torch process group, as created by `join`."""
        self.rank = rank
        self.size = size
        self._group = group
        self._shared: SharedSums | None = None

    @classmethod
    def join(cls, rank: int, size: int, *, host: str, port: int, backend: Backend, timeout_s: float = 300.0) -> Self:
        """Meet the other ranks at `host`:`port`, where rank 0 listens; blocks until all have joined.

        All ranks are on one node (a replica is placed strictly packed), so `host` is also the address that gloo binds
        to. Raises RankLost if the others do not join within `timeout_s`. Every later call does so too if a rank is lost
        or overdue by that long.
        """
        timeout = timedelta(seconds=timeout_s)
        kind: Any = dist.ProcessGroupGloo if backend == "gloo" else dist.ProcessGroupNCCL
        with _rank_lost(f"rank {rank} waited for {size} ranks at {host}:{port}"):
            store = PrefixStore("homing", _store(rank, size, host, port, timeout))
            if backend == "gloo":
                options = kind._Options()
                options._devices = [kind.create_device(hostname=host)]
            else:
                options = kind.Options()
            options._timeout = timeout
            group = cls(rank, size, kind(store, rank, size, options))
            if backend == "nccl":
                device = torch.device("cuda", torch.cuda.current_device())
                group.agree_on(SharedSums.open(rank, size, PrefixStore("shared", store), device), device)
            return group

    def agree_on(self, shared: SharedSums | None, device: torch.device) -> None:
        """Sum small tensors with `shared` from now on if all ranks can. None: this rank cannot."""
        able = torch.tensor([int(shared is not None)], dtype=torch.int32, device=device)
        if int(self.all_reduce(able)) == self.size:
            self._shared = shared
            log.info("shared_sums rank=%d most_bytes=%d", self.rank, MAX_BYTES)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' x. May overwrite `x`."""
        x = x.contiguous()
        if self._shared is not None and self._shared.fits(x):
            return self._shared.sum(x)
        self._finish("all_reduce", self._group.allreduce, [x], dist.AllreduceOptions())
        return x

    def gather(self, x: torch.Tensor) -> list[torch.Tensor] | None:
        """All ranks' x (of the same shape) in rank order on rank 0, None on other ranks."""
        options = dist.GatherOptions()
        options.rootRank = 0
        parts = [torch.empty_like(x) for _ in range(self.size)] if self.rank == 0 else None
        self._finish("gather", self._group.gather, [parts] if parts else [], [x.contiguous()], options)
        return parts

    def broadcast(self, x: torch.Tensor) -> None:
        """Copy rank 0's x to all ranks, in place."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        self._finish("broadcast", self._group.broadcast, [x], options)

    @staticmethod
    def _finish(name: str, call: Callable[..., Any], *arguments: Any) -> None:
        """Run a collective on the current stream; the last argument is its options.

        An asynchronous call would switch to nccl's own stream and back: two more events, or two more nodes in graphs.
        """
        arguments[-1].asyncOp = False
        with _rank_lost(name):
            work = call(*arguments)
            if work is not None:  # nccl returns None for synchronous calls
                work.wait()


@contextmanager
def _rank_lost(what: str) -> Iterator[None]:
    """Convert torch's errors about a lost or late rank to RankLost."""
    try:
        yield
    except (RuntimeError, OSError) as error:
        raise RankLost(f"{what}: {error}") from error


def _store(rank: int, size: int, host: str, port: int, timeout: timedelta) -> Store:
    if rank:
        _until_listening(host, port, timeout)
        return TCPStore(host, port, size, is_master=False, timeout=timeout)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # torch's own listener would accept on every interface, whatever `host` is.
    # Each rank connects twice, see `_until_listening`.
    listener = socket.create_server((host, port), family=family, backlog=2 * size)
    return TCPStore(host, port, size, is_master=True, timeout=timeout, master_listen_fd=listener.detach())


def _until_listening(host: str, port: int, timeout: timedelta) -> None:
    """Wait until rank 0 listens: torch's own client would pause for 0.3 to 1 s if it came first. Raises OSError."""
    deadline = time.monotonic() + timeout.total_seconds()
    while True:
        try:
            with socket.create_connection((host, port), max(CONNECT_POLL_S, deadline - time.monotonic())):
                return
        except OSError:  # refused, or unreachable as the network of a host that has just started may be
            if time.monotonic() >= deadline:
                raise
        time.sleep(CONNECT_POLL_S)
