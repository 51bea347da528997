"""A fake OpenAI-compatible engine: answers, caches blocks and publishes events as vLLM does.

Its tokens depend only on (seed, position), so a test knows what a request must yield wherever it ran.
"""

import asyncio
import json
import os
import random
import re
import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec
import zmq
from tokenizers import Tokenizer

from homing.events.wire.frames import END_SEQ, encode_seq
from homing.events.wire.messages import EventEndpoints
from homing.replica.demo import demo_model_path
from homing.router.replicas.external.probe import CANARY

Prefix = tuple[str | None, tuple[int, ...]]


def token_at(seed: int, position: int) -> int:
    """Return the token that every fake engine generates at this position of a sequence."""
    return random.Random(seed * 100_003 + position).randrange(5, 1000)


def answer(prompt: list[int], seed: int, count: int) -> list[int]:
    """Return the tokens that a request must yield."""
    return [token_at(seed, len(prompt) + place) for place in range(count)]


@dataclass(slots=True)
class Behaviour:
    """How the engine behaves; may be changed at any time."""

    tells_ids: bool = True
    tells_block_size: bool = True
    tells_sockets: bool = False  #: report its event sockets, as vLLM does in development mode
    load_port: int | None = None  #: report this port of a load socket, as SGLang does
    names_sources: list[dict[str, object]] | None = None  #: where each rank publishes, as vLLM 0.33 tells it
    silent_paths: tuple[str, ...] = ()  #: never answered
    ranks: int = 1  #: data-parallel ranks that its metrics show
    refusal: tuple[int, str] | None = None  #: status and message for every completion
    break_after: int | None = None  #: number of tokens after which the connection is cut
    memory_tokens: int | None = None  #: memory runs out after this many: an error ends the stream, then always 500
    #: marks prompts that end the process, and the number of tokens generated before
    dies_of: tuple[int, int] | None = None
    floods: bool = False  #: every answer is a line without an end
    healthy: bool = True
    stores: bool = True  #: store the prompts that it answers, and publish their events
    hung: bool = False  #: neither requests nor replays are answered
    token_s: float = 0.0
    reset_path: str = "/reset_prefix_cache"
    gate: asyncio.Event = field(default_factory=asyncio.Event)  #: while unset, answers stop before their second token


