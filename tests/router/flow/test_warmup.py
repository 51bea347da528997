"""The requests that fill a new replica's cache, one prefix after the other."""

from itertools import count
from random import Random

from homing.kvcache.hashing import join_hashes, token_bytes, wire_hashes
from homing.replica.messages import Abort, Generate, Refused, TokenBatch, TokenOutput
from homing.router.backend import RouterCounters, TextOutput, WarmUpProgress
from homing.router.flow.hot_prefixes import HotPrefixes
from homing.router.flow.request_state import Instruction, Send
from homing.router.flow.warmup import LOWEST_PRIORITY, CacheWarmup
from homing.router.routing.placement import Placement
from homing.router.routing.policy.registry import make_policy

from ..fakes import BLOCK, HASHER, ROOT, description_of, report_of


class World:
    """A replica `new`, out of routing for its warm-up, and `old`, which holds prompts that were sent twice or more."""

    def __init__(self, *blocks: int) -> None:
        """`blocks`: the length of each hot prompt, in blocks."""
        self.counters = RouterCounters()
        self.placement = Placement(make_policy("expected-ttft"), router_id="me", silence_s=1e9, rng=Random(1))
        for name in ("old", "new"):
            self.placement.join(description_of(name), 0.0)
        self.placement.fleet.set_unavailable("new", "warming")
        hot_prefixes = HotPrefixes(BLOCK, 1 << 20)
        for number, length in enumerate(blocks):
            tokens = token_bytes([number] * length * BLOCK)
            hashes = join_hashes(HASHER.chain(ROOT, tokens))
            for _ in range(2 + number):  # the last one is the hottest
                hot_prefixes.add(ROOT, tokens, hashes)
            self.placement.stored("old", wire_hashes(hashes))
        self.warm_ups = CacheWarmup(self.placement, hot_prefixes, self.counters, count(1))

    def begin(self, replica: str = "new") -> Generate | None:
        return sent(self.warm_ups.begin(replica, 1.0, 0.0))

    def answer(self, wire_id: int, cached: int = 0) -> Generate | None:
        output = TokenOutput(request_id=wire_id, index=0, token_ids=[1], finish_reason="length", cached_tokens=cached)
        return sent(self.warm_ups.on_reply("new", TokenBatch(step=0, outputs=[output]), 0.0))

    def refuse(self, wire_id: int) -> Generate | None:
        refused = Refused(request_id=wire_id, reason="prompt_too_long", message="no")
        return sent(self.warm_ups.on_reply("new", refused, 0.0))


def sent(instructions: list[Instruction]) -> Generate | None:
    """Return the only message, or None without instructions."""
    if not instructions:
        return None
    (send,) = instructions
    assert isinstance(send, Send)
    assert isinstance(send.message, Generate)
    return send.message


def test_each_prefix_is_computed_for_one_token_behind_everybody() -> None:
    """The token is dropped; only the blocks matter."""
    world = World(16, 8)

    request = world.begin()

    assert request is not None
    assert (request.request_id, request.prompt_tokens, request.warm_up) == (1, 8 * BLOCK, True)
    assert (request.sampling.max_tokens, request.priority) == (1, LOWEST_PRIORITY)
    assert world.answer(1) is not None
    assert world.warm_ups.progress("new") == WarmUpProgress(done_tokens=8 * BLOCK, planned_tokens=24 * BLOCK)


def test_an_engine_that_tells_no_ids_is_warmed_up_too() -> None:
    """SGLang replies with text instead of token ids."""
    world = World(16, 8)
    world.begin()

    told = sent(world.warm_ups.on_reply("new", TextOutput(1, "", 0), 0.0))
    ended = sent(world.warm_ups.on_reply("new", TextOutput(1, "a", 1, "length", cached_tokens=0), 0.0))

    assert told is None
    assert ended is not None
    assert world.counters.warm_up_requests == 1


def test_it_ends_when_all_are_computed() -> None:
    """Tokens that a prefix shares with an earlier one come from the cache and do not count as computed."""
    world = World(16, 8)
    world.begin()

    assert world.answer(1) is not None
    assert world.answer(2, cached=BLOCK) is None

    assert "new" not in world.warm_ups
    counters = world.counters
    assert (counters.warm_up_requests, counters.warm_up_tokens, counters.warm_ups_cut) == (2, 23 * BLOCK, 0)


def test_only_the_reply_to_the_present_request_sends_the_next() -> None:
    """A late reply to another request must not send two at once."""
    world = World(8, 8)
    world.begin()

    assert world.answer(4) is None
    assert world.refuse(4) is None
    assert world.refuse(1) is not None
    assert world.warm_ups.progress("new") == WarmUpProgress(done_tokens=0, planned_tokens=16 * BLOCK)


def test_a_stop_aborts_the_present_request() -> None:
    """It is aborted once; a replica that cannot be reached is sent nothing."""
    world = World(8)
    world.begin()

    assert world.warm_ups.stop("new") == [Send("new", Abort(request_ids=[1]))]
    assert world.warm_ups.stop("new") == []
    world.begin()
    world.warm_ups.drop("new")

    assert world.warm_ups.progress("new") is None
    assert world.counters.warm_ups_cut == 2


def test_only_a_replica_that_is_out_of_routing_for_it_is_warmed_up() -> None:
    """A serving replica's cache is filled by its own requests."""
    world = World(8)

    assert world.begin("old") is None
    assert world.begin("unknown") is None
    assert world.begin() is not None
    assert world.begin() is None
    assert world.warm_ups.replicas == ("new",)


def test_a_prefix_that_never_arrived_is_passed_over() -> None:
    """The replica would wait for its warm-up, and its requests for the replica, for good."""
    world = World(16, 8)
    world.begin()
    for second in range(3):
        world.placement.report("new", report_of(ts=1.0 + second), second)
    assert not world.warm_ups.expire(1.0)

    abort, following = world.warm_ups.expire(2.0)

    assert isinstance(abort, Send)
    assert abort.message == Abort(request_ids=[1])
    assert isinstance(following, Send)
    assert isinstance(following.message, Generate)
    assert not world.warm_ups.expire(2.5), "the next one has its own time"
    world.placement.report("new", report_of(ts=4.0, running=1), 4.0)
    assert not world.warm_ups.expire(9.0), "a replica that computes it has it"
