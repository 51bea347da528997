"""Starts coroutines without a task where they never wait: most requests are answered, or sent on, in one go.

What Python 3.12 has as eager tasks; a task and its turn of the loop cost as much as parsing a request.
"""

import asyncio
from collections.abc import Coroutine, Generator
from types import coroutine
from typing import Any


def start(work: Coroutine[Any, Any, None]) -> asyncio.Task[None] | None:
    """Run `work` until it waits for the first time; then a task does the rest. None: it is done.

    Before its first wait the coroutine has no current task. The caller keeps a reference to the task.
    """
    try:
        awaited = work.send(None)
    except StopIteration:
        return None
    return asyncio.get_running_loop().create_task(_finish(work, awaited))


async def _finish(work: Coroutine[Any, Any, None], awaited: Any) -> None:
    await _rest(work, awaited)


@coroutine
def _rest(work: Coroutine[Any, Any, None], awaited: Any) -> Generator[Any, Any, None]:
    """Hands on what `work` waits for, and what comes of it."""
    while True:
        thrown: BaseException | None = None
        try:
            sent = yield awaited
        except BaseException as error:  # a cancellation belongs to the work
            thrown = error
        try:
            awaited = work.send(sent) if thrown is None else work.throw(thrown)
        except StopIteration:
            return
