"""Fake replicas: a pure one for tests of the cores, and one behind real sockets.

A fake replica's tokens depend only on (seed, position), as a real one's do. So a test knows what a request must yield
wherever it ran.
"""

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Self

import msgspec
import zmq

from homing.events.config import EventsSettings
from homing.events.publish.publisher import EventPublisher
from homing.events.wire.messages import CacheCounters, EventEndpoints, LoadReport, PrefillCost, TierLoad
from homing.kvcache.config import KvCacheSettings
from homing.kvcache.hashing import BlockHash, BlockHasher, split_hashes, token_array, token_bytes
from homing.kvcache.parity import canary_hash
from homing.replica.messages import (
    Abort,
    CacheReset,
    Generate,
    ModelLimits,
    Parity,
    Refused,
    ReplicaDescription,
    Reply,
    Request,
    ResetCache,
    SamplingParams,
    TokenBatch,
    TokenOutput,
)
from homing.router.backend import GenerationRequest, TokenDelta, TokenStream
from homing.router.errors import RouterError
from homing.router.flow.request_flow import RequestFlow
from homing.router.flow.request_state import RequestId
from homing.router.replicas.membership import TextDigests
from homing.router.routing.replica_load import ReplicaLoad

SEED = 7
BLOCK = 16
ROOT = BlockHash(bytes(range(16)))
CACHE = KvCacheSettings(block_size=BLOCK)
HASHER = BlockHasher(BLOCK, SEED)
DIGESTS = TextDigests(tokenizer="t" * 64, template="c" * 64)
LIMITS = ModelLimits(name="fake", path="", vocab_size=1000, max_model_len=4096, eos_token_ids=(0,))
NOWHERE = EventEndpoints(events="", replay="", state="", snapshot="")


def replica_of(flow: RequestFlow, request_id: RequestId) -> str | None:
    """The replica that a request is on or was last on; None if it was never sent or is over."""
    state = flow.state_of(request_id)
    return state and state.replica


def token_at(seed: int, position: int) -> int:
    """Return the token that every fake replica generates at this position of a request."""
    return random.Random(seed * 100_003 + position).randrange(1, 1000)


def answer(request: GenerationRequest) -> list[int]:
    """Return the tokens that this request must yield."""
    return [token_at(request.sampling.seed, position) for position in range(request.sampling.max_tokens)]


def request_of(
    tokens: list[int], *, max_tokens: int = 8, seed: int = 1, salt: bytes = b"", **fields: object
) -> GenerationRequest:
    """Build a generation request."""
    return GenerationRequest(
        trace_id=f"trace-{seed}",
        token_ids=token_bytes(tokens),
        sampling=SamplingParams(max_tokens=max_tokens, seed=seed),
        given={"seed": seed},
        salt=salt,
        **fields,
    )


def parity_of(digests: TextDigests = DIGESTS, seed: int = SEED) -> Parity:
    """Build the parity data of a replica in this deployment."""
    return Parity(
        tokenizer_digest=digests.tokenizer,
        template_digest=digests.template,
        block_size=BLOCK,
        hash_algorithm="xxh3_128",
        model_root=ROOT,
        canary=canary_hash(BlockHasher(BLOCK, seed), ROOT),
    )


def description_of(replica_id: str, *, epoch: int = 1, **fields: object) -> ReplicaDescription:
    """Build a replica's description."""
    values: dict[str, object] = {
        "request_endpoint": "",
        "event_endpoints": NOWHERE,
        "parity": parity_of(),
        "model": LIMITS,
        "num_blocks": 1000,
        "max_running_requests": 8,
        "max_batched_tokens": 512,
        "tensor_parallel_size": 1,
        "prefill_tokens_per_s": 10_000.0,
        "decode_step_s": 0.002,
    }
    return ReplicaDescription(replica_id=replica_id, epoch=epoch, **(values | fields))


