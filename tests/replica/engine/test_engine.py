"""The engine with a model whose tokens can be computed by hand, and the real scheduler, cache and sampler."""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from homing.kvcache.hashing import BlockHash, BlockHasher, HashAlgorithm
from homing.kvcache.pins import PinLimits
from homing.kvcache.prefix_cache import PrefixCache
from homing.replica.engine.answers import StepResult
from homing.replica.engine.drafts import Drafter
from homing.replica.engine.engine import Engine
from homing.replica.engine.scheduler import SchedulerLimits
from homing.replica.engine.step_plan import StepPlan
from homing.replica.engine.throughput import SmoothedRates
from homing.replica.errors import Draining, InvalidRequest, PromptTooLong, RankLost
from homing.replica.execute.runner import ModelRunner
from homing.replica.messages import Generate, Pin, TokenLogprob, TokenOutput, decoded_positions

from ..fakes import VOCAB, FakeClock, FakeExecutor, FakeModel, Guesses, generate, undisturbed

HANG = 5_000
EOS = 96
Answer = list[TokenLogprob]


@dataclass
class Rig:
    """An engine on a fake model, with a record of its outputs."""

    blocks: int = 32
    block_size: int = 2
    budget: int = 64
    running: int = 8
    worth_waiting: int = 128
    hasher_of: Callable[[int], BlockHasher] = lambda block_size: BlockHasher(block_size, seed=3)
    enabled: bool = True
    drafter: Drafter | None = None
    evicted: Callable[[], None] = lambda: None
    outputs: dict[tuple[str, int], list[TokenOutput]] = field(default_factory=lambda: defaultdict(list))

    def __post_init__(self) -> None:
        self.hasher = self.hasher_of(self.block_size)
        limits = PinLimits(tenant_share=0.5, total_share=1.0)
        self.cache = PrefixCache(self.blocks + 1, self.block_size, enabled=self.enabled, pin_limits=limits)
        self.clock = FakeClock(tick=0.02)
        self.executor = FakeExecutor(FakeModel(self.blocks + 1, self.block_size))
        self.engine = Engine(
            limits=SchedulerLimits(self.running, self.budget, self.blocks * self.block_size, self.worth_waiting),
            vocab_size=VOCAB,
            eos_token_ids=(EOS,),
            cache=self.cache,
            hasher=self.hasher,
            executor=self.executor,
            rates=SmoothedRates(1000.0, 0.01),
            epoch=11,
            clock=self.clock,
            wall_clock=FakeClock(),
            drafter=self.drafter,
            evicted=self.evicted,
        )

    def request(self, request_id: int, tokens: list[int], **options) -> Generate:
        return generate(request_id, tokens, self.hasher, **options)

    def add(self, request_id: int, tokens: list[int], source: str = "a", pins: tuple[Pin, ...] = (), **options) -> None:
        request = self.request(request_id, tokens, **options)
        self.engine.add(source, msgspec.structs.replace(request, pins=pins))

    def step(self) -> StepResult:
        result = self.engine.step()
        for source, outputs in result.outputs.items():
            for output in outputs:
                self.outputs[source, output.request_id].append(output)
        self.engine.scheduler.check()
        return result

    def run(self) -> None:
        for _ in range(HANG):
            if not self.engine.has_work:
                return
            self.step()
        raise AssertionError("requests did not finish")

    def tokens(self, request_id: int, source: str = "a") -> list[int]:
        return [token for output in self.outputs[source, request_id] for token in output.token_ids]


@pytest.fixture
def rig():
    made = Rig()
    yield made
    made.engine.scheduler.check()


def prompt_that_ends(stop_after: int) -> list[int]:
    """A prompt for which the fake model generates the end-of-sequence id as token number `stop_after`."""
    prompts = ([first, second] for first in range(VOCAB) for second in range(VOCAB))
    for prompt in prompts:
        answer = undisturbed(prompt, stop_after + 1)
        if answer[-1] == EOS and EOS not in answer[:-1]:
            return prompt
    raise AssertionError("no such prompt")


def test_what_a_prompt_evicts_is_announced_before_its_step_runs() -> None:
    """Computing a prompt takes long. Requests that are routed in the meantime must not count on these blocks."""
    announced: list[int] = []
    rig = Rig(blocks=4, evicted=lambda: announced.append(rig.cache.counters.evicted_tokens))
    rig.add(1, [1] * 6, max_tokens=1)
    rig.run()
    assert announced == []

    rig.add(2, [2] * 6, max_tokens=1)
    rig.executor.fail_next = 1
    rig.step()

    assert announced == [4]  # before the executor, which failed


