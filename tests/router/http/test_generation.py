"""Properties of running generations that no single answer shows."""

import asyncio
import gc
import json
from typing import Any

import pytest

from .conftest import Live
from .fakes import FakeBackend

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}


async def ask(port: int, path: str, body: dict[str, Any]) -> bytes:
    """The answer, of a connection that makes no objects of this package."""
    data = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)
    answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    return answer


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/chat/completions", CHAT | {"stream": True}),
        ("/v1/chat/completions", CHAT | {"n": 2, "logprobs": True}),
        ("/v1/completions", {"prompt": [300, 301], "max_tokens": 5}),
        ("/v1/completions", {"prompt": ["a fox", "an owl"], "max_tokens": 5, "stream": True}),
    ],
)
async def test_a_request_leaves_nothing_to_the_garbage_collector(
    live: Live, backend: FakeBackend, path: str, body: dict[str, Any]
):
    """Cycles would keep prompts in memory between collections, and collections stop everybody's tokens."""
    await ask(live.port, path, body)  # what is made once
    backend.streams.clear()
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        answer = await ask(live.port, path, body)
        backend.streams.clear()
        gc.collect()
        left = {type(each).__name__ for each in gc.garbage if type(each).__module__.startswith("homing.")}
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()

    assert answer.startswith(b"HTTP/1.1 200")
    assert not left
