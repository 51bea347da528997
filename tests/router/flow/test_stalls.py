"""What is noticed at the tick, and how the flow ends it."""

import logging
from collections.abc import Callable
from typing import Any

import pytest

from homing.replica.messages import Abort, Generate, TokenOutput
from homing.router.flow.fair_queue import TRIES
from homing.router.flow.request_state import Phase
from homing.router.flow.request_table import ITS_TURN
from homing.router.flow.stalls import NOTICE_S, Glance, Stall, StallWatch, stalls_of
from homing.router.routing.placement import FEWEST
from homing.router.routing.policy.base import QUEUE_AHEAD, Candidate, Prompt
from homing.router.routing.policy.round_robin import RoundRobin

from ..fakes import answer, request_of
from .test_request_flow import PROMPT, World, replica_of

BUSY = Glance("busy", idle=False, takes=0, lost=())


@pytest.mark.parametrize(
    ("glances", "expected"),
    [
        ([Glance("r0", True, 0, ())], []),
        ([BUSY], []),
        ([Glance("r0", True, 2, ()), Glance("r1", True, 1, ())], [Stall("queue", "r0", 2), Stall("queue", "r1", 1)]),
        ([Glance("r0", True, 2, ()), BUSY], [Stall("idle_replica", "r0", 2)]),
        ([BUSY._replace(lost=(4, 7))], [Stall("lost", "busy", 2, (4, 7))]),
        (
            [Glance("r0", True, 1, ()), Glance("r1", False, 0, (3,))],
            [Stall("idle_replica", "r0", 1), Stall("lost", "r1", 1, (3,))],
        ),
    ],
)
def test_each_kind_of_stall_is_told_from_the_others(glances: list[Glance], expected: list[Stall]) -> None:
    """An alert on each kind has its own remedy."""
    assert stalls_of(glances) == expected


def test_a_stall_is_noticed_once_then_due_and_forgotten_when_it_ends() -> None:
    """A short one is none, and one that ends and comes back is another."""
    watch, stall = StallWatch(), Stall("queue", "r0", 1)
    late = stall._replace(kind="idle_replica")

    assert watch.observe([stall], 0.0) == ([], [])
    assert watch.observe([], 0.9) == ([], [])
    assert watch.observe([stall], 1.0) == ([], [])
    assert watch.observe([stall], 1.0 + NOTICE_S) == ([stall], [])
    assert watch.observe([late], 2.1) == ([], [late]), "whether others run elsewhere makes no difference"
    assert watch.observe([], 2.2) == ([], [])
    assert watch.observe([stall], 2.3) == ([], [])


def test_lost_requests_are_noticed_at_once() -> None:
    """They count as lost only after a second."""
    lost = Stall("lost", "r0", 1, (1,))

    assert StallWatch().observe([lost], 5.0) == ([lost], [])


class Moody(RoundRobin):
    """Has an obstacle for every replica."""

    def obstacle(self, prompt: Prompt, candidate: Candidate) -> str | None:
        return "a mood"


