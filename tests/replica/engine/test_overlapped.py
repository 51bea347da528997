"""Launching steps ahead gives the same tokens as running them one by one, for any schedule, and releases everything."""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from homing.kvcache.hashing import BlockHasher
from homing.kvcache.pins import PinLimits
from homing.kvcache.prefix_cache import PrefixCache
from homing.replica.config import ReplicaSettings
from homing.replica.engine.answers import StepResult
from homing.replica.engine.drafts import Drafter
from homing.replica.engine.engine import Engine
from homing.replica.engine.logprobs import read, score
from homing.replica.engine.overlapped import DrawTerms, OverlappedEngine, SlotTable
from homing.replica.engine.request import RequestPhase
from homing.replica.engine.scheduler import SchedulerLimits
from homing.replica.engine.step_plan import StepPlan
from homing.replica.engine.throughput import SmoothedRates
from homing.replica.execute.cuda_graphs import EagerSteps, NotCaptured
from homing.replica.execute.gpu_runner import GpuRunner
from homing.replica.execute.runner import ModelRunner
from homing.replica.messages import Constraint, Pin, PositionLogprobs, TokenOutput, decoded_positions

from ..fakes import VOCAB, FakeClock, FakeExecutor, FakeModel, Guesses, generate, request_state, undisturbed

EOS = 96
HANG = 5_000


@dataclass
class FakeLaunched:
    """Drawn tokens that become known only when they are read."""

    values: list[int | None]
    error: Exception | None = None
    scores: list[PositionLogprobs] = field(default_factory=list)

    def tokens(self) -> list[int | None]:
        if self.error is not None:
            raise self.error
        return self.values

    def logprobs(self) -> list[PositionLogprobs]:
        return self.scores


@dataclass
class FakeLauncher(FakeExecutor):
    """The fake model, plus the device's memory of the last token it drew for each slot."""

    last: dict[int, int] = field(default_factory=dict)
    fail_landing: int = 0
    fail_drawing: int = 0
    undrawn: tuple[list[int], list[int]] | None = None
    #: The draw terms of each step that waited for them.
    terms: list[DrawTerms] = field(default_factory=list)

    def launch(self, plan: StepPlan) -> FakeLaunched | None:
        followers = self._launch(plan)
        if plan.held:
            self.undrawn = followers, plan.drawn
            return None
        return self._draw(followers, plan.drawn, DrawTerms())

    def draw(self, terms: DrawTerms) -> FakeLaunched:
        self.terms.append(terms)
        if self.fail_drawing:
            self.fail_drawing -= 1
            raise self.error("the fake device fails to draw, as configured")
        assert self.undrawn is not None, "no step is waiting for its draw terms"
        return self._draw(*self.undrawn, terms)

    def _draw(self, followers: list[int], slots: list[int], terms: DrawTerms) -> FakeLaunched:
        logits = torch.zeros(len(followers), VOCAB)
        logits[torch.arange(len(followers)), torch.tensor(followers, dtype=torch.int64)] = 10.0
        edited = logits[: len(slots)].clone()
        if terms.edits is not None:
            terms.edits.apply(edited, torch.from_numpy)
        tokens = edited.argmax(-1)
        self.last.update(zip(slots, tokens.tolist(), strict=True))
        if self.fail_landing:
            self.fail_landing -= 1
            return FakeLaunched([], self.error("the fake device fails as configured"))
        scores = []
        for rows, first in ((terms.scored, 0), (terms.echoed, len(slots))):
            if rows:
                places = [first + row.place for row in rows]
                scores += read(rows, score(logits[places], rows, tokens, torch.from_numpy))
        return FakeLaunched(tokens.tolist(), scores=scores)

    def _launch(self, plan: StepPlan) -> list[int]:
        if self.fail_next:
            self.fail_next -= 1
            raise self.error("the fake model fails as configured")
        plan.check()
        assert len(set(plan.slots)) == len(plan.slots), "two rows share a slot"
        tokens = torch.frombuffer(bytearray(plan.token_ids), dtype=torch.int32)
        ends = torch.tensor(plan.q_lens).cumsum(0) - 1
        for row in plan.fed:
            tokens[ends[row]] = self.last[plan.slots[row]]
        return self.model.run(msgspec.structs.replace(plan, token_ids=tokens.numpy().tobytes()))


