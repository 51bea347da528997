"""A replica in a thread of this process, and the router's end of its sockets."""

import contextlib
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import zmq

from homing.events.config import EventsSettings
from homing.kvcache.config import KvCacheSettings
from homing.kvcache.hashing import BlockHash, BlockHasher
from homing.replica.config import ReplicaSettings
from homing.replica.messages import (
    Abort,
    AskNextEvictions,
    CacheReset,
    FailedStep,
    NextEvictions,
    Refused,
    ReplicaDescription,
    Reply,
    Request,
    ResetCache,
    TokenBatch,
    TokenOutput,
)

from .fakes import generate

if TYPE_CHECKING:
    from homing.replica.server import ReplicaServer

SEED = 99
#: Only catches hangs.
PATIENCE_S = 120


class Client:
    """A router, as the replica sees it."""

    def __init__(self, description: ReplicaDescription, hasher: BlockHasher, identity: bytes = b"router-1") -> None:
        self.hasher = hasher
        self.outputs: dict[int, list[TokenOutput]] = {}
        self.refused: dict[int, Refused] = {}
        self.failed: dict[int, str] = {}  #: messages of failed steps
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.identity = identity
        self.socket.linger = 0
        self.socket.connect(description.request_endpoint)

    def send(self, request: Request) -> None:
        self.socket.send(msgspec.msgpack.encode(request))

    def ask(self, request_id: int, tokens: Sequence[int], **options: Any) -> None:
        self.send(generate(request_id, tokens, self.hasher, **{"ignore_eos": True, **options}))

    def abort(self, *request_ids: int) -> None:
        self.send(Abort(request_ids=list(request_ids)))

    def reset_cache(self, ask_id: int) -> bool:
        """Ask the replica to reset its cache; return whether it did."""
        self.send(ResetCache(ask_id=ask_id))
        while not isinstance(reply := self.receive(), CacheReset):
            continue
        assert reply.ask_id == ask_id
        return reply.done

    def next_evictions(self) -> list[bytes]:
        """Ask the replica which blocks it would evict next."""
        self.send(AskNextEvictions())
        while not isinstance(reply := self.receive(), NextEvictions):
            continue
        return [reply.hashes[start : start + 16] for start in range(0, len(reply.hashes), 16)]

    def receive(self) -> Reply:
        assert self.socket.poll(PATIENCE_S * 1000), "the replica did not answer"
        reply: Reply = msgspec.msgpack.decode(self.socket.recv(), type=Reply)
        if isinstance(reply, Refused):
            self.refused[reply.request_id] = reply
        if isinstance(reply, FailedStep):
            self.failed.update(dict.fromkeys(reply.request_ids, reply.message))
        if not isinstance(reply, TokenBatch):
            return reply
        for output in reply.outputs:
            self.outputs.setdefault(output.request_id, []).append(output)
        return reply

    def ended(self, request_id: int) -> bool:
        outputs = self.outputs.get(request_id)
        return request_id in self.refused or request_id in self.failed or bool(outputs and outputs[-1].finish_reason)

    def wait(self, *request_ids: int) -> None:
        while not all(map(self.ended, request_ids)):
            self.receive()

    def tokens(self, request_id: int) -> list[int]:
        return [token for output in self.outputs[request_id] for token in output.token_ids]

    def close(self) -> None:
        self.socket.close()
        self._context.term()


class Served:
    """A running replica."""

    def __init__(self, server: "ReplicaServer", hasher: BlockHasher) -> None:
        self.server, self.description, self.hasher = server, server.description, hasher
        self.error: BaseException | None = None
        self.clients: list[Client] = []
        self.thread = threading.Thread(target=self._run, name="replica-under-test")
        self.thread.start()

    def _run(self) -> None:
        try:
            self.server.run()
        except Exception as error:
            self.error = error

    def client(self, identity: bytes = b"router-1") -> Client:
        self.clients.append(Client(self.description, self.hasher, identity))
        return self.clients[-1]

    def resident_hashes(self) -> set[BlockHash]:
        return {block.block_hash for block in self.server.residents()}

    def end(self) -> None:
        self.server.stop()
        self.thread.join(PATIENCE_S)
        assert not self.thread.is_alive(), "the replica did not stop"
        for client in self.clients:
            client.close()


@contextlib.contextmanager
def served(
    folder: Path,
    ipc_dir: Path | None,
    *,
    settings: dict[str, Any] | None = None,
    kvcache: dict[str, Any] | None = None,
    events: dict[str, Any] | None = None,
    replica_id: str = "r0",
    **options: Any,
) -> Iterator[Served]:
    """Start a replica of this model. On exit, it has stopped and left nothing behind."""
    replica_settings = ReplicaSettings(**{"dtype": "float32", "device": "cpu", "cpu_threads": 1, **(settings or {})})
    kvcache_settings = KvCacheSettings(**{"block_size": 8, "num_kv_blocks": 65, **(kvcache or {})})
    from homing.replica.server import start_replica  # imports torch, which tests of routers do not need

    server = start_replica(
        replica_settings,
        kvcache_settings,
        EventsSettings(**(events or {})),
        model_dir=folder,
        replica_id=replica_id,
        cluster_seed=SEED,
        ipc_dir=ipc_dir,
        **options,
    )
    hasher = BlockHasher(kvcache_settings.block_size, SEED, kvcache_settings.hash_algorithm)
    running = Served(server, hasher)
    try:
        yield running
        if running.thread.is_alive():
            server.check()
    finally:
        running.end()
    if ipc_dir:
        assert not list(ipc_dir.iterdir()), "socket files were left behind"
