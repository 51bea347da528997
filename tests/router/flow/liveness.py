"""A router and modelled replicas in virtual time, with faults drawn from a seed.

The request flow, placement and policies are the real ones, and each replica has the real scheduler and prefix cache, in
a pool so small that requests wait for blocks. Messages arrive in order after random delays. `Trouble` says what goes
wrong: messages and reports are lost, replicas die, restart and drain, fits are absurd. Nothing is random but the seed.
"""

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import cache
from heapq import heappop, heappush
from itertools import count
from math import inf, nan
from random import Random

import msgspec

from homing.events.load_report import SUMS
from homing.events.wire.messages import CacheCounters, LoadReport, PrefillCost
from homing.kvcache.hashing import BlockHash, wire_hash
from homing.kvcache.pins import PinLimits
from homing.kvcache.prefix_cache import PrefixCache
from homing.replica.engine.request import RequestKey, RequestPhase, admit
from homing.replica.engine.request import RequestState as EngineRequest
from homing.replica.engine.scheduler import Scheduler, SchedulerLimits
from homing.replica.engine.step_rows import ScheduledRow
from homing.replica.errors import RequestError
from homing.replica.messages import Abort, FailedStep, Generate, Pin, Refused, Reply, Request, TokenBatch, TokenOutput
from homing.router.backend import GenerationRequest, RouterCounters
from homing.router.config import RouterSettings
from homing.router.errors import RouterError
from homing.router.flow.dispatcher import ServedModel
from homing.router.flow.request_flow import RequestFlow
from homing.router.flow.request_state import Continue, Deliver, Ended, Instruction, RequestId, RequestState, Send
from homing.router.replicas.service import TICK_S
from homing.router.routing.placement import Placement
from homing.router.routing.policy.base import QUEUE_AHEAD
from homing.router.routing.policy.registry import make_policy

from ...replica.fakes import generate
from ..fakes import BLOCK, HASHER, LIMITS, ROOT, answer, description_of, request_of, token_at

ROUTER = "me"
HEARTBEAT_S = 0.2
SILENCE_S = 3.0
#: Ticks between two checks of all invariants, which take most of the time.
CHECK_EVERY = 20
#: The smallest pool, less the null block, holds it.
MODEL = msgspec.structs.replace(LIMITS, max_model_len=62 * BLOCK)
#: Costs and rates that a fit may come to.
ABSURD = (0.0, 1e-12, 7.2e-6, 1.0, 1e6, 1e300, inf, -inf, nan, -1.0, -1e300)
ADAPTERS = ("a", "b", "c")
POLICIES = ("expected-ttft", "expected-ttft", "expected-ttft", "prefix-hash", "power-of-two", "round-robin")


_token_at = cache(token_at)


@dataclass(frozen=True)
class Trouble:
    """Probabilities of faults."""

    lost_message: float  #: of a request that never reaches its replica
    lost_report: float
    late_wake: float  #: an idle replica notices a message only at its next heartbeat
    absurd_report: float
    failed_step: float
    late_tick: float
    unsendable: float  #: the connection takes no message

    @classmethod
    def drawn(cls, rng: Random) -> "Trouble":
        return cls(*(rng.choice((0.0, 0.0, high)) for high in (0.1, 0.7, 0.7, 1.0, 0.01, 0.5, 0.2)))