@dataclass
class Rig:
    """An overlapped engine on a fake model, with a record of its outputs."""

    blocks: int = 32
    block_size: int = 2
    budget: int = 64
    running: int = 8
    worth_waiting: int = 128
    drafter: Drafter | None = None
    outputs: dict[int, list[TokenOutput]] = field(default_factory=lambda: defaultdict(list))
    refused: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.hasher = BlockHasher(self.block_size, seed=3)
        limits = PinLimits(tenant_share=0.5, total_share=1.0)
        self.cache = PrefixCache(self.blocks + 1, self.block_size, pin_limits=limits)
        self.launcher = FakeLauncher(FakeModel(self.blocks + 1, self.block_size))
        self.engine = OverlappedEngine(
            limits=SchedulerLimits(self.running, self.budget, self.blocks * self.block_size, self.worth_waiting),
            vocab_size=VOCAB,
            eos_token_ids=(EOS,),
            cache=self.cache,
            hasher=self.hasher,
            executor=self.launcher,
            rates=SmoothedRates(1000.0, 0.01),
            epoch=11,
            clock=FakeClock(tick=0.02),
            wall_clock=FakeClock(),
            drafter=self.drafter,
        )

    def add(self, number: int, tokens: list[int], pins: tuple[Pin, ...] = (), **options) -> None:
        request = generate(number, tokens, self.hasher, **options)
        self.engine.add("a", msgspec.structs.replace(request, pins=pins))

    def step(self) -> StepResult:
        result = self.engine.step()
        for output in result.outputs.get("a", []):
            self.outputs[output.request_id].append(output)
        self.refused += [refused.request_id for refused in result.refused.get("a", [])] + result.failed.get("a", [])
        self.engine.scheduler.check()
        self.engine.slots.check()
        return result

    def run(self) -> None:
        for _ in range(HANG):
            if not self.engine.has_work:
                return
            self.step()
        raise AssertionError("requests did not finish")

    def tokens(self, number: int) -> list[int]:
        return [token for output in self.outputs[number] for token in output.token_ids]


@pytest.fixture
def rig():
    made = Rig()
    yield made
    made.run()
    made.engine.scheduler.check()
    assert made.cache.free_blocks + made.cache.pinned_idle_blocks == made.cache.total_blocks


def test_a_step_is_launched_before_the_one_before_has_landed(rig):
    """This is the point of overlapping: the device never waits for the host."""
    rig.add(1, [1, 2, 3], ignore_eos=True)

    first = rig.step()
    second = rig.step()

    assert not first.outputs
    assert [output.token_ids for output in second.outputs["a"]] == [undisturbed([1, 2, 3], 1)]
    assert len(rig.launcher.model.plans) == 2
    assert rig.launcher.model.plans[1].fed == [0]


def test_steps_wait_for_tokens_only_where_drafts_are_expected():
    """A draft needs the newest token; without drafts, the device must not wait for the host."""
    wanted = undisturbed([1, 2, 3], 30)
    rig = Rig(drafter=lambda tokens, most: wanted[len(tokens) - 3 :][: min(most, 4)] if 10 <= len(tokens) < 20 else [])
    rig.add(1, [1, 2, 3], max_tokens=30, ignore_eos=True)

    rig.run()

    assert rig.tokens(1) == wanted
    told = [len(output.token_ids) for output in rig.outputs[1]]
    assert told == [1] * 8 + [5, 5] + [1] * 12
    assert [bool(plan.fed) for plan in rig.launcher.model.plans].count(False) == 4  # prompt, drafts and the next step


def test_tokens_that_are_not_those_expected_end_the_wait_for_drafts():
    """A step held back in vain counts as a failed draft; otherwise a bad drafter would disable all overlap."""
    rig = Rig(drafter=lambda tokens, most: [VOCAB - 1] if len(tokens) % 2 else [])
    rig.add(1, [1, 2, 3], max_tokens=40, ignore_eos=True)

    rig.run()

    assert rig.tokens(1) == undisturbed([1, 2, 3], 40)
    assert [bool(plan.fed) for plan in rig.launcher.model.plans].count(True) > 30