def load_of(**fields: object) -> ReplicaLoad:
    """Build the load of an idle replica, with the given fields replaced."""
    values: dict[str, Any] = {
        "running": 0,
        "waiting": 0,
        "queued_prefill_tokens": 0,
        "free_blocks": 1000,
        "cached_free_blocks": 0,
        "total_blocks": 1000,
        "prefill_tokens_per_s": 10_000.0,
        "decode_step_s": 0.002,
        "max_running_requests": 8,
        "max_batched_tokens": 512,
    }
    merged = values | fields
    merged.setdefault("spare_blocks", merged["free_blocks"])
    merged.setdefault("prefill_cost", PrefillCost(0.0, 1 / merged["prefill_tokens_per_s"], 0.0))
    merged.setdefault("busy_until", merged["queued_prefill_tokens"] / merged["prefill_tokens_per_s"])
    return ReplicaLoad(**merged)


def report_of(**fields: object) -> LoadReport:
    """Build the load report of an idle replica, with the given fields replaced."""
    values: dict[str, object] = {
        "epoch": 1,
        "step": 0,
        "ts": 0.0,
        "running": 0,
        "waiting": 0,
        "queued_prefill_tokens": 0,
        "decode_context_tokens": 0,
        "free_blocks": 1000,
        "cached_free_blocks": 0,
        "total_blocks": 1000,
        "prefill_tokens_per_s": 10_000.0,
        "decode_step_s": 0.002,
        "counters": CacheCounters(),
    }
    return LoadReport(**(values | fields))


async def until(holds: Callable[[], object], seconds: float = 120.0) -> None:
    """Wait until `holds()` is true; the limit only catches hangs."""
    async with asyncio.timeout(seconds):
        while not holds():  # noqa: ASYNC110 - the condition is a plain value of the object under test
            await asyncio.sleep(0.005)


class Reading:
    """Iterates over a token stream; it is the stream's sink."""

    def __init__(self, stream: TokenStream) -> None:
        self.stream = stream
        self._items: asyncio.Queue[TokenDelta | RouterError] = asyncio.Queue()
        self._over = False
        #: The stream's `replica_id` at each delta.
        self.replicas: list[str | None] = []
        stream.listen(self)

    def delta(self, delta: TokenDelta) -> None:
        self.replicas.append(self.stream.replica_id)
        self._items.put_nowait(delta)

    def failed(self, error: RouterError) -> None:
        self._items.put_nowait(error)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> TokenDelta:
        if self._over:
            raise StopAsyncIteration
        item = await self._items.get()
        if isinstance(item, RouterError):
            raise item
        self._over = item.finish_reason is not None
        return item


@dataclass(slots=True)
class _Work:
    request: Generate
    generated: int
    cached_tokens: int | None = None  #: None until admitted
    loaded_tokens: int = 0  #: the part of them from host memory
    to_prefill: int = 0
    started: bool = False


