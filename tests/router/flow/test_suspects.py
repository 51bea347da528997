"""What is beside a request that kills replicas pays with a pause, and the request takes at most one more replica."""

from random import Random

import pytest

from homing.replica.messages import FailedStep, Generate, Refused
from homing.router.errors import ReplicasDied
from homing.router.flow.request_state import Phase, RequestId
from homing.router.flow.suspects import PATIENCE_S, SETTLE_S, TRIAL_S, TRIAL_TOKENS

from ..fakes import request_of, token_at
from .test_request_flow import World

PROMPT = list(range(40))


class DeadlyWorld(World):
    """Some requests kill the replica that runs them, after it has generated some tokens for them."""

    def __init__(self, replicas: int = 4, **settings: object) -> None:
        super().__init__(replicas, **settings)
        #: by trace: the number of tokens that a replica generates before it dies, of those of this replica or of all
        self.deadly: dict[str, tuple[int, bool]] = {}
        self.deaths = 0

    def ask(self, seed: int, *, kills_after: int | None = None, whole: bool = False, **fields: object) -> RequestId:
        request = request_of(fields.pop("prompt", [seed, *PROMPT]), seed=seed, **fields)
        if kills_after is not None:
            self.deadly[request.trace_id] = kills_after, whole
        return self.submit(request)

    def step(self, name: str) -> None:
        replica = self.replicas[name]
        for message in self.on_wire.pop(name, []):
            replica.take(message)
        for work in replica.work.values():
            after, whole = self.deadly.get(work.request.trace_id, (1 << 30, False))
            before = 0 if whole else len(work.request.token_ids) // 4 - work.request.prompt_tokens
            if work.generated - before >= after:
                self.deaths += 1
                self.lose(name)
                return
        super().step(name)

    def fail_step(self, name: str) -> None:
        """The replica's next step fails with all of its requests."""
        for message in self.on_wire.pop(name, []):
            self.replicas[name].take(message)
        gone = [*self.replicas[name].work]
        self.replicas[name].work.clear()
        self.run(self.flow.on_reply(name, FailedStep(request_ids=gone, message="out of memory"), self.now))
        self.run(self.flow.report(name, self.replicas[name].load("me"), self.now))

    def round(self) -> None:
        self.wait(0.05)
        for name in list(self.replicas):
            self.step(name)

    def settle(self) -> None:
        for _ in range(2000):
            self.round()
            if not self.flow.in_flight and not self.flow.waiting:
                return
        raise AssertionError("requests do not finish")


@pytest.mark.parametrize(("after", "whole"), [(0, False), (1, False), (3, True), (9, True), (9, False), (20, False)])
def test_a_deadly_request_takes_two_replicas_and_nothing_else(after: int, whole: bool) -> None:
    """Wherever in its answer it kills: at its prompt, at a certain token, or some time after it was sent."""
    world = DeadlyWorld()
    others = [world.ask(seed, max_tokens=200) for seed in range(1, 9)]
    for _ in range(10):
        world.round()

    poison = world.ask(100, kills_after=after, whole=whole, max_tokens=60)
    world.settle()

    assert world.deaths == 2
    assert isinstance(world.errors.pop(poison), ReplicasDied)
    assert not world.errors
    assert all(len(world.tokens(each)) == 200 for each in others)
    assert (world.flow.counters.blamed, world.flow.counters.suspected >= 2) == (1, True)
    world.flow.check()


def test_the_choices_of_a_deadly_request_are_blamed_together() -> None:
    """Four choices of one prompt would take a replica each."""
    world = DeadlyWorld(6)
    choices = [world.ask(seed, kills_after=0, prompt=PROMPT) for seed in range(4)]

    world.settle()

    assert world.deaths <= 2 + len({2, 3} & {*range(world.deaths)})
    assert all(isinstance(world.errors[each], ReplicasDied) for each in choices)
    world.flow.check()