def test_outputs_are_grouped_by_router_and_numbered(rig: Rig) -> None:
    """One frame per router and step; the index lets a router detect lost or repeated tokens."""
    rig.add(1, [1, 2, 3], source="a", ignore_eos=True)
    rig.add(1, [4, 5], source="b", ignore_eos=True)

    result = rig.step()
    rig.run()

    assert sorted(result.outputs) == ["a", "b"]
    assert [output.index for output in rig.outputs["a", 1]] == [0, 1, 2, 3]
    assert rig.tokens(1, "a") == undisturbed([1, 2, 3], 4)
    assert rig.tokens(1, "b") == undisturbed([4, 5], 4)


def test_the_first_output_alone_tells_cached_tokens(rig: Rig) -> None:
    """The API's `usage.prompt_tokens_details.cached_tokens` is taken from it."""
    for request_id in (1, 2):
        rig.add(request_id, [1, 2, 3, 4, 5], ignore_eos=True)
        rig.run()

    assert [output.cached_tokens for output in rig.outputs["a", 1]] == [0, None, None, None]
    assert [output.cached_tokens for output in rig.outputs["a", 2]] == [4, None, None, None]


def test_tokens_may_be_told_together_but_never_late_or_twice(rig: Rig) -> None:
    """A non-streamed answer needs no message per token, but its first token and its end are sent at once."""
    rig.add(1, [1, 2, 3], max_tokens=8, ignore_eos=True)
    together = rig.request(2, [1, 2, 3], max_tokens=8, ignore_eos=True)
    rig.engine.add("a", msgspec.structs.replace(together, tokens_per_output=3))

    rig.run()

    assert [output.index for output in rig.outputs["a", 2]] == [0, 1, 4, 7]
    assert [len(output.token_ids) for output in rig.outputs["a", 2]] == [1, 3, 3, 1]
    assert [output.finish_reason for output in rig.outputs["a", 2]] == [None, None, None, "length"]
    assert rig.tokens(2) == rig.tokens(1)


def test_a_request_ends_at_its_limit(rig: Rig) -> None:
    """finish_reason accompanies the last token, which saves a message."""
    rig.add(1, [1, 2, 3], max_tokens=3, ignore_eos=True)
    rig.run()

    assert [output.finish_reason for output in rig.outputs["a", 1]] == [None, None, "length"]


def test_a_request_ends_where_the_context_is_full(rig: Rig) -> None:
    """The router validates max_tokens against the context; here a larger value only means "as long as possible"."""
    rig.add(1, [1] * 60, max_tokens=1000, ignore_eos=True)
    rig.run()

    assert len(rig.tokens(1)) == 4
    assert rig.outputs["a", 1][-1].finish_reason == "length"


def test_the_end_of_sequence_stops_a_request_unless_ignored(rig: Rig) -> None:
    """The stop id is reported and counts as a token; the router leaves it out of the text."""
    prompt = prompt_that_ends(2)
    rig.add(1, prompt, max_tokens=9)
    rig.add(2, prompt, max_tokens=9, ignore_eos=True)
    rig.run()

    last = rig.outputs["a", 1][-1]
    assert (last.token_ids, last.finish_reason, last.stop_token_id) == ([EOS], "stop", EOS)
    assert rig.tokens(2) == undisturbed(prompt, 9)


def test_stop_ids_of_the_request_stop_it_too(rig: Rig) -> None:
    """`stop_token_ids` also applies when the end of sequence is ignored."""
    expected = undisturbed([1, 2], 6)
    stop = expected[3]
    rig.add(1, [1, 2], max_tokens=6, stop_token_ids=(stop,), ignore_eos=True)
    rig.run()

    assert rig.tokens(1) == expected[: expected.index(stop) + 1]
    assert rig.outputs["a", 1][-1].stop_token_id == stop


def test_no_stop_id_comes_before_min_tokens(rig: Rig) -> None:
    """Stop ids are banned from sampling until then, so the answer continues with another token."""
    prompt = prompt_that_ends(0)
    rig.add(1, prompt, max_tokens=6, min_tokens=3)
    rig.run()

    assert EOS not in rig.tokens(1)[:3]
    assert len(rig.tokens(1)) >= 3


