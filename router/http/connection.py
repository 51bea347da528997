"""The client's side of a connection: its body within limits, and the moment it leaves."""

import asyncio
from collections.abc import Awaitable

from starlette.requests import Request
from starlette.types import Receive

from ..errors import BodyTooLarge


class ClientGoneError(Exception):
    """The client left before its answer ended: there is nobody to tell."""


async def read_body(request: Request, most: int) -> bytes:
    """The whole body. Raises BodyTooLarge, before reading where the client announces the length."""
    announced = request.headers.get("content-length", "")
    if announced.isdigit() and int(announced) > most:
        raise BodyTooLarge(f"the body has {announced} bytes; at most {most} are accepted")
    parts: list[bytes] = []
    size = 0
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        part: bytes = message.get("body", b"")
        size += len(part)
        if size > most:
            raise BodyTooLarge(f"the body has more than {most} bytes")
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def while_connected(receive: Receive, work: Awaitable[None]) -> None:
    """Run `work`, cancelled at once when the client leaves (then raises ClientGoneError). The body must have been read.

    The work stays in the calling task: only the wait for the client's leaving is a task of its own.
    """
    task = asyncio.current_task()
    assert task is not None, "while_connected runs inside a task"
    left = False

    def leave(watch: "asyncio.Task[None]") -> None:
        nonlocal left
        if not watch.cancelled():
            left = True
            task.cancel()

    watch = asyncio.create_task(_disconnected(receive))
    watch.add_done_callback(leave)
    try:
        await work
    except asyncio.CancelledError:
        if left and task.uncancel() == 0:
            raise ClientGoneError from None
        raise
    finally:
        watch.remove_done_callback(leave)
        watch.cancel()
