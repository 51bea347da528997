"""Prefill attention on a CPU equals float64, and each query depends only on the tokens that it sees."""

import math
from collections.abc import Sequence

import pytest
import torch

from homing.replica.kernels.base import PagedRows
from homing.replica.kernels.cpu.attention.prefill import fits, prefill
from homing.replica.models.base import AttentionRule

from ...layouts import TOLERANCE, Shape, error, exact, paged

CPU, BFLOAT16 = torch.device("cpu"), torch.bfloat16
SHAPES = {
    "one query a head, page 64": Shape(heads=2, page=64, dtype=BFLOAT16),
    "eight, head dim 128, page 256": Shape(heads=8, kv_heads=1, key_dim=128, value_dim=128, page=256, dtype=BFLOAT16),
    "seven, values shorter, odd pages": Shape(heads=14, key_dim=96, value_dim=42, page=9, dtype=BFLOAT16),
    "float32, odd pages": Shape(heads=5, kv_heads=1, key_dim=31, value_dim=33, page=5),
}
INSTRUCTIONS = pytest.mark.parametrize("instructions", ["tiles", "native", "widened"], indirect=True)
USUAL = SHAPES["one query a head, page 64"]
#: Per row, its new tokens and all its tokens: a lone token, none, whole prompts, chunks, and more than a tile.
Q_LENS, LENGTHS = [1, 0, 2, 150, 33, 5, 64], [1, 0, 130, 150, 500, 5, 1088]


def queries_of(shape: Shape, tokens: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(tokens)
    return torch.randn(tokens, shape.heads, shape.key_dim, generator=generator).to(shape.dtype)


def attended(
    q: torch.Tensor, rows: PagedRows, q_lens: Sequence[int], scale: float, window: int | None = None
) -> torch.Tensor:
    """The kernel's output; elements that it does not write stay NaN."""
    out = torch.full((*q.shape[:2], rows.values.shape[3]), torch.nan, dtype=q.dtype)
    prefill(q, rows, torch.tensor([0, *q_lens]).cumsum(0).int(), AttentionRule(scale, window=window), out)
    return out


@INSTRUCTIONS
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("window", [None, 1, 20, 300])
def test_equals_attention_in_float64(instructions, shape, window):
    """Rows begin and end inside tiles, blocks and pages; unused slots hold NaN."""
    rows, q = paged(shape, LENGTHS, CPU), queries_of(shape, sum(Q_LENS))

    out = attended(q, rows, Q_LENS, 0.2, window)

    assert error(out, exact(q, rows, Q_LENS, AttentionRule(0.2, window))) < TOLERANCE[shape.dtype] / 2


@INSTRUCTIONS
@pytest.mark.parametrize("window", [None, 20])
def test_a_query_s_result_depends_on_nothing_but_what_it_sees(instructions, window):
    """Bit for bit, regardless of the other rows, the number of threads, and the chunks of its prompt."""
    rows, q = paged(USUAL, LENGTHS, CPU), queries_of(USUAL, sum(Q_LENS))
    together = attended(q, rows, Q_LENS, 0.2, window)

    first = 0
    for row, (count, length) in enumerate(zip(Q_LENS, LENGTHS, strict=True)):
        for new in {count, count // 3}:
            cut = length - count + new
            alone = PagedRows(rows.keys, rows.values, rows.tables[row : row + 1], torch.tensor([cut]).int())
            wanted = together[first : first + new]
            assert torch.equal(attended(q[first : first + new], alone, [new], 0.2, window), wanted)
        first += count


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_threads_share_the_tiles(threads):
    """Threads also share one short prompt, and each query is computed by a single thread."""
    before = torch.get_num_threads()
    rows, q = paged(USUAL, [1100, 40], CPU), queries_of(USUAL, 103)
    wanted = attended(q, rows, [63, 40], 0.2)

    torch.set_num_threads(threads)
    try:
        found = attended(q, rows, [63, 40], 0.2)
    finally:
        torch.set_num_threads(before)

    assert torch.equal(found, wanted)


@INSTRUCTIONS
@pytest.mark.parametrize("of_values", [True, False])
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("number", [math.nan, -math.nan, math.inf])
def test_a_token_without_numbers_reaches_those_who_see_it_and_no_others(instructions, number, window, of_values):
    """Earlier tokens of the chunk may be a prefix that others share; later tokens must not look valid."""
    q_lens, lengths = [100, 30], [130, 30]
    rows, q = paged(USUAL, lengths, CPU), queries_of(USUAL, 130)
    clean = attended(q, rows, q_lens, 0.2, window)
    odd = rows.values if of_values else rows.keys
    odd[rows.tables[0, 60 // USUAL.page].long(), 60 % USUAL.page] = number

    out = attended(q, rows, q_lens, 0.2, window)

    seeing = torch.zeros(130, dtype=torch.bool)
    seeing[30 : 100 if window is None else 30 + window] = True
    torch.testing.assert_close(out[~seeing], clean[~seeing], rtol=2**-7, atol=1e-4)
    # An infinite key scores inf or -inf; a score of -inf gets no weight.
    sound = out[seeing].isfinite().all(-1)
    assert not sound.any() or (not of_values and number == math.inf and not sound.all())


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("scale", [1e-6, 1.0, 30.0])
def test_any_spread_of_scores_is_weighed(scale, dtype):
    """From near ties to near certainty: scores far below the largest get no weight, and nothing overflows."""
    shape = Shape(heads=2 if dtype == BFLOAT16 else 4, dtype=dtype)
    rows, q = paged(shape, [300], CPU), queries_of(shape, 40)

    out = attended(q, rows, [40], scale)

    assert error(out, exact(q, rows, [40], AttentionRule(scale))) < TOLERANCE[dtype] * max(1, scale)


def test_heads_need_not_lie_side_by_side():
    """transformers' models pass such queries, and also slices of wider tensors."""
    rows, q = paged(USUAL, [50], CPU), queries_of(USUAL, 30)
    wanted = attended(q, rows, [30], 0.2)

    for given in (q.transpose(0, 1).contiguous().transpose(0, 1), torch.cat((q, q), 1)[:, : q.shape[1]]):
        assert torch.equal(attended(given, rows, [30], 0.2), wanted)


@pytest.mark.parametrize(
    ("dtype", "dim", "rule", "fit"),
    [
        (BFLOAT16, 64, AttentionRule(1.0, window=3), True),
        (BFLOAT16, 63, AttentionRule(1.0), False),
        (torch.float32, 63, AttentionRule(1.0), True),
        (BFLOAT16, 64, AttentionRule(1.0, softcap=2.0), False),
        (BFLOAT16, 64, AttentionRule(1.0, sinks=torch.zeros(6)), False),
    ],
    ids=str,
)
def test_what_the_kernel_cannot_compute_does_not_fit(dtype, dim, rule, fit):
    """Another implementation computes these."""
    assert fits(torch.zeros(3, 6, dim, dtype=dtype), rule) is fit
