"""Decode attention over pages: split-KV by a plan that is computed on the device, so that one launch fits any lengths.

A plan splits all rows' keys into chunks of equal length, such that chunks times KV heads are about the number of
programs. A fixed number of programs processes the chunks; a second kernel merges the chunks of each row. So one row of
32k tokens among many short ones still keeps every multiprocessor busy, and the host does not need the lengths.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ..base import PagedRows
from .pages import dot, key_tile, pages_of, row_of, upcasts, value_tile

LOG2E = 1.4426950408889634
#: Keys per step of the inner loop. 64 keeps registers at 124 to 147 without spills (cross-compiled for sm_90; not run).
TILE = 64
#: In float32 with head dims above 128, where 64 spill 12 KB of registers and exceed the shared memory of sm_86.
SMALL_TILE = 16
#: Programs per multiprocessor: the number that fits by registers and shared memory at that tile. Not measured.
PROGRAMS_PER_PROCESSOR = 4
_OTHER_PROGRAMS = 6
#: Rows that the plan kernel reads at a time: a constant, as a size that followed the rows would be compiled anew.
PLAN_ROWS = 256


@dataclass(slots=True, frozen=True)
class DecodePlan:
    """Chunks of a step. Row i has chunks `first_chunk[i]` up to `first_chunk[i + 1]`, each of `chunk_len` keys."""

    first_chunk: torch.Tensor  #: [rows + 1] int32
    chunk_len: torch.Tensor  #: [1] int32
    programs: int
    most_chunks: int
    window: int | None


def programs_of(device: torch.device) -> int:
    if device.type != "cuda":
        return _OTHER_PROGRAMS
    return PROGRAMS_PER_PROCESSOR * torch.cuda.get_device_properties(device).multi_processor_count


def plan_decode(seq_lens: torch.Tensor, kv_heads: int, window: int | None, tile: int = TILE) -> DecodePlan:
    """Split the keys of rows with these lengths into chunks; no length is read back."""
    rows, device = len(seq_lens), seq_lens.device
    programs = programs_of(device)
    first_chunk = torch.empty(rows + 1, dtype=torch.int32, device=device)
    chunk_len = torch.empty(1, dtype=torch.int32, device=device)
    most = rows + programs // kv_heads + 1
    _plan[(1,)](
        seq_lens,
        first_chunk,
        chunk_len,
        rows,
        window or 0,
        ITEMS=programs,
        KV_HEADS=kv_heads,
        TILE=tile,
        BLOCK=PLAN_ROWS,
    )
    return DecodePlan(first_chunk, chunk_len, programs, most, window)


def decode(
    q: torch.Tensor, rows: PagedRows, plan: DecodePlan, scale: float, out: torch.Tensor, tile: int | None = None
) -> None:
    """`base.TorchKernels.decode` for rules without softcap and sinks."""
    count, heads, key_dim = q.shape
    kv_heads, value_dim = rows.keys.shape[2], rows.values.shape[3]
    group = heads // kv_heads
    large = q.dtype == torch.float32 and max(key_dim, value_dim) > 128
    tile = tile or (SMALL_TILE if large else TILE)
    partial = torch.empty(plan.most_chunks, heads, value_dim, dtype=torch.float32, device=q.device)
    weights = torch.empty(plan.most_chunks, heads, dtype=torch.float32, device=q.device)
    dims = {"DV": value_dim, "DV_PAD": triton.next_power_of_2(value_dim)}
    _decode[(plan.programs,)](
        q,
        rows.keys,
        rows.values,
        rows.tables,
        rows.seq_lens,
        plan.first_chunk,
        plan.chunk_len,
        partial,
        weights,
        count,
        scale * LOG2E,
        plan.window or 0,
        *q.stride()[:2],
        *rows.keys.stride()[:3],
        *rows.values.stride()[:3],
        rows.tables.stride(0),
        KV_HEADS=kv_heads,
        GROUP=group,
        GROUP_PAD=max(16, triton.next_power_of_2(group)),
        DK=key_dim,
        DK_PAD=triton.next_power_of_2(key_dim),
        PAGE=rows.keys.shape[1],
        TILE=tile,
        UPCASTS=upcasts(q),
        num_warps=4,
        num_stages=3,
        **dims,
    )
    _merge[(count, heads)](partial, weights, plan.first_chunk, out, *out.stride()[:2], HEADS=heads, **dims, num_warps=1)


@triton.jit(do_not_specialize=["rows", "window"], do_not_specialize_on_alignment=["seq_lens"])
def _plan(
    seq_lens,
    first_chunk,
    chunk_len,
    rows,
    window,
    ITEMS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program: the chunk length, and the exclusive sum of the rows' chunk counts."""
    total = tl.zeros([], tl.int64)
    for start in range(0, rows, BLOCK):
        total += tl.sum(_seen(seq_lens, start + tl.arange(0, BLOCK), rows, window).to(tl.int64), 0)
    wanted = (total * KV_HEADS + ITEMS - 1) // ITEMS
    size = tl.maximum((wanted + TILE - 1) // TILE * TILE, TILE).to(tl.int32)
    before = tl.zeros([], tl.int32)
    for start in range(0, rows, BLOCK):
        i = start + tl.arange(0, BLOCK)
        chunks = (_seen(seq_lens, i, rows, window) + size - 1) // size
        upto = before + tl.cumsum(chunks, 0)
        tl.store(first_chunk + i, upto - chunks, mask=i < rows)
        before += tl.sum(chunks, 0)
    tl.store(first_chunk + rows, before)
    tl.store(chunk_len, size)


@triton.jit
def _seen(seq_lens, i, rows, window):
    """The number of tokens that each of the rows `i` sees; 0 beyond the last row."""
    length = tl.load(seq_lens + i, mask=i < rows, other=0)
    return tl.where(window > 0, tl.minimum(length, window), length)


@triton.jit
def _attend_chunk(
    query, keys, values, table, start, end, scale, k_page, k_token, v_page, v_token, GROUP_PAD: tl.constexpr,
    DK: tl.constexpr, DK_PAD: tl.constexpr, DV: tl.constexpr, DV_PAD: tl.constexpr, PAGE: tl.constexpr,
    TILE: tl.constexpr, UPCASTS: tl.constexpr,
):  # fmt: skip
    """Softmax over keys `start` up to `end` in base 2: the weighted values, and log2 of the weights' sum."""
    greatest = tl.full([GROUP_PAD], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_PAD], tl.float32)
    summed = tl.zeros([GROUP_PAD, DV_PAD], tl.float32)
    for at in range(start, end, TILE):
        token = at + tl.arange(0, TILE)
        there = token < end
        page = pages_of(table, token, there, PAGE)
        key = key_tile(keys, page, token, there, k_page, k_token, DK, DK_PAD, PAGE)
        scores = dot(query, key, UPCASTS) * scale
        scores = tl.where(there[None, :], scores, float("-inf"))
        highest = tl.maximum(greatest, tl.max(scores, 1))
        weights = tl.exp2(scores - highest[:, None])
        kept = tl.exp2(greatest - highest)
        total = total * kept + tl.sum(weights, 1)
        value = value_tile(values, page, token, there, v_page, v_token, DV, DV_PAD, PAGE)
        summed = summed * kept[:, None] + dot(weights.to(value.dtype), value, UPCASTS)
        greatest = highest
    return summed / total[:, None], greatest + tl.log2(total)


