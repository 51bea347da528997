"""Turns on the event loop: no wait without contention, tenants alternate, and the loop gets time in between."""

import asyncio

from homing.router.http.turns import SHORT_S, Turns


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


async def test_nobody_waits_who_is_alone():
    turns = Turns(Clock())
    waiting = turns.next(b"ann")

    try:
        waiting.send(None)
    except StopIteration:
        return
    raise AssertionError("it waits")


async def test_tenants_alternate_however_many_steps_one_has():
    turns, order = Turns(clock := Clock()), []

    async def step(tenant: bytes) -> None:
        await turns.next(tenant)
        clock.now += SHORT_S
        order.append(tenant)

    async with asyncio.TaskGroup() as group:
        for tenant in [b"flood"] * 50 + [b"other"] * 2:
            group.create_task(step(tenant))

    assert order.index(b"other") <= 2
    assert order[:5].count(b"other") == 2
    assert len(order) == 52


async def test_short_steps_share_a_turn():
    turns = Turns(Clock())

    async def steps() -> None:
        for _ in range(10):
            await turns.next(b"ann")

    try:
        steps().send(None)
    except StopIteration:
        return
    raise AssertionError("it waits")


async def test_one_step_is_done_in_each_turn_of_the_loop():
    turns, begun = Turns(clock := Clock()), []

    async def step() -> None:
        await turns.next(b"ann")
        clock.now += SHORT_S
        begun.append(None)

    async with asyncio.TaskGroup() as group:
        for _ in range(20):
            group.create_task(step())
        while len(begun) < 20:
            before = len(begun)
            await asyncio.sleep(0)
            assert len(begun) <= before + 1


async def test_a_long_step_leaves_the_loop_as_much_time_as_it_took():
    clock = Clock()
    turns = Turns(clock)
    loop = asyncio.get_running_loop()
    await turns.next(b"ann")
    clock.now += 0.03
    began = loop.time()

    await turns.next(b"ann")

    assert loop.time() - began >= 0.029


async def test_who_gave_up_gets_no_turn():
    turns = Turns(clock := Clock())
    await turns.next(b"ann")
    clock.now += SHORT_S
    gone = asyncio.ensure_future(turns.next(b"bob"))
    await asyncio.sleep(0)
    gone.cancel()

    await asyncio.wait_for(turns.next(b"eve"), 5)
    await asyncio.wait_for(turns.next(b"eve"), 5)