def test_a_continued_request_goes_on_where_the_other_replica_stopped(rig: Rig) -> None:
    """Index, limit and sampling position include the tokens that were generated elsewhere."""
    prompt, whole = [1, 2, 3], undisturbed([1, 2, 3], 6)
    rig.add(1, prompt + whole[:2], prompt_tokens=3, max_tokens=6, ignore_eos=True)
    rig.run()

    assert rig.tokens(1) == whole[2:]
    assert [output.index for output in rig.outputs["a", 1]] == [2, 3, 4, 5]
    assert rig.outputs["a", 1][-1].finish_reason == "length"


def test_a_seeded_request_draws_the_same_tokens_after_a_continuation(rig: Rig) -> None:
    """Sampling depends on (seed, position) alone, so failover cannot change an answer."""
    options = {"max_tokens": 8, "temperature": 3.0, "seed": 17, "ignore_eos": True}
    rig.add(1, [1, 2, 3], **options)
    rig.run()
    whole = rig.tokens(1)

    rig.add(2, [1, 2, 3, *whole[:5]], prompt_tokens=3, **options)
    rig.run()

    assert whole[:5] + rig.tokens(2) == whole


def test_logprobs_come_with_each_token_and_prompt_logprobs_with_the_first() -> None:
    """`echo` with logprobs: every prompt token except the first has one, however the prompt is chunked."""
    rig = Rig(budget=2)
    prompt = [1, 2, 3, 4, 5]
    rig.add(1, prompt, max_tokens=2, logprobs=1, prompt_logprobs=1, ignore_eos=True)
    rig.run()

    first, second = rig.outputs["a", 1]
    positions = decoded_positions(first.prompt_logprobs or ())
    assert positions[0] is None
    assert [value.chosen.token_id for value in positions if value] == prompt[1:]
    followers = [undisturbed(prompt[: i + 1], 1)[0] for i in range(4)]
    assert [value.top[0].token_id for value in positions if value] == followers
    assert second.prompt_logprobs is None
    assert second.logprobs is not None
    assert second.logprobs[0].chosen.token_id == second.token_ids[0]


def test_prompt_logprobs_survive_a_preemption_and_the_cache() -> None:
    """No cached blocks are used, and logprobs collected before the preemption are collected again."""
    rig = Rig(blocks=6, budget=3)
    rig.add(1, [1, 2, 3, 4], max_tokens=7, ignore_eos=True)
    rig.add(2, [1, 2, 3, 4, 5], max_tokens=3, prompt_logprobs=0, ignore_eos=True)
    rig.run()

    first = rig.outputs["a", 2][0]
    assert first.cached_tokens == 0
    assert [value.chosen.token_id for value in decoded_positions(first.prompt_logprobs or ()) if value] == [2, 3, 4, 5]


def pin(num_tokens: int, *, ttl_s: float = 60.0, tenant: int = 0) -> Pin:
    return Pin(num_tokens, ttl_s, bytes([tenant]) * 16)


def scan(rig: Rig, first_id: int) -> None:
    """One-off prompts, each of which needs nearly every available block."""
    for number in range(3):
        room = rig.cache.free_blocks * rig.block_size
        rig.add(first_id + number, [first_id + number] * (room - 4), ignore_eos=True)
        rig.run()


def test_a_pinned_prompt_survives_a_scan_that_takes_its_unpinned_twin(rig: Rig) -> None:
    """A pin must protect the prefix that the caller pays for; the first output confirms it."""
    pinned, twin = list(range(10, 21)), list(range(30, 41))
    rig.add(1, twin, ignore_eos=True)
    rig.add(2, pinned, ignore_eos=True, pins=(pin(11),))
    rig.run()
    scan(rig, first_id=50)
    for request_id, prompt in ((3, twin), (4, pinned)):
        rig.add(request_id, prompt, ignore_eos=True)
        rig.run()

    assert [output.pinned_tokens for output in rig.outputs["a", 2]] == [10, None, None, None]
    assert [rig.outputs["a", request_id][0].cached_tokens for request_id in (3, 4)] == [0, 10]
    assert rig.outputs["a", 1][0].pinned_tokens is None


def test_a_pin_ends_when_its_time_is_over(rig: Rig) -> None:
    """An idle engine checks the clock too: its load report must not include expired pins."""
    rig.add(1, list(range(10, 21)), ignore_eos=True, pins=(pin(11, ttl_s=60.0),))
    rig.run()
    before = rig.engine.load()
    rig.clock.now += 61.0
    rig.engine.expire_pins()
    after = rig.engine.load()

    assert (before.pinned_blocks, before.free_blocks) == (5, 27)
    assert (after.pinned_blocks, after.free_blocks, after.counters.pins_expired) == (0, 32, 1)


