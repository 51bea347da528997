"""Decode attention equals float64 for all lengths, pages, heads and dtypes."""

import heapq
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from homing.replica.kernels.base import PagedRows
from homing.replica.kernels.triton import decode as kernel
from homing.replica.models.base import AttentionRule

from ..layouts import DTYPES_BESIDE_8_BITS, IMPLEMENTATIONS, OF_8_BITS, TOLERANCE, Shape, error, exact, on_shapes, paged

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
    "bfloat16": Shape(heads=6, dtype=torch.bfloat16),
    "bfloat16, page 256": Shape(heads=6, dtype=torch.bfloat16, page=256),
    "bfloat16, page 64, group of 16, head dim 128": Shape(16, 1, 128, 128, page=64, dtype=torch.bfloat16),
}
#: Triton pads groups and head dims to powers of two. On a CPU they are bounds of plain loops, and
#: tests/replica/attention has one query per KV head and shorter values.
ONLY_TRITON = ("head dim 96", "head dim 128", "no group", "group of 8", "group of 6", "values shorter")

TILES = kernel.tiles_for(torch.float32, 16)


def decode(implementation, shape, lengths, device, window=None, **terms):
    """The kernel's output, and the expected output of the rows that are not padding."""
    rows = paged(shape, lengths, device)
    q = torch.randn(len(lengths), shape.heads, shape.key_dim, generator=torch.Generator().manual_seed(1))
    q = q.to(device, shape.dtype)
    out = torch.empty(len(lengths), shape.heads, shape.value_dim, dtype=shape.dtype, device=device)
    kernels, rule = implementation(), AttentionRule(shape.key_dim**-0.5, window, **terms)
    plan = kernels.plan_decode(rows, shape.heads, window)
    kernels.decode(q, rows, plan, rule, out)
    real = q[rows.seq_lens > 0]
    return out, exact(real, rows, [min(length, 1) for length in lengths], rule)


@pytest.mark.parametrize(("implementation", "shape"), on_shapes(SHAPES, ONLY_TRITON))
def test_equals_attention_in_float64(implementation, shape, device):
    """Lengths at, below and above page and tile boundaries; the long row is split into several chunks."""
    out, wanted = decode(implementation, shape, [1, 17, 64, 200, 5], device)

    assert error(out, wanted) < TOLERANCE[shape.dtype]


@pytest.mark.parametrize("implementation", OF_8_BITS)
@pytest.mark.parametrize("dtype", DTYPES_BESIDE_8_BITS, ids=str)
@pytest.mark.parametrize("window", [None, 30])
def test_keys_and_values_of_8_bits_are_exactly_what_is_stored(implementation, dtype, window, device):
    """Only the stored numbers are rounded."""
    shape = Shape(dtype=dtype, kv_dtype=torch.float8_e4m3fn)

    out, wanted = decode(implementation, shape, [1, 17, 64, 200, 5], device, window)

    assert error(out, wanted) < TOLERANCE[dtype]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("page", [16, 64, 256])
@pytest.mark.parametrize("lengths", [[5, 0, 70, 0, 33, 0, 0, 0], [0, 0, 9], [0, 1], [0, 0]], ids=str)
def test_padding_rows_are_zero_and_touch_no_other(implementation, lengths, page, device):
    """A batch is padded to the size of its graph; garbage in padding would be NaN in every later layer."""
    out, wanted = decode(implementation, Shape(page=page), lengths, device)

    padding = torch.tensor(lengths) == 0
    assert torch.equal(out[padding.to(device)], torch.zeros_like(out[padding.to(device)]))
    assert not any(lengths) or error(out[~padding.to(device)], wanted) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("window", [1, 16, 50, 500])
def test_window_hides_all_but_the_last_keys(implementation, window, device):
    """A sliding-window layer reads nothing before its window."""
    out, wanted = decode(implementation, Shape(), [3, 150, 49], device, window)

    assert error(out, wanted) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(("window", "softcap", "with_sinks"), [(None, 0.5, False), (30, None, True), (None, 0.5, True)])
def test_softcap_and_sinks_are_applied_in_every_dtype(implementation, window, softcap, with_sinks, device):
    """A row in several chunks has one sink; padding rows have only the sink, so they are zero."""
    sinks = torch.tensor([0.1, -4.0, 9.0, 3.5], device=device) if with_sinks else None
    lengths = [1, 0, 200, 64, 0]
    for dtype in DTYPES_BESIDE_8_BITS:
        out, wanted = decode(implementation, Shape(dtype=dtype), lengths, device, window, softcap=softcap, sinks=sinks)

        real = torch.tensor(lengths) > 0
        assert error(out[real.to(device)], wanted) < TOLERANCE[dtype]
        assert bool((out[~real.to(device)] == 0).all())


