"""A host tier changes no token of an answer, whatever is evicted, loaded, lost, aborted, preempted and cleared when."""

from collections import Counter
from dataclasses import dataclass, field

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from homing.kvcache.hashing import BlockHash, BlockHasher, token_bytes
from homing.kvcache.host_tier import HostTier
from homing.kvcache.pins import PinLimits
from homing.kvcache.prefix_cache import PrefixCache
from homing.replica.engine.drafts import Drafter
from homing.replica.engine.engine import Engine
from homing.replica.engine.host_blocks import HostBlocks
from homing.replica.engine.overlapped import OverlappedEngine
from homing.replica.engine.scheduler import SchedulerLimits
from homing.replica.engine.throughput import SmoothedRates
from homing.replica.messages import Pin, TokenOutput

from ..fakes import ROOT, VOCAB, FakeClock, FakeExecutor, FakeModel, Guesses, generate, undisturbed
from .test_overlapped import FakeLauncher

EOS = 96
HANG = 5_000
BLOCK = 4


class Resident:
    """What a subscriber believes to be in each medium."""

    def __init__(self) -> None:
        self.media: dict[str, set[bytes]] = {"GPU": set(), "CPU": set()}

    def stored(self, parent, hashes, tokens, salt, medium="GPU"):
        self.media[medium] |= set(hashes)

    def removed(self, hashes, medium="GPU"):
        assert self.media[medium] >= set(hashes), f"removed from {medium}, where it was not"
        self.media[medium] -= set(hashes)

    def cleared(self):
        for held in self.media.values():
            held.clear()


