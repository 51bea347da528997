"""Workers behind the routers of the front benchmark: fast fakes that answer at once, or at 100 tokens per second.

    python tests/bench/front_workers.py engine FILE    two fake replicas (ZeroMQ); FILE gets their descriptions
    python tests/bench/front_workers.py openai PORT    one fake OpenAI server, for routers that proxy HTTP

A request for `PACED_TOKENS` gets its first token at once and the others on a grid of 10 ms, as a batching engine would
send them; any other request gets all its tokens at once. For an answer that is not streamed, a replica sends the first
token alone and then several per message, as real replicas do. Both kinds send as little as they can.
"""

import asyncio
import gc
import sys
import time
from pathlib import Path
from typing import cast

import msgspec
import uvloop
import zmq

sys.path.insert(0, str(Path(__file__).parents[2]))
import homing
from homing.events.config import EventsSettings
from homing.events.publish.publisher import EventPublisher
from homing.kvcache.hashing import BlockHash, split_hashes
from homing.replica.messages import Abort, Generate, ModelLimits, ReplicaDescription, Request, TokenBatch, TokenOutput
from homing.router.replicas.membership import text_digests
from tests.router.fakes import BLOCK, description_of, parity_of, report_of

DEMO = Path(homing.__file__).parent / "replica" / "demo" / "model"
LIMITS = ModelLimits(name="demo", path=str(DEMO), vocab_size=4096, max_model_len=65_536, eos_token_ids=(4,))
#: More blocks than all loads together fill, because a fake evicts nothing.
BLOCKS = 4_000_000
PACED_TOKENS = 100
GRID_S = 0.01
#: Minimum seconds between load reports: a fake's short steps must not make it report more often than a real one.
REPORT_S = 0.005
#: Ids of ordinary words in the demo vocabulary.
FIRST_ID, IDS = 300, 500


class Work(msgspec.Struct, gc=False):
    """A running request at a fake replica."""

    request_id: int
    router: bytes
    left: int
    due: float
    paced: bool
    per_output: int
    generated: int = 0


class FastReplica:
    """An engine without a model or compute cost: one output per due request and step."""

    def __init__(self, name: str, folder: Path) -> None:
        """`folder` holds its sockets: with `homing serve`, the sockets within a node are files, too."""
        folder.mkdir()
        self.socket = zmq.Context.instance().socket(zmq.ROUTER)
        self.socket.bind(f"ipc://{folder / 'requests'}")
        self._publisher = EventPublisher(
            EventsSettings(publish_events=True),
            host="127.0.0.1",
            block_size=BLOCK,
            epoch=1,
            ipc_dir=folder,
        )
        self.description = description_of(
            name,
            request_endpoint=self.socket.getsockopt_string(zmq.LAST_ENDPOINT),
            event_endpoints=self._publisher.start(),
            parity=parity_of(text_digests(DEMO)),
            model=LIMITS,
            num_blocks=BLOCKS,
            max_running_requests=1024,
            max_batched_tokens=65_536,
            prefill_tokens_per_s=1e6,
        )
        self._work: dict[tuple[bytes, int], Work] = {}  #: by router and the router's request id
        self._resident: set[BlockHash] = set()
        self._computed: list[Generate] = []  #: requests whose blocks are not announced yet
        self._highest: dict[str, int] = {}
        self._decoder = msgspec.msgpack.Decoder(Request)
        self._encoder = msgspec.msgpack.Encoder()
        self._reported_at = 0.0
        self._steps = 0

    def receive(self, now: float) -> None:
        """Take all requests that have arrived."""
        while True:
            try:
                router, payload = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._take(router, self._decoder.decode(payload), now)

    def step(self, now: float) -> None:
        """Send all outputs that are due, in one message per router, then announce new blocks.

        The announcement of a long prompt takes a millisecond, which is not the router's.
        """
        self._steps += 1
        due = [work for work in self._work.values() if work.due <= now]
        outputs: dict[bytes, list[TokenOutput]] = {}
        for work in due:
            told = outputs.setdefault(work.router, [])
            told.append(self._output(work, 1 if work.generated == 0 else work.per_output, now))
            while work.left and not work.paced:
                told.append(self._output(work, work.per_output, now))
        for router, each in outputs.items():
            self.socket.send_multipart([router, self._encoder.encode(TokenBatch(step=0, outputs=each))])
        while self._computed:
            self._store(self._computed.pop(0))
        if now - self._reported_at > REPORT_S:
            self._reported_at = now
            self._publisher.report(self._report())

    def wait_s(self, now: float) -> float:
        """Seconds until a request or load report is due."""
        return max(0.0, min((work.due for work in self._work.values()), default=now + REPORT_S) - now)

    def _report(self) -> object:
        used = len(self._work)
        return report_of(
            # A router would consider a replica stuck if its step number never changed.
            ts=time.time(),
            step=self._steps,
            running=used,
            free_blocks=BLOCKS - used,
            total_blocks=BLOCKS,
            accepted=dict(self._highest),
            decode_step_s=0.01,
        )

    def _take(self, router: bytes, message: Request, now: float) -> None:
        if isinstance(message, Abort):
            for request_id in message.request_ids:
                self._work.pop((router, request_id), None)
            return
        wanted = message.sampling.max_tokens
        self._work[router, message.request_id] = Work(
            message.request_id, router, wanted, now, wanted == PACED_TOKENS, message.tokens_per_output
        )
        self._highest[router.decode()] = message.request_id
        self._computed.append(message)

    def _output(self, work: Work, most: int, now: float) -> TokenOutput:
        index, count = work.generated, min(most, work.left)
        work.generated += count
        work.left -= count
        if work.paced:
            work.due = (now // GRID_S + 1) * GRID_S
        if not work.left:
            del self._work[work.router, work.request_id]
        return TokenOutput(
            request_id=work.request_id,
            index=index,
            token_ids=[FIRST_ID + (index + each) % IDS for each in range(count)],
            finish_reason=None if work.left else "length",
            cached_tokens=0 if index == 0 else None,
        )

    def _store(self, request: Generate) -> None:
        hashes = split_hashes(request.block_hashes)
        known = next((index for index, block in enumerate(hashes) if block not in self._resident), len(hashes))
        if known < len(hashes):
            self._resident.update(hashes[known:])
            tokens = request.token_ids[known * BLOCK * 4 : len(hashes) * BLOCK * 4]
            self._publisher.stored(hashes[known - 1] if known else None, hashes[known:], tokens)
            self._publisher.flush()


def engine(file: Path) -> None:
    """Run two fake replicas in one process until it is killed."""
    gc.disable()  # nothing is ever evicted: collections of millions of hashes would delay answers more and more
    replicas = [FastReplica(name, file.parent / name) for name in ("r0", "r1")]
    poller = zmq.Poller()
    for replica in replicas:
        poller.register(replica.socket, zmq.POLLIN)
    descriptions: list[ReplicaDescription] = [replica.description for replica in replicas]
    file.write_bytes(msgspec.msgpack.encode(descriptions))
    while True:
        now = time.monotonic()
        poller.poll(min(replica.wait_s(now) for replica in replicas) * 1000)
        now = time.monotonic()
        for replica in replicas:
            replica.receive(now)
            replica.step(now)


class Asked(msgspec.Struct):
    """The fields of a request body that determine the answer."""

    max_tokens: int | None = None
    max_completion_tokens: int | None = None  #: some routers send this instead of max_tokens
    stream: bool = False

    @property
    def tokens(self) -> int:
        """Number of tokens in the answer."""
        return self.max_tokens or self.max_completion_tokens or 16


WORD = " token"
CHUNK = (
    b'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1700000000,"model":"demo","choices":['
    b'{"index":0,"delta":{"content":" token"},"logprobs":null,"finish_reason":null}]}\n\n'
)
STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
STREAM_END = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
FRAMED = b"%x\r\n%s\r\n" % (len(CHUNK), CHUNK)


def whole(tokens: int) -> bytes:
    """A complete answer that is not streamed."""
    body = msgspec.json.encode(
        {
            "id": "chatcmpl-1",
            "object": "chat.completion",
            "created": 1700000000,
            "model": "demo",
            "choices": [
                {
                    "index": 0,
                    "message": {"role": "assistant", "content": WORD * tokens},
                    "text": WORD * tokens,
                    "logprobs": None,
                    "finish_reason": "length",
                }
            ],
            "usage": {"prompt_tokens": 1, "completion_tokens": tokens, "total_tokens": tokens + 1},
        }
    )
    return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)