def planned(lengths, kv_heads, window, programs, min_chunk):
    """The device's plan for rows of these lengths, with too many query heads to share a product between rows."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    pages = torch.empty(1, 16, kv_heads, 16, device=device)
    tables = torch.zeros(len(lengths), 1, dtype=torch.int32, device=device)
    rows = PagedRows(pages, pages, tables, torch.tensor(lengths, dtype=torch.int32, device=device))
    return kernel.plan_decode(rows, 16 * kv_heads, window, replace(TILES, keys=32), programs, min_chunk=min_chunk)


def chunks_of(lengths, kv_heads, window, tile, programs, shortest=1):
    """The expected plan, computed with numpy: chunks per row, and visible tiles per row."""
    tiles = -(-np.minimum(lengths, window or max(lengths)) // tile)
    least = -(-int(tiles.sum()) * kv_heads // programs)
    for turns in range(1, 17):
        size = max(shortest, (least + least // 10) // turns)
        chunks = -(-tiles // size)
        if chunks.sum() * kv_heads <= turns * programs or size * 10 <= least or size == shortest:
            return chunks, tiles
    raise AssertionError(f"no chunks for {lengths}")


def balance(lengths, kv_heads, window, tile, programs):
    """Efficiency of a step: its ideal time with equal shares of all tiles, divided by its slowest program's time."""
    chunks, tiles = chunks_of(np.asarray(lengths), kv_heads, window, tile, programs)
    busy = [0] * programs
    for count, of_row in zip(chunks.tolist(), tiles.tolist(), strict=True):
        ends = [number * of_row // max(count, 1) for number in range(count + 1)]
        for size in np.repeat(np.diff(ends), kv_heads).tolist():
            heapq.heapreplace(busy, busy[0] + size)  # the first idle program takes the next chunk
    return -(-int(tiles.sum()) * kv_heads // programs) / max(*busy, 1)


#: Equal rows, one long row among short ones, and lengths around tile and page boundaries.
MIXES = st.lists(
    st.tuples(st.one_of(st.sampled_from([0, 1, 32, 33, 1025, 32_768]), st.integers(0, 9000)), st.integers(1, 90)),
    min_size=1,
    max_size=6,
).map(lambda mix: [length for length, count in mix for _ in range(count)])


@settings(max_examples=100, deadline=None)
@given(MIXES.filter(any), st.sampled_from([1, 2, 8]), st.sampled_from([None, 1, 1000]), st.sampled_from([7, 132, 528]))
def test_no_mix_of_lengths_leaves_programs_idle(lengths, kv_heads, window, programs):
    """The step takes as long as its last program; other programs' idle time is unused bandwidth."""
    assert balance(lengths, kv_heads, window, 32, programs) >= 0.9


def test_rows_that_are_a_token_longer_than_chunks_are_balanced():
    """If all chunks had the same length, such rows would have a second chunk of one token each."""
    for length in (1024, 1025, 1056, 2049):
        assert balance([length] * 64, 8, None, 32, 528) >= 0.9
        assert balance([length] * 70, 8, None, 32, 528) >= 0.9


@settings(max_examples=25, deadline=None)
@given(MIXES, st.sampled_from([1, 3, 8]), st.sampled_from([None, 1, 1000]), st.sampled_from([6, 528]), st.booleans())
def test_the_device_s_plan_is_that_of_numpy_and_fits_its_buffers(lengths, kv_heads, window, programs, short):
    """The host never reads the lengths, so the bound on the number of chunks must hold for all of them."""
    plan = planned(lengths, kv_heads, window, programs, 1 if short else 128)

    chunks, _ = chunks_of(np.asarray(lengths), kv_heads, window, 32, programs, 1 if short else 4)
    assert [stop - start for start, stop in pairwise(plan.first_chunk.tolist())] == chunks.tolist()
    assert int(plan.first_chunk[-1]) <= plan.max_chunks
    assert not plan.progress.any()


@settings(max_examples=12, deadline=None)
@given(
    st.lists(st.integers(0, 90), min_size=1, max_size=6).filter(any),
    st.sampled_from([16, 64, 256]),
    st.sampled_from([None, 1, 20]),
    st.sampled_from([(2, 1), (3, 3), (6, 2)]),
)
def test_equals_float64_for_any_lengths(lengths, page, window, heads):
    """Tiles of 16 keys, so that even short rows are split into several chunks, at any place."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shape = Shape(*heads, key_dim=16, value_dim=16, page=page)
    rows = paged(shape, lengths, device)
    q = torch.randn(len(lengths), shape.heads, 16, generator=torch.Generator().manual_seed(1)).to(device)
    out = torch.full((len(lengths), shape.heads, 16), torch.nan, device=device)

    plan = kernel.plan_decode(rows, shape.heads, window, replace(TILES, keys=16), min_chunk=16)
    rule = AttentionRule(0.25, window)
    kernel.decode(q, rows, plan, rule, out)

    real = rows.seq_lens > 0
    wanted = exact(q[real], rows, [min(length, 1) for length in lengths], rule)
    assert error(out[real], wanted) < TOLERANCE[torch.float32]
    assert bool((out[~real] == 0).all())


def test_equal_bits_whichever_program_ends_last_and_however_many_rows_are_padding(device):
    """A launch resets the plan's progress for the next layer, and merges each row's chunks in a fixed order.

    A graph has more rows than its step, and its result must equal that of the step without a graph.
    """
    shape = Shape(heads=2, kv_heads=1, key_dim=16, value_dim=16)
    q, found = torch.randn(4, 2, 16, generator=torch.Generator().manual_seed(1)).to(device), []
    rule = AttentionRule(0.25, sinks=torch.tensor([0.5, 1.5], device=device))

    for lengths in ([7, 70], [7, 70, 0, 0]):
        rows = paged(shape, lengths, device)
        plan = kernel.plan_decode(rows, 2, None, replace(TILES, keys=16), min_chunk=16)
        for programs in (6, 6, 1, 3):
            found.append(torch.full((len(lengths), 2, 16), torch.nan, device=device))
            kernel.decode(q[: len(lengths)], rows, replace(plan, programs=programs), rule, found[-1])
        assert not plan.progress.any()

    assert int(plan.first_chunk[2] - plan.first_chunk[1]) > 2
    assert all(torch.equal(each[:2], found[0]) for each in found)


def test_rows_that_share_pages_read_them_once(device):
    """Rows need not be adjacent, because they are sorted by their pages; here two documents' rows alternate."""
    shape = Shape(heads=4, kv_heads=1, key_dim=16, value_dim=16)
    rows = paged(shape, [70, 39, 33, 50, 36, 90, 35, 40, 0], device)
    for row in range(2, 8):
        rows.tables[row, :2] = rows.tables[row % 2, :2]

    plan = kernel.plan_decode(rows, 4, None, replace(TILES, keys=16), min_shared=32, min_chunk=16)

    assert plan.shared.tolist() == [32, 32, 0]
    assert {frozenset(plan.order[:4].tolist()), frozenset(plan.order[4:8].tolist())} == {
        frozenset({0, 2, 4, 6}),
        frozenset({1, 3, 5, 7}),
    }
    first = plan.first_chunk.tolist()
    assert [first[span + 1] > first[span] for span in range(12)] == [True] * 8 + [False, True, True, False]


@settings(max_examples=8, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4), st.integers(0, 20)), min_size=2, max_size=6),
    st.sampled_from([(2, 1), (8, 1), (3, 3), (6, 2)]),
    st.sampled_from([None, 20]),
    st.sampled_from([6, 60]),
    st.booleans(),
)
def test_rows_that_share_pages_equal_float64(mix, heads, window, programs, sinks):
    """Rows share any number of pages with one of five prefixes, and may end inside a page."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shape = Shape(*heads, key_dim=16, value_dim=16)
    rows = paged(shape, [64] * 5 + [16 * pages + own for _, pages, own in mix], device)
    for row, (tree, pages, _) in enumerate(mix, start=5):
        rows.tables[row, :pages] = rows.tables[tree, :pages]
    rows = replace(rows, tables=rows.tables[5:], seq_lens=rows.seq_lens[5:])
    q = torch.randn(len(mix), shape.heads, 16, generator=torch.Generator().manual_seed(1)).to(device)
    out = torch.full((len(mix), shape.heads, 16), torch.nan, device=device)

    plan = kernel.plan_decode(rows, shape.heads, window, replace(TILES, keys=16), programs, min_shared=1, min_chunk=16)
    rule = AttentionRule(0.25, window, sinks=torch.linspace(-2, 2, shape.heads, device=device) if sinks else None)
    kernel.decode(q, rows, plan, rule, out)

    real = rows.seq_lens > 0
    lengths = [min(length, 1) for length in rows.seq_lens.tolist()]
    assert not real.any() or error(out[real], exact(q[real], rows, lengths, rule)) < TOLERANCE[torch.float32]
    assert bool((out[~real] == 0).all())
    assert sorted(plan.order.tolist()) == list(range(len(mix)))
    assert int(plan.first_chunk[-1]) * plan.pack <= plan.max_chunks
    assert not plan.progress.any()
