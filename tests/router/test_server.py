# ruff: noqa: F401, F811 (fixtures are imported and then named as arguments)
"""The server behind a real socket: properties that show only on the wire."""

import asyncio
import json
import socket
import ssl
from collections.abc import Callable
from pathlib import Path

import httpx
import msgspec
import pytest
from openai import AsyncOpenAI

from homing.router.config import RouterSettings
from homing.router.errors import AddressInUse, TlsUnusable, TokenizerUnavailable
from homing.router.http.front import TextModels
from homing.router.http.protocol.server import listening_socket
from homing.router.replicas.membership import text_source
from homing.router.server import RouterServer
from homing.router.text.tokenizer import TextModel

from .http.conftest import (
    Live,
    LoadedText,
    answer_ids,
    backend,
    limits,
    live,
    openai_client,
    settings,
    text_model,
)
from .http.fakes import PAUSE, FakeBackend, reply

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
HANG_S = 120
#: A certificate for the loopback address and its key, for tests only.
TLS = Path(__file__).parent / "tls" / "server.pem"


def post(path: str, body: bytes, **headers: str) -> bytes:
    """Build a complete HTTP request."""
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {headers.pop('length', len(body))}\r\n\r\n"
    return head.encode() + body


async def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition that another connection or the server's own tasks make true."""
    while not condition():  # noqa: ASYNC110 (connections and metrics have no event to wait for)
        await asyncio.sleep(0.001)