def test_a_pin_over_the_budget_is_refused_and_the_request_runs(rig: Rig) -> None:
    """A tenant may pin half of this pool. A pin beyond that is rejected as a whole, reported and counted."""
    for request_id, base in ((1, 10), (2, 40)):
        rig.add(request_id, list(range(base, base + 20)), ignore_eos=True, pins=(pin(20),))
        rig.run()

    assert [rig.outputs["a", request_id][0].pinned_tokens for request_id in (1, 2)] == [20, 0]
    assert rig.engine.load().counters.pins_refused == 1
    assert rig.tokens(2) == undisturbed(list(range(40, 60)), 4)


def test_a_prompt_may_be_pinned_in_stages(rig: Rig) -> None:
    """For example, a system prompt for an hour and the conversation for minutes."""
    pins = (pin(4, ttl_s=3600.0), pin(11, ttl_s=60.0))
    rig.add(1, list(range(10, 21)), ignore_eos=True, pins=pins)
    rig.run()
    rig.clock.now += 61.0
    rig.engine.expire_pins()

    assert rig.outputs["a", 1][0].pinned_tokens == 10
    assert rig.engine.load().pinned_blocks == 2


@pytest.mark.parametrize("answer", [2, 30], ids=["for its prompt", "while it decodes"])
def test_pins_give_way_when_nothing_else_can(answer: int) -> None:
    """Even a fully pinned pool must serve any request that fits into it alone."""
    rig = Rig(blocks=16)
    for request_id in (1, 2):
        prompt = [10 * request_id] * 16
        rig.add(request_id, prompt, max_tokens=1, ignore_eos=True, pins=(pin(16, tenant=request_id),))
        rig.run()
    assert rig.cache.free_blocks == 0

    rig.add(3, [3] * (32 - answer), max_tokens=answer, ignore_eos=True)
    rig.run()

    assert rig.tokens(3) == undisturbed([3] * (32 - answer), answer)
    assert rig.engine.load().counters.pins_broken == 2


@pytest.mark.parametrize(
    ("wrong", "field"),
    [(pin(5), "5 tokens of a prompt"), (pin(3, ttl_s=float("nan")), "ttl_s nan"), (Pin(3, 1.0, b"ann"), "3 bytes")],
)
def test_a_pin_that_makes_no_sense_is_refused(rig: Rig, wrong: Pin, field: str) -> None:
    """A router of another version must not corrupt the pin budget."""
    with pytest.raises(InvalidRequest, match=field):
        rig.add(1, [1, 2, 3], pins=(wrong,))


def test_a_request_without_the_field_has_no_pins(rig: Rig) -> None:
    """Messages of routers without support for pins still decode."""
    encoded = msgspec.msgpack.encode(rig.request(1, [1, 2, 3]))

    assert b"pins" not in encoded
    assert msgspec.msgpack.decode(encoded, type=Generate).pins == ()


class CollidingHasher(BlockHasher):
    """Chained like the real hasher, but with only four distinct values."""

    def chain(self, parent, tokens, extras=None) -> list[BlockHash]:
        return [BlockHash(bytes([block_hash[0] % 4]) * 16) for block_hash in super().chain(parent, tokens, extras)]


def test_colliding_hashes_cost_hits_and_never_a_token() -> None:
    """Collisions of a fast hash can be forged; they must never change an answer, and are counted."""
    made = CollidingHasher(2, seed=3)
    rigs = [Rig(blocks=24, hasher_of=lambda _: made, enabled=enabled) for enabled in (True, False)]
    prompts = [[7, 7, first, second, 5, 6, third] for first in (1, 2) for second in (3, 4) for third in (8, 9)]
    for rig in rigs:
        for request_id, prompt in enumerate(prompts):
            rig.add(request_id, prompt, max_tokens=6, ignore_eos=True)
            rig.step()
        rig.run()
    colliding, uncached = rigs

    for request_id, prompt in enumerate(prompts):
        assert colliding.tokens(request_id) == uncached.tokens(request_id) == undisturbed(prompt, 6)
    assert colliding.engine.load().counters.collisions > 0
    assert uncached.engine.load().counters.hit_tokens == 0