@dataclass
class Rig:
    """An engine with a small pool on a fake model, whose next token depends on every entry of the KV before it."""

    blocks: int = 12
    slots: int = 64
    overlapped: bool = False
    drafter: Drafter | None = None
    block_s: float = 0.001
    tokens_per_s: float = 1000.0
    hasher: BlockHasher = field(default_factory=lambda: BlockHasher(BLOCK, seed=3))
    answers: dict[int, list[TokenOutput]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.resident = Resident()
        self.clock = FakeClock(tick=0.001)
        launcher = FakeLauncher if self.overlapped else FakeExecutor
        self.executor = launcher(FakeModel(self.blocks + 1, BLOCK))
        self.failures = Counter[str]()
        self.tier = HostTier(self.slots, self.resident)
        self.host = HostBlocks(self.tier, self.executor.move, self.clock, block_s=self.block_s, failures=self.failures)
        self.cache = PrefixCache(
            self.blocks + 1, BLOCK, listener=self.resident, pin_limits=PinLimits(0.5, 0.5), lower=self.host
        )
        kind = OverlappedEngine if self.overlapped else Engine
        self.engine = kind(
            limits=SchedulerLimits(4, 32, self.blocks * BLOCK, 8),
            vocab_size=VOCAB,
            eos_token_ids=(EOS,),
            cache=self.cache,
            hasher=self.hasher,
            executor=self.executor,
            rates=SmoothedRates(self.tokens_per_s, 0.01),
            epoch=11,
            clock=self.clock,
            wall_clock=FakeClock(),
            drafter=self.drafter,
            host=self.host,
        )

    def add(self, number: int, prompt: list[int], pins: tuple[Pin, ...] = (), **options) -> None:
        self.answers[number] = []
        request = generate(number, prompt, self.hasher, ignore_eos=True, **options)
        self.engine.add("a", msgspec.structs.replace(request, pins=pins))

    def step(self) -> None:
        result = self.engine.step()
        for outputs in result.outputs.values():
            for output in outputs:
                self.answers[output.request_id].append(output)
        self.engine.scheduler.check()
        assert self.resident.media["CPU"] == set(self.tier._held)
        assert self.resident.media["GPU"] == {each.block_hash for each in self.cache.residents()}

    def run(self) -> None:
        for _ in range(HANG):
            if not self.engine.has_work:
                return
            self.step()
        raise AssertionError("requests did not finish")

    def ask(self, number: int, prompt: list[int], **options) -> TokenOutput:
        """Run one request to its end; returns its first output."""
        self.add(number, prompt, **options)
        self.run()
        return self.answers[number][0]

    def tokens(self, number: int) -> list[int]:
        return [token for output in self.answers[number] for token in output.token_ids]


#: Three prompts of 8 blocks and a bit, of which the pool holds one.
LONG = [[start + place for place in range(34)] for start in (0, 20, 40)]


@pytest.mark.parametrize("overlapped", [False, True])
def test_a_prompt_that_the_pool_evicted_is_loaded_and_answered_alike(overlapped: bool) -> None:
    rig = Rig(overlapped=overlapped)

    first = [rig.ask(number, prompt) for number, prompt in enumerate(LONG)]
    again = [rig.ask(3 + number, prompt) for number, prompt in enumerate(LONG)]

    assert [output.cached_tokens for output in first] == [0, 0, 0]
    assert [output.cached_tokens for output in again] == [32, 32, 32]
    assert all(output.loaded_tokens for output in again)
    assert [rig.tokens(number) for number in range(6)] == [undisturbed(prompt, 4) for prompt in LONG] * 2
    counters = rig.engine.load().counters
    assert counters.hit_tokens == 96
    assert counters.host_hit_tokens == sum(output.loaded_tokens[0][1] for output in again)
    assert counters.promoted_tokens == counters.host_hit_tokens
    assert counters.demoted_tokens > counters.promoted_tokens / 2
    assert rig.engine.load().tiers[0].used_blocks == len(rig.tier)


def test_an_answer_comes_back_with_its_prompt() -> None:
    """The next turn of a conversation repeats the answer; tiers that keep only prompts compute it again."""
    rig = Rig()
    rig.ask(0, LONG[0][:20], max_tokens=13)
    turn = LONG[0][:20] + rig.tokens(0) + [1, 2, 3]
    rig.ask(1, LONG[1])
    rig.ask(2, LONG[2])

    output = rig.ask(3, turn)

    assert (output.cached_tokens, output.loaded_tokens) == (32, (("CPU", 32),))
    assert rig.tokens(3) == undisturbed(turn, 4)


@pytest.mark.parametrize("failures", [["host_corrupt"], [None, None, "host_stale", None]])
def test_a_load_that_fails_is_counted_and_computed(failures: list[str | None]) -> None:
    rig = Rig()
    for number, prompt in enumerate(LONG):
        rig.ask(number, prompt)
    rig.executor.load_failures = list(failures)

    output = rig.ask(3, LONG[0])

    good = next(at for at, failure in enumerate(failures) if failure)
    assert output.cached_tokens == good * BLOCK
    assert rig.tokens(3) == undisturbed(LONG[0], 4)
    assert rig.engine.load().counters.tier_failures == {failures[good]: 1}


def test_a_cleared_cache_leaves_nothing_in_host_memory() -> None:
    rig = Rig()
    for number, prompt in enumerate(LONG):
        rig.ask(number, prompt)
    assert rig.cache.reset()

    output = rig.ask(3, LONG[0])

    assert (output.cached_tokens, output.loaded_tokens) == (0, ())
    rig.engine.scheduler.check()


def test_what_cannot_be_saved_in_time_is_counted_and_lost() -> None:
    """A prompt that evicts thousands of blocks must not hold up a step for seconds."""
    rig = Rig(block_s=0.04)
    for number, prompt in enumerate(LONG):
        rig.ask(number, prompt)

    rig.ask(3, LONG[0])

    evicted = rig.cache.counters.evicted_tokens // BLOCK
    assert 0 < rig.host.saved < evicted
    assert rig.failures["host_behind"] == evicted - rig.host.saved
    assert rig.tokens(3) == undisturbed(LONG[0], 4)


def test_a_step_that_moves_blocks_computes_fewer_tokens() -> None:
    """Other requests wait for the step: what it saves and loads must not come on top of a full one."""
    rig = Rig(block_s=0.05, tokens_per_s=10_000.0)
    rig.clock.tick = 0.0  # what is measured does not count
    computed = []
    for number, prompt in enumerate(LONG[:2]):
        rig.add(number, prompt)
        rig.step()
        computed.append(rig.executor.model.plans[-1].q_lens)
        rig.run()

    assert computed == [[32], [1]]
    assert [rig.tokens(number) for number in range(2)] == [undisturbed(prompt, 4) for prompt in LONG[:2]]


class CollidingHasher(BlockHasher):
    """Hashes that depend on a block's last token only."""

    def chain(self, parent, tokens):
        size = BLOCK * 4
        return [BlockHash(tokens[end - 4 : end] * 4) for end in range(size, len(tokens) + 1, size)]


def test_a_block_that_follows_another_prefix_of_the_same_hash_is_not_loaded() -> None:
    """XXH3 collides for whoever wants it to. The second block, its hash and its parent's hash are those of the prompt;
    only the tokens before it differ, and its KV depends on them.
    """
    rig = Rig(hasher=CollidingHasher(BLOCK, seed=3))
    one, other = [1, 2, 3, 9, 5, 6, 7, 8, 10, 11], [4, 4, 4, 9, 5, 6, 7, 8, 10, 11]
    rig.ask(0, one)
    for number, prompt in enumerate(LONG, start=1):
        rig.ask(number, prompt)
    assert len(rig.tier.run(rig.hasher.chain(ROOT, token_bytes(one)))) == 2
    rig.ask(4, other[:6], max_tokens=1)  # the pool now holds its first block, under the hash of the other's

    output = rig.ask(5, other)

    assert (output.cached_tokens, output.loaded_tokens) == (4, ())
    assert rig.tokens(5) == undisturbed(other, 4)
    assert rig.tokens(0) == undisturbed(one, 4)


@st.composite
def lives(draw: st.DrawFn) -> dict[str, object]:
    prefixes = [[(7 * start + place) % EOS for place in range(40)] for start in range(4)]
    prompts = []
    for _ in range(draw(st.integers(4, 14))):
        prefix = prefixes[draw(st.integers(0, 3))]
        prompts.append(prefix[: draw(st.integers(1, 34))] + draw(st.lists(st.integers(0, 95), max_size=3)))
    return {
        "prompts": prompts,
        "steps": draw(st.lists(st.integers(0, 6), min_size=len(prompts), max_size=len(prompts))),
        "aborts": draw(st.sets(st.integers(0, 13), max_size=3)),
        "resets": draw(st.sets(st.integers(0, 13), max_size=2)),
        "pinned": draw(st.sets(st.integers(0, 13), max_size=2)),
        "failures": draw(st.lists(st.sampled_from([None, None, None, "host_corrupt", "host_stale"]), max_size=20)),
        "slots": draw(st.sampled_from([1, 3, 8, 64])),
        "block_s": draw(st.sampled_from([0.0001, 0.02])),
    }


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(life=lives(), overlapped=st.booleans(), drafts=st.booleans())
def test_answers_are_those_without_a_tier(life: dict, overlapped: bool, drafts: bool) -> None:
    """With copies of partly matching blocks, pins, preemptions, aborts, clears and loads that fail."""
    rig = Rig(
        slots=life["slots"],
        overlapped=overlapped,
        block_s=life["block_s"],
        drafter=Guesses(0.7) if drafts else None,
    )
    rig.executor.load_failures = list(life["failures"])
    for number, (prompt, steps) in enumerate(zip(life["prompts"], life["steps"], strict=True)):
        pins = (Pin(num_tokens=len(prompt), ttl_s=1.0, tenant=bytes(16)),) if number in life["pinned"] else ()
        rig.add(number, prompt, pins=pins, max_tokens=6)
        for _ in range(steps):
            rig.step()
        if number in life["aborts"]:
            rig.engine.abort("a", [number])
        if number in life["resets"]:
            rig.cache.reset()
    rig.run()

    for number, prompt in enumerate(life["prompts"]):
        expected = undisturbed(prompt, 6)
        got = rig.tokens(number)
        assert got == (expected[: len(got)] if number in life["aborts"] else expected)


@pytest.mark.parametrize("overlapped", [False, True])
def test_a_preempted_request_goes_on_from_host_memory(overlapped: bool) -> None:
    """What preemption frees is evicted for the others, saved, and loaded when the request starts again."""
    rig = Rig(overlapped=overlapped)
    prompts = [[start + place for place in range(15)] for start in (0, 20, 40)]
    for number, prompt in enumerate(prompts):
        rig.add(number, prompt, max_tokens=28)
    rig.run()

    assert rig.engine.scheduler.preemptions > 0
    assert rig.host.loaded > 0
    assert [rig.tokens(number) for number in range(3)] == [undisturbed(prompt, 28) for prompt in prompts]
