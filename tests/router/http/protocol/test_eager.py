"""Properties of the eager start: what never waits needs no task, and what waits behaves as in one."""

import asyncio

import pytest

from homing.router.http.protocol.eager import start


async def test_what_never_waits_is_done_at_once():
    """No task, no turn of the loop."""
    done: list[int] = []

    async def work() -> None:
        done.append(1)

    assert start(work()) is None
    assert done == [1]


async def test_what_waits_goes_on_in_a_task():
    """With the results of what it waited for, time after time."""
    done: list[int] = []
    first: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def work() -> None:
        done.append(await first)
        await asyncio.sleep(0)
        done.append(2)

    task = start(work())
    assert task is not None
    assert done == []
    first.set_result(1)
    await task

    assert done == [1, 2]


async def test_errors_of_what_it_waits_for_arrive_inside():
    """As `await` promises."""
    caught: list[str] = []
    first: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def work() -> None:
        try:
            await first
        except ValueError as error:
            caught.append(str(error))

    task = start(work())
    assert task is not None
    first.set_exception(ValueError("no"))
    await task

    assert caught == ["no"]


async def test_a_cancellation_reaches_the_work():
    """It may clean up behind it."""
    cleaned: list[bool] = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cleaned.append(True)

    task = start(work())
    assert task is not None
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    assert cleaned == [True]


async def test_what_raises_before_it_waits_raises_here():
    """Its caller is the one who can answer."""

    async def work() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError):
        start(work())