@pytest.mark.parametrize("busy", [False, True])
def test_what_a_policy_keeps_from_every_replica_is_sent_after_a_second(
    busy: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing else would ever send it: the cluster stood still with every replica idle."""
    world = World(2)
    if busy:
        world.run(world.flow.report("r1", world.replicas["r1"].load("me", waiting=1), 0.0))
    world.placement.policy = Moody()
    request = request_of(PROMPT)
    request_id = world.submit(request)
    state = world.flow.state_of(request_id)
    assert state is not None
    assert state.waits_for == "held: a mood: r0, r1"

    with caplog.at_level(logging.ERROR, "homing.router.flow.recovery"):
        for _ in range(25):
            world.wait(0.05)

    kind = "idle_replica" if busy else "queue"
    assert state.replica == "r0"
    assert state.waits_for == ""
    assert state.sent.decision.reason(()) == FEWEST
    counters = world.flow.counters
    assert (counters.stalls_queue, counters.stalls_idle_replica) == ((0, 1) if busy else (2, 0))
    assert f"requests_stand_still kind={kind} replica=r0" in caplog.records[0].getMessage()
    assert len(caplog.records) == (1 if busy else 2), "once for each replica"
    world.step("r0")
    world.settle()
    assert world.tokens(request_id) == answer(request)


def reported(world: World, name: str, at: float, **fields: object) -> None:
    world.now = at
    world.run(world.flow.report(name, world.replicas[name].load("me", ts=at, **fields), at))
    world.run(world.flow.expire(at))


def test_a_request_that_its_replica_never_accepts_is_sent_to_another_one() -> None:
    """Its message was lost on the way. Should it have arrived after all, it is stopped there: no token comes twice."""
    world = World(2)
    request = request_of(PROMPT)
    request_id = world.submit(request)
    first = world.home(request_id)
    lost = world.on_wire[first].pop()

    for tick in range(12):
        reported(world, first, tick / 10)

    assert world.home(request_id) != first
    assert world.flow.counters.stalls_lost == 1
    assert [each for each in world.on_wire[first] if isinstance(each, Abort)] == [Abort(request_ids=[lost.request_id])]
    world.reply(first, TokenOutput(lost.request_id, 0, [99]))
    world.settle()
    assert world.tokens(request_id) == answer(request)


def test_requests_that_the_only_replica_never_accepts_are_sent_there_again_at_once() -> None:
    """If they avoided it, each would wait another round for that."""
    world = World(1)
    requests = [world.submit(request_of(PROMPT, seed=seed)) for seed in range(4)]
    world.on_wire["r0"].clear()

    for tick in range(12):
        reported(world, "r0", tick / 10)

    assert [each.request_id for each in world.on_wire["r0"] if isinstance(each, Generate)] == [5, 6, 7, 8]
    assert all(world.phase_of(each) is Phase.SENT for each in requests)


def test_a_request_that_its_replica_forgot_is_continued() -> None:
    """A replica ends a router's requests if it reads too slowly; the router may be back before it notices."""
    world = World(1, silence_s=2.0)
    request = request_of(PROMPT)
    request_id = world.submit(request)
    world.step("r0")
    world.step("r0")
    world.replicas["r0"].work.clear()

    for tick in range(10, 36):
        reported(world, "r0", tick / 10)

    sent = world.sent("r0")
    assert sent.request_id == 2
    assert world.flow.counters.stalls_lost == 1
    world.settle()
    assert world.tokens(request_id) == answer(request)


def test_what_every_replica_loses_ends_with_an_error() -> None:
    """It may be what no replica can decode. The other requests must not wait for it, nor its client for ever."""
    world = World(1, retries=2)
    request_id = world.submit(request_of(PROMPT))

    for tick in range(200):
        world.on_wire["r0"] = [each for each in world.on_wire["r0"] if not isinstance(each, Generate)]
        reported(world, "r0", tick / 10)

    assert "does not have the request" in str(world.errors[request_id])
    assert world.flow.counters.stalls_lost == 3


def test_a_request_that_arrives_before_a_long_step_is_not_sent_again() -> None:
    """The report before that step shows no request, and is repeated until the step is over."""
    world = World(2, silence_s=2.0)
    request_id = world.submit(request_of(PROMPT))
    home = world.home(request_id)
    idle = world.replicas[home].load("me", ts=0.5)

    for tick in range(5, 100):
        world.now = tick / 10
        world.run(world.flow.report(home, idle, world.now))
        world.run(world.flow.expire(world.now))

    assert replica_of(world.flow, request_id) == home
    assert not world.flow.counters.stalls_lost


def test_requests_that_a_replica_reads_in_many_turns_are_not_sent_again() -> None:
    """A flood waits in its socket, as it reads so many requests before a step."""
    world = World(1, silence_s=2.0)
    for _ in range(100):
        world.submit(request_of(PROMPT))

    for tick in range(100):
        world.replicas["r0"].highest = tick
        reported(world, "r0", float(tick), waiting=1 + tick)

    assert not world.flow.counters.stalls_lost


@pytest.mark.parametrize("waiting", [0, 1])
def test_a_request_that_a_busy_replica_has_is_not_sent_again(waiting: int) -> None:
    """A long prompt or a constraint that is compiled takes its time."""
    world = World(2)
    request_id = world.submit(request_of(PROMPT))
    home = world.home(request_id)
    world.replicas[home].highest = world.sent(home).request_id
    if not waiting:
        world.replicas[home].highest = 0
        world.replicas[home].take(world.on_wire[home].pop())

    for tick in range(100):
        reported(world, home, tick / 10, waiting=waiting)

    assert replica_of(world.flow, request_id) == home
    assert not world.flow.counters.stalls_lost


def leave_none(world: World) -> None:
    for name in ("r0", "r1"):
        world.lose(name)


def drain_and_warm(world: World) -> None:
    world.run(world.flow.set_unavailable("r0", "draining", world.now))
    world.run(world.flow.set_unavailable("r1", "warming", world.now))


def fall_silent(world: World) -> None:
    world.wait(100.0)


def fill(world: World) -> None:
    for name in ("r0", "r1"):
        report = world.replicas[name].load("me", free_blocks=0, waiting=QUEUE_AHEAD)
        world.run(world.flow.report(name, report, world.now))


def queue_others(world: World) -> None:
    fill(world)
    for seed in range(10, 10 + TRIES):
        world.submit(request_of(PROMPT, seed=seed))


def offer_an_adapter(world: World) -> None:
    world.placement.set_adapters("r1", frozenset({"poet"}))
    world.run(world.flow.set_unavailable("r1", "draining", world.now))


@pytest.mark.parametrize(
    ("before", "fields", "why"),
    [
        (leave_none, {}, "no replica has joined"),
        (drain_and_warm, {}, "held: draining: r0; warming up: r1"),
        (fall_silent, {}, "held: silent: r0, r1"),
        (fill, {}, "held: saturated: r0, r1"),
        (queue_others, {}, ITS_TURN),
        (lambda world: None, {"adapter": "poet"}, "held: no replica offers poet"),
        (offer_an_adapter, {"adapter": "poet"}, "held: draining: r1"),
    ],
)
def test_a_request_that_waits_says_why(before: Callable[[World], None], fields: dict[str, Any], why: str) -> None:
    """On the live page and in `homing requests`; also before its turn has come."""
    world = World(2, external=True, silence_s=50.0)
    before(world)
    request_id = world.submit(request_of(PROMPT, **fields))

    world.wait(0.05)

    state = world.flow.state_of(request_id)
    assert state is not None
    assert state.waits_for == why