def test_no_step_is_launched_for_a_request_that_is_known_to_end(rig):
    """The final length is known ahead; only a stop by token value costs an extra row."""
    rig.add(1, [1, 2, 3], max_tokens=3, ignore_eos=True)

    rig.run()

    assert len(rig.launcher.model.plans) == 3
    assert rig.tokens(1) == undisturbed([1, 2, 3], 3)


def test_a_request_ends_where_the_context_is_full(rig):
    """Includes blocks that are full to the last slot; no step is launched after the last token."""
    rig.add(1, [1] * 60, max_tokens=1000, ignore_eos=True)

    rig.run()

    assert rig.tokens(1) == undisturbed([1] * 60, 4)
    assert rig.outputs[1][-1].finish_reason == "length"
    assert len(rig.launcher.model.plans) == 4


def test_row_in_flight_of_an_ended_request_is_dropped(rig):
    """The token after the end must not be sent, and its KV must not be announced."""
    prompt = next([a, b] for a in range(VOCAB) for b in range(VOCAB) if undisturbed([a, b], 2)[-1] == EOS)
    rig.add(1, prompt, max_tokens=20)

    rig.run()

    assert rig.tokens(1) == undisturbed(prompt, 2)
    assert rig.outputs[1][-1].finish_reason == "stop"
    assert len(rig.launcher.model.plans) == 3


def test_aborted_request_is_told_nothing_more(rig):
    """The abort may arrive while one of the request's steps is in flight."""
    rig.add(1, [1, 2, 3], max_tokens=20, ignore_eos=True)
    rig.add(2, [4, 5], max_tokens=6, ignore_eos=True)
    for _ in range(3):
        rig.step()

    rig.engine.abort("a", [1])
    told = len(rig.tokens(1))
    rig.run()

    assert len(rig.tokens(1)) == told
    assert rig.tokens(2) == undisturbed([4, 5], 6)


@pytest.mark.parametrize("where", ["fail_next", "fail_landing"])
def test_failed_step_ends_its_requests_alone(rig, where):
    """Requests that arrive after a failed launch or a failed device step are served."""
    rig.add(1, [1, 2, 3], max_tokens=20, ignore_eos=True)
    rig.step()
    setattr(rig.launcher, where, 1)

    rig.step()
    rig.step()
    rig.add(2, [4, 5], max_tokens=6, ignore_eos=True)
    rig.run()

    assert rig.refused == [1]
    assert rig.tokens(2) == undisturbed([4, 5], 6)


@pytest.mark.parametrize(
    ("asked", "wanted"),
    [
        ({"logit_bias": {7: 100.0}}, [7, 7, 7]),
        ({"allowed_token_ids": (7,)}, [7, 7, 7]),
        ({"logit_bias": {7: 100.0, 8: 99.0}, "bad_words": ((7, 7),)}, [7, 8, 7]),
        ({"logit_bias": {7: 100.0, 8: 99.0, 9: 98.0}, "presence_penalty": 3.0}, [7, 8, 9]),
        ({"logit_bias": {EOS: 100.0, 8: 90.0}, "min_tokens": 3, "ignore_eos": False}, [8, 8, 8]),
    ],
    ids=str,
)
def test_what_depends_on_the_tokens_before_is_known_when_a_step_draws(rig, asked, wanted):
    """Steps are still launched ahead, and the draws of other requests in them do not change."""
    rig.add(1, [1, 2, 3], max_tokens=12, ignore_eos=True)
    for _ in range(3):
        rig.step()
    rig.add(2, [4, 5], **({"max_tokens": 3, "ignore_eos": True} | asked))

    rig.run()

    assert rig.tokens(1) == undisturbed([1, 2, 3], 12)
    assert rig.tokens(2)[:3] == wanted
    assert all(plan.slots for plan in rig.launcher.model.plans)
    assert [bool(plan.fed) for plan in rig.launcher.model.plans].count(False) <= 1


