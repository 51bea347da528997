"""vLLM without a model, for bench-engines: its HTTP API, cache, evictions and events, with steps of modelled duration.

    python tests/bench/fake_vllm.py MODEL PORT EVENTS_PORT REPLAY_PORT

MODEL is a folder with a tokenizer and a chat template. Requests share steps: each running request decodes one token,
and the rest of a step's tokens goes to prompts in order of arrival. After a reset with `{"cpu_blocks": NUMBER}`,
computed blocks are also copied to a slower memory of that size, and announced as by vLLM's offloading connector.
"""

import asyncio
import sys
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any, cast

import httptools
import msgspec
import uvloop
import zmq

sys.path.insert(0, str(Path(__file__).parents[2]))
from homing.events.follow.socket_reader import SocketReader
from homing.events.wire.frames import END_SEQ, encode_seq
from homing.kvcache.hashing import BlockHash, BlockHasher, token_array, token_bytes, wire_hash
from homing.kvcache.pool import Block
from homing.kvcache.prefix_cache import PrefixCache
from homing.router.text.template import TemplateInput
from homing.router.text.tokenizer import TextModel
from tests.bench.engines_fleet import BLOCK, BLOCKS, MAX_LEN, MODEL

ROOT = BlockHash(bytes(16))
STEP_TOKENS = 2048
MOST_RUNNING = 8
STEP_S = 0.004
PROMPT_TOKEN_S = 0.00002
LOADED_TOKEN_S = PROMPT_TOKEN_S / 10
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


class Body(msgspec.Struct):
    """The fields of a request body that matter."""

    messages: list[dict[str, Any]] = []
    prompt: list[int] | str = ""
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stream: bool = False
    stream_options: dict[str, bool] | None = None
    return_token_ids: bool | None = None
    add_special_tokens: bool = True
    cpu_blocks: int = 0


@dataclass(eq=False)
class Work:
    """A waiting or running request."""

    client: "Connection"
    body: Body
    ids: list[int]  #: prompt tokens, then generated ones
    most: int
    hashes: list[BlockHash]  #: of the prompt's full blocks
    prompt: int = 0
    cached: int = 0
    computed: int = 0
    committed: int = 0  #: blocks
    blocks: list[Block] = field(default_factory=list)


class Publisher:
    """A `CacheListener` that publishes each step's changes as vLLM does: one event per removed block."""

    def __init__(self, events: int, replay: int, loop: asyncio.AbstractEventLoop) -> None:
        context = zmq.Context.instance()
        self._pub, router = context.socket(zmq.PUB), context.socket(zmq.ROUTER)
        self._pub.bind(f"tcp://127.0.0.1:{events}")
        router.bind(f"tcp://127.0.0.1:{replay}")
        self._replays = SocketReader(loop, router, self._replay)
        self._history: list[bytes] = []
        self._step: list[dict[str, Any]] = []
        self.in_cpu = OrderedDict[BlockHash, None]()  #: the least recently used first
        self.cpu_blocks = 0

    def stored(
        self, parent: BlockHash | None, hashes: Sequence[BlockHash], tokens: bytes, salt: str = "", medium: str = "GPU"
    ) -> None:
        about = {"lora_id": None, "medium": medium, "lora_name": None, "extra_keys": [None] * len(hashes)}
        about |= {"group_idx": 0, "kv_cache_spec_kind": "full_attention"}
        names = {"block_hashes": [*map(wire_hash, hashes)], "parent_block_hash": parent and wire_hash(parent)}
        ids = {"token_ids": token_array(tokens).tolist(), "block_size": BLOCK}
        self._step.append({"type": "BlockStored"} | names | ids | about)
        if self.cpu_blocks:
            self._copy([each for each in hashes if each not in self.in_cpu])

    def _copy(self, hashes: Sequence[BlockHash]) -> None:
        """Copy blocks to the CPU's memory, and announce them with a placeholder."""
        names = {"block_hashes": [*map(wire_hash, hashes)], "parent_block_hash": None, "token_ids": [], "block_size": 0}
        if hashes:
            self._step.append({"type": "BlockStored", "lora_id": None, "medium": "CPU", "lora_name": None} | names)
        self.use_copies(reversed(hashes))
        while len(self.in_cpu) > self.cpu_blocks:
            self.removed([self.in_cpu.popitem(last=False)[0]], "CPU")

    def use_copies(self, hashes: Iterable[BlockHash]) -> None:
        for each in hashes:
            self.in_cpu[each] = None
            self.in_cpu.move_to_end(each)

    def removed(self, hashes: Sequence[BlockHash], medium: str = "GPU") -> None:
        for each in hashes:
            self._step.append(
                {"type": "BlockRemoved", "block_hashes": [wire_hash(each)], "medium": medium, "group_idx": 0}
            )

    def cleared(self, cpu_blocks: int) -> None:
        self._step.append({"type": "AllBlocksCleared"})
        self.in_cpu.clear()
        self.cpu_blocks = cpu_blocks

    def flush(self) -> None:
        if self._step:
            self._history.append(msgspec.msgpack.encode([float(len(self._history)), self._step, 0]))
            self._pub.send_multipart([b"", encode_seq(len(self._history) - 1), self._history[-1]])
            self._step = []

    def _replay(self, frames: list[bytes]) -> None:
        since = int.from_bytes(frames[-1], "big")
        for seq, payload in enumerate(self._history[since:], since):
            self._replays.send([frames[0], b"", b"", encode_seq(seq), payload])
        self._replays.send([frames[0], b"", b"", END_SEQ, b""])


