"""A cluster's router processes: starts and restarts them, and sends them the controller's questions.

All of them listen on one port; the kernel distributes new connections among them. If there are several, each also has
a port of its own, because metrics are per process. Depends on Ray and the router actor; of replicas, it only passes on
descriptions. Runs on the controller's event loop.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import chain, repeat
from typing import Any, TypeVar

import ray
from ray.exceptions import RayActorError, RayError

from ...router.backend import AbsentReplica
from ...router.control import (
    CacheWorth,
    CountInFlight,
    Demand,
    MeasureDemand,
    Member,
    Question,
    SetMembership,
    SetMissing,
    WarmUp,
    WeighCaches,
)
from ..config import router_url
from .actors import death, until_failed, until_frozen, until_silent, within
from .autoscale import combined_demand
from .control_messages import ClusterModel, Failed, Listening, Models
from .planner import STABLE_AFTER_S, restart_pause_s

log = logging.getLogger(__name__)

#: Generous: a router answers between two iterations of its event loop.
ASK_TIMEOUT_S = 10.0
#: Pauses before a refused membership is sent again; the last one is repeated.
RETRY_S = (1.0, 2.0, 5.0, 15.0)

A = TypeVar("A")


@dataclass(slots=True)
class Seat:
    """The place of one router, whichever process currently fills it."""

    number: int
    actor: Any = None  #: set exactly while the router listens
    direct_port: int = 0  #: kept when the process is replaced
    error: str | None = None
    missing: SetMissing = field(default_factory=SetMissing)  #: the last `SetMissing` sent to its current process
    retrying: "asyncio.Task[None] | None" = None  #: sends a membership again that its process refused


class RouterProcesses:
    def __init__(self, models: Models, *, notify: Callable[[str, str], None]) -> None:
        self._models = models  #: for routers started from now on
        common = models[0].settings
        self._supervisor: Any = None
        self._notify = notify
        self._seats = [Seat(number) for number in range(common.cluster.routers)]
        self._port = common.router.port
        #: If the setting asks for any free port, the first router chooses it and the others wait.
        self._port_known = asyncio.Event()
        #: Numbered from a clock that is never set, to be higher than the numbers of the controller's previous process,
        #: which ran on the same machine.
        self._membership = _membership(models, (), time.monotonic_ns() // 1000)
        self._stopping = False

    @property
    def url(self) -> str | None:
        """The URL on which all routers listen; None until they all do."""
        return self._address(self._port) if all(seat.actor is not None for seat in self._seats) else None

    @property
    def direct_urls(self) -> tuple[str, ...]:
        """Each router's own URL; empty if there is only one router."""
        return tuple(self._address(seat.direct_port) for seat in self._seats if seat.direct_port)

    @property
    def error(self) -> str | None:
        return next((seat.error for seat in self._seats if seat.error is not None), None)

    async def keep(self, supervisor: Any, running: Mapping[int, Any]) -> None:
        """Keep all routers running until `stop`. `running`: actors to take over, by seat number."""
        self._supervisor = supervisor
        await asyncio.gather(*(self._keep(seat, running.get(seat.number)) for seat in self._seats))

    async def publish(self, models: tuple[ClusterModel, ...], members: tuple[Member, ...]) -> None:
        """Have all routers serve these models with these replicas; routers that start later get the same."""
        membership = self._membership = _membership(models, members, self._membership.number + 1)
        self._models = models
        await asyncio.gather(*(self._send_membership(seat, membership) for seat in self._seats))
        self._keep_spare()

    async def send_missing(self, absent: tuple[AbsentReplica, ...], off: frozenset[str]) -> None:
        """Show these replicas as missing, and refuse requests for the models in `off`, in every router."""
        missing = SetMissing(absent, off)
        for seat in self._seats:
            if seat.actor is not None and seat.missing != missing:
                seat.missing = missing
                seat.actor.ask.remote(missing)

    async def warm_up(self, replica_id: str, timeout_s: float) -> str:
        """Wait until all routers can use the replica and its cache is warm; returns why a router refuses it, or empty.

        Returns early if a router needs the replica at once: that router already uses it, and the others will.
        """
        settings = self._models[0].settings
        share = settings.router.warm_up_share / len(self._seats)  # routers fill equal parts, with their own prompts
        question = WarmUp(replica_id, share, timeout_s)
        limit_s = timeout_s + ASK_TIMEOUT_S  # longer than the router's own timeout
        asked = [asyncio.ensure_future(self._ask(seat, question, limit_s)) for seat in self._seats]
        try:
            for answered in asyncio.as_completed(asked):
                answer = await answered
                if answer is not None and (answer.refusal or answer.pressed):
                    return answer.refusal
        finally:
            for each in asked:
                each.cancel()
        return ""

    async def in_flight(self, replica_id: str) -> int:
        answers = await asyncio.gather(*(self._ask(seat, CountInFlight(replica_id)) for seat in self._seats))
        return sum(answer for answer in answers if answer is not None)

    async def cache_worths(self) -> list[CacheWorth]:
        """What would be lost with each replica's cache, from the first router that answers: all know the same."""
        for seat in self._seats:
            if (answer := await self._ask(seat, WeighCaches())) is not None:
                return answer
        return []

    async def demands(self) -> dict[str, Demand]:
        """The demand for each model, combined over all routers that answer."""
        asked = (self._ask(seat, MeasureDemand()) for seat in self._seats)
        answers = [answer for answer in await asyncio.gather(*asked) if answer is not None]
        models = dict.fromkeys(model for answer in answers for model in answer)
        return {model: combined_demand([each[model] for each in answers if model in each]) for model in models}

    async def stop(self) -> None:
        self._stopping = True
        actors = [seat.actor for seat in self._seats if seat.actor is not None]
        await asyncio.gather(*(within(5, actor.stop.remote()) for actor in actors))
        for actor in actors:
            ray.kill(actor)

    async def _keep(self, seat: Seat, running: Any) -> None:
        """Start a router, and restart it whenever it dies, on the same ports and with the current members."""
        failures = 0
        while True:
            if seat.number and not self._port and running is None:
                await self._port_known.wait()
            began = time.monotonic()
            reason = await self._run(seat, running)
            running = None
            if self._stopping:
                return
            seat.actor, seat.error = None, reason
            self._notify("warning", f"router_lost router={seat.number} reason={reason!r}")
            failures = 1 if time.monotonic() - began >= STABLE_AFTER_S else failures + 1
            await asyncio.sleep(restart_pause_s(failures))

    async def _run(self, seat: Seat, running: Any) -> str:
        """Start a router, unless `running` is one, and wait until it ends; returns the reason."""
        router = running
        try:
            membership = self._membership
            router = running or await self._supervisor.start_router.remote(seat.number, self._models)
            listening: Listening | Failed | None = (
                await asyncio.wait_for(router.listening.remote(), ASK_TIMEOUT_S)
                if running
                else await router.start.remote(
                    self._models, Listening(self._port, seat.direct_port), membership, seat.number
                )
            )
            if listening is None:
                ray.kill(router)
                return "it was still starting when the controller died"
            if isinstance(listening, Failed):
                return listening.message
            self._port = listening.port
            self._port_known.set()
            seat.actor, seat.direct_port, seat.error, seat.missing = router, listening.direct_port, None, SetMissing()
            self._notify("info", f"router_ready router={seat.number} port={listening.port}")
            if running:
                router.ask.remote(SetMissing())  # resets what the previous controller sent, which is unknown
            if running or membership != self._membership:  # it changed while the router was starting
                await self._send_membership(seat, self._membership)
            self._keep_spare()
            # A silent router is killed: clients whose connections the kernel assigns to it would wait.
            cluster = self._models[0].settings.cluster
            ends = until_silent(router, cluster), until_failed(router), until_frozen(router)
            watching = [asyncio.ensure_future(end) for end in ends]
            try:
                await asyncio.wait(watching, return_when=asyncio.FIRST_COMPLETED)
                reason = next(each.result() for each in watching if each.done())
            finally:
                for each in watching:
                    each.cancel()
            ray.kill(router)  # only now, so that this death is not taken for the reason
            return reason
        except Exception as error:
            if router is not None:
                ray.kill(router)  # a remaining process must not keep the port
            return death(error)

    def _keep_spare(self) -> None:
        """Have a spare router once replicas serve; earlier, its imports would delay their start."""
        if self._membership.members and self._models[0].settings.cluster.spare_process:
            self._supervisor.keep_spare_router.remote(self._models)

    async def _ask(self, seat: Seat, question: Question[A], timeout_s: float = ASK_TIMEOUT_S) -> A | None:
        """A router's answer; None if it does not answer or no router is running."""
        if seat.actor is None:
            return None
        try:
            answer: A = await asyncio.wait_for(seat.actor.ask.remote(question), timeout_s)
            return answer
        except (RayError, TimeoutError) as error:
            name = type(question).__name__
            log.warning("router_not_answered router=%d question=%s reason=%s", seat.number, name, death(error))
            return None

    async def _send_membership(self, seat: Seat, membership: SetMembership) -> None:
        if not await self._offer(seat, membership):
            seat.retrying = asyncio.create_task(self._insist(seat, membership))

    async def _offer(self, seat: Seat, membership: SetMembership) -> bool:
        """Send a membership. Returns whether it need not be sent again."""
        if seat.actor is None or membership != self._membership:
            return True  # not listening yet, or a newer membership is on its way
        try:
            await seat.actor.ask.remote(membership)
        except RayActorError:
            return True  # `until_failed` reports it
        except Exception as error:
            self._notify("error", f"membership_refused router={seat.number} reason={death(error)!r}")
            return False
        return True

    async def _insist(self, seat: Seat, membership: SetMembership) -> None:
        """Send a membership that a router refused until it takes it: nothing else would send it again."""
        for pause_s in chain(RETRY_S, repeat(RETRY_S[-1])):
            await asyncio.sleep(pause_s)
            if await self._offer(seat, membership):
                return

    def _address(self, port: int) -> str:
        return router_url(self._models[0].settings.router, port)


def _membership(models: tuple[ClusterModel, ...], members: tuple[Member, ...], number: int) -> SetMembership:
    return SetMembership(tuple(model.name for model in models), members, models[0].seed, number)