def test_with_one_replica_new_requests_wait_for_the_trial_only() -> None:
    """The replica that comes back is needed by all, and what is new there would be at risk."""
    world = DeadlyWorld(1)
    suspects = [world.ask(seed, max_tokens=300) for seed in range(1, 9)]
    world.round()
    world.lose("r0")
    world.join("r9")
    world.wait(SETTLE_S)
    new = world.ask(20)

    alone = world.phase_of(new)
    while world.phase_of(new) is Phase.WAITING:
        world.round()

    assert alone is Phase.WAITING
    assert world.now < 8 * (TRIAL_TOKENS + 2) * 0.05 + 1.0
    assert not any(world.phase_of(each) is Phase.OVER for each in suspects)
    world.settle()
    assert not world.errors


def test_a_suspect_runs_where_nothing_else_does_and_nothing_is_sent_there() -> None:
    """A request beside it would be at risk."""
    world = World(3)
    suspect = world.submit(request_of(PROMPT, max_tokens=100))
    world.lose(world.home(suspect))
    world.submit(request_of([7, *PROMPT], seed=2, max_tokens=100))
    busy = world.home(RequestId(2))

    world.wait(SETTLE_S)
    assert world.home(suspect) not in (busy, None)
    during = [world.home(world.submit(request_of([seed, *PROMPT], seed=seed))) for seed in range(10, 16)]
    for _ in range(TRIAL_TOKENS + 1):
        world.step(world.home(suspect))
    after = [world.home(world.submit(request_of([seed, *PROMPT], seed=seed))) for seed in range(20, 26)]

    assert set(during) == {busy}
    assert world.home(suspect) in after
    world.settle()


@pytest.mark.parametrize("why", ["refused", "not sent", "lost"])
def test_a_suspect_that_leaves_its_trial_is_tried_apart_again(why: str) -> None:
    """Nothing is known about it yet, so a request beside it would be at risk."""
    world = World(4)
    suspect = world.submit(request_of(PROMPT, max_tokens=100))
    world.lose(world.home(suspect))
    world.wait(SETTLE_S)
    tried = world.home(suspect)
    assert tried is not None
    message = world.on_wire[tried].pop()
    assert isinstance(message, Generate)

    match why:
        case "refused":
            refused = Refused(request_id=message.request_id, reason="draining", message="", retry=True)
            world.run(world.flow.on_reply(tried, refused, world.now))
        case "not sent":
            world.run(world.flow.unsendable(tried, message, world.now))
        case "lost":
            for _ in range(40):
                world.wait(0.05)
                world.run(world.flow.report(tried, world.replicas[tried].load("me", ts=world.now), world.now))
    world.wait(SETTLE_S)
    others = {world.home(world.submit(request_of([seed, *PROMPT], seed=seed))) for seed in range(10, 18)}

    assert world.home(suspect) not in (tried, None)
    assert world.home(suspect) not in others
    world.settle()
    world.flow.check()


def test_an_unanswered_suspect_waits_for_an_empty_replica_but_not_for_long() -> None:
    """Answers may be long; a replica with few requests is kept from new ones meanwhile, if there is another one."""
    world = World(3)
    running = [world.submit(request_of([seed, *PROMPT], seed=seed, max_tokens=1000)) for seed in range(2, 5)]
    for _ in range(TRIAL_TOKENS):
        for name in world.replicas:
            world.step(name)
    suspect = world.submit(request_of(PROMPT))
    assert len({world.home(each) for each in running}) == 3
    world.lose(world.home(suspect))

    died = world.now
    waited = 0.0
    while world.phase_of(suspect) is Phase.WAITING:
        waited = world.now - died
        assert "tried apart" in world.flow.oldest(9)[-1].waits_for
        world.wait(0.05)
        for name in world.replicas:
            world.step(name)

    assert PATIENCE_S - 0.1 < waited < PATIENCE_S + 0.1
    assert not any(each in world.records for each in running)


