"""The request flow over fake replicas without sockets."""

from collections import Counter, defaultdict
from collections.abc import Callable
from random import Random

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from homing.events.follow.subscription import FeedStatus
from homing.kvcache.hashing import join_hashes, tenant_root, token_array, token_bytes, wire_hash, wire_hashes
from homing.replica.messages import Abort, Constraint, EmbeddingParams, Generate, Refused, TokenBatch, TokenOutput
from homing.router.backend import GenerationRequest, RouterCounters, TokenDelta
from homing.router.config import RouterSettings
from homing.router.errors import (
    DeadlineExceeded,
    InvalidGeneration,
    PromptTooLong,
    QueueFull,
    RequestFailed,
    RouterClosed,
    RouterError,
    Superseded,
)
from homing.router.flow.activity import activity_of
from homing.router.flow.dispatcher import ServedModel
from homing.router.flow.request_flow import PRESSING_WAIT_S, RequestFlow
from homing.router.flow.request_state import (
    TRANSITIONS,
    Continue,
    Deliver,
    Ended,
    Event,
    Instruction,
    Phase,
    RequestId,
    RequestState,
    Send,
    Transition,
)
from homing.router.flow.turns import PLACED_AT_ONCE
from homing.router.routing.placement import Placement
from homing.router.routing.policy.base import QUEUE_AHEAD
from homing.router.routing.policy.registry import make_policy
from homing.router.routing.replica_load import UnavailableReason

from ..fakes import BLOCK, HASHER, LIMITS, ROOT, FakeReplica, answer, description_of, replica_of, request_of