STREAMS: dict["OpenAi", int] = {}
ASKED = msgspec.json.Decoder(Asked)
#: The answer to all requests other than generations that routers send to a worker.
ABOUT = msgspec.json.encode(
    {
        "status": "ok",
        "model_path": "demo",
        "served_model_name": "demo",
        "is_generation": True,
        "object": "list",
        "data": [{"id": "demo", "object": "model", "max_model_len": 65536}],
        "tp_size": 1,
        "dp_size": 1,
        "version": "0.0.0",
    }
)
ABOUT_ANSWER = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (
    len(ABOUT),
    ABOUT,
)


class OpenAi(asyncio.Protocol):
    """One connection to the fake OpenAI server."""

    def __init__(self) -> None:
        self._data = b""
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def connection_lost(self, error: Exception | None) -> None:
        STREAMS.pop(self, None)

    def data_received(self, data: bytes) -> None:
        self._data += data
        head, found, rest = self._data.partition(b"\r\n\r\n")
        if not found:
            return
        fields = head.lower()
        at = fields.find(b"content-length:")
        length = int(fields[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
        if b"transfer-encoding: chunked" in fields:
            if not rest.endswith(b"0\r\n\r\n"):
                return
            size = int(rest.split(b"\r\n", 1)[0], 16)
            body = rest.split(b"\r\n", 1)[1][:size]
            length = len(rest)
        else:
            body = rest[:length]
        if len(rest) < length:
            return
        self._data = rest[length:]
        self._answer(head, body)

    def _answer(self, head: bytes, body: bytes) -> None:
        assert self.transport is not None
        if not head.startswith(b"POST") or not body:
            self.transport.write(ABOUT_ANSWER)
            return
        asked = ASKED.decode(body)
        if not asked.stream:
            self.transport.write(whole(asked.tokens))
            return
        self.transport.write(STREAM_HEAD + FRAMED)
        STREAMS[self] = asked.tokens - 1

    def tick(self) -> None:
        """Send one more chunk."""
        assert self.transport is not None
        STREAMS[self] -= 1
        if STREAMS[self]:
            self.transport.write(FRAMED)
        else:
            del STREAMS[self]
            self.transport.write(FRAMED + STREAM_END)


async def openai(port: int) -> None:
    """Run a fake OpenAI server until it is killed."""
    async with await asyncio.get_running_loop().create_server(OpenAi, "127.0.0.1", port):
        due = time.monotonic()
        while True:
            due += GRID_S
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            for stream in list(STREAMS):
                stream.tick()


if __name__ == "__main__":
    if sys.argv[1] == "engine":
        engine(Path(sys.argv[2]))
    else:
        uvloop.run(openai(int(sys.argv[2])))