def test_many_suspects_are_tried_at_the_same_time_on_different_replicas() -> None:
    """64 requests of a replica that died by itself go on within seconds."""
    world = DeadlyWorld(4)
    asked = [world.ask(seed, max_tokens=100) for seed in range(1, 257)]
    for _ in range(3):
        world.round()
    world.lose("r0")
    began = world.now

    while world.flow.waiting:
        world.round()

    assert world.now - began < 64 / 3 * (TRIAL_TOKENS + 2) * 0.05
    world.settle()
    assert not world.errors
    assert all(len(world.tokens(each)) == 100 for each in asked)


def test_a_request_that_outlives_one_death_survives_another() -> None:
    """Replicas die for many reasons, and a long answer may meet several of them."""
    world = DeadlyWorld(2, retries=6)
    request_id = world.ask(1, max_tokens=1000)

    for number in range(6):
        for _ in range(20 + 20 * number):
            world.round()
        world.join(f"n{number}")
        world.lose(world.home(request_id))
    world.settle()

    assert len(world.tokens(request_id)) == 1000
    assert world.records[request_id].moves.continuations == 6


def test_replicas_that_die_together_blame_nobody() -> None:
    """The router notices the deaths of a machine's replicas one after the other."""
    world = World(3)
    request_id = world.submit(request_of(PROMPT))
    for name in ("r0", "r1"):
        world.lose(name)
        world.wait(SETTLE_S / 2)

    world.settle()

    assert len(world.tokens(request_id)) == 8


def test_a_suspect_in_a_full_replicas_queue_is_not_the_cause_of_its_death() -> None:
    """It was not begun there; the death of a busy replica during the wait says nothing about it."""
    world = World(2)
    others = [world.submit(request_of([seed, *PROMPT], seed=seed, max_tokens=90)) for seed in range(2, 10)]
    for _ in range(30):
        for name in world.replicas:
            world.step(name)
    suspect = world.submit(request_of(PROMPT, seed=50))
    world.lose(world.home(suspect))
    (left,) = world.replicas
    while world.phase_of(suspect) is Phase.WAITING:
        world.wait(0.05)
        if world.phase_of(suspect) is Phase.WAITING:
            world.step(left)
    world.on_wire[left].clear()  # nothing is computed for it

    for _ in range(20):
        world.wait(0.05)
        world.step(left)
    world.lose(left)
    world.join("r9")
    world.settle()

    assert not world.errors
    assert all(len(world.tokens(each)) == 90 for each in others)


def test_a_long_prompt_does_not_keep_other_suspects_waiting() -> None:
    """A trial of a prompt that takes minutes ends by time."""
    world = World(2)
    long, short = (world.submit(request_of([seed, *PROMPT], seed=seed)) for seed in (1, 2))
    world.lose("r0")
    world.lose("r1")
    world.join("r2")

    world.wait(SETTLE_S)
    assert sum(world.phase_of(each) is Phase.SENT for each in (long, short)) == 1
    world.wait(TRIAL_S)

    assert {world.phase_of(each) for each in (long, short)} == {Phase.SENT}
    world.settle()


def test_a_client_that_leaves_a_trial_makes_room_for_the_next() -> None:
    """Its request is the one that waits longest for nothing."""
    world = World(1)
    first, second = (world.submit(request_of([seed, *PROMPT], seed=seed)) for seed in (1, 2))
    world.lose("r0")
    world.join("r1")
    world.wait(SETTLE_S)
    tried = first if world.phase_of(first) is Phase.SENT else second

    world.run(world.flow.cancel(tried, world.now))

    assert world.phase_of(second if tried == first else first) is Phase.SENT
    world.settle()
    world.flow.check()