class ModelReplica:
    """A replica's engine loop around the real scheduler, with modelled step times."""

    def __init__(self, world: "World", name: str, blocks: int, epoch: int) -> None:
        self.world, self.name, self.epoch = world, name, epoch
        self.alive = True
        self.draining = False
        self.stopped = False  #: like a process that gets no processor time
        self.link = 0  #: number of connections that the router has lost
        self.adapters = frozenset(world.rng.sample(ADAPTERS, world.rng.randrange(3))) if world.external else frozenset()
        self.inbox: deque[Request] = deque()
        self.steps = 0
        self.others = 0  #: requests of another router
        self.accepted: dict[str, int] = {}
        self.stepping = False
        rng = world.rng
        self.cache = PrefixCache(blocks, BLOCK, listener=self, pin_limits=PinLimits(0.8, 0.9))
        budget = rng.choice((64, 256, 512))
        self.max_running = rng.choice((1, 4, 8, 16))
        limits = SchedulerLimits(self.max_running, budget, MODEL.max_model_len)
        self.scheduler = Scheduler(limits, self.cache, HASHER)
        self.description = description_of(
            name,
            epoch=epoch,
            model=MODEL,
            num_blocks=blocks,
            max_running_requests=self.max_running,
            max_batched_tokens=budget,
            external=world.external,
        )

    # From the cache

    def stored(
        self, parent: BlockHash | None, hashes: Sequence[BlockHash], tokens: bytes, salt: str, medium: str = "GPU"
    ) -> None:
        blocks = [wire_hash(each) for each in hashes]
        self._event(lambda: self.world.placement.stored(self.name, blocks))

    def removed(self, hashes: Sequence[BlockHash], medium: str = "GPU") -> None:
        blocks = [wire_hash(each) for each in hashes]
        self._event(lambda: self.world.placement.removed(self.name, blocks))

    def cleared(self) -> None:
        self._event(lambda: self.world.placement.reset(self.name, ()))

    def _event(self, apply: Callable[[], None]) -> None:
        self.world.to_router(self, apply)

    # Engine loop

    def receive(self, message: Request) -> None:
        self.inbox.append(message)
        if self.world.rng.random() >= self.world.trouble.late_wake:
            self.wake()

    def wake(self) -> None:
        if self.alive and not self.stepping and not self.stopped:
            self._turn()

    def heartbeat(self) -> None:
        if not self.alive:
            return
        if not self.stepping and not self.stopped:
            self.report()
            self.wake()
        self.world.after(HEARTBEAT_S, self.heartbeat)

    def _turn(self) -> None:
        """Read the inbox, then begin a step."""
        self.cache.expire_pins(self.world.now)
        while self.inbox:
            self._take(self.inbox.popleft())
        rows = self.scheduler.schedule()
        if not rows:
            assert not len(self.scheduler), f"{self.name} has {len(self.scheduler)} requests and runs none"
            return
        self.stepping = True
        tokens = sum(row.count for row in rows)
        seconds = 0.002 + tokens * 0.0001
        self.world.after(seconds, lambda: self._land(rows))

    def _land(self, rows: Sequence[ScheduledRow]) -> None:
        if not self.alive:
            return
        if self.stopped:
            self.world.after(0.05, lambda: self._land(rows))
            return
        self.stepping = False
        self.steps += 1
        failed = self.world.rng.random() < self.world.trouble.failed_step
        outputs: list[TokenOutput] = []
        for row in rows:
            request = row.request
            if failed:
                self.scheduler.finish(request)
                continue
            self.scheduler.complete(row)
            if row.samples and request.phase is RequestPhase.RUNNING:
                outputs.append(self._draw(request))
        outputs = [each for each in outputs if each.request_id > 0]
        ids = [row.request.key.request_id for row in rows if row.request.key.source == ROUTER]
        if failed and ids:
            self.reply(FailedStep(request_ids=ids, message="no memory"))
        if outputs:
            self.reply(TokenBatch(step=self.steps, outputs=outputs))
        self.report()
        self._turn()

    def _draw(self, request: EngineRequest) -> TokenOutput:
        index = request.generated
        if request.pins and not request.output_sent:
            self.scheduler.pin(request, self.world.now)
        token = _token_at(request.sampling.seed, index)
        request.append(token, HASHER)
        cached = None if request.output_sent else request.cached_tokens
        request.output_sent = True
        full = request.num_tokens >= MODEL.max_model_len
        ends = full or request.generated >= request.sampling.max_tokens
        if ends:
            self.scheduler.finish(request)
        return TokenOutput(
            request_id=request.key.request_id,
            index=index,
            token_ids=[token],
            finish_reason="length" if ends else None,
            cached_tokens=cached,
        )

    def _take(self, message: Request) -> None:
        match message:
            case Generate():
                self.accepted[ROUTER] = max(message.request_id, self.accepted.get(ROUTER, 0))
                if self.draining:
                    self._refuse(message, "draining")
                    return
                try:
                    self.scheduler.add(admit(ROUTER, message, MODEL.vocab_size, BLOCK))
                except RequestError as error:
                    self._refuse(message, str(error))
            case Abort():
                for request_id in message.request_ids:
                    if request := self.scheduler.get(RequestKey(ROUTER, request_id)):
                        self.scheduler.finish(request)

    def take_other(self, tokens: list[int], max_tokens: int) -> None:
        """Take a request of another router; their ids are negative here."""
        self.others += 1
        self.scheduler.add(
            admit("other", generate(-self.others, tokens, HASHER, max_tokens=max_tokens), MODEL.vocab_size, BLOCK)
        )
        self.wake()

    def forget(self) -> None:
        """End the router's requests without a word, as after a reply that it did not read."""
        for request in [each for each in self.scheduler.requests() if each.key.source == ROUTER]:
            self.scheduler.finish(request)
        self.accepted.clear()

    def _refuse(self, message: Generate, why: str) -> None:
        self.reply(Refused(request_id=message.request_id, reason="draining", message=why, retry=True))

    def reply(self, reply: Reply) -> None:
        self.world.to_router(self, lambda: self.world.run(self.world.flow.on_reply(self.name, reply, self.world.now)))

    def report(self) -> None:
        world = self.world
        if world.rng.random() < world.trouble.lost_report:
            return
        report = self.load()
        world.to_router(self, lambda: world.run(world.flow.report(self.name, report, world.now)))

    def load(self) -> LoadReport:
        backlog, rng = self.scheduler.backlog(), self.world.rng
        report = LoadReport(
            epoch=self.epoch,
            step=self.steps,
            ts=self.world.now,
            running=backlog.running,
            waiting=backlog.waiting,
            queued_prefill_tokens=backlog.queued_prefill.tokens,
            decode_context_tokens=backlog.decode_context_tokens,
            free_blocks=self.cache.free_blocks,
            cached_free_blocks=self.cache.cached_free_blocks,
            total_blocks=self.cache.total_blocks,
            prefill_tokens_per_s=10_000.0,
            decode_step_s=0.002,
            counters=CacheCounters(),
            accepted=dict(self.accepted),
            draining=self.draining,
            queued_prefill=backlog.queued_prefill,
            waiting_blocks=backlog.waiting_blocks,
        )
        if rng.random() >= self.world.trouble.absurd_report:
            return report
        odd = rng.choice
        return msgspec.structs.replace(
            report,
            prefill_tokens_per_s=odd((0.0, 1e-300, 1e-3, 1e300)),
            decode_step_s=odd((0.0, 1e-300, 1e3, 1e300)),
            prefill_cost=PrefillCost(odd(ABSURD), odd(ABSURD), odd(ABSURD), odd(ABSURD)),
            queued_prefill_s=odd((None, 0.0, 1e300)),
            prefill_sums=odd((None, [abs(odd(ABSURD)) for _ in range(SUMS)], [odd(ABSURD) for _ in range(SUMS)])),
        )


