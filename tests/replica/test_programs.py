"""Recorded decode steps give the logits of steps that were never recorded, bit for bit."""

import logging
from random import Random

import numpy as np
import pytest
import torch

from homing.replica.config import ReplicaSettings
from homing.replica.plan import PlanRow, lay_out, plan_of_rows
from homing.replica.programs import MOST_SHAPES, DecodePrograms, Shape, decode_shape
from homing.replica.runner import ModelRunner

from .toys import BLOCK_SIZE

PAGES_EACH = 40


@pytest.fixture
def runners(checkpoint):
    """The same model with and without programs."""
    folder = checkpoint("llama", torch_dtype="bfloat16")
    found = []
    for _ in range(2):
        found.append(ModelRunner(ReplicaSettings(dtype="bfloat16", device="cpu"), folder, BLOCK_SIZE))
        found[-1].allocate_kv(12 * PAGES_EACH)
    found[1]._programs = None
    return found


def laid_out(rows, **kwargs):
    return lay_out(plan_of_rows(0, rows, **kwargs), BLOCK_SIZE)


def test_a_shape_is_of_rows_that_decode():
    """Their number, the width of their tables in powers of two, and the threads."""
    rows = [PlanRow([7], 20, list(range(1, 9))), PlanRow([8], 3, [9])]

    assert decode_shape(laid_out(rows), 2) == Shape(2, 16, 2)
    assert decode_shape(laid_out([PlanRow([7], BLOCK_SIZE * 40, list(range(1, 99)))]), 1) == Shape(1, 64, 1)


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
    """They come in too many shapes, or compute what a program does not."""
    assert decode_shape(batch, 1) is None


def test_logits_are_those_of_steps_that_are_not_recorded(runners):
    """Whatever the order of batch sizes, lengths and blocks: a program keeps nothing of the rows it was recorded on."""
    rng, lengths = Random(5), [0] * 11
    tables = [list(range(1 + row * PAGES_EACH, (row + 1) * PAGES_EACH)) for row in range(11)]
    replayed = 0

    for step in range(120):
        picked = rng.sample(range(11), rng.choice([1, 1, 2, 5, 11]))
        counts = [rng.choice([1, 9, 60]) if rng.random() < 0.1 or not lengths[row] else 1 for row in picked]
        rows = [
            PlanRow([rng.randrange(200) for _ in range(count)], lengths[row], tables[row])
            for row, count in zip(picked, counts, strict=True)
        ]
        plan = plan_of_rows(step, rows)
        with_programs, without = (runner.forward(plan) for runner in runners)
        assert torch.equal(with_programs, without)
        replayed += sum(counts) == len(rows)
        for row, count in zip(picked, counts, strict=True):
            lengths[row] += count

    assert replayed > 50


@torch.inference_mode()
def test_answers_are_the_caller_s_to_change(runners):
    """The sampler writes into them, and the next step must not."""
    row = PlanRow([7], 0, [1])
    runner = runners[0]

    answers = [runner.forward(plan_of_rows(step, [row])) for step in range(4)]
    answers[2].fill_(0)
    again = runner.forward(plan_of_rows(4, [row]))

    assert torch.equal(answers[3], answers[0])
    assert torch.equal(again, answers[0])


def test_a_shape_is_recorded_when_it_comes_again():
    """And the one that was not used for longest is forgotten."""
    forward = Forward()
    programs = DecodePrograms(forward)
    first = laid_out([PlanRow([7], 0, [1])])

    assert programs.run(first) is None
    for rows in range(2, MOST_SHAPES + 2):
        assert programs.run(laid_out([PlanRow([7], 0, [1])] * rows)) is None

    assert forward.steps == 0
    assert programs.run(first) is None, "it was forgotten"
    assert programs.run(first) is not None
    assert programs.run(first) is not None
    assert forward.steps == 1


class Forward:
    """A model whose logits are its token ids' embeddings."""

    def __init__(self) -> None:
        from homing.replica.kernels.cpu.rows import take

        self._take, self._table, self.steps = take, torch.randn(200, 3), 0

    def __call__(self, batch):
        self.steps += 1
        return self._take(self._table, batch.token_ids)


def test_what_cannot_be_recorded_runs_as_ever(caplog):
    """The log says once why, and nothing is tried again."""
    calls = []
    programs = DecodePrograms(lambda batch: calls.append(batch) or batch.token_ids + 1)
    caplog.set_level(logging.INFO)

    answers = [programs.run(laid_out([PlanRow([7], step % 16, [1])])) for step in range(5)]

    assert answers == [None] * 5
    assert len(calls) == 1
    assert caplog.text.count("decode_programs_unusable reason='aten.add.Tensor'") == 1


def test_other_threads_are_another_shape():
    """How work is shared is in the calls."""
    batch = laid_out([PlanRow([7], 0, [1])])

    assert len({decode_shape(batch, threads) for threads in (1, 2, 1)}) == 2
    assert isinstance(batch.token_ids, np.ndarray)


def test_memory_made_anew_is_recorded_anew(runners):
    """A program holds addresses of the old pool."""
    runner, without = runners
    plans = [plan_of_rows(step, [PlanRow([5 + step], step, [1])]) for step in range(5)]
    for plan in plans:
        runner.forward(plan)

    runner.allocate_kv(50)
    answers = [runner.forward(plan) for plan in plans]

    assert all(torch.equal(answer, without.forward(plan)) for answer, plan in zip(answers, plans, strict=True))