@pytest.mark.parametrize("algorithm", ["xxh3_128", "sha256"])
def test_prefixes_are_shared_under_either_hash(algorithm: HashAlgorithm) -> None:
    """The engine behaves the same with the slower hash."""
    rig = Rig(hasher_of=lambda block_size: BlockHasher(block_size, 3, algorithm))
    for request_id in (1, 2):
        rig.add(request_id, [1, 2, 3, 4, 5], ignore_eos=True)
        rig.run()

    assert rig.outputs["a", 2][0].cached_tokens == 4
    assert rig.tokens(1) == rig.tokens(2) == undisturbed([1, 2, 3, 4, 5], 4)


def test_an_abort_frees_blocks_before_the_next_step(rig: Rig) -> None:
    """Aborts of unknown ids, or of another router's requests, are ignored."""
    rig.add(1, [1, 2, 3], source="a")
    rig.step()

    rig.engine.abort("b", [1])
    still = rig.engine.has_work
    rig.engine.abort("a", [1, 99])

    assert still
    assert not rig.engine.has_work
    assert rig.cache.free_blocks == rig.cache.total_blocks


def test_a_router_that_is_gone_takes_its_requests_along(rig: Rig) -> None:
    """No router would read their tokens."""
    rig.add(1, [1, 2, 3], source="a")
    rig.add(2, [4, 5], source="a")
    rig.add(1, [6], source="b", max_tokens=9)
    rig.step()

    assert rig.engine.forget("a") == 2
    assert [request.key.source for request in rig.engine.scheduler.requests()] == ["b"]
    assert rig.engine.load().accepted == {"b": 1}


WRONG = {
    "block_hashes": {"block_hashes": b"x" * 32},
    "root": {"root": b"short"},
    "prompt_tokens": {"prompt_tokens": 4},
    "token_ids: .* 4-byte": {"token_ids": b"xyz"},
    "token_ids: .* vocabulary": {"token_ids": b"\xff" * 12},
}
WRONG_SAMPLING = {
    "max_tokens": {"max_tokens": 0},
    "min_tokens": {"min_tokens": 5},
    "seed": {"seed": -1},
    "temperature": {"temperature": -0.1},
    "top_p": {"top_p": 0.0},
    "top_k": {"top_k": -1},
    "min_p": {"min_p": 1.5},
    "presence_penalty": {"presence_penalty": float("inf")},
    "frequency_penalty": {"frequency_penalty": float("nan")},
    "repetition_penalty": {"repetition_penalty": 0.0},
    "stop_token_ids": {"stop_token_ids": (VOCAB,)},
    "logit_bias: .* token ids": {"logit_bias": {-1: 1.0}},
    "logit_bias: .* finite": {"logit_bias": {1: float("inf")}},
    "allowed_token_ids": {"allowed_token_ids": (1, VOCAB)},
    "logprob_token_ids": {"logprob_token_ids": (-1,)},
    "bad_words: .* token ids": {"bad_words": ((1, VOCAB),)},
    "bad_words: a word": {"bad_words": ((),)},
    "logprobs": {"logprobs": 1000},
    "prompt_logprobs": {"prompt_logprobs": -1},
}


@pytest.mark.parametrize("field", WRONG)
def test_a_request_that_contradicts_itself_is_refused_by_field(rig: Rig, field: str) -> None:
    """A request from a router of another version or block size would otherwise fail a step for all requests."""
    request = msgspec.structs.replace(rig.request(1, [1, 2, 3]), **WRONG[field])

    with pytest.raises(InvalidRequest, match=field):
        rig.engine.add("a", request)
    assert not rig.engine.has_work


@pytest.mark.parametrize("field", WRONG_SAMPLING)
def test_sampling_out_of_range_is_refused_by_field(rig: Rig, field: str) -> None:
    """The client sees the field's name in the error."""
    with pytest.raises(InvalidRequest, match=field):
        rig.add(1, [1, 2, 3], **WRONG_SAMPLING[field])


def test_too_long_a_prompt_a_finished_answer_and_a_used_id_are_refused(rig: Rig) -> None:
    """None of these requests could finish."""
    rig.add(1, [1, 2])

    with pytest.raises(PromptTooLong):
        rig.add(2, [1] * 64)
    with pytest.raises(InvalidRequest, match="already generated"):
        rig.add(3, [1, 2, 3], prompt_tokens=1, max_tokens=2)
    with pytest.raises(InvalidRequest, match="already running"):
        rig.add(1, [1, 2])


