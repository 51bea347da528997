"""Captured decode steps give exactly the logits of steps that were not captured."""

import logging
import math
from functools import partial
from random import Random
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from homing.replica.attention.paged import Batch
from homing.replica.config import ReplicaSettings
from homing.replica.engine.step_plan import PlanRow, lay_out, plan_of_rows
from homing.replica.execute import captured_steps
from homing.replica.execute.captured_steps import MAX_SHAPES, CapturedSteps, DecodeShape, decode_shape
from homing.replica.execute.runner import ModelRunner, captured_steps_for
from homing.replica.kernels.cpu.pointwise import take
from homing.replica.models.layers import few_rows

from ..fakes import Guesses
from ..schedules import ASKS, SETUPS, Schedule, made_runner
from ..test_schedules import following
from ..toys import BLOCK_SIZE, make_runner
from .test_runner import BOUNDS, distance

PAGES_EACH = 40
#: Native decoders and models run through transformers. The vocabulary, and the last model's sizes, are no multiples of
#: a matrix product's output block.
MODELS = {
    "llama": ("llama", {}),
    "mistral with a window": ("mistral", {"sliding_window": 12}),
    "qwen2": ("qwen2", {}),
    "qwen3 with tied embeddings": ("qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "phi3": ("phi3", {}),
    "gemma2 with windows and softcaps": ("gemma2", {"sliding_window": 11, "head_dim": 16}),
    "mixtral": ("mixtral", {"num_local_experts": 4}),
    "gpt_oss": ("gpt_oss", {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "odd sizes": ("llama", {"hidden_size": 36, "head_dim": 10, "intermediate_size": 50}),
}


class Counted(CapturedSteps):
    """Counts the steps that were replayed."""

    made = 0

    def run(self, batch):
        logits = super().run(batch)
        self.made += logits is not None
        return logits


@pytest.fixture
def runners(checkpoint):
    return runners_of(checkpoint("llama"))


def runners_of(folder):
    """The same model with and without captured steps."""
    found = [ModelRunner(ReplicaSettings(dtype="bfloat16", device="cpu"), folder, BLOCK_SIZE) for _ in range(2)]
    for runner in found:
        allocate(runner, 12 * PAGES_EACH)
    found[1].captured_steps = None
    return found


@torch.inference_mode()
def allocate(runner, blocks):
    """KV memory full of NaN: a row must only see values that were written."""
    runner.allocate_kv(blocks)
    runner.captured_steps = Counted(runner.batch_logits)
    for pages in (*runner.pool.keys, *runner.pool.values):
        pages.fill_(math.nan)


@pytest.fixture
def threads_as_before():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def laid_out(rows, **kwargs):
    return lay_out(plan_of_rows(0, rows, **kwargs), BLOCK_SIZE)


def test_a_shape_is_of_rows_that_decode():
    """A shape is the number of rows, the table width rounded up to a power of two, and the number of threads."""
    rows = [PlanRow([7], 20, list(range(1, 9))), PlanRow([8], 3, [9])]

    assert decode_shape(laid_out(rows), 2) == DecodeShape(2, 16, 2)
    assert decode_shape(laid_out([PlanRow([7], BLOCK_SIZE * 40, list(range(1, 99)))]), 1) == DecodeShape(1, 64, 1)


@pytest.mark.parametrize(
    "batch",
    [
        laid_out([PlanRow([7, 8], 20, list(range(1, 9)))]),
        laid_out([PlanRow([7], 20, list(range(1, 9)))], logits_at=[]),
        laid_out([]),
    ],
    ids=["several tokens", "no logits", "no rows"],
)
def test_other_steps_have_no_shape(batch):
    """They come in too many shapes, or compute something that a captured step does not."""
    assert decode_shape(batch, 1) is None


@pytest.mark.usefixtures("threads_as_before")
@pytest.mark.parametrize("model", MODELS)
def test_logits_are_those_of_steps_that_are_not_recorded(checkpoint, model):
    """Holds for any sequence of batch sizes, lengths, blocks and wanted logits, and any thread count: a captured step
    keeps nothing of the rows it was recorded with, and unwritten memory may be NaN.
    """
    model_type, overrides = MODELS[model]
    runners = runners_of(checkpoint(model_type, **overrides))
    rng, lengths = Random(5), [0] * 11
    tables = [list(range(1 + row * PAGES_EACH, (row + 1) * PAGES_EACH)) for row in range(11)]
    for step in range(60):
        torch.set_num_threads(1 + step // 8 % 3)
        picked = rng.sample(range(11), rng.choice([1, 1, 2, 5, 11]))
        counts = [rng.choice([1, 9, 60]) if rng.random() < 0.1 or not lengths[row] else 1 for row in picked]
        rows = [
            PlanRow([rng.randrange(200) for _ in range(count)], lengths[row], tables[row])
            for row, count in zip(picked, counts, strict=True)
        ]
        plan = plan_of_rows(step, rows, rng.sample(range(sum(counts)), len(rows)))
        captured, without = (runner.forward(plan) for runner in runners)
        assert captured.isfinite().all()
        assert torch.equal(captured, without)
        for row, count in zip(picked, counts, strict=True):
            lengths[row] += count

    assert runners[0].captured_steps.made > (15 if few_rows() == math.inf else 7)


@pytest.mark.parametrize("model", MODELS)
def test_no_schedule_tells_recorded_steps_from_others(model, checkpoint, scale):
    """Joins, leaves, preemption, copies and drafts give the same tokens and ends, and bit-identical logprobs."""
    model_type, overrides = MODELS[model]
    folder = checkpoint(model_type, **overrides)
    recording, plain = (made_runner(folder, resident=False, dtype="bfloat16") for _ in range(2))
    recording.captured_steps, plain.captured_steps = Counted(recording.batch_logits), None

    @settings(max_examples=max(1, int(30 * scale)), deadline=None)
    @given(ASKS, SETUPS, st.booleans())
    def answers_are_the_same(asks, setup, drafted):
        answers = [[*ask.prompt, *got.tokens] for (ask, _), got in Schedule(plain, setup).run(asks).items()]
        drafter = Guesses(0.7, following=partial(following, answers)) if drafted else None
        found, wanted = (Schedule(runner, setup, drafter).run(asks) for runner in (recording, plain))
        assert found == wanted

    answers_are_the_same()

    assert recording.captured_steps.made, "nothing was recorded"


def test_a_text_computed_by_captured_steps_is_as_exact_as_a_prompt(checkpoint, runners):
    """The error against float32 stays within the bound of docs/models.md."""
    tokens, runner, exact = list(range(3, 43)), runners[0], make_runner(checkpoint("llama"))
    wanted = exact.forward(plan_of_rows(0, [PlanRow(tokens, 0, list(range(1, 8)))], range(len(tokens))))

    steps = [plan_of_rows(at, [PlanRow([token], at, list(range(1, 8)))]) for at, token in enumerate(tokens)]
    got = torch.cat([runner.forward(step) for step in steps])

    assert distance(got, wanted) < BOUNDS["bfloat16"]
    assert runner.captured_steps.made == len(tokens) - 1


@torch.inference_mode()
def test_answers_are_the_caller_s_to_change(runners):
    """The sampler writes into the logits, which the next step must not overwrite."""
    row = PlanRow([7], 0, [1])
    runner = runners[0]

    answers = [runner.forward(plan_of_rows(step, [row])) for step in range(4)]
    answers[2].fill_(0)
    again = runner.forward(plan_of_rows(4, [row]))

    assert torch.equal(answers[3], answers[0])
    assert torch.equal(again, answers[0])
    assert runner.captured_steps.made == 4


def test_a_shape_is_recorded_when_it_comes_again():
    """A shape is recorded on its second use, and the least recently used one is dropped."""
    forward = Forward()
    programs = CapturedSteps(forward)
    first = laid_out([PlanRow([7], 0, [1])])

    assert programs.run(first) is None
    for rows in range(2, MAX_SHAPES + 2):
        assert programs.run(laid_out([PlanRow([7], 0, [1])] * rows)) is None

    assert forward.steps == 0
    assert programs.run(first) is None, "the shape was not dropped"
    assert programs.run(first) is not None
    assert programs.run(first) is not None
    assert forward.steps == 1


class Forward:
    """A model whose logits are the embeddings of its token ids."""

    def __init__(self) -> None:
        self._table, self.steps = torch.randn(200, 3), 0

    def __call__(self, batch):
        self.steps += 1
        return take(self._table, batch.token_ids)


def test_what_cannot_be_recorded_runs_as_ever(caplog):
    """The log gives the reason, and recording is not tried again."""
    calls = []
    programs = CapturedSteps(lambda batch: calls.append(batch) or batch.token_ids[batch.token_ids > 0])
    caplog.set_level(logging.INFO, logger="homing")  # other tests may have raised the level

    answers = [programs.run(laid_out([PlanRow([7], step % 16, [1])])) for step in range(5)]

    assert answers == [None] * 5
    assert len(calls) == 1
    assert caplog.text.count("captured_steps_unusable rows=1 reason='aten.index.Tensor'") == 1


@pytest.mark.parametrize(("measured", "few"), [(2, 2), (6, 6), (math.inf, 2)])
def test_few_rows_are_recorded_where_more_cannot_be(measured, few, caplog, monkeypatch):
    """Larger steps may take a path that depends on values."""
    monkeypatch.setattr(captured_steps, "few_rows", lambda: measured)
    table = torch.randn(200, 3)

    def of_few_rows(taken):
        return taken if len(taken) <= few else taken[taken.isfinite()]

    programs = Counted(lambda batch: of_few_rows(take(table, batch.token_ids)))
    caplog.set_level(logging.INFO, logger="homing")  # other tests may have raised the level

    for rows in (1, 9, 9, few + 1, few + 1, 9, 1, few, few, 1):
        programs.run(laid_out([PlanRow([7], 0, [1])] * rows))

    assert programs.made == 3
    assert caplog.text.count("captured_steps_unusable") == 1


def test_several_ranks_have_no_captured_steps(caplog):
    """Ranks sum between kernels, which a captured step would leave out."""
    caplog.set_level(logging.INFO, logger="homing")  # other tests may have raised the level

    assert captured_steps_for(torch.device("cpu"), SimpleNamespace(size=2), None) is None
    assert "captured_steps_unusable reason='2 ranks" in caplog.text


def test_a_step_that_fails_while_it_is_recorded_leaves_nothing_behind():
    """The engine handles the error; the next step of the same shape is recorded."""
    forward, failures = Forward(), [MemoryError("no more")]

    def fails_once(batch):
        logits = forward(batch)
        if failures:
            raise failures.pop()
        return logits

    programs, batches = CapturedSteps(fails_once), [laid_out([PlanRow([7 + at], 0, [1])]) for at in range(3)]
    programs.run(batches[0])

    with pytest.raises(MemoryError):
        programs.run(batches[1])

    assert torch.equal(programs.run(batches[2]), forward(Batch.on_device(batches[2], torch.device("cpu"))))


def test_memory_made_anew_is_recorded_anew(runners):
    """A captured step holds addresses of the old pool."""
    runner, without = runners
    plans = [plan_of_rows(step, [PlanRow([5 + step], step, [1])]) for step in range(5)]
    for plan in plans:
        runner.forward(plan)

    allocate(runner, 50)
    answers = [runner.forward(plan) for plan in plans]

    assert runner.captured_steps.made == len(plans) - 1
    assert all(torch.equal(answer, without.forward(plan)) for answer, plan in zip(answers, plans, strict=True))
