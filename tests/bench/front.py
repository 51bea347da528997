"""CPU cost of the HTTP front alone: one small plain request, and one streamed chunk, over a real socket.

    python tests/bench/front.py [REQUESTS]

The server runs in this process and is measured by its thread's CPU time; the client is a second process that speaks raw
HTTP over one connection. The backend is a fake that has all tokens ready, so what is measured is parsing, template,
tokenizing, detokenizing, encoding, SSE and the HTTP stack.
"""

import asyncio
import json
import socket
import subprocess
import sys
import time
from pathlib import Path

import uvloop

sys.path.insert(0, str(Path(__file__).parents[2]))
import homing
from homing.replica.messages import ModelLimits
from homing.router.config import RouterSettings
from homing.router.server import RouterServer
from tests.router.http.fakes import FakeBackend, reply

DEMO = Path(homing.__file__).parent / "replica" / "demo" / "model"
SHORT, LONG = 1, 201
CHAT = {"messages": [{"role": "user", "content": "Tell me a story about a fox."}]}


def client(port: int, count: int, body: bytes) -> None:
    """Send `count` requests one after the other; each ends with a marker of its kind."""
    marker = b"0\r\n\r\n" if b'"stream": true' in body else b"}}}"
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body)
    with socket.create_connection(("127.0.0.1", port)) as connection:
        for _ in range(count):
            connection.sendall(head + body)
            data = b""
            while not data.endswith(marker):
                part = connection.recv(1 << 20)
                if not part:
                    raise ConnectionError("the server closed the connection")
                data = data[-8:] + part


async def measure(port: int, count: int, body: dict[str, object]) -> float:
    """CPU microseconds of this thread per request."""
    command = [sys.executable, __file__, "client", str(port), str(count), json.dumps(body)]
    started = time.thread_time()
    process = await asyncio.create_subprocess_exec(*command, stdin=subprocess.DEVNULL)
    if await process.wait():
        raise SystemExit("the client failed")
    return (time.thread_time() - started) / count * 1e6


async def main(count: int) -> None:
    """Print the table."""
    limits = ModelLimits(name="demo", path=str(DEMO), vocab_size=3072, max_model_len=4096, eos_token_ids=(4,))
    ids = [300 + index % 500 for index in range(LONG)]
    backend = FakeBackend(limits, reply(ids))
    server = RouterServer(RouterSettings(), backend)
    port = await server.start("127.0.0.1", 0)
    await server.load_text(str(DEMO))
    await measure(port, 50, CHAT | {"max_tokens": SHORT})
    plain = await measure(port, count, CHAT | {"max_tokens": SHORT})
    short = await measure(port, count, CHAT | {"max_tokens": SHORT, "stream": True})
    long = await measure(port, max(count // 20, 10), CHAT | {"max_tokens": LONG, "stream": True})
    await server.stop()
    print(f"{'plain chat request, 1 token':36} {plain:8.1f} us CPU")
    print(f"{'streamed chat request, 1 token':36} {short:8.1f} us CPU")
    print(f"{'each further streamed chunk':36} {(long - short) / (LONG - SHORT):8.1f} us CPU")


if __name__ == "__main__":
    if sys.argv[1:2] == ["client"]:
        client(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4].encode())
    else:
        uvloop.run(main(int(sys.argv[1]) if len(sys.argv) > 1 else 2000))