def test_a_draining_engine_finishes_what_it_has_and_takes_nothing_new(rig: Rig) -> None:
    """Scale-down and rolling updates must not lose requests; the refusal allows a retry on another replica."""
    rig.add(1, [1, 2, 3], ignore_eos=True)
    rig.engine.drain()

    with pytest.raises(Draining) as refusal:
        rig.add(2, [1])
    rig.run()

    assert refusal.value.retry
    assert rig.tokens(1) == undisturbed([1, 2, 3], 4)
    assert rig.engine.load().draining


def test_the_load_report_counts_what_is_here(rig: Rig) -> None:
    """Routing depends on every field of the report."""
    rig.add(7, [1, 2, 3], source="a", max_tokens=9, ignore_eos=True)
    rig.step()
    rig.add(3, [4] * 10, source="b")

    load = rig.engine.load()

    assert (load.epoch, load.step, load.running, load.waiting) == (11, 1, 1, 1)
    assert (load.queued_prefill_tokens, load.decode_context_tokens) == (10, 3)
    assert (load.free_blocks, load.cached_free_blocks, load.total_blocks) == (30, 0, 32)
    assert load.accepted == {"a": 7, "b": 3}
    assert (load.counters.generated_tokens, load.counters.prefilled_tokens) == (1, 3)
    assert load.counters.query_tokens == 3


def test_what_fills_the_cache_is_counted_as_nobodys_traffic(rig: Rig) -> None:
    """Warm-up must not distort users' hit rates, but its work is counted, and later prompts hit its blocks."""
    for request_id in (1, 2):
        warm_up = rig.request(request_id, [1, 2, 3, 4, 5], max_tokens=1)
        rig.engine.add("a", msgspec.structs.replace(warm_up, warm_up=True))
        rig.run()
    counted = rig.engine.load().counters

    rig.add(3, [1, 2, 3, 4, 9], max_tokens=1)
    rig.run()

    assert (counted.query_tokens, counted.hit_tokens, counted.generated_tokens) == (0, 0, 0)
    assert counted.prefilled_tokens == 5 + 1
    after = rig.engine.load().counters
    assert (after.query_tokens, after.hit_tokens, after.generated_tokens) == (5, 4, 1)


def test_a_prompt_is_one_query_however_often_it_is_admitted() -> None:
    """A preempted request finds its own blocks again, and a moved one was counted by the replica before: no reuse."""
    rig = Rig(blocks=6, block_size=2)
    rig.add(1, [1, 2, 3, 4], max_tokens=7, ignore_eos=True)
    rig.add(2, [5, 6, 7, 8], max_tokens=7, ignore_eos=True)
    rig.run()
    moved = msgspec.structs.replace(rig.request(3, [1, 2, 3, 4], max_tokens=1), counted=True)
    rig.engine.add("a", moved)
    rig.run()

    counted = rig.engine.load().counters

    assert counted.preemptions > 0
    assert (counted.query_tokens, counted.hit_tokens, counted.partial_hit_tokens) == (8, 0, 0)


def test_a_step_that_raises_gives_up_its_own_requests_and_commits_nothing(rig: Rig) -> None:
    """Its KV may be incomplete. Requests outside the step, and the engine itself, continue."""
    rig = Rig(running=1)
    rig.add(1, [1, 2, 3, 4, 5])
    rig.add(2, [1, 2, 3, 4, 5], ignore_eos=True)
    rig.executor.fail_next = 1

    result = rig.step()

    assert (result.failed, result.refused) == ({"a": [1]}, {})
    assert "fails as configured" in str(result.error)
    assert rig.engine.failures_in_a_row == 1
    rig.run()
    assert rig.outputs["a", 2][0].cached_tokens == 0
    assert rig.tokens(2) == undisturbed([1, 2, 3, 4, 5], 4)
    assert rig.engine.failures_in_a_row == 0


