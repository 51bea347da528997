"""Randomly damaged HTTP gets an error in OpenAI's format or a closed connection, and the server keeps working."""

import asyncio
import json
import random
from collections.abc import Iterator

import msgspec

from homing.router.http.errors import ErrorBody

from .conftest import Live
from .fakes import FakeBackend

BODY = json.dumps({"prompt": "Once upon a time", "max_tokens": 3}).encode()
PLAIN = (
    b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer k\r\ncontent-type: application/json\r\n"
    b"connection: close\r\ncontent-length: %d\r\n\r\n%s" % (len(BODY), BODY)
)
CHUNKED = (
    b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n"
    b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)
)
GET = b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
WHOLE = (PLAIN, CHUNKED, GET, GET + PLAIN)
SPECIAL = (
    b"\r\n",
    b"\n",
    b"\r",
    b"\0",
    b" ",
    b":",
    b"\xff",
    b"content-length: 5\r\n",
    b"transfer-encoding: x\r\n",
    b"-1",
)
CONNECTIONS = 600
AT_ONCE = 50


def damaged(data: bytes, rng: random.Random) -> bytes:
    """Return `data` with one to three random insertions, replacements, deletions or repetitions."""
    for _ in range(rng.randint(1, 3)):
        at, end = sorted(rng.randrange(len(data) + 1) for _ in range(2))
        match rng.randrange(4):
            case 0:
                data = data[:at] + rng.choice(SPECIAL) + data[at:]
            case 1:
                data = data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :]
            case 2:
                data = data[:at] + data[end:]
            case _:
                data = data[:at] + data[at:end] + data[at:]
    return data


async def spoken(port: int, data: bytes) -> bytes:
    """Send `data`, close the sending side and return everything the server sends."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(data)
        writer.write_eof()
        return await reader.read()
    except ConnectionError:
        return b""
    finally:
        writer.close()


def parsed(said: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield status and body of each response on a connection; every response must have a content length."""
    while said:
        head, _, rest = said.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 "), head
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        yield int(head.split()[1]), rest[:length]
        said = rest[length:]


async def test_damaged_http_is_answered_or_closed_and_harms_nobody(live: Live, backend: FakeBackend) -> None:
    """Our own code around the HTTP parser must withstand what proxies and scanners send."""
    rng = random.Random(5)
    wounds = [damaged(rng.choice(WHOLE), rng) for _ in range(CONNECTIONS)]
    answers = []
    for at in range(0, CONNECTIONS, AT_ONCE):
        answers += await asyncio.gather(*(spoken(live.port, wound) for wound in wounds[at : at + AT_ONCE]))

    for status, body in (each for answer in answers for each in parsed(answer)):
        assert status in (200, 501) or 400 <= status < 500, body
        if status >= 400:
            assert msgspec.json.decode(body, type=ErrorBody).error.code
    assert b"200 OK" in await spoken_to_the_end(live.port)
    for stream in backend.streams:
        await asyncio.wait_for(stream.cancelled.wait(), 30)


async def spoken_to_the_end(port: int) -> bytes:
    """Send a valid request and return the complete response."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(PLAIN)
    answer = await reader.read()
    writer.close()
    return answer
