"""Prompt attention is chosen by what was measured, and both choices compute the same."""

import logging
import math
from dataclasses import dataclass

import pytest
import torch

from homing.replica.kernels.base import TorchKernels
from homing.replica.kernels.cpu import cpu_kernels
from homing.replica.kernels.cpu.attention import choice, fused
from homing.replica.kernels.cpu.attention.choice import FEWEST, PromptChoice, decide, decode_choice, prompt_choice
from homing.replica.kernels.cpu.cpu_kernels import CompiledKernels
from homing.replica.kernels.cpu.runtime import measurements
from homing.replica.kernels.cpu.runtime.measurements import REPEATS, compared
from homing.replica.models import layers
from homing.replica.models.base import AttentionRule

from ...layouts import TOLERANCE, Shape, error, exact, paged

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("short", "long", "taken"),
    [(0.5, 1.2, []), (0.8, 2.0, [(64, 256), (512, 512)]), (2.0, 3.0, [(16, 16), (64, 64), (64, 256), (512, 512)])],
)
def test_torch_computes_the_rows_for_which_it_is_clearly_faster(short, long, taken):
    """About equal speeds must not let noise decide: replicas that start at once would differ."""
    found = decide(compared(short), compared(long))

    rows = [(1, 5000), (8, 8), (16, 16), (64, 64), (64, 256), (512, 512)]
    assert [row for row in rows if found.takes(*row)] == taken
    assert f"{long:.2f} times as fast" in found.reason


def test_a_torch_without_the_operator_computes_nothing(monkeypatch, caplog):
    """It is a private operator of torch: our loops must then compute all rows."""
    caplog.set_level(logging.INFO, logger="homing")
    monkeypatch.setattr(fused, "prefill", lambda *_: torch.ops.aten.no_such_attention())

    found = prompt_choice.__wrapped__(torch.float32, 4, 2, 32)

    assert found.least is None
    assert "no_such_attention" in found.reason
    assert "prompt_attention_chosen dtype=float32" in caplog.text
    assert "choice='own loops" in caplog.text


def test_wrong_results_are_not_used_however_fast(monkeypatch):
    """Speed is compared on random rows whose results are known."""
    monkeypatch.setattr(fused, "prefill", lambda q, rows, firsts, rule, out: out.zero_() is out)

    assert prompt_choice.__wrapped__(torch.float32, 4, 2, 32).least is None


def test_measuring_takes_little_of_a_start():
    """One KV head on one thread suffices. Counted in queries times tokens, as time depends on the machine."""
    work = sum(queries * tokens for queries, tokens in (choice.SHORT, choice.LONG)) * (1 + REPEATS)

    assert work <= 1 << 20


@dataclass
class Processor:
    """Speeds of the libraries compared with ours, by the first words of a comparison."""

    speeds: dict[str, float]

    def compare(self, name, ours, library):
        ours()
        library()
        return compared(next(speed for words, speed in self.speeds.items() if name.startswith(words)))


#: Figures of real processors where there are some; for AMX those reported for torch's attention and oneDNN.
AMX = {"prompt": 3.0, "decode": 0.5, "product of 1 ": 0.6, "product of 4 ": 1.3, "product": 2.0}
ZEN4 = {"prompt": 0.3, "decode": 0.25, "product": 0.8}
AVX2 = {
    "prompt attention of 64 ": 0.8,
    "prompt": 1.8,
    "decode": 0.6,
    "product of 1 ": 0.7,
    "product of 4 ": 1.1,
    "product": 2.5,
}


@pytest.mark.parametrize(
    ("speeds", "prompts", "decodes", "few"),
    [(AMX, (FEWEST, 1), False, 2), (ZEN4, None, False, math.inf), (AVX2, (64, 256), False, 8)],
    ids=["AMX", "Zen 4", "AVX2"],
)
def test_each_processor_gets_what_is_fastest_on_it(speeds, prompts, decodes, few, monkeypatch):
    """Nothing asks for the processor's name or features: only the measured speeds count."""
    monkeypatch.setattr(choice, "measurements", lambda: Processor(speeds))
    monkeypatch.setattr(measurements, "measurements", lambda: Processor(speeds))
    compared_products = {rows: each.library for rows, each in layers.product_speeds.__wrapped__(torch.bfloat16).items()}

    assert prompt_choice.__wrapped__(torch.bfloat16, 4, 2, 32).least == prompts
    assert decode_choice.__wrapped__(torch.bfloat16, 4, 2, 32).by_torch == decodes
    assert layers._most_rows(compared_products) == few


@pytest.mark.parametrize("least", [None, (64, 256), (FEWEST, 1)], ids=str)
@pytest.mark.parametrize("rule", [AttentionRule(0.2), AttentionRule(0.2, sinks=torch.ones(6))], ids=["plain", "sinks"])
def test_every_choice_computes_the_same(least, rule, monkeypatch):
    """Steps mix rows of both kinds; a later token that is NaN must not spoil the earlier ones either way."""
    monkeypatch.setattr(cpu_kernels, "prompt_choice", lambda *_: PromptChoice(least, ""))
    shape = Shape(heads=6, key_dim=32, value_dim=32)
    q_lens, lengths = [3, 100, 70, 0, 20, 300], [9, 400, 70, 0, 1000, 300]
    rows = paged(shape, lengths, CPU)
    q = torch.randn(sum(q_lens), 6, 32, generator=torch.Generator().manual_seed(1))
    out, firsts = torch.full_like(q, torch.nan), torch.tensor([0, *q_lens]).cumsum(0).int()

    CompiledKernels().prefill(q, rows, firsts, rule, out)

    assert error(out, exact(q, rows, q_lens, rule)) < TOLERANCE[shape.dtype]
    rows.values[rows.tables[5, 299 // shape.page], 299 % shape.page] = torch.nan
    wanted = torch.full_like(q, torch.nan)
    TorchKernels().prefill(q, rows, firsts, rule, wanted)
    CompiledKernels().prefill(q, rows, firsts, rule, out)
    torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-4, equal_nan=True)
    assert bool(out[-1].isnan().any())
