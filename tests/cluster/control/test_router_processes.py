"""Combining the answers of several routers into one, without Ray."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from homing.cluster.config import Settings, load_settings
from homing.cluster.control.control_messages import ClusterModel, Listening, Models
from homing.cluster.control.router_processes import RouterProcesses
from homing.router.backend import AbsentReplica
from homing.router.control import (
    AnyQuestion,
    CacheWorth,
    CountInFlight,
    Demand,
    MeasureDemand,
    SetMembership,
    SetMissing,
    WarmUp,
    WarmUpEnded,
    WeighCaches,
)

Answers = Callable[[AnyQuestion], Any]


class FakeActor:
    """The part of a router's actor that is called here."""

    def __init__(self, answers: Answers) -> None:
        self.asked: list[AnyQuestion] = []
        self._answers = answers
        self.ask = SimpleNamespace(remote=self._ask)
        self.start = SimpleNamespace(remote=self._start)
        self.watch = self.ping = self.mark = SimpleNamespace(remote=asyncio.Event().wait)

    async def _start(self, models: Models, wanted: Listening, membership: SetMembership, seat: int) -> Listening:
        self.asked.append(membership)
        return Listening(8000, 9000 + seat)

    def _ask(self, question: AnyQuestion) -> "asyncio.Future[Any]":
        self.asked.append(question)
        return asyncio.ensure_future(self._answer(question))

    async def _answer(self, question: AnyQuestion) -> Any:
        answer = self._answers(question)
        return await answer if asyncio.iscoroutine(answer) else answer


def spec() -> Models:
    settings: Settings = load_settings({"served_model_name": "fox", "routers": 2}, {})
    return (ClusterModel(settings=settings, seed=7, model_dir=None, run_dir=None, host=""),)


@asynccontextmanager
async def running(*answers: Answers) -> AsyncIterator[tuple[RouterProcesses, list[FakeActor]]]:
    """Two routers with these answers."""
    actors = [FakeActor(each) for each in answers]

    async def start_router(seat: int, models: Models) -> FakeActor:
        return actors[seat]

    supervisor = SimpleNamespace(start_router=SimpleNamespace(remote=start_router))
    routers = RouterProcesses(spec(), notify=lambda level, text: None)
    keeping = asyncio.create_task(routers.keep(supervisor, {}))
    while routers.url is None:  # noqa: ASYNC110 - what is waited for is a plain value of the thing under test
        await asyncio.sleep(0)
    try:
        yield routers, actors
    finally:
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)


async def never() -> None:
    await asyncio.Event().wait()


async def test_each_router_gets_each_membership_under_a_rising_number() -> None:
    """The first is sent at the router's start. It includes the cluster's seed."""
    async with running(lambda _: None, lambda _: None) as (routers, actors):
        await routers.publish(spec(), ())

        for actor in actors:
            first, second = actor.asked
            assert isinstance(first, SetMembership)
            assert isinstance(second, SetMembership)
            assert (second.models, second.cluster_seed, second.number) == (("fox",), 7, first.number + 1)


async def test_numbers_rise_over_a_restart_of_the_controller_also_if_the_clock_is_set_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Routers would ignore every membership of the new process, until the clock has caught up."""
    numbers = []
    for now in (1_800_000_000, 1_700_000_000):
        monkeypatch.setattr("time.time_ns", lambda now=now: now * 1_000_000_000)
        async with running(lambda _: None, lambda _: None) as (_, actors):
            (first,) = actors[0].asked
            assert isinstance(first, SetMembership)
            numbers.append(first.number)

    assert numbers == sorted(set(numbers))


async def test_a_membership_that_a_router_refuses_is_sent_again_until_it_is_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The router would keep its old replicas until the next change, which may never come."""
    monkeypatch.setattr("homing.cluster.control.router_processes.RETRY_S", (0.0,))
    refusals = [ValueError("a file is missing")] * 3

    async def refuse(question: AnyQuestion) -> None:
        if isinstance(question, SetMembership) and refusals:
            raise refusals.pop()

    async with running(refuse, lambda _: None) as (routers, actors):
        await routers.publish(spec(), ())
        while refusals:  # noqa: ASYNC110 - what is waited for is a plain value
            await asyncio.sleep(0)
        for _ in range(10):
            await asyncio.sleep(0)

        assert [len(actor.asked) for actor in actors] == [5, 2]
        assert len(set(actors[0].asked[1:])) == 1


async def test_routers_are_told_of_missing_replicas_once() -> None:
    """The controller checks several times a second, and usually nothing has changed."""
    missing = AbsentReplica(replica_id="r0", model="fox", state="starting", reason="", since=0.0)
    async with running(lambda _: None, lambda _: None) as (routers, actors):
        for _ in range(3):
            await routers.send_missing((missing,), frozenset({"fox"}))

        assert [actor.asked[1:] for actor in actors] == [[SetMissing((missing,), frozenset({"fox"}))]] * 2


async def test_requests_in_flight_are_added_up() -> None:
    """Each router counts only its own requests."""
    async with running(lambda _: 2, lambda _: 3) as (routers, actors):
        assert await routers.in_flight("r1") == 5
        assert actors[0].asked[-1] == CountInFlight("r1")


async def test_what_caches_are_worth_is_asked_of_one_router() -> None:
    """All routers have the same information."""
    worth = CacheWorth("r0", 1, 2, 3.0)
    async with running(lambda _: [worth], lambda _: never()) as (routers, actors):
        assert await routers.cache_worths() == [worth]
        assert WeighCaches() not in actors[1].asked


async def test_demands_of_routers_are_joined_by_model() -> None:
    """Held requests belong to one router each; the load of replicas is seen by all routers."""

    def demand(held: int) -> Demand:
        return Demand(
            held_requests=held,
            held_tokens=10 * held,
            queued_tokens=5,
            running=1,
            slots=4,
            prefill_tokens_per_s=10.0,
            serving=1,
        )

    async with running(lambda _: {"fox": demand(1)}, lambda _: {"fox": demand(2)}) as (
        routers,
        actors,
    ):
        assert await routers.demands() == {"fox": demand(3)}
        assert actors[0].asked[-1] == MeasureDemand()


async def test_a_warm_up_ends_when_all_have_ended_it_or_one_needs_the_replica_or_refuses_it() -> None:
    """Each router warms up its part of the share. One that needs the replica has admitted it, so the others follow."""
    for answers, refusal in (
        ((lambda _: WarmUpEnded(), lambda _: WarmUpEnded()), ""),
        ((lambda _: WarmUpEnded(pressed=True), lambda _: never()), ""),
        ((lambda _: never(), lambda _: WarmUpEnded(refusal="no")), "no"),
    ):
        async with running(*answers) as (routers, actors):
            assert await routers.warm_up("r1", 30.0) == refusal

            share = spec()[0].settings.router.warm_up_share / 2
            assert actors[0].asked[-1] == WarmUp("r1", share, 30.0)
