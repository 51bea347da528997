"""The router processes of a cluster: each is started, told who serves, and started again when it dies.

All of them listen on one port, where the kernel deals new connections out among them; each has a port of its own, too,
as metrics are per process. Knows Ray and the router actor, nothing of replicas beyond their descriptions. Runs on the
controller's event loop.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError

from ...router.backend import AbsentReplica
from .actors import death, within
from .autoscale import Demand, together
from .control_messages import CacheWorth, ClusterSpec, Failed, Listening, Member, Membership, ModelSpec, Wanted
from .planner import Pacing

log = logging.getLogger(__name__)

#: A router answers between two steps of its event loop.
ASK_TIMEOUT_S = 10.0

#: What a router that begins knows of who is missing, and of which models nobody is wanted.
NOBODY: tuple[tuple[AbsentReplica, ...], frozenset[str]] = ((), frozenset())

Notify = Callable[[str, str], None]


@dataclass(slots=True)
class Seat:
    """One of the routers, whatever process is in it."""

    number: int
    actor: Any = None  #: set exactly while it listens
    direct_port: int = 0  #: kept when the process is another one
    error: str | None = None
    absent: tuple[tuple[AbsentReplica, ...], frozenset[str]] = NOBODY  #: what its present process was told


class RouterProcesses:
    """As many routers as the settings want."""

    def __init__(self, spec: ClusterSpec, *, pacing: Pacing, notify: Notify) -> None:
        """`notify` gets level and text."""
        self._spec = spec  #: of those that are started from now on
        common = spec.common.settings
        self._supervisor: Any = None
        self._pacing = pacing
        self._notify = notify
        self._seats = [Seat(number) for number in range(common.cluster.routers)]
        self._port = common.router.port
        #: Where a free port was asked for, the first router chooses it and the others wait.
        self._port_known = asyncio.Event()
        #: Numbers go on rising in the next life of the controller.
        self._told = Membership(spec.models, number=time.time_ns() // 1000)
        self._stopping = False

    @property
    def url(self) -> str | None:
        """Where all of them listen; None until they do."""
        return self._address(self._port) if all(seat.actor is not None for seat in self._seats) else None

    @property
    def direct_urls(self) -> tuple[str, ...]:
        """Each router's own address; a router that is alone has none."""
        return tuple(self._address(seat.direct_port) for seat in self._seats if seat.direct_port)

    @property
    def error(self) -> str | None:
        """Why one of them does not listen."""
        return next((seat.error for seat in self._seats if seat.error is not None), None)

    async def keep(self, supervisor: Any, running: Mapping[int, Any]) -> None:
        """Keep all of them running until `stop`; those that run already, by seat, are taken over."""
        self._supervisor = supervisor
        await asyncio.gather(*(self._keep(seat, running.get(seat.number)) for seat in self._seats))

    async def publish(self, models: tuple[ModelSpec, ...], members: tuple[Member, ...]) -> None:
        """These models are served, by these replicas; a router that comes later is told as it starts."""
        told = self._told = Membership(models, members, self._told.number + 1)
        self._spec = ClusterSpec(models)
        await asyncio.gather(*(self._tell(seat, told) for seat in self._seats))

    async def tell_absent(self, absent: tuple[AbsentReplica, ...], off: frozenset[str]) -> None:
        """These should serve and do not, and of these models nobody should: for every router that does not know yet."""
        for seat in self._seats:
            if seat.actor is not None and seat.absent != (absent, off):
                seat.absent = (absent, off)
                seat.actor.tell_absent.remote(absent, off)

    async def warm_up(self, replica_id: str, timeout_s: float) -> str:
        """Until every router can send it requests and its cache is warm; in words why one refuses it, or empty.

        Sooner when one of them wants it at once: it has let the replica in by then, as the others will.
        """
        limit_s = timeout_s + ASK_TIMEOUT_S  # the router itself ends what takes too long
        questions = (self._ask(seat, "warm_up", replica_id, timeout_s, timeout_s=limit_s) for seat in self._seats)
        asked = [asyncio.ensure_future(question) for question in questions]
        try:
            for answered in asyncio.as_completed(asked):
                answer: Failed | Wanted | None = await answered
                if answer is not None:
                    return answer.message if isinstance(answer, Failed) else ""
        finally:
            for question in asked:
                question.cancel()
        return ""

    async def in_flight(self, replica_id: str) -> int:
        """Requests at this replica that routers wait for."""
        answers = await asyncio.gather(*(self._ask(seat, "in_flight", replica_id) for seat in self._seats))
        return sum(answer or 0 for answer in answers)

    async def worths(self) -> list[CacheWorth]:
        """What would be lost with each replica; every router knows the same, so the first that answers is believed."""
        for seat in self._seats:
            worths: list[CacheWorth] | None = await self._ask(seat, "worths")
            if worths is not None:
                return worths
        return []

    async def demands(self) -> dict[str, Demand]:
        """By model: what waits and works, in the eyes of all routers that know it; of nothing when none answers."""
        asked = (self._ask(seat, "demands") for seat in self._seats)
        answers: list[dict[str, Demand]] = [answer for answer in await asyncio.gather(*asked) if answer is not None]
        models = dict.fromkeys(model for answer in answers for model in answer)
        return {model: together([each[model] for each in answers if model in each]) for model in models}

    async def stop(self) -> None:
        """End them in good order."""
        self._stopping = True
        actors = [seat.actor for seat in self._seats if seat.actor is not None]
        await asyncio.gather(*(within(5, actor.stop.remote()) for actor in actors))
        for actor in actors:
            ray.kill(actor)

    async def _keep(self, seat: Seat, running: Any) -> None:
        """Start a router, and again when it dies: on the same ports, with the members of that time."""
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
            failures = 1 if time.monotonic() - began >= self._pacing.stable_after_s else failures + 1
            await asyncio.sleep(self._pacing.pause_s(failures))

    async def _run(self, seat: Seat, running: Any) -> str:
        """Start one, unless it runs already, and wait until it ends; returns why it did."""
        router = running
        try:
            told = self._told
            router = running or await self._supervisor.start_router.remote(seat.number, self._spec)
            found: Listening | Failed | None = (
                await asyncio.wait_for(router.listening.remote(), ASK_TIMEOUT_S)
                if running
                else await router.start.remote(self._port, seat.direct_port, told, seat.number)
            )
            if found is None:
                ray.kill(router)
                return "it was still starting when the controller died"
            if isinstance(found, Failed):
                return found.message
            self._seated(seat, router, found)
            if running:
                router.tell_absent.remote(*NOBODY)  # what it was told of them is not known any more
            if running or told != self._told:  # it changed while the router was starting
                await self._tell(seat, self._told)
            return await self._until_ended(router)
        except Exception as error:
            if router is not None:
                ray.kill(router)  # what is left of it must not keep the port
            return death(error)

    async def _until_ended(self, router: Any) -> str:
        """Why it ended, or why it had to: one that hangs keeps those waiting whom the kernel deals out to it."""
        watching = [asyncio.ensure_future(self._watch(router)), asyncio.ensure_future(self._ping(router))]
        try:
            ended, _ = await asyncio.wait(watching, return_when=asyncio.FIRST_COMPLETED)
            return ended.pop().result()
        finally:
            for each in watching:
                each.cancel()

    async def _watch(self, router: Any) -> str:
        failed: Failed | None = None
        try:
            while failed is None:
                failed = await router.watch.remote()
        except RayError as error:
            return death(error)
        return failed.message

    async def _ping(self, router: Any) -> str:
        cluster = self._spec.common.settings.cluster
        try:
            while True:
                await asyncio.sleep(cluster.health_interval_s)
                await asyncio.wait_for(router.ping.remote(), cluster.health_timeout_s)
        except TimeoutError:
            ray.kill(router)
            return f"no answer for {cluster.health_timeout_s:g} s"
        except RayError as error:
            return death(error)

    def _seated(self, seat: Seat, router: Any, found: Listening) -> None:
        self._port = found.port
        self._port_known.set()
        seat.actor, seat.direct_port, seat.error, seat.absent = router, found.direct_port, None, NOBODY
        self._notify("info", f"router_ready router={seat.number} port={found.port}")

    async def _ask(self, seat: Seat, question: str, *words: object, timeout_s: float = ASK_TIMEOUT_S) -> Any:
        """A router's answer; None when there is none, or no router."""
        if seat.actor is None:
            return None
        try:
            return await asyncio.wait_for(getattr(seat.actor, question).remote(*words), timeout_s)
        except (RayError, TimeoutError) as error:
            log.warning("router_not_answered router=%d question=%s reason=%s", seat.number, question, death(error))
            return None

    async def _tell(self, seat: Seat, told: Membership) -> None:
        if seat.actor is None or told != self._told:
            return  # a newer membership is on its way
        try:
            await seat.actor.apply_membership.remote(told)
        except RayActorError:
            return  # `watch` tells it
        except Exception as error:
            self._notify("error", f"membership_refused router={seat.number} reason={death(error)!r}")

    def _address(self, port: int) -> str:
        router = self._spec.common.settings.router
        scheme, host = "https" if router.tls_cert_file else "http", router.host
        here = "127.0.0.1" if host in ("0.0.0.0", "::", "") else host
        return f"{scheme}://{here}:{port}"