def test_logits_that_are_no_numbers_end_their_request_alone(rig: Rig) -> None:
    """It gets a clear error; its step caches nothing and frees its blocks, and does not count as failed."""
    rig.add(1, [1, 2, 3, 4, 5])
    rig.add(2, [6, 7, 8, 9, 9, 9], max_tokens=8, ignore_eos=True)
    logits = rig.executor.forward

    def forward(plan: StepPlan) -> torch.Tensor:
        found = logits(plan)
        found[0] = math.nan
        return found

    rig.executor.forward = forward  # type: ignore[method-assign]
    result = rig.step()
    rig.executor.forward = logits  # type: ignore[method-assign]
    rig.add(3, [1, 2, 3, 4, 5], ignore_eos=True)
    rig.run()

    ((refused,),) = result.refused.values()
    assert (refused.request_id, refused.reason, refused.retry) == (1, "internal", False)
    assert "after token 5 are NaN or infinite" in refused.message
    assert "dtype" in refused.message
    assert (result.error, rig.engine.failures_in_a_row) == (None, 0)
    assert rig.tokens(2) == undisturbed([6, 7, 8, 9, 9, 9], 8)
    assert rig.outputs["a", 3][0].cached_tokens == 0
    assert rig.tokens(3) == undisturbed([1, 2, 3, 4, 5], 4)
    assert rig.cache.free_blocks == rig.cache.total_blocks


def test_a_step_that_raises_before_its_copies_harms_no_later_one() -> None:
    """The copy never ran: its target is empty and must not be shared; its source is still valid."""
    rig = Rig(block_size=8)
    rig.add(1, [*range(12)], max_tokens=6, ignore_eos=True)
    rig.run()
    rig.add(2, [*range(11), 40], ignore_eos=True)
    rig.executor.fail_next = 1

    failed = rig.step().failed["a"]
    rig.add(3, [*range(11), 41], ignore_eos=True)
    rig.run()

    assert failed == [2]
    assert rig.outputs["a", 3][0].cached_tokens == 11
    assert rig.tokens(3) == undisturbed([*range(11), 41], 4)


def test_a_lost_rank_is_passed_on(rig: Rig) -> None:
    """The ranks are out of step, so the replica must be rebuilt."""
    rig.executor.fail_next, rig.executor.error = 1, RankLost
    rig.add(1, [1, 2, 3])

    with pytest.raises(RankLost):
        rig.engine.step()


@cache
def real_runner(folder: Path) -> ModelRunner:
    """A runner shared by all examples: leftovers of an earlier example in its blocks must not matter."""
    from ..toys import make_runner

    return make_runner(folder)


@dataclass
class Real:
    """An engine on a small random model in float32, with a record of the answers."""

    runner: ModelRunner
    partial_block_reuse: bool
    budget: int
    blocks: int

    def __post_init__(self) -> None:
        size = self.runner.block_size
        self.hasher = BlockHasher(size, seed=3)
        self.cache = PrefixCache(self.blocks + 1, size, partial_block_reuse=self.partial_block_reuse)
        self.engine = Engine(
            limits=SchedulerLimits(4, self.budget, self.blocks * size),
            vocab_size=self.runner.spec.vocab_size,
            eos_token_ids=(),
            cache=self.cache,
            hasher=self.hasher,
            executor=self.runner,
            rates=SmoothedRates(1000.0, 0.01),
            epoch=11,
        )

    def answers(self, prompts: Sequence[Sequence[int]], steps_between: Sequence[int], **sampling) -> dict[int, Answer]:
        """Logprobs by token for each answer; each request arrives some steps after the previous one."""
        collected: dict[int, Answer] = defaultdict(list)
        for number, (prompt, steps) in enumerate(zip(prompts, steps_between, strict=True)):
            self.engine.add("a", generate(number, prompt, self.hasher, logprobs=0, max_tokens=5, **sampling))
            self._step(steps, collected)
        while self.engine.has_work:
            self._step(1, collected)
        return collected

    def _step(self, count: int, collected: dict[int, Answer]) -> None:
        for _ in range(count):
            for output in self.engine.step().outputs["a"]:
                collected[output.request_id] += [values.chosen for values in output.logprobs or []]
            self.engine.scheduler.check()


BRANCHING = st.lists(
    st.tuples(st.integers(0, 30), st.lists(st.integers(3, 6), min_size=1, max_size=9), st.integers(0, 9)),
    min_size=2,
    max_size=6,
)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    BRANCHING,
    st.integers(3, 40),
    st.integers(6, 20),
    st.sampled_from([{}, {"temperature": 0.8, "seed": 5, "top_p": 0.9}]),
)
def test_copying_inside_blocks_changes_no_token(
    checkpoint: Callable[..., Path],
    requests: list[tuple[int, list[int], int]],
    budget: int,
    blocks: int,
    sampling: dict[str, float],
) -> None:
    """Prompts diverge at odd positions; greedy and seeded, chunked, evicted and preempted, in float32."""
    prompts = [[*range(40, 40 + shared), *own] for shared, own, _ in requests]
    steps = [count for _, _, count in requests]

    with_copies, without = (
        Real(real_runner(checkpoint("llama")), partial, budget, blocks).answers(prompts, steps, **sampling)
        for partial in (True, False)
    )

    for number in range(len(prompts)):
        copied, computed = with_copies[number], without[number]
        assert [token.token_id for token in copied] == [token.token_id for token in computed]
        assert [token.logprob for token in copied] == pytest.approx([token.logprob for token in computed], abs=1e-3)