class World:
    """One router, its replicas and its clients."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = Random(seed)
        self.now = 0.0
        self.trouble = Trouble.drawn(rng)
        self.policy = rng.choice(POLICIES)
        self.external = rng.random() < 0.3
        if self.external:  # a request's connection ends with it
            self.trouble = replace(self.trouble, lost_message=0.0)
        self.drawn_trouble = self.trouble
        self.forgot = False  #: whether a replica forgot requests
        kinds = {"kill": 2, "drain": 2, "stop": 2, "disconnect": 2, "forget": 1}
        self._accidents = {kind: rng.choice((0, weight)) for kind, weight in kinds.items()}
        self.settings = RouterSettings(max_waiting_requests=1000, retries=rng.choice((3, 16)))
        self.counters = RouterCounters()
        self.placement = Placement(
            make_policy(self.policy),
            router_id=ROUTER,
            silence_s=SILENCE_S,
            rng=Random(seed),
            counters=self.counters,
        )
        self.flow = RequestFlow(self.placement, self.settings, block_size=BLOCK, counters=self.counters)
        self.flow.adopt(ServedModel(HASHER, ROOT, MODEL))
        self.replicas: dict[str, ModelReplica] = {}
        self.requests: dict[RequestId, GenerationRequest] = {}
        self.tokens: dict[RequestId, list[int]] = {}
        self.over: dict[RequestId, RequestState] = {}
        self.errors: dict[RequestId, RouterError] = {}
        self.ticks = 0
        self.neglected_before = set[str]()  #: at the last tick
        self.continuing = False  #: whether the flow is to place more requests
        self.longest_s = 0.0  #: without progress in the calm time
        self.moved_at = 0.0  #: when a request last got a token, was sent or ended
        self.lost: set[int] = set()  #: wire ids that no replica will see
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._arrivals: dict[object, float] = {}  #: when the last message of a channel arrives
        self._epochs = count(1)
        self.frozen = False  #: whether no message arrives at the router
        self._frozen: list[Callable[[], None]] = []
        for index in range(rng.randint(1, 4)):
            self.start(f"r{index}")
        self.after(TICK_S, self._tick)

    # Time

    def after(self, seconds: float, do: Callable[[], None]) -> None:
        heappush(self._agenda, (self.now + seconds, next(self._order), do))

    def advance(self, until: float) -> None:
        while self._agenda and self._agenda[0][0] <= until:
            self.now, _, do = heappop(self._agenda)
            do()
        self.now = until

    def _channel(self, name: object, do: Callable[[], None]) -> None:
        """Call `do` when a message sent now arrives, after all earlier ones of its channel."""
        at = max(self._arrivals.get(name, 0.0), self.now + self.rng.expovariate(1000.0))
        self._arrivals[name] = at
        self.after(at - self.now, do)

    def to_router(self, replica: ModelReplica, do: Callable[[], None]) -> None:
        def arrive() -> None:
            if self.frozen:
                self._frozen.append(arrive)
            elif self.replicas.get(replica.name) is replica and link == replica.link and replica.name in self.placement:
                do()

        link = replica.link
        self._channel((replica.name, replica.epoch, link, "up"), arrive)

    def thaw(self) -> None:
        self.frozen = False
        held, self._frozen = self._frozen, []
        for do in held:
            do()

    def _tick(self) -> None:
        self.run(self.flow.expire(self.now))
        self.ticks += 1
        if self.ticks % CHECK_EVERY == 0:
            self.flow.check()
        # A request that a replica refused or lost tries another one first, which may be kept for a trial.
        neglected, before = self.neglected(), self.neglected_before
        self.neglected_before = neglected if not self.continuing else set()
        assert not neglected & before, f"an idle replica while a request waits\n{self.state()}"
        late = self.rng.random() < self.trouble.late_tick
        self.after(self.rng.uniform(TICK_S, 0.5) if late else TICK_S, self._tick)

    # Replicas

    def start(self, name: str) -> None:
        replica = ModelReplica(self, name, self.rng.choice((64, 96, 128, 256)), next(self._epochs))
        self.replicas[name] = replica
        warms = self.rng.random() < 0.3 and len(self.replicas) > 1
        self.run(self.flow.join(replica.description, self.now, "warming" if warms else None))
        self.placement.set_adapters(name, replica.adapters)
        if warms:
            self.run(self.flow.warm_up(name, 0.5, self.now))
            self.after(0.01, lambda: self._serve(replica))
        self.after(self.rng.uniform(0.0, HEARTBEAT_S), replica.heartbeat)

    def _serve(self, replica: ModelReplica) -> None:
        """Let a replica take requests once it is warm, as the controller does."""
        if replica.alive and not replica.draining and replica.name in self.placement:
            if replica.name in self.flow.warm_ups:
                self.after(0.01, lambda: self._serve(replica))
            else:
                self.run(self.flow.set_unavailable(replica.name, None, self.now))

    def kill(self, name: str) -> None:
        replica = self.replicas.pop(name)
        replica.alive = False
        if name in self.placement:
            self.run(self.flow.replica_gone(name, self.now)[1])

    def disconnect(self, name: str) -> None:
        """Lose the connection to a living replica, and make it again."""
        replica = self.replicas[name]
        if name not in self.placement:
            return
        replica.link += 1
        orphans, instructions = self.flow.replica_gone(name, self.now)
        self.run(instructions)
        self.after(0.5, lambda: self._connect(replica, orphans))

    def _connect(self, replica: ModelReplica, orphans: list[int]) -> None:
        if replica.alive and replica.name not in self.placement:
            replica.receive(Abort(request_ids=orphans))
            self.run(self.flow.join(replica.description, self.now, "draining" if replica.draining else None))
            self.placement.set_adapters(replica.name, replica.adapters)

    def stop(self, name: str) -> None:
        replica = self.replicas[name]
        replica.stopped = True

        def resume() -> None:
            replica.stopped = False

        self.after(self.rng.uniform(0.5, 8.0), resume)

    def forget(self, name: str) -> None:
        if not self.external:
            self.forgot = True
            self.replicas[name].forget()

    def drain(self, name: str) -> None:
        self.replicas[name].draining = True
        if name in self.placement:
            self.run(self.flow.set_unavailable(name, "draining", self.now))

    # Requests

    def submit(self, request: GenerationRequest) -> None:
        request_id, instructions = self.flow.submit(request, self.now)
        self.requests[request_id], self.tokens[request_id] = request, []
        self.run(instructions)

    def cancel(self, request_id: RequestId) -> None:
        self.run(self.flow.cancel(request_id, self.now))

    def run(self, instructions: list[Instruction]) -> None:
        for each in instructions:
            match each:
                case Send(replica, message):
                    self._send(replica, message)
                case Continue() if not self.continuing:
                    self.continuing = True
                    self.after(0.0, self._continue)
                case Deliver(request_id, delta, _):
                    assert request_id not in self.over, "a delta after the request's end"
                    self.tokens[request_id] += delta.token_ids
                    self.moved_at = self.now
                case Ended(state, error):
                    assert state.request_id not in self.over, "a request ended twice"
                    self.over[state.request_id] = state
                    self.moved_at = self.now
                    if error is not None:
                        self.errors[state.request_id] = error

    def _continue(self) -> None:
        self.continuing = False
        self.run(self.flow.pump(self.now))

    def _send(self, name: str, message: Request) -> None:
        replica = self.replicas.get(name)
        if replica is None:
            self.after(0.0, lambda: self.run(self.flow.unsendable(name, message, self.now)))
            return
        if isinstance(message, Generate):
            self.moved_at = self.now
            if self.rng.random() < self.trouble.unsendable:
                self.after(0.0, lambda: self.run(self.flow.unsendable(name, message, self.now)))
                return
            if self.rng.random() < self.trouble.lost_message:
                self.lost.add(message.request_id)
                return
        link = replica.link

        def arrive() -> None:
            if replica.alive and link == replica.link:
                replica.receive(message)

        self._channel((name, replica.epoch, link, "down"), arrive)

    # What happens

    def random_request(self, number: int) -> GenerationRequest:
        rng = self.rng
        topic = rng.randrange(4)
        tokens = [topic * 100 + place % 90 for place in range(rng.choice((1, 15, 16, 17, 100, 300, 700)))]
        tokens += [rng.randrange(1000) for _ in range(rng.randrange(20))]
        tokens = tokens[: MODEL.max_model_len - 60]
        pins = (Pin(rng.randint(1, len(tokens)), rng.uniform(0.1, 100.0), bytes(16)),)
        request = request_of(
            tokens,
            max_tokens=rng.choice((1, 2, 10, 30)),
            seed=number,
            priority=rng.choice((0, 0, 0, 1, 2)),
            tenant=bytes([rng.randrange(3)]),
            weight=rng.choice((0.1, 1.0, 10.0)),
            deadline=rng.choice((inf, inf, inf, self.now + rng.uniform(0.0, 5.0))),
            adapter=rng.choice(("", *ADAPTERS)) if self.external else "",
            pins=rng.choice(((), (), pins)),
        )
        scores_prompt = rng.choice((None, None, None, 0))
        sampling = msgspec.structs.replace(request.sampling, prompt_logprobs=scores_prompt)
        return msgspec.structs.replace(request, sampling=sampling)

    def something(self, number: int) -> None:
        """One event of a troubled time."""
        rng = self.rng
        event = rng.choices(
            ("submit", "burst", "flood", "cancel", "start", "adapters", "other", *self._accidents, "wait"),
            (60, 4, 0.5, 8, 4, 2, 8, *self._accidents.values(), 20),
        )[0]
        names = sorted(self.replicas)
        match event:
            case "submit":
                self.submit(self.random_request(number))
            case "burst":
                for choice in range(rng.randint(2, 12)):
                    self.submit(self.random_request(number * 1000 + choice))
            case "flood":
                for choice in range(100):
                    self.submit(self.random_request(number * 1000 + choice))
            case "adapters" if self.external and len(self.placement):
                name = rng.choice([each.name for each in self.placement.fleet])
                self.placement.set_adapters(name, frozenset(rng.sample(ADAPTERS, rng.randrange(3))))
            case "cancel":
                running = sorted(self.requests.keys() - self.over.keys())
                if running:
                    self.cancel(rng.choice(running))
            case "start" if len(names) < 4:
                free = [f"r{index}" for index in range(4) if f"r{index}" not in self.replicas]
                self.start(rng.choice(free))
            case "other" if names:
                self.replicas[rng.choice(names)].take_other([rng.randrange(1000) for _ in range(200)], 20)
            case "kill" | "drain" | "stop" | "disconnect" | "forget" if names:
                getattr(self, event)(rng.choice(names))
        self.advance(self.now + rng.choice((0.0, 0.001, 0.01, 0.1, 0.5)))

    def freeze(self, seconds: float) -> list[RequestState]:
        """Let time pass without a message to the router. Returns the requests that could have been sent all along."""
        self.frozen = True
        before = self.could_be_sent()
        self.advance(self.now + seconds)
        stuck = [state for state in self.could_be_sent() if state in before and state.phase == "waiting"]
        going_on = self.continuing
        self.thaw()
        return [] if going_on else stuck

    def neglected(self) -> set[str]:
        """Idle replicas that could take a request that waits."""
        closed = self.closed()
        idle = [
            joined
            for joined in self.placement.fleet
            if joined.load.available and not joined.load.requests and not joined.requests and joined.name not in closed
        ]
        waiting = [each for each in self.flow.oldest(10_000) if each.phase == "waiting" and each.suspicion is None]
        adapters = {each.request.adapter for each in waiting}
        return {joined.name for joined in idle if adapters & {"", *joined.adapters}}

    def closed(self) -> Collection[str]:
        return self.flow._turns.kept_for_trials(self.now)

    def could_be_sent(self) -> list[RequestState]:
        """The waiting requests, if a replica takes new ones and is not kept for a suspect's trial."""
        closed = self.closed()
        adapters = {
            adapter
            for joined in self.placement.fleet
            if joined.load.available and joined.name not in closed and joined.load.waiting < QUEUE_AHEAD
            for adapter in ("", *joined.adapters)
        }
        waiting = [each for each in self.flow.oldest(10_000) if each.phase == "waiting" and each.suspicion is None]
        return [each for each in waiting if each.request.adapter in adapters]

    def calm(self) -> None:
        """No more faults: all replicas serve, and everything that waits must end."""
        self.trouble = Trouble(0, 0, 0, 0, 0, 0, 0)
        for name in sorted(self.replicas):
            if self.replicas[name].draining:
                self.kill(name)
        if not self.replicas:
            self.start("r0")
        for name, replica in self.replicas.items():
            replica.stopped, replica.adapters = False, frozenset(ADAPTERS)
            if name not in self.placement:
                continue
            self.placement.set_adapters(name, frozenset(ADAPTERS))

    def state(self) -> str:
        flow = self.flow
        lines = [f"now {self.now:.2f} policy {self.policy} {self.trouble} moved_at {self.moved_at:.2f}"]
        lines += [
            f"{each.request_id} {each.phase.value} on {each.replica} lost={bool(self.lost & {*wire_ids(each)})} "
            f"generated {each.generated} suspicion {each.suspicion} waits_for {each.waits_for!r} {each.moves}"
            for each in flow.oldest(10_000)
        ]
        for name, replica in self.replicas.items():
            load = self.placement.fleet.load(name, self.now) if name in self.placement else None
            lines.append(f"{name} {len(replica.scheduler)} requests, {load}")
        lines.append(f"trials {flow._table.suspects._trials}")
        return "\n".join(lines)