@dataclass(slots=True)
class FakeReplica:
    """A pure engine without a model. A step prefills within its token budget; each prefilled request gets one token."""

    replica_id: str
    resident: set[bytes] = field(default_factory=set)
    work: dict[int, _Work] = field(default_factory=dict)
    full_prefills: int = 0  #: requests without any cached block
    highest: int = 0
    aborted: list[int] = field(default_factory=list)
    budget: int = 512
    left: int = 512  #: of the step's token budget
    pinned_tokens: int | None = None  #: reported with each request's first token
    chain: list[BlockHash] = field(default_factory=list)  #: of the last prompt whose blocks were stored
    host: set[bytes] = field(default_factory=set)  #: blocks in host memory
    host_block_s: float = 0.0001  #: time to load one of them
    copied_tokens: int = 0  #: tokens of each prompt that count as cached beyond its cached blocks

    def take(self, message: Request) -> Refused | None:
        """Handle a message from the router."""
        if isinstance(message, Abort):
            self.aborted += message.request_ids
            for request_id in message.request_ids:
                self.work.pop(request_id, None)
            return None
        assert message.request_id > self.highest, f"{message.request_id} after {self.highest}: request ids must rise"
        self.highest = message.request_id
        assert self._hashes_fit(message), "the block hashes do not match the tokens"
        generated = len(token_array(message.token_ids)) - message.prompt_tokens
        self.work[message.request_id] = _Work(message, generated)
        return None

    def step(self) -> tuple[TokenBatch, list[tuple[bytes | None, list[BlockHash], bytes]]]:
        """Return the outputs and the newly stored blocks, as (parent, hashes, tokens)."""
        ready = [work for work in self.work.values() if self._prefill(work)]
        self.left = self.budget
        stored = [blocks for work in ready if not work.started for blocks in self._store(work.request)]
        outputs = [self._output(work.request.request_id, work) for work in ready]
        for output in outputs:
            if output.finish_reason:
                del self.work[output.request_id]
        return TokenBatch(step=0, outputs=outputs), stored

    def load(self, router_id: str, **fields: object) -> LoadReport:
        """Build this replica's load report."""
        queued = sum(work.to_prefill for work in self.work.values() if work.cached_tokens is not None)
        tiers = (TierLoad("CPU", 1000, len(self.host), self.host_block_s),) if self.host else ()
        values = {"queued_prefill_tokens": queued, "tiers": tiers} | fields
        return report_of(running=len(self.work), accepted={router_id: self.highest}, **values)

    def _prefill(self, work: _Work) -> bool:
        """Continue the prefill within the rest of the step's budget; return True when it is complete."""
        if work.cached_tokens is None and self.left:
            work.cached_tokens, work.loaded_tokens = self._cached_tokens(work.request)
            work.to_prefill = len(work.request.token_ids) // 4 - work.cached_tokens
        taken = min(self.left, work.to_prefill)
        self.left -= taken
        work.to_prefill -= taken
        return work.cached_tokens is not None and not work.to_prefill

    def _output(self, request_id: int, work: _Work) -> TokenOutput:
        sampling = work.request.sampling
        index, work.generated = work.generated, work.generated + 1
        cached = None if work.started else work.cached_tokens
        work.started = True
        return TokenOutput(
            request_id=request_id,
            index=index,
            token_ids=[token_at(sampling.seed, index)],
            finish_reason="length" if work.generated >= sampling.max_tokens else None,
            cached_tokens=cached,
            loaded_tokens=(("CPU", work.loaded_tokens),) if cached is not None and work.loaded_tokens else (),
            pinned_tokens=None if cached is None else self.pinned_tokens,
        )

    def _cached_tokens(self, request: Generate) -> tuple[int, int]:
        """The tokens of this prompt that are not computed, and the part of them that is loaded from host memory."""
        blocks = loaded = 0
        usable = (len(request.token_ids) // 4 - 1) // BLOCK
        for block in split_hashes(request.block_hashes):
            if block not in self.resident:
                if block not in self.host or blocks >= usable:
                    break
                loaded += BLOCK
            blocks += 1
        self.full_prefills += not blocks
        return min(blocks * BLOCK + self.copied_tokens, len(request.token_ids) // 4 - 1), loaded

    def _store(self, request: Generate) -> list[tuple[bytes | None, list[BlockHash], bytes]]:
        hashes = split_hashes(request.block_hashes)
        known = next((index for index, block in enumerate(hashes) if block not in self.resident), len(hashes))
        if known == len(hashes):
            return []
        self.resident.update(hashes[known:])
        self.chain = hashes
        tokens = request.token_ids[known * BLOCK * 4 : len(hashes) * BLOCK * 4]
        return [(hashes[known - 1] if known else None, hashes[known:], tokens)]

    @staticmethod
    def _hashes_fit(request: Generate) -> bool:
        return split_hashes(request.block_hashes) == HASHER.chain(BlockHash(request.root), request.token_ids)


class SocketReplica:
    """A `FakeReplica` behind the sockets of a real one. It steps in the test's event loop."""

    def __init__(
        self, replica_id: str, *, epoch: int = 1, step_s: float = 0.005, publish: bool = True, tiers: bool = False
    ) -> None:
        self.core = FakeReplica(replica_id)
        self.paused = False
        self._step_s = step_s
        self._context = zmq.Context()
        self._socket = self._bound("tcp://127.0.0.1:*")
        self._endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._publisher = EventPublisher(
            EventsSettings(publish_events=publish, heartbeat_interval_s=0.05),
            host="127.0.0.1",
            block_size=BLOCK,
            epoch=epoch,
            tiers=tiers,
        )
        self.description = description_of(
            replica_id,
            epoch=epoch,
            request_endpoint=self._endpoint,
            event_endpoints=self._publisher.start(),
        )
        self._routers: dict[int, bytes] = {}
        self._decoder = msgspec.msgpack.Decoder(Request)
        self._task: asyncio.Task[None] | None = None
        self.on_message: Callable[[Request], Reply | None] = lambda message: None
        #: Messages that it reads and drops without a word.
        self.drops: Callable[[Request], bool] = lambda message: False

    def demote(self, *, keep: int = 0) -> None:
        """Move all cached blocks of a replica with one chain to host memory, except the first few."""
        gone = self.core.chain[keep:]
        self.core.resident.difference_update(gone)
        self.core.host.update(gone)
        self._publisher.removed(gone)
        self._publisher.stored(None, gone, b"", medium="CPU")
        self._publisher.flush()

    def start(self) -> None:
        """Start stepping."""
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Stop like a killed process: close the sockets at once, without a message."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        if not self._socket.closed:
            self._publisher.close()
            self._socket.close(0)
            self._context.term()

    def disconnect(self) -> None:
        """Break all connections, as a short network failure does; the replica stays alive."""
        self._socket.close(0)
        self._socket = self._bound(self._endpoint)

    def send_raw(self, router_id: str, payload: bytes) -> None:
        """Send any bytes as a reply."""
        self._socket.send_multipart([router_id.encode(), payload])

    def _bound(self, endpoint: str) -> zmq.Socket[bytes]:
        sock = self._context.socket(zmq.ROUTER)
        sock.linger = 0
        sock.router_handover = True
        for _ in range(1000):  # libzmq's own thread releases a closed socket's address a moment later
            try:
                sock.bind(endpoint)
            except zmq.ZMQError:
                time.sleep(0.005)
                continue
            return sock
        raise AssertionError(f"{endpoint} is still in use")

    async def _run(self) -> None:
        while True:
            self._receive()
            if not self.paused:
                self._step()
            await asyncio.sleep(self._step_s)

    def _receive(self) -> None:
        while self._socket.poll(0):
            router, payload = self._socket.recv_multipart()
            message = self._decoder.decode(payload)
            if self.drops(message):
                continue
            reply = self.on_message(message)
            if reply is not None:
                self._socket.send_multipart([router, msgspec.msgpack.encode(reply)])
                continue
            if isinstance(message, ResetCache):
                self._socket.send_multipart([router, msgspec.msgpack.encode(self._reset(message))])
                continue
            if isinstance(message, Generate):
                self._routers[message.request_id] = router
            self.core.take(message)

    def _reset(self, message: ResetCache) -> CacheReset:
        idle = not self.core.work
        if idle:
            self.core.resident.clear()
            self._publisher.cleared()
        return CacheReset(ask_id=message.ask_id, done=idle)

    def _step(self) -> None:
        batch, stored = self.core.step()
        for parent, hashes, tokens in stored:
            self._publisher.stored(parent, hashes, tokens)
        self._publisher.flush()
        for router in {self._routers[output.request_id] for output in batch.outputs}:
            mine = [output for output in batch.outputs if self._routers[output.request_id] == router]
            self._socket.send_multipart([router, msgspec.msgpack.encode(TokenBatch(step=0, outputs=mine))])
            self._publisher.report(self.core.load(router.decode(), epoch=self.description.epoch))
        if not batch.outputs:
            # Idle engines report too: a replica without progress counts as stuck after `replica_silence_s`.
            self._publisher.report(self.core.load("", epoch=self.description.epoch, ts=time.time()))