def test_logprobs_come_with_their_tokens():
    """Covers drawn tokens and a prompt in chunks, next to a request without logprobs."""
    rig = Rig(budget=16, blocks=48)
    rig.add(1, [1, 2, 3], max_tokens=4, ignore_eos=True, logprobs=2)
    rig.add(2, [5] * 40, max_tokens=2, ignore_eos=True, prompt_logprobs=0)
    rig.add(3, [1, 2], max_tokens=4, ignore_eos=True)

    rig.run()

    scored = [entry for output in rig.outputs[1] for entry in output.logprobs or ()]
    assert [entry.chosen.token_id for entry in scored] == rig.tokens(1) == undisturbed([1, 2, 3], 4)
    assert [len(entry.top) for entry in scored] == [2] * 4
    assert scored[0].chosen.logprob == pytest.approx(-math.log1p((VOCAB - 1) * math.exp(-10)), rel=1e-4)
    echoed = decoded_positions(rig.outputs[2][0].prompt_logprobs or ())
    assert [entry and entry.chosen.token_id for entry in echoed] == [None, *[5] * 39]
    assert not any(output.logprobs or output.prompt_logprobs for output in rig.outputs[3])
    assert all(plan.slots for plan in rig.launcher.model.plans)


def test_who_comes_while_the_last_chunk_of_its_prefix_is_in_flight_waits_for_it():
    """The prefix's blocks are announced one step later; recomputing them would cost the whole prompt."""
    rig = Rig(worth_waiting=4)
    rig.add(1, [1, 2, 3, 4, 5, 6, 7, 8, 9], ignore_eos=True)
    rig.step()
    rig.add(2, [1, 2, 3, 4, 5, 6, 7, 8, 5], ignore_eos=True)

    meanwhile = rig.step().rows
    rig.run()

    assert meanwhile == 1
    assert [rig.outputs[number][0].cached_tokens for number in (1, 2)] == [0, 8]
    assert [rig.tokens(number)[0] for number in (1, 2)] == [
        undisturbed([1, 2, 3, 4, 5, 6, 7, 8, last], 1)[0] for last in (9, 5)
    ]


@pytest.mark.parametrize("where", ["fail_next", "fail_landing", "aborted"])
def test_who_waits_for_a_prefix_in_flight_goes_on_when_it_never_comes(where):
    """If the step fails or the leader is aborted, no block is announced and the waiter computes all of them."""
    rig = Rig(worth_waiting=4, budget=4)
    rig.add(1, [1, 2, 3, 4, 5, 6, 7, 8, 9], ignore_eos=True)
    rig.step()
    rig.add(2, [1, 2, 3, 4, 5, 6, 7, 8, 5], ignore_eos=True)
    rig.step()
    if where == "aborted":
        rig.engine.abort("a", [1])
    else:
        setattr(rig.launcher, where, 1)
    rig.run()

    assert rig.refused == ([] if where == "aborted" else [1])
    assert rig.tokens(2) == undisturbed([1, 2, 3, 4, 5, 6, 7, 8, 5], 4)


REQUEST = st.tuples(
    st.integers(0, 6),
    st.lists(st.integers(0, 2), min_size=1, max_size=5),
    st.integers(1, 6),
    st.integers(0, 3),
    st.sampled_from(["greedy", "greedy", "greedy", "biased", "echo", "pinned", "aborted"]),
)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(REQUEST, min_size=1, max_size=8),
    st.integers(1, 16),
    st.integers(1, 4),
    st.integers(1, 20),
    st.integers(1, 5),
    st.sampled_from([1, 4, 128]),
    st.none() | st.builds(Guesses, st.sampled_from([0.3, 0.8, 1.0]), st.integers(0, 99)),
)
def test_whatever_the_schedule_everybody_gets_the_tokens_of_an_undisturbed_run(
    requests, blocks, block_size, budget, running, worth_waiting, guesses
):
    """Mixes chunks, hits, waits, preempted rows in flight, aborts, drafts and draws that wait, in any order."""
    rig = Rig(blocks, block_size, budget, running, worth_waiting, guesses)
    expected: dict[int, list[int]] = {}
    aborted: dict[int, list[int]] = {}
    for number, (shared, own, max_tokens, steps_before, kind) in enumerate(requests):
        prompt = [*range(shared), *own]
        if len(prompt) + max_tokens > blocks * block_size:
            continue
        for _ in range(steps_before):
            rig.step()
        rig.engine.abort("a", aborted)
        bias = {"biased": {"logit_bias": {200 % VOCAB: 0.0}}, "echo": {"prompt_logprobs": 0, "logprobs": 1}}.get(
            kind, {}
        )
        pins = (Pin(tenant=b"t" * 16, num_tokens=len(prompt), ttl_s=60.0),) if kind == "pinned" else ()
        rig.add(number, prompt, max_tokens=max_tokens, ignore_eos=True, pins=pins, **bias.get(kind, {}))
        (aborted if kind == "aborted" else expected)[number] = undisturbed(prompt, max_tokens)

    rig.run()

    assert {number: rig.tokens(number) for number in expected} == expected
    assert all(wanted[: len(rig.tokens(number))] == rig.tokens(number) for number, wanted in aborted.items())
    assert rig.cache.free_blocks + rig.cache.pinned_idle_blocks == rig.cache.total_blocks