@triton.jit(do_not_specialize=["rows", "window", "table_row"], do_not_specialize_on_alignment=["tables", "seq_lens"])
def _decode(
    q, keys, values, tables, seq_lens, first_chunk, chunk_len, partial, weights, rows, scale, window, q_row, q_head,
    k_page, k_token, k_head, v_page, v_token, v_head, table_row, KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr, DK: tl.constexpr, DK_PAD: tl.constexpr, DV: tl.constexpr, DV_PAD: tl.constexpr,
    PAGE: tl.constexpr, TILE: tl.constexpr, UPCASTS: tl.constexpr,
):  # fmt: skip
    """Each program processes every n-th pair of chunk and KV head; the query heads of a group are matrix rows."""
    size = tl.load(chunk_len)
    g = tl.arange(0, GROUP_PAD)
    dk = tl.arange(0, DK_PAD)
    dv = tl.arange(0, DV_PAD)
    for item in range(tl.program_id(0), tl.load(first_chunk + rows) * KV_HEADS, tl.num_programs(0)):
        chunk = item // KV_HEADS
        head = item % KV_HEADS
        row = row_of(first_chunk, chunk, rows, 0)
        length = tl.load(seq_lens + row)
        seen = tl.minimum(length, window) if window > 0 else length
        start = length - seen + (chunk - tl.load(first_chunk + row)) * size
        heads = head * GROUP + g
        q_at = row * q_row + heads[:, None] * q_head + dk[None, :]
        query = tl.load(q + q_at, mask=(g[:, None] < GROUP) & (dk[None, :] < DK), other=0.0)
        mean, weight = _attend_chunk(
            query, keys + head * k_head, values + head * v_head, tables + row * table_row,
            start, tl.minimum(start + size, length), scale, k_page, k_token, v_page, v_token,
            GROUP_PAD, DK, DK_PAD, DV, DV_PAD, PAGE, TILE, UPCASTS,
        )  # fmt: skip
        place = chunk * (KV_HEADS * GROUP) + heads
        tl.store(partial + place[:, None] * DV + dv[None, :], mean, mask=(g[:, None] < GROUP) & (dv[None, :] < DV))
        tl.store(weights + place, weight, mask=g < GROUP)


@triton.jit
def _merge(
    partial, weights, first_chunk, out, out_row, out_head, HEADS: tl.constexpr, DV: tl.constexpr, DV_PAD: tl.constexpr
):
    """The mean of a row's chunks by their weights; zero for a row without any."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    d = tl.arange(0, DV_PAD)
    greatest = -float("inf")
    total = 0.0
    summed = tl.zeros([DV_PAD], tl.float32)
    for chunk in range(tl.load(first_chunk + row), tl.load(first_chunk + row + 1)):
        weight = tl.load(weights + chunk * HEADS + head)
        highest = tl.maximum(greatest, weight)
        kept = tl.exp2(greatest - highest)
        share = tl.exp2(weight - highest)
        summed = summed * kept + share * tl.load(partial + (chunk * HEADS + head) * DV + d, mask=d < DV, other=0.0)
        total = total * kept + share
        greatest = highest
    mean = summed / tl.maximum(total, 1.0)  # the likeliest chunk weighs 1, so only a row without chunks has less
    tl.store(out + row * out_row + head * out_head + d, mean.to(out.dtype.element_ty), mask=d < DV)
