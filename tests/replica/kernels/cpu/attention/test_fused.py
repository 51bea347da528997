"""torch's fused attention on gathered pages equals float64, and hidden tokens cannot change its results."""

import math

import pytest
import torch

from homing.replica.kernels.cpu.attention.fused import BLOCK, fits, prefill
from homing.replica.models.base import AttentionRule

from ...layouts import TOLERANCE, Shape, error, exact, paged

CPU = torch.device("cpu")
SHAPES = {
    "three queries a head": Shape(heads=6, dtype=torch.bfloat16),
    "one, page 64": Shape(heads=2, page=64, dtype=torch.bfloat16),
    "eight, head dim 128, page 256": Shape(heads=8, kv_heads=1, key_dim=128, value_dim=128, page=256),
    "odd pages": Shape(heads=10, kv_heads=2, key_dim=40, value_dim=40, page=5),
}
#: Per row, its new tokens and all its tokens: a lone token, none, whole prompts, chunks, and more than a block.
Q_LENS, LENGTHS = [1, 0, 2, 150, 33, 5, 2 * BLOCK + 9], [1, 0, 130, 150, 500, 5, 1088]
RULES = {
    "plain": AttentionRule(0.2),
    "window of 1": AttentionRule(0.2, window=1),
    "window of 20": AttentionRule(0.2, window=20),
    "window of 300": AttentionRule(0.2, window=300),
}


def attended(shape, rows, q, rule):
    out = torch.full((*q.shape[:2], rows.values.shape[3]), torch.nan, dtype=q.dtype)
    assert fits(q, rows, rule)
    return prefill(q, rows, torch.tensor([0, *Q_LENS]).cumsum(0).int(), rule, out), out


def queries_of(shape: Shape) -> torch.Tensor:
    generator = torch.Generator().manual_seed(4)
    return torch.randn(sum(Q_LENS), shape.heads, shape.key_dim, generator=generator).to(shape.dtype)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("sinks", [False, True])
def test_equals_attention_in_float64(shape, rule, sinks):
    """Rows begin and end inside pages and blocks; unused slots hold NaN."""
    if sinks:
        rule = AttentionRule(rule.scale, rule.window, sinks=torch.linspace(-1, 2, shape.heads).to(shape.dtype))
    rows, q = paged(shape, LENGTHS, CPU), queries_of(shape)

    done, out = attended(shape, rows, q, rule)

    assert done
    assert error(out, exact(q, rows, Q_LENS, rule)) < TOLERANCE[shape.dtype]


@pytest.mark.parametrize("which", ["keys", "values"])
@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_keys_and_values_that_are_no_numbers_are_left_to_others(which, number):
    """0 * NaN is NaN: a later token of a prompt would spoil the cached prefix that other prompts share."""
    shape = SHAPES["odd pages"]
    rows, q = paged(shape, LENGTHS, CPU), queries_of(shape)
    last = LENGTHS[-1] - 1
    getattr(rows, which)[rows.tables[len(LENGTHS) - 1, last // shape.page], last % shape.page, 0, 0] = number

    done, _ = attended(shape, rows, q, RULES["plain"])

    assert not done


def test_softcap_and_unequal_dims_do_not_fit():
    """torch's kernel has no softcap, and computes values of another size slowly."""
    narrow = Shape(heads=4, kv_heads=2, key_dim=16, value_dim=8)

    assert not fits(queries_of(SHAPES["odd pages"]), paged(SHAPES["odd pages"], [4], CPU), AttentionRule(1, softcap=5))
    assert not fits(queries_of(narrow), paged(narrow, [4], CPU), AttentionRule(1))