async def exchange(port: int, data: bytes) -> bytes:
    """Send `data` and read one complete response."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    async with asyncio.timeout(HANG_S):
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
        body = b"" if data.startswith(b"HEAD") else await reader.readexactly(length)
    writer.close()
    await writer.wait_closed()
    return head + body


async def test_broken_json_on_the_wire_is_400(live: Live):
    """No client library would send it."""
    answer = await exchange(live.port, post("/v1/chat/completions", b"{"))

    assert answer.startswith(b"HTTP/1.1 400 ")
    assert json.loads(answer.split(b"\r\n\r\n")[1])["error"]["code"] == "invalid_json"


async def test_a_huge_body_is_refused_before_it_is_read(live: Live):
    """The announced length is enough to decide; the connection is then closed."""
    answer = await exchange(live.port, post("/v1/chat/completions", b"", length=str(10**12)))

    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"connection: close" in answer


async def test_metrics_answer_head_requests(live: Live):
    """A benchmark client sends one every second."""
    answer = await exchange(live.port, b"HEAD /metrics HTTP/1.1\r\nhost: localhost\r\n\r\n")

    assert answer.startswith(b"HTTP/1.1 200 ")
    assert b"text/plain" in answer


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("choices", [1, 2])
async def test_a_client_that_leaves_cancels_its_streams(live: Live, backend, answer_ids, stream, choices):
    """Also while the replica is silent between two tokens, streamed or not: other requests need its blocks."""
    whole = reply(answer_ids)
    backend.script = lambda request: [*list(whole(request))[:2], PAUSE]
    reader, writer = await asyncio.open_connection("127.0.0.1", live.port)
    writer.write(post("/v1/chat/completions", json.dumps(CHAT | {"stream": stream, "n": choices}).encode()))

    async with asyncio.timeout(HANG_S):
        if stream:
            await reader.readuntil(b"data: ")
        await until(lambda: len(backend.streams) == choices)
        assert not any(each.cancelled.is_set() for each in backend.streams)
        writer.transport.abort()
        await asyncio.gather(*(each.cancelled.wait() for each in backend.streams))
        await until(lambda: b"homing_client_disconnects_total 1.0" in live.server.metrics.render())


async def test_a_client_that_leaves_before_the_first_token_cancels_too(live: Live, backend):
    """Prefill is the most expensive phase."""
    backend.script = lambda request: [PAUSE]
    _, writer = await asyncio.open_connection("127.0.0.1", live.port)
    writer.write(post("/v1/chat/completions", json.dumps(CHAT | {"stream": True}).encode()))

    async with asyncio.timeout(HANG_S):
        await until(lambda: bool(backend.streams))
        writer.transport.abort()
        await backend.streams[0].cancelled.wait()


async def test_closing_openais_stream_cancels(openai_client: AsyncOpenAI, backend, answer_ids):
    """This is how applications abandon an answer."""
    whole = reply(answer_ids)
    backend.script = lambda request: [*list(whole(request))[:2], PAUSE]
    messages = CHAT["messages"]

    async with asyncio.timeout(HANG_S):
        stream = await openai_client.chat.completions.create(model="demo", messages=messages, stream=True)
        await anext(stream)
        await stream.close()
        await backend.streams[0].cancelled.wait()


async def test_a_kept_alive_connection_serves_again_after_errors(live: Live):
    """One bad request must not cost the next one its connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", live.port)
    statuses = []

    async with asyncio.timeout(HANG_S):
        for body in (b"{", json.dumps(CHAT).encode(), b"[]", json.dumps(CHAT).encode()):
            writer.write(post("/v1/chat/completions", body))
            head = await reader.readuntil(b"\r\n\r\n")
            length = next(line for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:"))
            await reader.readexactly(int(length[15:]))
            statuses.append(int(head[9:12]))
    writer.close()

    assert statuses == [400, 200, 400, 200]


async def test_accepted_sockets_send_at_once(live: Live):
    """Without TCP_NODELAY a client with delayed ACKs gets its first event 40 ms late."""
    _, writer = await asyncio.open_connection("127.0.0.1", live.port)
    connections = live.server._http[0].connections
    async with asyncio.timeout(HANG_S):
        await until(lambda: bool(connections))

    accepted = next(iter(connections))._transport.get_extra_info("socket")
    assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    writer.close()


async def test_a_taken_port_is_named(live: Live):
    """The error says which address is in use."""
    with pytest.raises(AddressInUse, match=rf"127\.0\.0\.1:{live.port}"):
        listening_socket("127.0.0.1", live.port)


async def test_a_shared_port_belongs_to_several_servers(settings: RouterSettings, backend: FakeBackend, text_model):
    """Several router processes listen on the shared port; each also has a port of its own."""
    servers = [RouterServer(settings, backend, grace_s=1.0) for _ in range(2)]
    port = await servers[0].start("127.0.0.1", 0, shared=True)
    own = await servers[0].start("127.0.0.1", 0)

    assert await servers[1].start("127.0.0.1", port, shared=True) == port
    assert own != port
    with pytest.raises(AddressInUse):
        await servers[1].start("127.0.0.1", own)
    for number in (port, own):
        assert b" 200 " in await exchange(
            number, b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
        )
    for server in servers:
        await server.stop()


async def test_a_stopped_server_frees_its_port(settings: RouterSettings, backend: FakeBackend, text_model):
    """A restart on the same port must work at once; a second stop does nothing."""
    server = RouterServer(settings, backend, grace_s=1.0)
    port = await server.start("127.0.0.1", 0)
    await exchange(port, b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")

    await server.stop()
    await server.stop()

    listening_socket("127.0.0.1", port).close()


@pytest.mark.parametrize("stream", [True, False])
async def test_a_stop_ends_answers_that_outlast_the_grace_with_an_error(
    settings, backend, answer_ids, text_model, stream: bool
):
    """The error tells clients that the network is not broken. The fixture checks that replicas cancel the requests."""
    backend.script = lambda request: [*list(reply(answer_ids)(request))[:2], PAUSE]
    server = RouterServer(settings, backend, texts=LoadedText(text_model), grace_s=0.3)
    port = await server.start("127.0.0.1", 0)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(post("/v1/chat/completions", json.dumps(CHAT | {"stream": stream}).encode()))

    async with asyncio.timeout(HANG_S):
        while not backend.streams:  # noqa: ASYNC110 - the fake has no event to wait for
            await asyncio.sleep(0.01)
        await server.stop()
        answer = (await reader.read()).decode()
    writer.close()

    error = json.loads(answer[answer.index('{"error"') : answer.rindex("}") + 1])["error"]
    assert error["message"] == "the server is shutting down"
    assert answer.startswith("HTTP/1.1 200" if stream else "HTTP/1.1 503")
    assert answer.endswith("0\r\n\r\n" if stream else "}")
    assert "[DONE]" not in answer


async def test_the_tokenizer_is_loaded_once_before_the_first_request(settings, backend):
    """Concurrent requests share one load; the error names a folder without a tokenizer."""
    loads = []

    def load(path):
        loads.append(path)
        raise TokenizerUnavailable(f"nothing in {path}")

    texts, source = TextModels(load), text_source(Path("model"))
    server = RouterServer(settings, backend, texts=texts)
    with pytest.raises(TokenizerUnavailable, match="model"):
        await server.load_text(Path("model"))
    results = await asyncio.gather(texts.get(source), texts.get(source), return_exceptions=True)

    assert len(loads) == 2
    assert all(isinstance(each, TokenizerUnavailable) for each in results)
    await server.stop()


async def test_a_certificate_makes_it_https(settings: RouterSettings, backend: FakeBackend, text_model: TextModel):
    """Streams use TLS too, and one file may hold both certificate and key."""
    encrypted = msgspec.structs.replace(settings, tls_cert_file=str(TLS))
    server = RouterServer(encrypted, backend, texts=LoadedText(text_model), grace_s=1.0)
    port = await server.start("127.0.0.1", 0)
    trust = ssl.create_default_context(cafile=TLS)

    async with httpx.AsyncClient(base_url=f"https://127.0.0.1:{port}", verify=trust) as client:
        response = await client.post("/v1/chat/completions", json=CHAT | {"stream": True})
    await server.stop()

    assert response.status_code == 200
    assert response.text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize(
    "fields", [{"tls_key_file": "x"}, {"tls_cert_file": "nowhere.pem"}, {"tls_cert_file": __file__}]
)
async def test_a_certificate_that_cannot_be_used_is_named(settings: RouterSettings, backend: FakeBackend, fields):
    """The error comes at startup, not with the first client."""
    server = RouterServer(msgspec.structs.replace(settings, **fields), backend)

    with pytest.raises(TlsUnusable, match="tls_cert_file"):
        await server.start("127.0.0.1", 0)


async def test_each_request_leaves_a_line_in_the_access_log(settings, backend, text_model, tmp_path: Path):
    """The line answers the first questions: who, what, where, how long."""
    file = tmp_path / "access.log"
    server = RouterServer(
        msgspec.structs.replace(settings, access_log=str(file)), backend, texts=LoadedText(text_model), grace_s=1.0
    )
    port = await server.start("127.0.0.1", 0)
    await exchange(port, post("/v1/chat/completions", json.dumps(CHAT).encode()))
    await exchange(port, post("/v1/chat/completions", b"{"))
    await server.stop()

    good, bad = file.read_text().splitlines()
    assert "status=200" in good
    assert "replica=r0 why=only" in good
    assert "status=400" in bad
    assert "replica" not in bad