class FollowingGuide:
    """A guide that allows every token and records the tokens it accepted."""

    restricts, ended, problem = True, False, ""

    def __init__(self) -> None:
        self.followed: list[int] = []
        self.filled_after: list[int] = []

    def accept(self, token_ids: Sequence[int]) -> None:
        self.followed += token_ids

    def fill(self, words: np.ndarray, address: int) -> None:
        self.filled_after.append(len(self.followed))
        words[:] = -1


def add_guided(rig: Rig, number: int, tokens: list[int], **options) -> FollowingGuide:
    guide = FollowingGuide()
    request = generate(number, tokens, rig.hasher, **options)
    rig.engine.add("a", msgspec.structs.replace(request, constraint=Constraint(kind="json_object")), guide)
    return guide


def test_a_mask_is_filled_when_its_guide_knows_all_tokens_before_it() -> None:
    """One mask per token, in the step that draws it, although steps are launched ahead; other rows do not change."""
    rig = Rig()
    rig.add(2, [4, 5], max_tokens=9)
    guide = add_guided(rig, 1, [1, 2, 3], max_tokens=6)

    rig.run()

    assert rig.tokens(1) == guide.followed == undisturbed([1, 2, 3], 6)
    assert rig.tokens(2) == undisturbed([4, 5], 9)
    assert guide.filled_after == list(range(6))
    assert [terms.masks.rows.tolist() for terms in rig.launcher.terms if terms.masks] == [[1]] * 6


def test_a_step_that_cannot_draw_ends_its_own_requests_alone() -> None:
    """It is handled like any other failed step."""
    rig = Rig()
    rig.launcher.fail_drawing = 1
    add_guided(rig, 1, [1, 2, 3], max_tokens=6)

    rig.run()
    rig.add(2, [4, 5], max_tokens=3)
    rig.run()

    assert rig.refused == [1]
    assert rig.tokens(2) == undisturbed([4, 5], 3)


# With a real model.

SAMPLINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "seed": 5},
    {"temperature": 0.8, "seed": 1 << 63, "top_p": 0.9, "top_k": 20},
    {"temperature": 1.3, "seed": 9, "min_p": 0.05},
    {"temperature": 0.0, "repetition_penalty": 1.4, "min_tokens": 3, "logprobs": 2},
    {"temperature": 1.0, "seed": 3, "presence_penalty": 0.6, "logit_bias": {5: 2.0, 9: -4.0}, "prompt_logprobs": 1},
    {"temperature": 1.0, "seed": 4, "frequency_penalty": 0.4, "bad_words": ((7, 8), (9,)), "logprobs": 0},
]


class Counted(EagerSteps):
    """Graph stand-ins that count their replays; steps with prompts are padded too."""

    pads_mixed = True

    def __init__(self) -> None:
        super().__init__()
        self.replayed: Counter[str] = Counter()

    def replay(self, key: tuple[str, int]) -> None:
        self.replayed[key[0]] += 1
        super().replay(key)


@pytest.fixture
def one_size(monkeypatch) -> None:
    """Pads every decode batch to the largest size."""
    monkeypatch.setattr("homing.replica.execute.gpu_runner.graph_sizes", lambda most: [most])


