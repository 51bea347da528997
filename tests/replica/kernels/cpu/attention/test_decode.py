"""Decode attention on a CPU equals float64, with native and with widened instructions."""

import numpy as np
import pytest
import torch

from homing.replica.kernels.base import PagedRows, TorchKernels
from homing.replica.kernels.cpu.attention.decode import _share_pages, decode
from homing.replica.kernels.cpu.attention.decode_loops import PART, fills_vectors
from homing.replica.kernels.cpu.runtime.call_recording import Arena, record
from homing.replica.kernels.cpu.runtime.scalars import storage_of
from homing.replica.models.base import AttentionRule

from ...layouts import TOLERANCE, Shape, error, exact, paged

CPU, BFLOAT16 = torch.device("cpu"), torch.bfloat16
SHAPES = {
    "one query a head": Shape(heads=2, dtype=BFLOAT16),
    "three": Shape(heads=6, dtype=BFLOAT16),
    "sixteen, head dim 128": Shape(heads=16, kv_heads=1, key_dim=128, value_dim=128, dtype=BFLOAT16),
    "seven, values shorter, page 64": Shape(heads=14, key_dim=96, value_dim=32, page=64, dtype=BFLOAT16),
}


@pytest.mark.usefixtures("instructions")
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("window", [None, 1, 20, 1_100])
def test_equals_attention_in_float64(shape, window):
    """Lengths begin and end inside vectors and parts; unused slots hold NaN, and padding rows become 0."""
    lengths = [1, 17, 0, 64, 200, 5, 2 * PART + 200]
    rows, scale = paged(shape, lengths, CPU), 0.2
    q = torch.randn(len(lengths), shape.heads, shape.key_dim).bfloat16()
    out = torch.full((len(lengths), shape.heads, shape.value_dim), torch.nan, dtype=BFLOAT16)

    decode(q, rows, AttentionRule(scale, window=window), out)

    real = rows.seq_lens > 0
    wanted = exact(q[real], rows, [min(length, 1) for length in lengths], AttentionRule(scale, window))
    assert error(out[real], wanted) < TOLERANCE[BFLOAT16]
    assert torch.equal(out[~real], torch.zeros_like(out[~real]))


@pytest.mark.usefixtures("instructions")
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_softcap_and_sinks_equal_plain_torch(shape):
    """Models with such rules use the same kernel; a padding row stays 0."""
    lengths = [1, 17, 0, PART + 1]
    rows, q = paged(shape, lengths, CPU), torch.randn(len(lengths), shape.heads, shape.key_dim).bfloat16()
    rule = AttentionRule(0.5, softcap=2.0, sinks=torch.linspace(-1, 2, shape.heads))
    out, wanted = (torch.full((len(q), shape.heads, shape.value_dim), torch.nan, dtype=BFLOAT16) for _ in range(2))

    decode(q, rows, rule, out)

    TorchKernels().decode(q, rows, None, rule, wanted)
    assert error(out, wanted.double()) < TOLERANCE[BFLOAT16]
    assert torch.equal(out[2], torch.zeros_like(out[2]))


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(("dtype", "heads"), [(torch.float32, 4), (BFLOAT16, 6)], ids=str)
def test_a_long_row_is_the_same_alone_among_others_and_by_any_number_of_threads(dtype, heads, shared):
    """Bit for bit, also in a repeatedly run recorded step: threads share the row, and the last one merges it.

    Rows that share pages are computed one head at a time, others all heads of a page together.
    """
    shape, lengths = Shape(heads=heads, dtype=dtype), [3, 3 * PART + 5, PART, 900]
    rows, q = paged(shape, lengths, CPU), torch.randn(len(lengths), heads, shape.key_dim).to(dtype)
    if shared:
        rows.tables[2] = rows.tables[1]
    rule, before = AttentionRule(0.2), torch.get_num_threads()

    def attended(first, stop):
        out = q.new_empty(stop - first, heads, shape.value_dim)
        own = PagedRows(rows.keys, rows.values, rows.tables[first:stop], rows.seq_lens[first:stop])
        decode(q[first:stop], own, rule, out)
        return out

    alone, found = torch.cat([attended(row, row + 1) for row in range(4)]), []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        with torch.inference_mode():
            step = record(Arena(), lambda: attended(0, 4))
            found += [attended(0, 4), *(step.run().clone() for _ in range(3))]
    torch.set_num_threads(before)

    assert all(torch.equal(each, alone) for each in found)


@pytest.mark.parametrize(
    ("first_pages", "lengths", "share"),
    [
        ([1, 2, 3], [5, 5, 5], False),
        ([1, 2, 2], [5, 5, 5], True),
        ([1, 2, 1], [5, 5, 5], True),
        ([0, 3, 0], [0, 5, 0], False),
        ([4], [9], False),
        ([], [], False),
    ],
)
def test_rows_share_pages_if_they_begin_with_the_same_one(first_pages, lengths, share):
    """Padding rows have no pages, whatever their tables hold."""
    tables = np.array([[page, 7] for page in first_pages], dtype=np.int32).reshape(-1, 2)

    assert _share_pages(tables.ctypes.data, 2, np.array(lengths, dtype=np.int32)) == share


@pytest.mark.parametrize(
    ("sizes", "fit"),
    [((64, 64, 16), True), ((128, 32, 256), True), ((48, 64, 16), False), ((64, 80, 16), False), ((64, 64, 8), False)],
)
def test_heads_and_pages_must_fill_vectors(sizes, fit):
    """Other sizes are computed element by element, and float32 always is."""
    assert fills_vectors(storage_of(BFLOAT16), *sizes) is fit
    assert not fills_vectors(storage_of(torch.float32), *sizes)
