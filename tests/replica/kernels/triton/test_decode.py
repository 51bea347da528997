"""Decode attention equals the definition in float64, whatever the lengths, pages, heads and dtype."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from homing.replica.kernels.triton import decode as kernel
from homing.replica.models.base import AttentionRule

from ..layouts import IMPLEMENTATIONS, TOLERANCE, Shape, error, exact, paged

SHAPES = {
    "page 16": Shape(),
    "page 64": Shape(page=64),
    "page 256": Shape(page=256),
    "head dim 96": Shape(key_dim=96, value_dim=96),
    "head dim 128": Shape(key_dim=128, value_dim=128),
    "no group": Shape(heads=2),
    "group of 8": Shape(heads=8, kv_heads=1),
    "group of 6": Shape(heads=12),
    "group of 20": Shape(heads=20, kv_heads=1),
    "values shorter": Shape(key_dim=96, value_dim=64),
    "bfloat16": Shape(dtype=torch.bfloat16),
    "bfloat16, page 256": Shape(dtype=torch.bfloat16, page=256),
    "bfloat16, page 64, head dim 128": Shape(dtype=torch.bfloat16, page=64, key_dim=128, value_dim=128),
}


def decode(implementation, shape, lengths, device, window=None):
    """What the kernel gives, and what it should give for the rows that are not padding."""
    rows = paged(shape, lengths, device)
    q = torch.randn(len(lengths), shape.heads, shape.key_dim, generator=torch.Generator().manual_seed(1))
    q = q.to(device, shape.dtype)
    out = torch.empty(len(lengths), shape.heads, shape.value_dim, dtype=shape.dtype, device=device)
    kernels, scale = implementation(), shape.key_dim**-0.5
    plan = kernels.plan_decode(rows.seq_lens, shape.kv_heads, window)
    kernels.decode(q, rows, plan, AttentionRule(scale, window=window), out)
    real = q[rows.seq_lens > 0]
    return out, exact(real, rows, [min(length, 1) for length in lengths], scale, window)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_equals_attention_in_float64(implementation, shape, device):
    """Lengths at, below and above pages and tiles; the long row is cut into several chunks."""
    out, wanted = decode(implementation, shape, [1, 17, 64, 200, 5], device)

    assert error(out, wanted) < TOLERANCE[shape.dtype]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("page", [16, 64, 256])
@pytest.mark.parametrize("lengths", [[5, 0, 70, 0, 33, 0, 0, 0], [0, 0, 9], [0, 1], [0, 0]], ids=str)
def test_padding_rows_are_zero_and_touch_no_other(implementation, lengths, page, device):
    """A batch is padded to the size of its graph; garbage there would be NaN in every later layer."""
    out, wanted = decode(implementation, Shape(page=page), lengths, device)

    padding = torch.tensor(lengths) == 0
    assert torch.equal(out[padding.to(device)], torch.zeros_like(out[padding.to(device)]))
    assert not any(lengths) or error(out[~padding.to(device)], wanted) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("window", [1, 16, 50, 500])
def test_window_hides_all_but_the_last_keys(implementation, window, device):
    """A sliding layer reads nothing before its window."""
    out, wanted = decode(implementation, Shape(), [3, 150, 49], device, window)

    assert error(out, wanted) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_softcap_and_sinks_are_honoured_by_all(implementation, device):
    """No kernel has them; whoever has none must not ignore them."""
    rows = paged(Shape(), [20, 3], device)
    q = torch.randn(2, 4, 64, device=device)
    rule = AttentionRule(0.3, softcap=2.0, sinks=torch.tensor([0.1, -1.0, 2.0, 0.5], device=device))
    kernels, out = implementation(), torch.empty(2, 4, 64, device=device)

    kernels.decode(q, rows, kernels.plan_decode(rows.seq_lens, 2, None), rule, out)

    reference, wanted = IMPLEMENTATIONS[0](), torch.empty(2, 4, 64, device=device)
    reference.decode(q, rows, None, rule, wanted)
    plain = torch.empty(2, 4, 64, device=device)
    reference.decode(q, rows, None, AttentionRule(0.3), plain)
    torch.testing.assert_close(out, wanted)
    assert not torch.allclose(out, plain, atol=1e-2)


def test_plan_covers_every_key_once_and_fills_the_programs(device):
    """Chunks of one length, as many as programs divided by KV heads, give or take a row's last one."""
    lengths = torch.tensor([0, 1, 3000, 64, 0, 65], dtype=torch.int32, device=device)

    plan = kernel.plan_decode(lengths, 2, None)

    size, first = int(plan.chunk_len), plan.first_chunk.tolist()
    assert [stop - start for start, stop in pairwise(first)] == [-(-length // size) for length in lengths.tolist()]
    assert size % kernel.TILE == 0
    assert first[0] == 0
    assert first[-1] <= plan.most_chunks


def spans_of(plan, lengths, window):
    """Which keys each row's chunks read, as the kernel reads the plan."""
    size, first = int(plan.chunk_len), plan.first_chunk.tolist()
    found = []
    for row, length in enumerate(lengths):
        start = length - min(length, window or length)
        chunks = range(first[row + 1] - first[row])
        found.append([key for n in chunks for key in range(start + n * size, min(start + (n + 1) * size, length))])
    return found


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(0, 700), min_size=1, max_size=9),
    st.sampled_from([1, 2, 3, 8]),
    st.sampled_from([None, 1, 64, 100, 1000]),
)
def test_any_plan_covers_each_row_s_keys_once_and_fits_its_buffers(lengths, kv_heads, window):
    """No length is read on the host, so the bound on chunks must hold for all."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    plan = kernel.plan_decode(torch.tensor(lengths, dtype=torch.int32, device=device), kv_heads, window)

    seen = [list(range(length - min(length, window or length), length)) for length in lengths]
    assert spans_of(plan, lengths, window) == seen
    assert int(plan.first_chunk[-1]) <= plan.most_chunks


@settings(max_examples=12, deadline=None)
@given(
    st.lists(st.integers(0, 90), min_size=1, max_size=6).filter(any),
    st.sampled_from([16, 64, 256]),
    st.sampled_from([None, 1, 20]),
    st.sampled_from([(2, 1), (3, 3), (6, 2)]),
)
def test_equals_float64_for_any_lengths(lengths, page, window, heads):
    """Splits at any place: tiles of 16, so that even short rows have several chunks."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shape = Shape(*heads, key_dim=16, value_dim=16, page=page)
    rows = paged(shape, lengths, device)
    q = torch.randn(len(lengths), shape.heads, 16, generator=torch.Generator().manual_seed(1)).to(device)
    out = torch.full((len(lengths), shape.heads, 16), torch.nan, device=device)

    plan = kernel.plan_decode(rows.seq_lens, shape.kv_heads, window, tile=16)
    kernel.decode(q, rows, plan, 0.25, out, tile=16)

    real = rows.seq_lens > 0
    wanted = exact(q[real], rows, [min(length, 1) for length in lengths], 0.25, window)
    assert error(out[real], wanted) < TOLERANCE[torch.float32]
    assert bool((out[~real] == 0).all())


def test_plan_of_windowed_layers_counts_what_they_see(device):
    """Chunks of keys that nobody sees would keep programs busy for nothing."""
    lengths = torch.tensor([5000, 100], dtype=torch.int32, device=device)

    plan = kernel.plan_decode(lengths, 2, 128)

    assert int(plan.chunk_len) <= 128
    assert int(plan.first_chunk[-1]) <= plan.most_chunks