def answers(kind: type[Engine], runner: ModelRunner, prompts: Sequence[Sequence[int]], blocks: int) -> dict:
    hasher = BlockHasher(runner.block_size, seed=3)
    cache = PrefixCache(blocks + 1, runner.block_size)
    engine = kind(
        limits=SchedulerLimits(4, 24, blocks * runner.block_size),
        vocab_size=runner.spec.vocab_size,
        eos_token_ids=(2,),
        cache=cache,
        hasher=hasher,
        executor=runner,
        rates=SmoothedRates(1000.0, 0.01),
        epoch=1,
    )
    found: dict[int, list[Any]] = defaultdict(list)

    def step() -> None:
        for output in engine.step().outputs["a"]:
            found[output.request_id] += output.token_ids
            told = [
                *(output.logprobs or ()),
                *(entry for entry in decoded_positions(output.prompt_logprobs or ()) if entry),
            ]
            found[output.request_id] += [(entry.chosen.token_id, len(entry.top)) for entry in told]
        engine.scheduler.check()

    for number, prompt in enumerate(prompts):
        sampling = SAMPLINGS[number % len(SAMPLINGS)]
        engine.add("a", generate(number, prompt, hasher, max_tokens=9, ignore_eos=number % 3 > 0, **sampling))
        step()
    while engine.has_work:
        step()
    assert cache.free_blocks == cache.total_blocks
    return dict(found)


def runner_of(kind: type[ModelRunner], folder: Path, blocks: int, provider: str = "native", **options) -> ModelRunner:
    torch.set_num_threads(1)
    settings = ReplicaSettings(
        dtype="float32", device="cpu", model_provider=provider, max_running_requests=4, max_model_len=128
    )
    made = kind(settings, folder, 8, **options)
    made.allocate_kv(blocks + 1)
    return made


@pytest.mark.parametrize("provider", ["native", "transformers"])
@pytest.mark.parametrize("model", ["qwen3", "mistral"])
def test_resident_steps_give_the_tokens_of_plain_steps(provider, model, checkpoint, prompts, one_size):
    """Greedy and sampled, chunked, with shared prefixes and preemption, for both providers, padded or not."""
    folder = checkpoint(model, **({"head_dim": 32} if model == "qwen3" else {"sliding_window": 12}))
    blocks = 14

    plain = answers(Engine, runner_of(ModelRunner, folder, blocks, provider), prompts, blocks)
    ahead = answers(OverlappedEngine, runner_of(GpuRunner, folder, blocks, provider), prompts, blocks)
    graphs = Counted()
    padded = answers(OverlappedEngine, runner_of(GpuRunner, folder, blocks, provider, graphs=graphs), prompts, blocks)

    assert ahead == plain
    assert padded == plain
    assert sum(map(len, plain.values())) > 40


class CountsEager(GpuRunner):
    eager = 0

    def _run(self, *arguments: Any) -> Any:
        self.eager += 1
        return super()._run(*arguments)

    def forward(self, plan: StepPlan) -> Any:
        self.eager += 1
        return super().forward(plan)


def test_no_step_of_a_mixed_workload_is_eager(checkpoint, prompts, one_size):
    """Covers chunks next to decodes, copies, penalties, biases, bans, logprobs: one eager step delays every request."""
    folder, graphs = checkpoint("llama"), Counted()
    runner = runner_of(CountsEager, folder, 30, graphs=graphs)
    asked = [*prompts, *prompts[:2]]

    found = answers(OverlappedEngine, runner, asked, 30)

    assert found == answers(Engine, runner_of(ModelRunner, folder, 30), asked, 30)
    assert graphs.replayed["mixed"] > 5
    assert graphs.replayed["compute"] > 5
    assert runner.eager == 2  # chunks with prompt logprobs for more positions than the batch has rows


class RefusesMixed(Counted):
    """Fails as on a device whose prefill attention reads a result back."""

    def capture(self, key: tuple[str, int], run: Callable[[], None]) -> None:
        if key[0] == "mixed":
            raise NotCaptured("operation not permitted when stream is capturing")
        super().capture(key, run)


def test_decodes_keep_their_graphs_where_steps_with_prompts_have_none(checkpoint, prompts, caplog):
    """Most steps only decode. Models with softcaps or sinks have no capturable prefill kernel."""
    folder, graphs = checkpoint("llama"), RefusesMixed()

    with caplog.at_level("INFO"):
        runner = runner_of(CountsEager, folder, 14, graphs=graphs)
    ahead = answers(OverlappedEngine, runner, prompts, 14)

    assert ahead == answers(Engine, runner_of(ModelRunner, folder, 14), prompts, 14)
    assert graphs.replayed["compute"] > 5
    assert runner.eager > 0
    assert "mixed_graphs_unusable reason='operation not permitted when stream is capturing'" in caplog.text