class FakeEngine:
    """One HTTP server with its publisher. Runs in the event loop that starts it."""

    def __init__(self, *, block_size: int = 16, model: str = "fake", canary_ids: tuple[int, ...] = (1, 2, 3)) -> None:
        self.block_size = block_size
        self.model = model
        self.canary_ids = canary_ids
        self.max_model_len = 4096
        self.adapters: list[str] = []
        self.behaves = Behaviour()
        self.behaves.gate.set()
        self.bodies: list[dict[str, Any]] = []
        self.hung_up = 0  #: answers whose client disconnected
        self.running = 0
        self.cached: dict[Prefix, int] = {}
        self.history: list[bytes] = []
        self.replay_from = 0  #: older batches are no longer in the replay buffer
        self.starts = 0
        self._ports: tuple[int, int, int] | None = None
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        assert self._ports is not None
        return f"http://127.0.0.1:{self._ports[0]}"

    @property
    def endpoints(self) -> EventEndpoints:
        assert self._ports is not None
        _, events, replay = self._ports
        return EventEndpoints(
            events=f"tcp://127.0.0.1:{events}", replay=f"tcp://127.0.0.1:{replay}", state="", snapshot=""
        )

    def serve_at(self, port: int) -> None:
        """Listen on this port; call it before `start`."""
        self._ports = (port, 0, 0)

    async def start(self) -> None:
        """Start with an empty cache and event number 0, on the same ports as before if it was started before."""
        http, events, replay = self._ports or (0, 0, 0)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._pub, self._router = self._context.socket(zmq.PUB), self._context.socket(zmq.ROUTER)
        events = self._bind(self._pub, events)
        replay = self._bind(self._router, replay)
        self.cached, self.history, self.replay_from = {}, [], 0
        self.starts += 1
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", http)
        self._ports = (self._server.sockets[0].getsockname()[1], events, replay)
        self._replays = asyncio.create_task(self._answer_replays())

    def lose_event_ports(self) -> None:
        """Close the sockets of the event stream; the HTTP server goes on."""
        self._replays.cancel()
        for sock in (self._pub, self._router):
            sock.close(0)

    async def stop(self) -> None:
        """Stop like a killed process."""
        assert self._server is not None
        self._server.close()
        await asyncio.sleep(0)  # lets connections that were just accepted get their handlers first
        for writer in tuple(self._writers):
            writer.transport.abort()
        self._replays.cancel()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(self._replays, *self._tasks, return_exceptions=True)
        await asyncio.sleep(0)  # aborted connections are released in the loop's next iteration
        for sock in (self._pub, self._router):
            sock.close(0)
        self._context.term()

    # The cache and its events

    def evict(self, prompt: list[int], *, blocks: int, salt: str | None = None) -> None:
        """Evict the last blocks of a prompt."""
        chain = self._chain(prompt, salt)
        gone = [self.cached.pop(prefix) for prefix in chain[len(chain) - blocks :]]
        self.publish({"type": "BlockRemoved", "block_hashes": gone, "medium": "GPU", "group_idx": 0})

    def clear(self) -> None:
        """Empty the cache."""
        self.cached.clear()
        self.publish({"type": "AllBlocksCleared"})

    def publish(self, *events: dict[str, Any], heard: bool = True) -> None:
        """Number and keep a batch; send it, unless it is to be lost (`heard` is false)."""
        self.history.append(msgspec.msgpack.encode([1.0 + len(self.history), list(events), 0]))
        if heard:
            self.send(encode_seq(len(self.history) - 1), self.history[-1])

    def send(self, seq: bytes, payload: bytes) -> None:
        """Publish one message unchanged."""
        self._pub.send_multipart([b"", seq, payload])

    def held(self, prompt: list[int], salt: str | None = None) -> int:
        """Return the number of leading blocks of a prompt that are cached."""
        count = 0
        for prefix in self._chain(prompt, salt):
            if prefix not in self.cached:
                break
            count += 1
        return count

    def _chain(self, prompt: list[int], salt: str | None) -> list[Prefix]:
        ends = range(self.block_size, len(prompt) + 1, self.block_size)
        return [(salt, tuple(prompt[:end])) for end in ends]

    def store(self, prompt: list[int], salt: str | None = None, adapter: str | None = None) -> None:
        """Cache a prompt's full blocks and publish those that were not cached yet."""
        kept_as = salt if adapter is None else f"{adapter}/{salt}"
        chain = self._chain(prompt, kept_as)
        start = self.held(prompt, kept_as)
        if start == len(chain):
            return
        for prefix in chain[start:]:
            self.cached[prefix] = secrets.randbits(64)
        self.publish(
            {
                "type": "BlockStored",
                "block_hashes": [self.cached[prefix] for prefix in chain[start:]],
                "parent_block_hash": self.cached[chain[start - 1]] if start else None,
                "token_ids": prompt[start * self.block_size : len(chain) * self.block_size],
                "block_size": self.block_size,
                "lora_id": None if adapter is None else 1,
                "medium": "GPU",
                "lora_name": adapter,
                "extra_keys": [
                    [name for name in (adapter, None if place else salt) if name] or None
                    for place in range(start, len(chain))
                ],
                "group_idx": 0,
            }
        )

    def _bind(self, sock: "zmq.Socket[bytes]", port: int) -> int:
        sock.linger = 0
        if not port:
            return sock.bind_to_random_port("tcp://127.0.0.1")
        sock.bind(f"tcp://127.0.0.1:{port}")
        return port

    async def _answer_replays(self) -> None:
        while True:
            while not self.behaves.hung and self._router.poll(0):
                identity, _, since = self._router.recv_multipart()
                first = max(int.from_bytes(since, "big"), self.replay_from)
                for seq in range(first, len(self.history)):
                    self._router.send_multipart([identity, b"", b"", encode_seq(seq), self.history[seq]])
                self._router.send_multipart([identity, b"", b"", END_SEQ, b""])
            await asyncio.sleep(0.01)

    # HTTP

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._writers.add(writer)
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            length = next((int(line[15:]) for line in head.lower().splitlines() if line[:15] == "content-length:"), 0)
            body = await reader.readexactly(length)
            method, path, _ = head.split(" ", 2)
            while self.behaves.hung:  # noqa: ASYNC110 - any test may change it from any thread
                await asyncio.sleep(0.01)
            await self._answer(method, path, body, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            self.hung_up += 1
        finally:
            writer.close()
            with suppress(ConnectionError, asyncio.CancelledError):
                await writer.wait_closed()
            self._tasks.discard(task)
            self._writers.discard(writer)

    async def _answer(self, method: str, path: str, body: bytes, writer: asyncio.StreamWriter) -> None:
        while path in self.behaves.silent_paths:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        match path:
            case "/v1/completions" | "/v1/chat/completions":
                await self._complete(json.loads(body), writer)
            case "/version":
                self._whole(writer, 200, b'{"version": "0.33.0"}')
            case "/server_info?config_format=json" if self.behaves.load_port is not None:
                named = {"load_endpoint_port_base": self.behaves.load_port, "load_topic": "load", "dp_size": 1}
                self._whole(writer, 200, json.dumps({"kv_events": named}).encode())
            case "/server_info?config_format=json" if self.behaves.tells_sockets:
                ends = self.endpoints
                config = {"endpoint": ends.events.replace("127.0.0.1", "*"), "replay_endpoint": ends.replay}
                self._whole(writer, 200, json.dumps({"vllm_config": {"kv_events_config": config}}).encode())
            case "/kv_event_sources" if self.behaves.names_sources is not None:
                self._whole(writer, 200, json.dumps(self.behaves.names_sources).encode())
            case "/health":
                self._whole(writer, 200 if self.behaves.healthy else 503, b"")
            case "/v1/models":
                card = {"id": self.model, "object": "model", "max_model_len": self.max_model_len}
                more = [{"id": name, "root": f"/adapters/{name}", "parent": self.model} for name in self.adapters]
                self._whole(writer, 200, json.dumps({"data": [card, *more]}).encode())
            case "/tokenize":
                words = str(json.loads(body).get("prompt", "")).split()
                numbers = [int(word) for word in words if word.isdigit()] if not self.behaves.stores else []
                ids = numbers if numbers and len(numbers) == len(words) else list(self.canary_ids)
                about = {"tokens": ids, "count": len(ids), "max_model_len": self.max_model_len}
                self._whole(writer, 200, json.dumps(about).encode())
            case "/metrics":
                size = f'block_size="{self.block_size}",' if self.behaves.tells_block_size else ""
                lines = [
                    f'vllm:cache_config_info{{{size}engine="0",num_gpu_blocks="500"}} 1.0',
                    f'vllm:num_requests_running{{engine="0"}} {float(self.running)}',
                    'vllm:num_requests_waiting{engine="0"} 0.0',
                    'vllm:kv_cache_usage_perc{engine="0"} 0.1',
                ]
                lines += [f'vllm:num_requests_running{{engine="{n}"}} 0.0' for n in range(1, self.behaves.ranks)]
                self._whole(writer, 200, "\n".join(lines).encode())
            case self.behaves.reset_path:
                self.cached.clear()  # vLLM announces this with its next step
                self._whole(writer, 200, b"")
            case _:
                self._whole(writer, 404, b'{"detail":"Not Found"}')
        await writer.drain()

    def _whole(self, writer: asyncio.StreamWriter, status: int, body: bytes) -> None:
        writer.write(
            f"HTTP/1.1 {status} Said\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body
        )

    async def _complete(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        self.bodies.append(body)
        if self.behaves.refusal is not None:
            status, words = self.behaves.refusal
            self._whole(writer, status, json.dumps({"error": {"message": words}}).encode())
            return
        writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-type: text/event-stream\r\n")
        writer.write(b"transfer-encoding: chunked\r\n\r\n")
        self.running += 1
        try:
            await self._generate(body, writer)
        finally:
            self.running -= 1

    async def _generate(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        chat, salt = "messages" in body, body.get("cache_salt")
        prompt = list(self.canary_ids) if chat else body["prompt"]
        marks = [int(word) for word in re.findall(r"\d+", json.dumps(body["messages"]))] if chat else prompt
        cached = self.held(prompt, salt) * self.block_size
        if self.behaves.stores:
            self.store(prompt, salt, body["model"] if body["model"] in self.adapters else None)
        count, seed = body["max_tokens"], body.get("seed") or 0
        while self.behaves.floods:
            writer.write(b"10000\r\n" + bytes(0x10000) + b"\r\n")
            await writer.drain()
        for place in range(count):
            if place == 1:
                await self.behaves.gate.wait()
            if (
                self.behaves.dies_of is not None
                and self.behaves.dies_of[1] == place
                and self.behaves.dies_of[0] in marks
            ):
                os._exit(1)
            if place == self.behaves.break_after:
                writer.transport.abort()
                raise ConnectionResetError
            if place == self.behaves.memory_tokens:
                self.behaves.refusal, self.behaves.healthy = (500, "CUDA out of memory"), False
                await self._event(writer, {"error": {"message": "CUDA out of memory", "code": 500}})
                break
            token = token_at(seed, len(prompt) + place)
            choice: dict[str, Any] = {"index": 0, "text": f"<{token}>", "logprobs": None, "stop_reason": None}
            choice["finish_reason"] = "length" if place == count - 1 else None
            if body.get("logprobs") is not None:
                choice["logprobs"] = {"tokens": [f"token_id:{token}"], "token_logprobs": [-0.5], "top_logprobs": None}
            if chat:
                choice["delta"] = {"content": choice.pop("text")} if place else {"reasoning": "hm"}
            elif self.behaves.tells_ids:
                choice["token_ids"] = [token]
            usage = {"prompt_tokens": len(prompt), "completion_tokens": place + 1}
            await self._event(writer, {"choices": [choice], "usage": usage})
            await asyncio.sleep(self.behaves.token_s)
        else:
            usage = {"completion_tokens": count, "prompt_tokens_details": {"cached_tokens": cached}}
            await self._event(writer, {"choices": [], "usage": usage})
        self._chunk(writer, b"data: [DONE]\n\n")
        self._chunk(writer, b"")

    async def _event(self, writer: asyncio.StreamWriter, content: dict[str, Any]) -> None:
        if writer.transport.is_closing():
            raise ConnectionResetError
        self._chunk(writer, b"data: " + json.dumps(content).encode() + b"\n\n")
        await writer.drain()

    def _chunk(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        writer.write(b"%x\r\n%s\r\n" % (len(data), data))


@contextmanager
def engines_in_a_thread(*engines: FakeEngine) -> Iterator[asyncio.AbstractEventLoop]:
    """Run engines in a thread, for tests without an event loop."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="engines")
    thread.start()
    try:
        for engine in engines:
            asyncio.run_coroutine_threadsafe(engine.start(), loop).result(30)
        yield loop
    finally:
        for engine in engines:
            asyncio.run_coroutine_threadsafe(engine.stop(), loop).result(30)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(30)
        loop.close()


def demo_engine() -> FakeEngine:
    """Return an engine that claims to serve the demo model."""
    tokenizer = Tokenizer.from_file(str(demo_model_path() / "tokenizer.json"))
    ids = tokenizer.encode(CANARY, add_special_tokens=False).ids
    engine = FakeEngine(model="demo", canary_ids=tuple(ids))
    engine.max_model_len = 8192
    return engine


def backend_flags(*engines: FakeEngine) -> list[str]:
    """Return the options with which `homing serve` finds these engines."""
    words = []
    for engine in engines:
        ends = engine.endpoints
        words += ["--backend", engine.url, "--events", ends.events, "--replay", ends.replay]
    return words