class World:
    """A request flow with its fake replicas, and a record of all deltas and outcomes."""

    def __init__(
        self,
        replicas: int = 2,
        *,
        retries: int = 3,
        max_waiting: int = 100,
        seed: int = 0,
        silence_s: float = 1e9,
        external: bool = False,
        slots: int = 8,
    ) -> None:
        self.external, self.slots = external, slots
        self.now = 0.0
        settings = RouterSettings(max_waiting_requests=max_waiting, retries=retries)
        self.placement = Placement(
            make_policy("expected-ttft"),
            router_id="me",
            silence_s=silence_s,
            rng=Random(seed),
        )
        self.flow = RequestFlow(self.placement, settings, block_size=BLOCK, counters=RouterCounters())
        self.flow.adopt(ServedModel(HASHER, ROOT, LIMITS))
        self.replicas: dict[str, FakeReplica] = {}
        self.on_wire: dict[str, list[Generate | Abort]] = defaultdict(list)
        self.deltas: dict[RequestId, list[TokenDelta]] = defaultdict(list)
        self.records: dict[RequestId, RequestState] = {}
        self.errors: dict[RequestId, RouterError] = {}
        self.held: list[RequestId] = []
        for index in range(replicas):
            self.join(f"r{index}")

    def join(self, name: str, rest: UnavailableReason | None = None) -> None:
        self.replicas[name] = FakeReplica(name)
        self.run(
            self.flow.join(
                description_of(name, external=self.external, max_running_requests=self.slots), self.now, rest
            )
        )
        self.placement.set_feed(name, FeedStatus.LIVE)

    def lose(self, name: str) -> None:
        del self.replicas[name]
        self.on_wire.pop(name, None)
        self.run(self.flow.replica_gone(name, self.now)[1])

    def wait(self, seconds: float) -> None:
        """Let time pass, and the router's timer go off."""
        self.now += seconds
        self.run(self.flow.expire(self.now))

    def submit(self, request: GenerationRequest) -> RequestId:
        request_id, instructions = self.flow.submit(request, self.now)
        self.run(instructions)
        if self.phase_of(request_id) is Phase.WAITING:
            self.held.append(request_id)
        return request_id

    def phase_of(self, request_id: RequestId) -> Phase:
        unfinished = {each.request_id: each.phase for each in self.flow.oldest(10_000)}
        return unfinished.get(request_id, Phase.OVER)

    def reply(self, name: str, *outputs: TokenOutput) -> None:
        self.run(self.flow.on_reply(name, TokenBatch(step=0, outputs=list(outputs)), self.now))

    def step(self, name: str) -> None:
        """The replica takes its messages and makes a step; its outputs, events and load report are delivered."""
        replica = self.replicas[name]
        for message in self.on_wire.pop(name, []):
            refused = replica.take(message)
            assert refused is None
        batch, stored = replica.step()
        for _, hashes, _ in stored:
            self.placement.stored(name, [wire_hash(block) for block in hashes])
        self.run(self.flow.on_reply(name, batch, self.now))
        self.run(self.flow.report(name, replica.load("me"), self.now))

    def settle(self) -> None:
        for _ in range(200):
            self.wait(0.05)
            for name in list(self.replicas):
                self.step(name)
            if not self.flow.in_flight and not self.flow.waiting:
                return
        raise AssertionError("requests do not finish")

    def run(self, instructions: list[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case Continue():
                    self.run(self.flow.pump(self.now))
                case Send(replica, message):
                    self.on_wire[replica].append(message)
                case Deliver(request_id, delta, _):
                    assert request_id not in self.records, "a delta came after the request's end"
                    self.deltas[request_id].append(delta)
                case Ended(request, error):
                    assert request.request_id not in self.records, "a request ended twice"
                    self.records[request.request_id] = request
                    if error is not None:
                        self.errors[request.request_id] = error

    def tokens(self, request_id: RequestId) -> list[int]:
        return [token for delta in self.deltas[request_id] for token in delta.token_ids]

    def sent(self, name: str) -> Generate:
        message = self.on_wire[name][-1]
        assert isinstance(message, Generate)
        return message

    def home(self, request_id: RequestId) -> str:
        replica = replica_of(self.flow, request_id)
        assert replica is not None
        return replica


@pytest.fixture
def world():
    world = World()
    yield world
    world.flow.check()


PROMPT = list(range(100))


def test_a_request_ends_with_exactly_its_tokens(world: World) -> None:
    """The plain case: one replica serves the whole request."""
    request = request_of(PROMPT)
    request_id = world.submit(request)

    world.settle()

    assert world.tokens(request_id) == answer(request)
    assert world.deltas[request_id][-1].finish_reason == "length"
    assert [delta.cached_tokens for delta in world.deltas[request_id]] == [0] + [None] * 7
    assert world.records[request_id].outcome == "finished"


def test_siblings_follow_the_first_before_any_event(world: World) -> None:
    """Blocks count as expected as soon as their request is dispatched."""
    homes = {world.home(world.submit(request_of([*PROMPT, index], seed=index))) for index in range(3)}

    assert len(homes) == 1


def test_the_prediction_is_recorded_beside_what_was_delivered(world: World) -> None:
    """Routing decisions are judged by comparing their predictions with the outcome."""
    world.submit(request_of(PROMPT))
    world.settle()

    again = world.submit(request_of([*PROMPT, *[7] * 20], seed=2))
    world.settle()

    record = world.records[again]
    assert (record.forecast.cached_tokens, record.cached_tokens, record.forecast.regret_tokens) == (96, 96, 0)
    assert record.forecast.known_tokens == 0, "it takes time to compute, so only sessions get it"


def test_a_session_learns_how_much_of_its_prompt_was_known(world: World) -> None:
    """These are tokens that any replica had cached before this request."""
    world.submit(request_of(PROMPT))
    world.settle()

    again = world.submit(request_of([*PROMPT, *[7] * 20], seed=2, session="s"))
    world.settle()

    assert world.records[again].forecast.known_tokens == 96


def test_tokens_copied_inside_a_block_are_more_than_predicted_and_no_regret(world: World) -> None:
    """The event stream names only whole blocks; a partial hit beyond them is a gain, not a wrong decision."""
    world.submit(request_of(PROMPT))
    world.settle()
    for replica in world.replicas.values():
        replica.copied_tokens = 5

    again = world.submit(request_of([*PROMPT, *[7] * 20], seed=2))
    world.settle()

    record = world.records[again]
    assert (record.forecast.cached_tokens, record.cached_tokens, record.forecast.regret_tokens) == (96, 101, 0)


def predictions(world: World) -> tuple[int, int, int]:
    counters = world.flow.counters
    return counters.predictions_exact, counters.predictions_low, counters.predictions_high


def test_predictions_are_judged_in_whole_blocks(world: World) -> None:
    """Exact, low and high predictions are counted at the first token; a part of a block is no error."""
    world.submit(request_of(PROMPT))
    world.settle()
    seen = [predictions(world)]
    for seed, copied in ((2, 15), (3, 16), (4, -1)):
        for replica in world.replicas.values():
            replica.copied_tokens = copied
        world.submit(request_of([*PROMPT, *[seed] * 20], seed=seed))
        world.settle()
        seen.append(predictions(world))

    assert seen == [(1, 0, 0), (2, 0, 0), (2, 1, 0), (2, 1, 1)]


@pytest.mark.parametrize("busy", [True, False])
def test_a_short_prompt_that_passes_a_long_one_is_predicted_to_compute_their_common_blocks(
    world: World, busy: bool
) -> None:
    """Replicas start shorter prompts first, unless the longer one has started already."""
    world.flow.set_unavailable("r1", "draining", 0.0)
    if busy:
        world.submit(request_of([9] * 50))

    long = world.submit(request_of([*PROMPT, *[5] * 200], seed=2))
    short = world.submit(request_of([*PROMPT, 6], seed=3))
    world.settle()

    found = [world.records[each].forecast.cached_tokens for each in (long, short)]
    assert found == ([96, 0] if busy else [0, 96])


def test_only_a_replica_that_did_not_drain_counts_as_lost(world: World) -> None:
    """Alerts compare this number with a limit; a planned update must not raise one."""
    world.flow.set_unavailable("r1", "draining", 0.0)

    world.lose("r1")
    assert world.flow.counters.replicas_lost == 0

    world.lose("r0")
    assert world.flow.counters.replicas_lost == 1


def test_a_prompt_that_ends_with_a_block_is_predicted_without_it(world: World) -> None:
    """Its last token is always computed, and the event stream names only whole blocks."""
    world.submit(request_of(PROMPT[:96]))
    world.settle()
    again = world.submit(request_of(PROMPT[:96], seed=2))
    world.settle()

    assert world.records[again].forecast.cached_tokens == 80


def test_a_prompt_to_be_scored_is_expected_nowhere(world: World) -> None:
    """An engine computes all of it, so cached blocks must not attract it."""
    world.submit(request_of(PROMPT))
    world.settle()
    request = request_of(PROMPT, seed=2)
    scored = msgspec.structs.replace(request, sampling=msgspec.structs.replace(request.sampling, prompt_logprobs=1))
    again = world.submit(scored)
    world.settle()

    record = world.records[again]
    assert (record.forecast.cached_tokens, record.forecast.regret_tokens) == (0, 0)


def test_a_request_that_moves_before_its_first_token_is_predicted_anew(world: World) -> None:
    """The prediction is compared with the replica that computed the prompt."""
    world.submit(request_of(PROMPT))
    world.settle()
    again = world.submit(request_of(PROMPT, seed=2))

    world.lose(world.home(again))
    world.settle()

    assert world.records[again].forecast.cached_tokens == 0
    assert predictions(world) == (2, 0, 0)


def test_a_busy_holder_is_regretted(world: World) -> None:
    """The best hit that was passed up is recorded, so that its cost can be monitored."""
    first = world.submit(request_of(PROMPT))
    holder = world.home(first)
    world.settle()
    for seed in range(20, 24):
        world.run(world.flow.report(holder, world.replicas[holder].load("me", queued_prefill_tokens=5000), world.now))
        request_id = world.submit(request_of(PROMPT, seed=seed))
        if world.home(request_id) != holder:
            break
    other = request_id
    world.settle()

    assert world.records[other].forecast.regret_tokens == 96
    assert world.records[other].forecast.reason == "load"
    assert world.flow.counters.regret_tokens == 96


def test_a_moved_request_is_counted_once(world: World) -> None:
    """The lost replica counted its look-up; one that refused it did not. The regret is that of the last decision."""
    first = world.submit(request_of(PROMPT))
    holder = world.home(first)
    world.settle()
    world.run(world.flow.report(holder, world.replicas[holder].load("me", queued_prefill_tokens=50_000), world.now))
    moved = world.submit(request_of(PROMPT, seed=30))
    other = world.home(moved)
    assert other != holder
    refused = Refused(request_id=world.sent(other).request_id, reason="internal", message="no", retry=True)
    world.run(world.flow.on_reply(other, refused, world.now))
    assert not world.sent(world.home(moved)).counted

    world.lose(world.home(moved))
    for _ in range(2):  # the only replica left had refused it
        world.wait(1.0)
    assert world.sent(world.home(moved)).counted
    world.settle()

    assert world.flow.counters.regret_tokens == world.records[moved].forecast.regret_tokens


def test_a_lost_replicas_request_goes_on_with_what_was_generated(world: World) -> None:
    """No token is lost or duplicated, and the next replica gets the block hashes of prompt and generated tokens."""
    request = request_of(PROMPT, max_tokens=40)
    request_id = world.submit(request)
    home = world.home(request_id)
    for _ in range(30):
        world.step(home)

    world.lose(home)
    world.wait(1.0)

    sent = world.sent(world.home(request_id))
    assert list(token_array(sent.token_ids)) == PROMPT + answer(request)[:30]
    assert (sent.prompt_tokens, len(sent.block_hashes) // 16) == (100, 130 // 16)
    world.settle()
    assert world.tokens(request_id) == answer(request)
    assert world.records[request_id].moves.continuations == 1


def test_a_constraint_goes_with_its_request_to_every_replica(world: World) -> None:
    """The next replica computes its guide's state from the tokens after the prompt."""
    constraint = Constraint(kind="regex", source="a+")
    request_id = world.submit(msgspec.structs.replace(request_of(PROMPT, max_tokens=40), constraint=constraint))
    home = world.home(request_id)
    first = world.sent(home)
    for _ in range(3):
        world.step(home)

    world.lose(home)
    world.wait(1.0)

    second = world.sent(world.home(request_id))
    assert (first.constraint, second.constraint) == (constraint, constraint)
    assert (second.prompt_tokens, len(second.token_ids) // 4) == (100, 103)


def test_only_the_first_delta_carries_cached_tokens_wherever_it_comes_from(world: World) -> None:
    """A usage that changed in the middle of an answer would be wrong for one of its halves."""
    request_id = world.submit(request_of(PROMPT))
    world.step(world.home(request_id))

    world.lose(world.home(request_id))
    world.settle()

    assert [delta.cached_tokens for delta in world.deltas[request_id]] == [0] + [None] * 7


def test_a_request_that_only_lacks_its_last_word_is_finished_here(world: World) -> None:
    """The replica died after all tokens and before the finish reason: nothing is left to generate."""
    request = request_of(PROMPT, max_tokens=2)
    request_id = world.submit(request)
    home = world.home(request_id)
    wire_id = world.sent(home).request_id
    world.reply(home, TokenOutput(wire_id, 0, answer(request)))

    world.lose(home)

    assert world.deltas[request_id][-1] == TokenDelta(token_ids=[], finish_reason="length")
    assert world.tokens(request_id) == answer(request)


def test_refusals_are_bounded() -> None:
    """A request that every replica refuses must not go round for ever."""
    world = World(4, retries=2)
    request_id = world.submit(request_of(PROMPT))

    for _ in range(3):
        home = world.home(request_id)
        refused = Refused(request_id=world.sent(home).request_id, reason="internal", message="no", retry=True)
        world.run(world.flow.on_reply(home, refused, world.now))

    assert "no" in world.errors[request_id].message
    assert world.records[request_id].moves.continuations == 2
    world.flow.check()


def test_a_stuck_replicas_request_goes_on_elsewhere_and_its_late_tokens_count_for_nothing() -> None:
    """A stuck replica is not dead: tokens that it sends after it recovers must not be delivered twice."""
    world = World(silence_s=3.0)
    request = request_of(range(40), max_tokens=8)
    request_id = world.submit(request)
    stuck = world.home(request_id)
    other = next(name for name in world.replicas if name != stuck)
    for _ in range(3):
        world.step(stuck)
    said = len(world.tokens(request_id))

    world.now = 10.0
    world.step(other)
    world.run(world.flow.expire(world.now))
    world.wait(1.0)

    assert world.home(request_id) == other
    assert isinstance(world.on_wire[stuck][-1], Abort)
    assert said > 0
    world.settle()
    assert world.tokens(request_id) == answer(request)
    assert world.records[request_id].moves.continuations == 1
    world.flow.check()


def test_a_request_without_a_retry_left_stays_with_its_stuck_replica() -> None:
    """The replica may recover; failing the request would certainly lose it."""
    world = World(retries=0, silence_s=3.0)
    request_id = world.submit(request_of(range(40), max_tokens=8))
    stuck = world.home(request_id)

    world.now = 10.0
    world.step(next(name for name in world.replicas if name != stuck))
    world.run(world.flow.expire(world.now))

    assert world.home(request_id) == stuck
    world.settle()
    assert request_id not in world.errors


def test_with_no_replica_left_requests_wait_for_the_next(world: World) -> None:
    """Rebuilding a replica takes seconds; the client's stream can wait that long."""
    request = request_of(PROMPT)
    request_id = world.submit(request)
    world.step(world.home(request_id))
    for name in ("r0", "r1"):
        world.lose(name)

    world.join("r2")
    world.settle()

    assert world.tokens(request_id) == answer(request)


def test_tokens_that_came_before_are_dropped_and_counted(world: World) -> None:
    """Duplicate tokens are harmless if they are detected."""
    request = request_of(PROMPT)
    request_id = world.submit(request)
    home, right = world.home(request_id), answer(request)
    wire_id = world.sent(home).request_id

    world.reply(home, TokenOutput(wire_id, 0, right[:3]))
    world.reply(home, TokenOutput(wire_id, 1, right[1:5]))
    world.reply(home, TokenOutput(wire_id, 0, right[:2]))

    assert world.tokens(request_id) == right[:5]
    assert world.flow.counters.duplicate_tokens == 4


def test_a_hole_in_the_tokens_fails_the_request(world: World) -> None:
    """An answer with missing tokens is worse than none; the replica gets an abort."""
    request_id = world.submit(request_of(PROMPT))
    home = world.home(request_id)
    wire_id = world.sent(home).request_id

    world.reply(home, TokenOutput(wire_id, 1, [5]))

    assert isinstance(world.errors[request_id], RequestFailed)
    assert world.on_wire[home][-1] == Abort(request_ids=[wire_id])


@pytest.mark.parametrize(
    ("reason", "error"),
    [("prompt_too_long", PromptTooLong), ("invalid", InvalidGeneration), ("internal", RequestFailed)],
)
def test_a_final_refusal_says_whose_fault_it_is(world: World, reason: str, error: type[RouterError]) -> None:
    """A caller's mistake is a 400; an engine's failure is not."""
    request_id = world.submit(request_of(PROMPT))
    home = world.home(request_id)

    refused = Refused(request_id=world.sent(home).request_id, reason=reason, message="no")
    world.run(world.flow.on_reply(home, refused, world.now))

    assert type(world.errors[request_id]) is error


def test_a_refusal_with_retry_sends_the_request_elsewhere(world: World) -> None:
    """A draining replica refuses requests that were already on their way to it."""
    request_id = world.submit(request_of(PROMPT))
    home = world.home(request_id)

    refused = Refused(request_id=world.sent(home).request_id, reason="draining", message="no", retry=True)
    world.run(world.flow.on_reply(home, refused, world.now))

    assert world.home(request_id) != home


def test_a_message_that_cannot_be_sent_goes_elsewhere(world: World) -> None:
    """The connection may be gone before the router learns of it."""
    request_id = world.submit(request_of(PROMPT))
    home = world.home(request_id)

    world.run(world.flow.unsendable(home, world.on_wire.pop(home)[0], world.now))

    assert world.home(request_id) != home
    assert world.flow.counters.unsent == 1


def test_a_cancelled_request_is_aborted_and_silent_from_then_on(world: World) -> None:
    """Tokens that arrive after the client left are dropped."""
    request_id = world.submit(request_of(PROMPT))
    home = world.home(request_id)
    wire_id = world.sent(home).request_id

    world.run(world.flow.cancel(request_id, world.now))
    world.reply(home, TokenOutput(wire_id, 0, [5]))
    world.run(world.flow.cancel(request_id, world.now))

    assert world.on_wire[home][-1] == Abort(request_ids=[wire_id])
    assert not world.deltas[request_id]
    assert world.records[request_id].outcome == "cancelled"


def test_an_answer_that_is_complete_counts_as_finished_though_its_replica_is_stopped(world: World) -> None:
    """The router finds stop strings; on call, `cancelled` must mean clients that left."""
    request_id = world.submit(request_of(PROMPT))
    home = world.home(request_id)
    wire_id = world.sent(home).request_id
    world.reply(home, TokenOutput(wire_id, 0, [5]))

    world.run(world.flow.cancel(request_id, world.now, answered=True))

    assert world.on_wire[home][-1] == Abort(request_ids=[wire_id])
    assert world.records[request_id].outcome == "finished"
    assert (world.flow.counters.finished, world.flow.counters.cancelled) == (1, 0)


def test_a_deadline_ends_a_request_wherever_it_is() -> None:
    """On a replica it is aborted; in the queue it is removed."""
    world = World(1)
    running = world.submit(request_of(PROMPT, deadline=5.0))
    world.lose("r0")
    waiting = world.submit(request_of(PROMPT, deadline=6.0))
    world.join("r0")
    world.wait(1.0)
    assert world.flow.waiting == 1

    world.now = 7.0
    world.run(world.flow.expire(world.now))

    assert {type(world.errors[request_id]) for request_id in (running, waiting)} == {DeadlineExceeded}
    assert isinstance(world.on_wire["r0"][-1], Abort)
    world.flow.check()


def test_saturated_engines_leave_requests_in_the_router_in_order_of_priority() -> None:
    """Requests in the queue of an engine that is not ours can no longer be reordered."""
    world = World(1, external=True)
    for seed in range(QUEUE_AHEAD):
        world.submit(request_of(PROMPT, seed=seed))
    late = world.submit(request_of(PROMPT, seed=90))
    urgent = world.submit(request_of(PROMPT, seed=91, priority=-1))

    assert world.held == [late, urgent]
    world.run(world.flow.cancel(RequestId(1), world.now))

    assert replica_of(world.flow, urgent) == "r0"
    assert replica_of(world.flow, late) is None
    world.settle()
    world.flow.check()


@pytest.mark.parametrize("external", [False, True])
@pytest.mark.parametrize(("replicas", "most"), [(2, 14), (3, 10), (5, 7)])
def test_equal_prompts_that_all_replicas_hold_spread_evenly(replicas: int, most: int, external: bool) -> None:
    """24 at once. Only the load differs between replicas, and each request changes it."""
    for seed in range(5):
        world = World(replicas, seed=seed, external=external, slots=32)
        for name in world.replicas:
            world.placement.stored(name, wire_hashes(join_hashes(HASHER.chain(tenant_root(ROOT), token_bytes(PROMPT)))))
        sent = [world.submit(request_of(PROMPT, seed=number)) for number in range(24)]
        taken = Counter(world.home(each) for each in sent)

        assert max(taken.values()) <= most, taken
        assert len(taken) == replicas
        world.flow.check()


def test_the_tenant_and_its_weight_reach_the_replica() -> None:
    """Its engine divides its steps and blocks among tenants, too: a share ends at the last queue, not here."""
    world = World(1)

    _, instructions = world.flow.submit(request_of(PROMPT, tenant=b"acme", weight=2.5), 0.0)

    sent = [each.message for each in instructions if isinstance(each, Send)]
    assert [(each.tenant, each.weight) for each in sent if isinstance(each, Generate)] == [(b"acme", 2.5)]


def test_a_request_that_fits_nowhere_lets_others_pass_and_says_what_it_waits_for() -> None:
    """Requests that a replica can take must not wait behind one that none can take. Then it has its turn first."""
    world = World(2, external=True, slots=100)
    for name in ("r0", "r1"):
        full = world.replicas[name].load("me", free_blocks=20, waiting=QUEUE_AHEAD)
        world.run(world.flow.report(name, full, world.now))
    large = world.submit(request_of(range(500), seed=1))
    small = [world.submit(request_of(range(32), seed=seed)) for seed in range(2, 6)]

    states = {each.trace_id: (each.state, each.waits_for) for each in activity_of(world.flow, "m", BLOCK, {}).running}
    assert states["trace-1"] == ("waiting", "held: saturated: r0, r1")
    assert states["trace-2"] == ("sent", "")
    assert all(world.phase_of(each) is Phase.SENT for each in small)
    world.settle()
    assert {world.records[each].outcome for each in (large, *small)} == {"finished"}


def test_no_more_work_passes_a_request_that_waits_for_room_than_it_needs_itself() -> None:
    """Otherwise small requests that keep coming would keep a large one out for good."""
    world = World(1, external=True, slots=100)
    tight = world.replicas["r0"].load("me", free_blocks=30, waiting=QUEUE_AHEAD)
    world.run(world.flow.report("r0", tight, world.now))
    large = world.submit(request_of(range(500), seed=1))
    passed = 0
    for seed in range(2, 9):
        small = world.submit(request_of([seed] * 200, seed=seed))
        if world.phase_of(small) is Phase.SENT:
            passed += 1
            world.reply("r0", TokenOutput(world.sent("r0").request_id, 0, [1], finish_reason="stop"))

    # The first one goes before it by rank, as it is shorter; then three pass it, which are more work than it is.
    assert (passed, world.phase_of(large)) == (4, Phase.WAITING)
    world.on_wire.clear()
    world.settle()
    assert world.records[large].outcome == "finished"


def test_a_single_request_does_not_wait_behind_a_flood() -> None:
    """A tenant with a thousand queued requests gets its share and no more."""
    world = World(1, max_waiting=2000, external=True)
    flood = [world.submit(request_of(PROMPT, seed=seed, tenant=b"flood")) for seed in range(1000)]
    single = world.submit(request_of(PROMPT, seed=5000, tenant=b"single"))
    before = world.flow.in_flight

    while replica_of(world.flow, single) is None:
        world.step("r0")

    served = sum(replica_of(world.flow, request_id) is not None or request_id in world.records for request_id in flood)
    assert world.held[-1] == single
    assert served <= before + world.flow.in_flight + 1


def test_a_full_queue_makes_room_for_who_has_less_in_it() -> None:
    """A flood must not lock others out: the flooding tenant's newest request gives way."""
    world = World(0, max_waiting=3)
    flood = [world.submit(request_of(PROMPT, seed=seed, tenant=b"flood")) for seed in range(3)]

    with pytest.raises(QueueFull):
        world.submit(request_of(PROMPT, seed=3, tenant=b"flood"))
    single = world.submit(request_of(PROMPT, seed=4, tenant=b"single"))

    assert isinstance(world.errors[flood[2]], QueueFull)
    assert not {flood[0], flood[1], single} & set(world.records)
    assert world.flow.waiting == 3
    world.flow.check()


def test_what_was_generated_counts_as_service() -> None:
    """Long answers are work too: a tenant that got one waits until the other tenant has had its share."""
    world = World(1)
    for seed in range(12):
        world.submit(request_of(PROMPT, seed=seed, tenant=b"long", max_tokens=200 if seed == 0 else 300))
    world.run(world.flow.cancel(RequestId(12), world.now))
    waiting = {
        tenant: [world.submit(request_of(PROMPT, seed=20 + at, tenant=tenant, max_tokens=1)) for at in range(3)]
        for tenant in (b"long", b"brief")
    }
    while not world.records.get(RequestId(1)):
        world.step("r0")
    world.settle()

    first = {tenant: min(world.records[each].ttft_s or 0.0 for each in waiting[tenant]) for tenant in waiting}
    assert first[b"brief"] <= first[b"long"]


def test_deadlines_of_requests_that_are_over_are_forgotten(world: World) -> None:
    """They are minutes ahead, so a busy router would accumulate millions."""
    for seed in range(3000):
        world.run(world.flow.cancel(world.submit(request_of(PROMPT, seed=seed)), world.now))
        world.on_wire.clear()
    world.run(world.flow.expire(world.now))

    assert not world.flow.deadlines


def test_requests_of_a_replica_that_left_are_placed_a_few_at_a_time() -> None:
    """However many it had: each placing hashes a prompt and takes a decision, and other streams must not wait."""
    world = World(replicas=1, slots=100)
    requests = [world.submit(request_of([*PROMPT, index], seed=index)) for index in range(30)]
    world.join("r1")

    world.flow.set_unavailable("r0", "draining", world.now)
    slices = [world.flow.replica_gone("r0", world.now)[1]]
    while isinstance(slices[-1][-1], Continue):
        slices.append(world.flow.pump(world.now))

    sent = [[each for each in instructions if isinstance(each, Send)] for instructions in slices]
    assert [each.replica for part in sent for each in part] == ["r1"] * len(requests)
    assert max(map(len, sent)) == PLACED_AT_ONCE
    world.flow.check()


def test_a_full_queue_says_when_to_come_back() -> None:
    """The error carries a Retry-After time, and the queue is unchanged."""
    world = World(0, max_waiting=2)
    for seed in range(2):
        world.submit(request_of(PROMPT, seed=seed))

    with pytest.raises(QueueFull) as caught:
        world.submit(request_of(PROMPT, seed=3))

    assert caught.value.retry_after_s == 1.0
    world.flow.check()


def test_a_prompt_that_leaves_no_room_for_an_answer_is_refused_here(world: World) -> None:
    """The router knows the limit, so no replica is asked."""
    with pytest.raises(PromptTooLong):
        world.submit(request_of([1] * LIMITS.max_model_len))


def test_explaining_changes_nothing(world: World) -> None:
    """Operators call it in the middle of an incident."""
    table = world.flow.explain(request_of(PROMPT), world.now)

    assert table.chosen in ("r0", "r1")
    assert world.flow.in_flight == world.flow.waiting == 0
    assert not world.on_wire


def test_a_shutdown_ends_every_request_by_name(world: World) -> None:
    """No reader may wait forever."""
    request_ids = [world.submit(request_of(PROMPT, seed=seed)) for seed in range(30)]

    world.run(world.flow.fail_all(lambda: RouterClosed("bye")))

    assert all(isinstance(world.errors[request_id], RouterClosed) for request_id in request_ids)


def test_only_who_has_no_token_may_begin_anew_when_its_model_is_replaced() -> None:
    """Another model would continue differently. A request that starts again has not failed: it counts as cancelled."""
    world = World(1)
    begun = world.submit(request_of(PROMPT))
    world.step("r0")
    sent = world.submit(request_of([*PROMPT, 1], seed=2))

    world.run(world.flow.supersede())

    assert isinstance(world.errors[begun], Superseded)
    assert isinstance(world.errors[sent], Superseded)
    assert [world.records[each].outcome for each in (begun, sent)] == ["failed", "cancelled"]
    assert (world.flow.counters.failed, world.flow.counters.cancelled) == (1, 1)
    assert sum(isinstance(message, Abort) for message in world.on_wire["r0"]) == 2
    world.flow.check()


def test_a_burst_of_siblings_neither_scatters_nor_herds(capsys: pytest.CaptureFixture[str]) -> None:
    """One hundred questions with the same prefix at once: no replica is sent the whole prefix twice.

    An engine may still compute it twice: a sibling admitted in the very step that completes the first one's prefill
    comes before the first one's blocks are committed.
    """
    world = World(4)
    shared = list(range(960))
    request_ids = [world.submit(request_of([*shared, *range(seed, seed + 20)], seed=seed)) for seed in range(100)]
    world.settle()

    sent_whole = sum(record.forecast.cached_tokens == 0 for record in world.records.values())
    computed = sum(replica.full_prefills for replica in world.replicas.values())
    by_replica = [
        sum(world.records[request_id].replica == name for request_id in request_ids) for name in world.replicas
    ]
    with capsys.disabled():
        print(f"\n100 siblings on 4 replicas: {by_replica} requests, {sent_whole} sent whole, {computed} full prefills")
    assert sent_whole <= 4
    assert computed <= 8
    assert max(by_replica) <= 50
    assert all(record.outcome == "finished" for record in world.records.values())


def warming(world: World, share: float = 1.0) -> None:
    """Finish twelve requests with two kinds of prompt; then start the warm-up of a new replica."""
    for seed in range(12):
        world.submit(request_of([*([seed % 2 + 1] * 256), seed], seed=seed, salt=bytes([seed % 2])))
    world.settle()
    world.join("new", "warming")
    world.run(world.flow.warm_up("new", share, world.now))


def test_a_new_replica_is_filled_with_what_is_hot_before_it_serves(world: World) -> None:
    """One request at a time, at the lowest priority, under the tenants' roots; not counted as client traffic."""
    warming(world)
    before = msgspec.structs.replace(world.flow.counters)
    sent = []
    while "new" in world.flow.warm_ups:
        sent.append(world.sent("new"))
        assert len(world.on_wire["new"]) == 1
        world.step("new")
    world.run(world.flow.set_unavailable("new", None, world.now))

    counters = world.flow.counters
    assert [(each.warm_up, each.sampling.max_tokens, len(each.token_ids)) for each in sent] == [(True, 1, 1024)] * 2
    assert {each.root for each in sent} == {tenant_root(ROOT, salt=bytes([kind])) for kind in range(2)}
    assert {each.salt for each in sent} == {"\0", "\1"}
    assert min(each.priority for each in sent) > 10**9
    assert (counters.warm_up_requests, counters.warm_up_tokens, counters.warm_ups_cut) == (2, 512, 0)
    assert counters.finished == before.finished
    assert counters.delivered_cached_tokens == before.delivered_cached_tokens
    assert world.placement.index.match(wire_hashes(sent[0].block_hashes))["new"] == 16


def test_a_warm_up_takes_no_more_than_its_share_and_tells_how_far_it_is(world: World) -> None:
    """The pool is for future requests; and `explain` must say why the replica gets no requests yet."""
    warming(world, share=0.017)  # of 1,000 blocks: one prefix of 16

    table = world.flow.explain(request_of(PROMPT), world.now)
    why = next(row.why for row in table.replicas if row.replica_id == "new")
    first = len(world.sent("new").token_ids) // 4
    world.step("new")

    assert why == "warming up: 0 of 256 tokens computed"
    assert first == 256
    assert "new" not in world.flow.warm_ups


def test_a_warm_up_ends_at_once_when_a_request_is_held() -> None:
    """A replica that could serve must not be kept from serving."""
    world = World(1)
    warming(world)
    world.run(world.flow.set_unavailable("r0", "draining", world.now))

    request_id = world.submit(request_of(PROMPT))
    world.run(world.flow.expire(world.now))

    assert request_id in world.held
    assert isinstance(world.on_wire["new"][-1], Abort)
    assert "new" not in world.flow.warm_ups
    assert world.flow.counters.warm_ups_cut == 1
    assert world.flow.warm_up("new", 1.0, world.now) == []
    world.run(world.flow.set_unavailable("new", None, world.now))
    world.settle()
    assert world.tokens(request_id) == answer(request_of(PROMPT))


def test_a_warm_up_ends_when_requests_queue_wherever_they_can_go(world: World) -> None:
    """One more replica, even a cold one, relieves the others at once; its requests then fill its cache."""
    warming(world)
    seconds = PRESSING_WAIT_S + 1
    for name in ("r0", "r1"):
        assert "new" in world.flow.warm_ups
        queued = {"queued_prefill_tokens": 10_000, "queued_prefill_s": seconds, "step": 9}
        world.run(world.flow.report(name, world.replicas[name].load("me", **queued), world.now))

    assert world.flow.is_pressed(world.now)
    assert isinstance(world.on_wire["new"][-1], Abort)
    world.now += seconds
    assert not world.flow.is_pressed(world.now)
    assert world.flow.warm_up("new", 1.0, world.now) != []


def test_a_warm_up_ends_with_its_time_with_its_replica_and_where_it_cannot_be_sent(world: World) -> None:
    """A warm-up request that is still running then must have no effect."""
    for end in ("serves", "is lost", "is not reached"):
        warming(world)
        if end == "serves":
            world.run(world.flow.set_unavailable("new", None, world.now))
            assert isinstance(world.on_wire["new"][-1], Abort)
        elif end == "is not reached":
            world.run(world.flow.unsendable("new", world.sent("new"), world.now))
        world.lose("new")
        assert "new" not in world.flow.warm_ups
        assert not world.errors


def test_a_prefix_that_the_new_replica_refuses_is_passed_over(world: World) -> None:
    """A prefix that does not fit says nothing about the other prefixes."""
    warming(world)
    first = world.on_wire.pop("new")[0]

    refused = Refused(request_id=first.request_id, reason="prompt_too_long", message="no")
    world.run(world.flow.on_reply("new", refused, world.now))

    assert world.sent("new").root != first.root
    world.step("new")
    assert world.flow.counters.warm_up_requests == 1


def test_only_who_rests_for_it_is_warmed_up(world: World) -> None:
    """A serving replica's cache is filled by its own requests."""
    assert world.flow.warm_up("r0", 1.0, world.now) == []
    assert world.flow.warm_up("unknown", 1.0, world.now) == []


class FlowMachine(RuleBasedStateMachine):
    """Whatever is lost, refused, cancelled or late: a request yields exactly its tokens or a clear error."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World(2, retries=2, max_waiting=20, silence_s=2.0)  # without a step for 2 s, a replica is stuck
        self.requests: dict[RequestId, GenerationRequest] = {}
        self.cancelled: set[RequestId] = set()
        self.names = 2

    @rule(tokens=st.integers(1, 300), count=st.integers(1, 5), priority=st.integers(0, 2), late=st.booleans())
    def submit(self, tokens, count, priority, late):
        request = request_of(
            list(range(tokens)),
            max_tokens=count,
            seed=len(self.requests),
            priority=priority,
            deadline=self.world.now + (3 if late else 1000),
        )
        try:
            self.requests[self.world.submit(request)] = request
        except QueueFull:
            assert self.world.flow.waiting >= 20

    @precondition(lambda self: self.world.replicas)
    @rule(data=st.data())
    def step(self, data):
        self.world.step(data.draw(st.sampled_from(sorted(self.world.replicas))))

    @precondition(lambda self: self.world.replicas)
    @rule(data=st.data())
    def lose(self, data):
        self.world.lose(data.draw(st.sampled_from(sorted(self.world.replicas))))

    @precondition(lambda self: len(self.world.replicas) < 4)
    @rule()
    def join(self):
        self.world.join(f"r{self.names}")
        self.names += 1

    @precondition(lambda self: len(self.world.replicas) < 4)
    @rule()
    def come_to_be_warmed_up(self):
        self.world.join(f"r{self.names}", "warming")
        self.world.run(self.world.flow.warm_up(f"r{self.names}", 1.0, self.world.now))
        self.names += 1

    @precondition(lambda self: self.world.replicas)
    @rule(data=st.data())
    def serve(self, data):
        name = data.draw(st.sampled_from(sorted(self.world.replicas)))
        self.world.run(self.world.flow.set_unavailable(name, None, self.world.now))

    @precondition(lambda self: any(self.world.on_wire.values()))
    @rule(data=st.data(), retry=st.booleans(), unsendable=st.booleans())
    def turn_away(self, data, retry, unsendable):
        name = data.draw(st.sampled_from(sorted(name for name, wire in self.world.on_wire.items() if wire)))
        message = self.world.on_wire[name].pop()
        if unsendable:
            self.world.run(self.world.flow.unsendable(name, message, self.world.now))
        elif isinstance(message, Generate):
            refused = Refused(request_id=message.request_id, reason="internal", message="no", retry=retry)
            self.world.run(self.world.flow.on_reply(name, refused, self.world.now))

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def cancel(self, data):
        request_id = data.draw(st.sampled_from(sorted(self.requests)))
        if request_id not in self.world.records:
            self.cancelled.add(request_id)
        self.world.run(self.world.flow.cancel(request_id, self.world.now))

    @rule(seconds=st.integers(1, 3))
    def pass_time(self, seconds):
        self.world.now += seconds
        self.world.run(self.world.flow.expire(self.world.now))

    @invariant()
    def consistent(self):
        self.world.flow.check()

    def teardown(self):
        self.world.join("last")
        self.world.settle()
        for request_id, request in self.requests.items():
            outcome, got = self.world.records[request_id].outcome, self.world.tokens(request_id)
            assert got == answer(request)[: len(got)], "a token was lost, duplicated or wrong"
            assert (outcome == "cancelled") == (request_id in self.cancelled)
            assert (outcome == "finished") == (len(got) == request.sampling.max_tokens and outcome != "cancelled") or (
                outcome == "failed"
            )
            assert (outcome == "failed") == (request_id in self.world.errors)
        self.world.flow.check()
        assert not self.world.flow.in_flight


TestFlow = FlowMachine.TestCase
TestFlow.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


def waiting(world: World) -> RequestId:
    for name in list(world.replicas):
        world.lose(name)
    return world.submit(request_of(PROMPT))


def streaming(world: World) -> RequestId:
    request_id = world.submit(request_of(PROMPT))
    world.step(world.home(request_id))
    return request_id


def sent(world: World, **fields: object) -> RequestId:
    return world.submit(request_of(PROMPT, **fields))


def fail_all(world: World, request_id: RequestId) -> None:
    world.run(world.flow.fail_all(lambda: RouterClosed("bye")))


def cancel(world: World, request_id: RequestId) -> None:
    world.run(world.flow.cancel(request_id, world.now))


def lose(world: World, request_id: RequestId) -> None:
    """Lose all other replicas first, so that the request cannot be sent again."""
    home = world.home(request_id)
    for name in [*(name for name in world.replicas if name != home), home]:
        world.lose(name)


#: By transition: a function that brings a request into the phase, and one that triggers the event.
SCENARIOS: dict[tuple[Phase, Event], tuple[Callable[[World], RequestId], Callable[[World, RequestId], object]]] = {
    (Phase.NEW, "send"): (sent, lambda world, request_id: None),
    (Phase.NEW, "queue"): (waiting, lambda world, request_id: None),
    (Phase.WAITING, "send"): (waiting, lambda world, request_id: world.join("r9")),
    (Phase.SENT, "start"): (sent, lambda world, request_id: world.step(world.home(request_id))),
    (Phase.SENT, "move"): (sent, lose),
    (Phase.STREAMING, "move"): (streaming, lose),
    (Phase.SENT, "finish"): (lambda world: sent(world, max_tokens=0), lose),
    (Phase.STREAMING, "finish"): (streaming, lambda world, request_id: world.settle()),
    (Phase.WAITING, "fail"): (waiting, fail_all),
    (Phase.SENT, "fail"): (sent, fail_all),
    (Phase.STREAMING, "fail"): (streaming, fail_all),
    (Phase.WAITING, "cancel"): (waiting, cancel),
    (Phase.SENT, "cancel"): (sent, cancel),
    (Phase.STREAMING, "cancel"): (streaming, cancel),
}


@pytest.mark.parametrize("transition", TRANSITIONS, ids=lambda each: f"{each.before.value}-{each.event}")
def test_each_transition_of_the_table_happens(world: World, transition: Transition) -> None:
    """The table has no row that the flow never uses. A transition missing from it is an assertion error."""
    begin, happen = SCENARIOS[transition.before, transition.event]

    request_id = begin(world)
    if transition.before is not Phase.NEW:
        assert world.phase_of(request_id) is transition.before
    happen(world, request_id)

    assert world.phase_of(request_id) is transition.after


def test_embedding_is_computed_elsewhere_when_its_replica_is_lost() -> None:
    """It is computed again completely, because no part of it was delivered."""
    world = World()
    asked = EmbeddingParams("last", 8)
    request_id = world.submit(request_of([*range(3 * BLOCK)], embedding=asked))
    home = world.home(request_id)

    world.lose(home)
    world.wait(1.0)

    other = world.home(request_id)
    message = world.sent(other)
    assert (other != home, message.embedding, message.prompt_tokens) == (True, asked, 3 * BLOCK)
    last = TokenOutput(message.request_id, 0, [], finish_reason="stop", cached_tokens=0, embedding=b"1234")
    world.reply(other, last)
    assert [delta.embedding for delta in world.deltas[request_id]] == [b"1234"]
    assert world.records[request_id].outcome == "finished"


def test_prompt_of_an_embedding_may_fill_the_context() -> None:
    """An embedding needs no room for an answer."""
    world = World()
    full = [*range(LIMITS.max_model_len)]

    world.submit(request_of(full, embedding=EmbeddingParams("last")))

    with pytest.raises(PromptTooLong):
        world.submit(request_of(full))
    with pytest.raises(PromptTooLong):
        world.submit(request_of([*full, 1], embedding=EmbeddingParams("last")))


def test_mean_embedding_is_not_routed_to_cached_blocks() -> None:
    """A mean over all tokens cannot use cached blocks; an embedding of the last token can."""
    world = World()
    prompt = [*range(4 * BLOCK)]
    world.submit(request_of(prompt))
    world.settle()

    told = {
        pooling: world.flow.explain(request_of(prompt, embedding=EmbeddingParams(pooling)), world.now)
        for pooling in ("last", "mean")
    }

    cached = {pooling: max(each.held_blocks for each in table.replicas) for pooling, table in told.items()}
    assert cached == {"last": 4, "mean": 0}