@dataclass
class Refusing:
    """Captures only the larger sizes, as on a device where some steps read a result back."""

    captured: list[tuple[str, int]] = field(default_factory=list)
    cleared: int = 0
    pads_mixed = False

    def capture(self, key: tuple[str, int], run: Callable[[], None]) -> None:
        run()
        if key[1] < 4:
            raise NotCaptured("operation not permitted when stream is capturing")
        self.captured.append(key)

    def replay(self, key: tuple[str, int]) -> None:
        raise AssertionError(f"{key} was replayed although its capture failed")

    def clear(self) -> None:
        self.cleared += 1


def test_steps_that_no_graph_takes_are_called(checkpoint, prompts, caplog):
    """Applies to all sizes, so that a request's tokens are computed in one way whatever the batch; the log says why."""
    folder = checkpoint("llama")
    graphs = Refusing()

    with caplog.at_level("WARNING"):
        runner = runner_of(GpuRunner, folder, 14, graphs=graphs)
    ahead = answers(OverlappedEngine, runner, prompts, 14)

    assert ahead == answers(Engine, runner_of(ModelRunner, folder, 14), prompts, 14)
    assert graphs.captured == [("compute", 4), ("draw", 4)]
    assert graphs.cleared == 2
    assert "graphs_unusable reason='operation not permitted when stream is capturing'" in caplog.text


def test_experts_that_run_on_what_chose_them_are_not_captured(checkpoint, prompts, caplog):
    """Their shapes depend on the data: a graph would replay those of the captured step."""
    folder = checkpoint("mixtral", num_local_experts=4)
    graphs = Refusing()

    with caplog.at_level("WARNING"):
        runner = runner_of(GpuRunner, folder, 14, graphs=graphs)
    ahead = answers(OverlappedEngine, runner, prompts, 14)

    assert ahead == answers(Engine, runner_of(ModelRunner, folder, 14), prompts, 14)
    assert not graphs.captured
    assert "graphs_unusable reason='the number of tokens per expert is read back'" in caplog.text


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.lists(st.integers(3, 9), min_size=1, max_size=30), min_size=1, max_size=7), st.integers(6, 20))
def test_resident_steps_give_the_tokens_of_plain_steps_for_any_prompts(checkpoint, prompts, blocks):
    """A small vocabulary makes shared prefixes frequent, and small pools make preemption frequent."""
    folder = checkpoint("llama")

    plain = answers(Engine, runner_of(ModelRunner, folder, blocks), prompts, blocks)
    ahead = answers(OverlappedEngine, runner_of(GpuRunner, folder, blocks), prompts, blocks)

    assert ahead == plain


# --- slots in the device's request table

SLOT_HASHER = BlockHasher(2, seed=3)


def running(number: int):
    state = request_state(number, [1, 2, 3], SLOT_HASHER)
    state.arrival, state.phase = number, RequestPhase.RUNNING
    return state


@pytest.fixture
def book():
    made = SlotTable(3)
    yield made
    made.check()


def test_slots_are_kept_and_start_once(book):
    """A second start would discard the device's state of the slot."""
    first, second = running(1), running(2)

    slots, started = book.assign([first])
    again, more = book.assign([first, second])

    assert slots == [1]
    assert started == [first]
    assert again[0] == 1
    assert more == [second]
    assert 0 not in again


def test_slot_of_an_ended_request_is_given_on(book):
    """There are only as many slots as requests that may run."""
    ended = [running(1), running(2), running(3)]
    book.assign(ended)
    for request in ended:
        request.phase = RequestPhase.FINISHED

    slots, started = book.assign([running(4), running(5), running(6)])

    assert sorted(slots) == [1, 2, 3]
    assert len(started) == 3


def test_preempted_request_starts_anew(book):
    """It gets other blocks when it resumes, possibly within the same scheduler call."""
    request = running(1)
    book.assign([request])
    request.preemptions += 1

    _, started = book.assign([request])

    assert started == [request]