def wire_ids(request: RequestState) -> list[int]:
    return [each.wire_id for each in request.placed]


#: Longest time without any progress while a request is unfinished: a trial, and a resend.
BOUND_S = 12.0


def run(seed: int, events: int = 60) -> World:
    """Go through a troubled time with this seed, then a calm one in which every request must end with its tokens."""
    world = World(seed)
    counters = world.counters
    for number in range(events):
        world.something(number)
        if world.rng.random() < 0.1:
            stuck = world.freeze(0.6)
            names = [each.request_id for each in stuck]
            assert not stuck, f"seed {seed}: {names} wait although a replica takes requests\n{world.state()}"
    world.calm()
    while world.requests.keys() - world.over.keys():
        world.advance(world.now + 1.0)
        world.longest_s = max(world.longest_s, world.now - world.moved_at)
        assert world.now - world.moved_at < BOUND_S, f"seed {seed}: stands still\n{world.state()}"
    for request_id, request in world.requests.items():
        tokens, state = world.tokens[request_id], world.over[request_id]
        assert tokens == answer(request)[: len(tokens)], f"seed {seed}: wrong tokens of {request_id}"
        if state.outcome == "finished":
            assert len(tokens) == request.sampling.max_tokens, f"seed {seed}: {request_id} ended early"
    assert not counters.stalls_queue + counters.stalls_idle_replica, f"seed {seed}: only the tick's check helped"
    assert not counters.stalls_lost or world.drawn_trouble.lost_message or world.forgot, (
        f"seed {seed}: a request was taken for lost"
    )
    world.advance(world.now + 5.0)
    assert not world.flow.in_flight
    assert not world.flow.warm_ups, f"seed {seed}: a warm-up does not end"
    world.flow.check()
    return world