def test_right_drafts_save_steps_and_wrong_ones_cost_none() -> None:
    """Right drafts reduce the number of steps; every step still draws at least one token, as without drafts."""
    steps = {}
    for name, drafter in {"none": None, "right": Guesses(1.0), "wrong": Guesses(0.0)}.items():
        rig = Rig(drafter=drafter)
        rig.add(1, [1, 2, 3], max_tokens=30, ignore_eos=True)
        rig.run()
        assert rig.tokens(1) == undisturbed([1, 2, 3], 30)
        steps[name] = rig.engine.load().step

    assert steps["right"] < steps["wrong"] <= steps["none"] == 30


def test_an_answer_ends_inside_its_drafts() -> None:
    """Draft tokens beyond the stop id are not drawn; the accepted tokens are sent at once."""
    rig = Rig(drafter=Guesses(1.0, seed=4))
    prompt = prompt_that_ends(6)

    rig.add(1, prompt, max_tokens=40)
    rig.run()

    assert rig.tokens(1) == undisturbed(prompt, 7)
    assert rig.outputs["a", 1][-1].finish_reason == "stop"
    assert len(rig.outputs["a", 1]) < 7
    assert rig.cache.free_blocks == rig.cache.total_blocks


def test_what_is_copied_is_not_computed(checkpoint: Callable[..., Path]) -> None:
    """The saving is exact: computed prompt tokens decrease by the number of copied tokens."""
    prompts = [[*range(40, 40 + shared), 7, 8] for shared in (30, 13, 27, 6)]

    counters = []
    for partial in (True, False):
        real = Real(real_runner(checkpoint("llama")), partial, budget=64, blocks=60)
        real.answers(prompts, [20] * len(prompts))
        counters.append(real.engine.load().counters)
    copying, computing = counters

    assert copying.partial_hit_tokens == (13 - 8) + (27 - 24) + 6
    assert computing.partial_hit_tokens == 0
    assert computing.prefilled_tokens - copying.prefilled_tokens == copying.partial_hit_tokens
    for counted in counters:
        assert counted.prefilled_tokens == counted.query_tokens - counted.hit_tokens


REQUEST = st.tuples(
    st.integers(0, 6), st.lists(st.integers(0, 2), min_size=1, max_size=5), st.integers(1, 6), st.integers(0, 3)
)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(REQUEST, min_size=1, max_size=8),
    st.integers(1, 16),
    st.integers(1, 4),
    st.integers(1, 20),
    st.integers(1, 5),
    st.integers(0, 7),
    st.sampled_from([1, 4, 128]),
    st.none() | st.builds(Guesses, st.sampled_from([0.0, 0.7, 1.0]), st.integers(0, 99)),
)
def test_whatever_the_schedule_everybody_gets_the_tokens_of_an_undisturbed_run(
    requests: list[tuple[int, list[int], int, int]],
    blocks: int,
    block_size: int,
    budget: int,
    running: int,
    pinning: int,
    worth_waiting: int,
    guesses: Guesses | None,
) -> None:
    """Budget, chunks, hits, waits, preemption, drafts and pins (of the first few requests) affect only speed."""
    rig = Rig(blocks, block_size, budget, running, worth_waiting, drafter=guesses)
    expected = {}
    for number, (shared, own, max_tokens, steps_before) in enumerate(requests):
        prompt = [*range(shared), *own]
        if len(prompt) + max_tokens > blocks * block_size:
            continue
        for _ in range(steps_before):
            rig.step()
        pins = (pin(len(prompt), tenant=number % 2),) if number < pinning else ()
        rig.add(number, prompt, max_tokens=max_tokens, ignore_eos=True, pins=pins)
        expected[number] = undisturbed(prompt, max_tokens)

    rig.run()

    assert {number: rig.tokens(number) for number in expected} == expected
    assert rig.cache.free_blocks + rig.cache.pinned_idle_blocks == rig.cache.total_blocks
