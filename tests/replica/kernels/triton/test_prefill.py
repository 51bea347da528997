"""Prefill attention equals float64: whole prompts, chunks after a prefix and lone tokens in one step."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from homing.replica.kernels.triton import prefill as kernel
from homing.replica.models.base import AttentionRule

from ..layouts import DTYPES_BESIDE_8_BITS, IMPLEMENTATIONS, OF_8_BITS, TOLERANCE, Shape, error, exact, on_shapes, paged

SHAPES = {
    "page 16": Shape(),
    "page 64": Shape(page=64),
    "page 256": Shape(page=256),
    "head dim 96": Shape(key_dim=96, value_dim=96),
    "head dim 128, group of 4": Shape(heads=4, kv_heads=1, key_dim=128, value_dim=128),
    "no group": Shape(heads=2),
    "values shorter": Shape(key_dim=96, value_dim=64),
    "bfloat16": Shape(heads=6, dtype=torch.bfloat16),
    "bfloat16, page 256": Shape(heads=6, dtype=torch.bfloat16, page=256),
}
#: Triton pads groups and head dims to powers of two. On a CPU, ../cpu/attention and tests/replica/attention have them.
ONLY_TRITON = ("head dim 96", "head dim 128, group of 4", "no group", "values shorter")


def prefill(run, shape, q_lens, lengths, device, window=None, **terms):
    """The output of `run` and the expected output; padding rows have no queries."""
    rows = paged(shape, lengths, device)
    tokens = sum(q_lens)
    q = torch.randn(tokens, shape.heads, shape.key_dim, generator=torch.Generator().manual_seed(1))
    q = q.to(device, shape.dtype)
    out = torch.empty(tokens, shape.heads, shape.value_dim, dtype=shape.dtype, device=device)
    first = torch.tensor([0, *q_lens]).cumsum(0).int().to(device)
    rule = AttentionRule(shape.key_dim**-0.5, window, **terms)
    run(q, rows, first, rule, out)
    return out, exact(q, rows, q_lens, rule)


@pytest.mark.parametrize(("implementation", "shape"), on_shapes(SHAPES, ONLY_TRITON))
def test_equals_attention_in_float64(implementation, shape, device):
    """A whole prompt, a chunk after a prefix, a lone token, a row without queries, a prompt longer than a tile."""
    out, wanted = prefill(implementation().prefill, shape, [9, 40, 1, 0, 70], [9, 100, 33, 0, 70], device)

    assert error(out, wanted) < TOLERANCE[shape.dtype]


@pytest.mark.parametrize("implementation", OF_8_BITS)
@pytest.mark.parametrize("dtype", DTYPES_BESIDE_8_BITS, ids=str)
@pytest.mark.parametrize("window", [None, 30])
def test_keys_and_values_of_8_bits_are_exactly_what_is_stored(implementation, dtype, window, device):
    """Only the stored numbers are rounded."""
    shape = Shape(dtype=dtype, kv_dtype=torch.float8_e4m3fn)

    out, wanted = prefill(implementation().prefill, shape, [9, 40, 1, 0, 70], [9, 100, 33, 0, 70], device, window)

    assert error(out, wanted) < TOLERANCE[dtype]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("window", [1, 7, 64, 300])
def test_window_hides_all_but_the_last_keys(implementation, window, device):
    """Each query has its own window; tiles before all windows are skipped."""
    out, wanted = prefill(implementation().prefill, Shape(), [30, 20], [200, 20], device, window)

    assert error(out, wanted) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(("window", "softcap", "with_sinks"), [(None, 0.5, False), (20, None, True), (None, 0.5, True)])
def test_softcap_and_sinks_are_applied_in_every_dtype(implementation, window, softcap, with_sinks, device):
    """Gemma 2 has softcaps, gpt-oss has sinks."""
    sinks = torch.tensor([0.1, -4.0, 9.0, 3.5], device=device) if with_sinks else None
    for dtype in DTYPES_BESIDE_8_BITS:
        run, shape, terms = implementation().prefill, Shape(dtype=dtype), {"softcap": softcap, "sinks": sinks}
        out, wanted = prefill(run, shape, [9, 40, 1, 0, 70], [9, 100, 33, 0, 70], device, window, **terms)

        assert error(out, wanted) < TOLERANCE[dtype]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_a_token_without_numbers_reaches_those_who_see_it_and_no_others(implementation, window, number, device):
    """Otherwise an earlier prefix in the chunk would be cached as NaN and reused by other requests."""
    q_lens, lengths = [9, 100, 30], [9, 130, 30]
    clean, _ = prefill(implementation().prefill, Shape(), q_lens, lengths, device, window)

    def run(q, rows, first, rule, out):
        rows.values[rows.tables[1, 60 // 16].long(), 60 % 16] = number
        implementation().prefill(q, rows, first, rule, out)

    out, _ = prefill(run, Shape(), q_lens, lengths, device, window)

    seeing = torch.zeros(len(out), dtype=torch.bool)
    seeing[9 + 30 : 9 + 100 if window is None else 9 + 30 + window] = True
    torch.testing.assert_close(out[~seeing], clean[~seeing], rtol=1e-5, atol=1e-5)
    assert not out[seeing].isfinite().any()


@pytest.mark.parametrize("queries", [16, 32])
@pytest.mark.parametrize("q_lens", [[16], [16, 16, 16], [15, 1, 17, 31], [0, 33, 0, 1], [64, 0]], ids=str)
def test_every_query_has_a_tile(queries, q_lens, device):
    """Rows end at, before and after a tile's end: the grid is an upper bound, and excess tiles do nothing."""

    def run(q, rows, first, rule, out):
        kernel.prefill(q, rows, first, rule, out, kernel.Tiles(queries, 16, 8, 3))

    lengths = [count and count + 21 for count in q_lens]
    out, wanted = prefill(run, Shape(), q_lens, lengths, device)

    assert error(out, wanted) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_rows_without_queries_alone_are_no_error(implementation, device):
    """There is no output to write."""
    out, _ = prefill(implementation().prefill, Shape(), [0, 0, 0], [0, 0, 0], device)

    assert out.shape == (0, 4, 64)


@settings(max_examples=10, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 60)), min_size=1, max_size=4),
    st.sampled_from([16, 64, 256]),
    st.sampled_from([None, 1, 20, 100]),
)
def test_equals_float64_for_any_lengths(rows, page, window):
    """Cached and new parts of any length, and empty rows among them."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    q_lens = [count for count, _ in rows]
    lengths = [count and count + before for count, before in rows]

    def run(q, paged_rows, first, rule, out):
        kernel.prefill(q, paged_rows, first, rule, out, kernel.Tiles(16, 16, 8, 3))

    out, wanted = prefill(
        run, Shape(heads=2, kv_heads=1, key_dim=16, value_dim=16, page=page), q_lens, lengths, device, window
    )

    assert not len(out) or error(out, wanted) < TOLERANCE[torch.float32]