def test_a_message_that_was_never_sent_costs_no_attempt() -> None:
    """An engine that refuses connections is about to leave routing."""
    world = World(2, retries=1)
    request_id = world.submit(request_of(PROMPT))

    for _ in range(5):
        home = world.home(request_id)
        message = world.on_wire[home].pop()
        assert isinstance(message, Generate)
        world.run(world.flow.unsendable(home, message, world.now))
        world.wait(0.05)
    world.settle()

    assert len(world.tokens(request_id)) == 8
    assert world.records[request_id].suspicion is None


@pytest.mark.parametrize("seed", range(12))
def test_deadly_requests_among_others_end_and_the_others_do_not(seed: int) -> None:
    """Any number of them, wherever they kill; replicas are replaced after a while."""
    rng = Random(seed)
    world = DeadlyWorld(rng.randint(2, 5))
    harmless: dict[RequestId, int] = {}
    deadly: list[RequestId] = []
    born = 0
    for number in range(60):
        if rng.random() < 0.08:
            after, whole = rng.choice([0, 0, 1, 2, 3]), rng.random() < 0.5
            deadly.append(world.ask(number, kills_after=after, whole=whole, max_tokens=30))
        else:
            tokens = rng.randint(1, 60)
            harmless[world.ask(number, max_tokens=tokens)] = tokens
        for _ in range(rng.randint(0, 3)):
            world.round()
        if len(world.replicas) < 4 and rng.random() < 0.5:
            world.join(f"n{(born := born + 1)}")
        world.flow.check()
    while world.flow.in_flight or world.flow.waiting:
        if len(world.replicas) < 3:
            world.join(f"n{(born := born + 1)}")
        world.round()
        assert world.now < 600.0, "requests do not end"

    assert all(isinstance(world.errors.get(each), ReplicasDied) for each in deadly)
    assert world.deaths <= 3 * len(deadly)
    assert not [each for each in harmless if each in world.errors]
    assert all(len(world.tokens(each)) == tokens for each, tokens in harmless.items())


@pytest.mark.parametrize("by_chance", [True, False])
def test_a_failed_step_ends_only_what_fails_the_next_one_too(by_chance: bool) -> None:
    """Memory runs out in a step for all of its requests; only one that needs too much everywhere ends."""
    world = DeadlyWorld(2)
    asked = [world.ask(seed, max_tokens=40) for seed in range(1, 7)]
    for _ in range(10):
        world.round()
    heavy = world.ask(50, prompt=[*range(500)])
    home = world.home(heavy)
    world.fail_step(home)

    failures = 1
    while not by_chance and heavy not in world.errors:
        if world.phase_of(heavy) is Phase.WAITING:
            world.round()
        else:
            world.fail_step(world.home(heavy))
            failures += 1
    world.settle()

    assert (heavy in world.errors) is not by_chance
    assert failures <= 4  # more than two if other requests are, by chance, as far as when their steps failed
    assert all(
        world.tokens(each) == [token_at(seed, place) for place in range(40)] for seed, each in enumerate(asked, 1)
    )
    assert world.flow.counters.replicas_lost == 0
    world.flow.check()


@pytest.mark.parametrize("replicas", [2, 3, 4])
@pytest.mark.parametrize("sick_rounds", [1, 4, 40])
def test_a_replica_that_fails_steps_for_a_while_ends_no_request(replicas: int, sick_rounds: int) -> None:
    """Another program took its memory. It looks empty, as it has lost its requests, and new ones are sent there."""
    world = DeadlyWorld(replicas)
    asked = [world.ask(seed, max_tokens=30) for seed in range(1, 9)]
    for _ in range(10):
        world.round()

    for number in range(sick_rounds):
        asked.append(world.ask(9 + number, max_tokens=30))
        world.wait(0.05)
        world.fail_step("r0")
        for name in [*world.replicas][1:]:
            world.step(name)
    world.settle()

    assert not world.errors
    assert all(
        world.tokens(each) == [token_at(seed, place) for place in range(30)] for seed, each in enumerate(asked, 1)
    )
    world.flow.check()