class Engine:
    """The scheduler and its prefix cache."""

    def __init__(self, model: Path, publisher: Publisher) -> None:
        self.root = str(model)
        self.text = TextModel.load(model, cache_bytes=1 << 24)
        self._publisher = publisher
        self._cache = self._new_cache()
        self._hasher = BlockHasher(BLOCK, 0)
        self._waiting: deque[Work] = deque()
        self._running: list[Work] = []
        self._asked = asyncio.Event()
        self._loaded = 0  #: tokens that the next step loads from the CPU's memory

    def _new_cache(self) -> PrefixCache:
        return PrefixCache(BLOCKS, BLOCK, listener=self._publisher, partial_block_reuse=False)

    def begin(self, client: "Connection", body: Body) -> Work:
        ids = list(self.text.encode_chat_now(TemplateInput(body.messages))) if body.messages else list(body.prompt)
        most = body.max_completion_tokens or body.max_tokens or 16
        work = Work(client, body, ids, most, self._hasher.chain(ROOT, token_bytes(ids)), len(ids))
        self._waiting.append(work)
        self._asked.set()
        return work

    def abort(self, work: Work) -> None:
        with suppress(ValueError):
            self._waiting.remove(work)
        if work in self._running:
            self._running.remove(work)
            self._cache.release(work.blocks)

    def reset(self, cpu_blocks: int) -> None:
        """Reset the cache; the event is sent with the next step, as by vLLM."""
        if not self._running:
            self._cache = self._new_cache()
            self._publisher.cleared(cpu_blocks)

    def metrics(self) -> str:
        used = f'vllm:kv_cache_usage_perc{{engine="0"}} {self._cache.usage}'
        config = f'vllm:cache_config_info{{block_size="{BLOCK}",engine="0",num_gpu_blocks="{BLOCKS}"}} 1.0'
        counts = [("running", len(self._running)), ("waiting", len(self._waiting))]
        named = [f'vllm:num_requests_{name}{{engine="0"}} {count}.0' for name, count in counts]
        return "\n".join([config, used, *named, *PADDING])

    async def run(self) -> None:
        while True:
            if not self._running and not self._waiting:
                self._asked.clear()
                await self._asked.wait()
            planned, left = dict[Work, int](), STEP_TOKENS
            for work in self._running:
                planned[work] = min(left, len(work.ids) - work.computed)
                left -= planned[work]
            while left and self._waiting and len(self._running) < MOST_RUNNING and self._admit(self._waiting[0]):
                work = self._waiting.popleft()
                self._running.append(work)
                planned[work] = min(left, len(work.ids) - work.computed)
                left -= planned[work]
            loaded, self._loaded = self._loaded, 0
            await asyncio.sleep(STEP_S + PROMPT_TOKEN_S * sum(planned.values()) + LOADED_TOKEN_S * loaded)
            for work, tokens in planned.items():
                if work in self._running:
                    self._advance(work, tokens)
            self._publisher.flush()

    def _admit(self, work: Work) -> bool:
        packed = token_bytes(work.ids)
        found = self._cache.match(ROOT, work.hashes, packed, work.prompt)
        blocks = self._cache.acquire(found, (work.prompt + work.most) // BLOCK + 1 - len(found.blocks))
        if blocks is None:
            return False
        copies = self._publisher.in_cpu
        rest = work.hashes[len(found.blocks) : (work.prompt - 1) // BLOCK]
        loaded = list(takewhile(copies.__contains__, rest))
        self._loaded += len(loaded) * BLOCK
        self._publisher.use_copies(reversed(loaded))
        work.blocks, work.committed = blocks, len(found.blocks)
        work.computed = work.cached = found.tokens + len(loaded) * BLOCK
        return True

    def _advance(self, work: Work, tokens: int) -> None:
        work.computed += tokens
        full = work.computed // BLOCK
        if full > work.committed:
            first = work.committed
            parent = work.hashes[first - 1] if first else ROOT
            packed = token_bytes(work.ids[first * BLOCK : full * BLOCK])
            work.hashes[first:] = self._hasher.chain(parent, packed) if full > len(work.hashes) else work.hashes[first:]
            self._cache.commit(work.blocks[first:full], first, parent, work.hashes[first:full], packed)
            work.committed = full
        if work.computed < len(work.ids):
            return
        place = len(work.ids) - work.prompt
        work.ids.append(300 + place % 500)
        last = place + 1 == work.most
        work.client.told(work, place, last)
        if last:
            self._running.remove(work)
            self._cache.release(work.blocks)


#: As long as vLLM's metrics page, which has hundreds of lines of histograms.
PADDING = [
    f'vllm:histogram_{name}_seconds_bucket{{engine="0",le="{limit / 8}",model_name="{MODEL}"}} {limit}.0'
    for name in ("ttft", "itl", "queue", "prefill", "decode", "inference", "e2e", "prompt", "generation", "params")
    for limit in range(1, 31)
]


class Connection(asyncio.Protocol):
    """One client's connection, with one request at a time."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._parser = httptools.HttpRequestParser(self)
        self._work: Work | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._work is not None:
            self._engine.abort(self._work)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_message_begin(self) -> None:
        self._body = b""

    def on_url(self, url: bytes) -> None:
        self._path = url.decode().partition("?")[0]

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        match self._path:
            case "/v1/chat/completions" | "/v1/completions":
                self._work = self._engine.begin(self, msgspec.json.decode(self._body, type=Body))
            case "/metrics":
                self._whole(self._engine.metrics().encode())
            case "/tokenize":
                body = msgspec.json.decode(self._body, type=Body)
                text = self._engine.text
                ids = text.encode_chat_now(TemplateInput(body.messages)) if body.messages else None
                [ids] = [ids] if ids else text.encode_now([str(body.prompt)], special_tokens=body.add_special_tokens)
                self._whole(msgspec.json.encode({"tokens": list(ids), "count": len(ids), "max_model_len": MAX_LEN}))
            case "/reset_prefix_cache":
                self._engine.reset(msgspec.json.decode(self._body or b"{}", type=Body).cpu_blocks)
                self._whole(b"")
            case _:
                root = self._engine.root
                card = {"id": MODEL, "object": "model", "max_model_len": MAX_LEN, "root": root}
                about = {"object": "list", "data": [card], "version": "0.32.0", "status": "ok", "model_path": root}
                self._whole(msgspec.json.encode(about | {"is_generation": True, "tp_size": 1, "dp_size": 1}))

    def _whole(self, body: bytes) -> None:
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        self._transport.write(head % len(body) + body)

    def told(self, work: Work, place: int, last: bool) -> None:
        """Send a generated token, or the whole answer after the last one if it is not streamed."""
        options, counts = work.body.stream_options or {}, self._usage(work, place + 1)
        if not work.body.stream:
            if last:
                self._whole(msgspec.json.encode(self._answer(work, {"message": {"content": "x"}}, "length") | counts))
                self._work = None
            return
        along = counts if options.get("continuous_usage_stats") else {}
        if not place:
            self._transport.write(HEAD)
            if work.body.messages:
                self._event(self._answer(work, {"delta": {"role": "assistant", "content": ""}}, None) | along)
        shown: dict[str, Any] = {"delta": {"content": " token"}} if work.body.messages else {"text": " token"}
        if work.body.return_token_ids:
            shown["token_ids"] = [work.ids[-1]]
        self._event(self._answer(work, shown, "length" if last else None) | along)
        if last:
            if options.get("include_usage"):
                self._event({**self._answer(work, {}, None), "choices": []} | self._usage(work, place + 1, end=True))
            self._chunk(b"data: [DONE]\n\n")
            self._transport.write(b"0\r\n\r\n")
            self._work = None

    def _answer(self, work: Work, shown: dict[str, Any], finish: str | None) -> dict[str, Any]:
        choice = {"index": 0, "logprobs": None, "finish_reason": finish, "stop_reason": None, **shown}
        kind = "chat.completion.chunk" if work.body.messages else "text_completion"
        about = {"id": "chatcmpl-0123456789abcdef0123456789abcdef", "object": kind, "created": 1700000000}
        return about | {"model": MODEL, "choices": [choice]}

    def _usage(self, work: Work, generated: int, *, end: bool = False) -> dict[str, Any]:
        counts: dict[str, Any] = {"prompt_tokens": work.prompt, "total_tokens": work.prompt + generated}
        counts["completion_tokens"] = generated
        if end or not work.body.stream:
            counts["prompt_tokens_details"] = {"cached_tokens": work.cached}
        return {"usage": counts}

    def _event(self, content: dict[str, Any]) -> None:
        self._chunk(b"data: " + msgspec.json.encode(content) + b"\n\n")

    def _chunk(self, data: bytes) -> None:
        self._transport.write(b"%x\r\n%s\r\n" % (len(data), data))


async def main(model: Path, port: int, events: int, replay: int) -> None:
    loop = asyncio.get_running_loop()
    engine = Engine(model, Publisher(events, replay, loop))
    async with await loop.create_server(lambda: Connection(engine), "127.0.0.1", port):
        await engine.run()


if __name__ == "__main__":
    uvloop.run(main(Path(sys.argv[1]), *map(int, sys.argv[2:])))
