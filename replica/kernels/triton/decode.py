"""Decode attention over pages: split-KV by a plan that is computed on the device, so that one launch fits any lengths.

A plan cuts the keys of each row into equal chunks, as long as the step's work can still be dealt evenly. A fixed number
of programs takes pairs of a chunk and a KV head from a counter, so that whoever had short ones takes more of them; the
program that completes the last chunk of a row and head merges its chunks, in their order. So one row of 32k tokens
among many short ones keeps every multiprocessor busy, the host does not need the lengths, and equal steps give equal
bits. Which chunks a row has, and with them its rounding, depends on the step's other rows.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ..base import PagedRows
from .pages import dot, key_tile, pages_of, row_of, upcasts, value_tile

LOG2E = 1.4426950408889634
#: Where there are no multiprocessors.
_OTHER_PROGRAMS = 6
#: Rows that the plan kernel reads at a time: a constant, as a size that followed the rows would be compiled anew.
PLAN_ROWS = 256
#: Most chunks of a program whose chunks all have the tenth of its work that the plan wants at least, in whole tiles.
MOST_SHARES = 19
#: Numbers that a merge reads at a time.
MERGED = 2048


@dataclass(slots=True, frozen=True)
class Tiles:
    """Keys per step of the inner loop, and how a program processes them."""

    keys: int
    stages: int
    programs: int  #: as many as a multiprocessor's registers hold
    shared: int  #: most bytes of shared memory of a program
    warps: int = 4


def tiles_for(dtype: torch.dtype, dim: int) -> Tiles:
    """Tiles with two buffers of keys and values, or in large rows of float32 one, that do not spill.

    Chosen by cross-compilation (tests/gpu/compile.py); not run. Two of the stages are for the pages' numbers.
    """
    if dtype == torch.float32:
        return Tiles(16, 3, 4, 50 * 1024) if dim > 128 else Tiles(16, 5, 5, 42 * 1024)
    if dim > 128:
        return Tiles(16, 5, 3, 42 * 1024)
    return Tiles(32, 5, 4, 38 * 1024) if dim > 64 else Tiles(32, 5, 4, 20 * 1024)


def resident(tiles: Tiles, shared: int) -> int:
    """How many programs a multiprocessor with this many bytes of shared memory holds, which keeps 1 KB of each."""
    return min(tiles.programs, shared // (tiles.shared + 1024))


@dataclass(slots=True, frozen=True)
class DecodePlan:
    """Chunks of a step. Row i has chunks `first_chunk[i]` up to `first_chunk[i + 1]`, equal but for a tile."""

    first_chunk: torch.Tensor  #: [rows + 1] int32
    #: [1 + rows * KV heads] int32 zeros, as a launch leaves them: pairs taken; chunks completed of each row and head
    progress: torch.Tensor
    tiles: Tiles
    programs: int
    most_chunks: int
    window: int | None


def programs_of(device: torch.device, tiles: Tiles) -> int:
    """As many programs as the device runs at once."""
    if device.type != "cuda":
        return _OTHER_PROGRAMS
    about = torch.cuda.get_device_properties(device)
    return about.multi_processor_count * resident(tiles, about.shared_memory_per_multiprocessor)


def plan_decode(
    rows: PagedRows,
    heads: int,  # noqa: ARG001
    window: int | None,
    tiles: Tiles | None = None,
    programs: int | None = None,
) -> DecodePlan:
    """Split the keys of rows into chunks; no length is read back. `heads` are those of the queries."""
    count, device = len(rows.seq_lens), rows.seq_lens.device
    kv_heads, key_dim = rows.keys.shape[2:]
    tiles = tiles or tiles_for(rows.keys.dtype, max(key_dim, rows.values.shape[3]))
    programs = programs or programs_of(device, tiles)
    first_chunk = torch.empty(count + 1, dtype=torch.int32, device=device)
    progress = torch.empty(1 + count * kv_heads, dtype=torch.int32, device=device)
    _plan[(1,)](
        rows.seq_lens,
        first_chunk,
        progress,
        count,
        window or 0,
        PROGRAMS=programs,
        KV_HEADS=kv_heads,
        TILE=tiles.keys,
        BLOCK=PLAN_ROWS,
    )
    most = count + MOST_SHARES * programs // kv_heads
    return DecodePlan(first_chunk, progress, tiles, programs, most, window)


def decode(q: torch.Tensor, rows: PagedRows, plan: DecodePlan, scale: float, out: torch.Tensor) -> None:
    """`base.TorchKernels.decode` for rules without softcap and sinks."""
    count, heads, key_dim = q.shape
    kv_heads, value_dim = rows.keys.shape[2], rows.values.shape[3]
    group = heads // kv_heads
    flat = triton.next_power_of_2(group * value_dim)
    partial = torch.empty(plan.most_chunks, heads, value_dim, dtype=torch.float32, device=q.device)
    weights = torch.empty(plan.most_chunks, heads, dtype=torch.float32, device=q.device)
    _decode[(plan.programs,)](
        q,
        rows.keys,
        rows.values,
        rows.tables,
        rows.seq_lens,
        plan.first_chunk,
        plan.progress,
        partial,
        weights,
        out,
        count,
        scale * LOG2E,
        plan.window or 0,
        *q.stride()[:2],
        *rows.keys.stride()[:3],
        *rows.values.stride()[:3],
        *out.stride()[:2],
        rows.tables.stride(0),
        KV_HEADS=kv_heads,
        GROUP=group,
        GROUP_PAD=max(16, triton.next_power_of_2(group)),
        DK=key_dim,
        DK_PAD=triton.next_power_of_2(key_dim),
        DV=value_dim,
        DV_PAD=triton.next_power_of_2(value_dim),
        FLAT=flat,
        MERGED=max(1, MERGED // flat),
        PAGE=rows.keys.shape[1],
        TILE=plan.tiles.keys,
        UPCASTS=upcasts(q),
        num_warps=plan.tiles.warps,
        num_stages=plan.tiles.stages,
    )


@triton.jit(do_not_specialize=["rows", "window"], do_not_specialize_on_alignment=["seq_lens"])
def _plan(
    seq_lens,
    first_chunk,
    progress,
    rows,
    window,
    PROGRAMS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program: the longest chunks with which no program has a tenth more work than it must, and their sum by rows.

    If programs take n chunks of at most c tiles each in any order, whoever is idle first, the last one ends after at
    most c times n / programs, rounded up, and after at most c more than an equal share. Lengths are in tiles.
    """
    total = tl.zeros([], tl.int64)
    for start in range(0, rows, BLOCK):
        total += tl.sum(_tiles(seq_lens, start + tl.arange(0, BLOCK), rows, window, TILE).to(tl.int64), 0)
    least = ((total * KV_HEADS + PROGRAMS - 1) // PROGRAMS).to(tl.int32)
    turns = 1 + tl.arange(0, 16)
    sizes = tl.maximum((least + least // 10) // turns, 1)
    counts = tl.zeros([16], tl.int32)
    for start in range(0, rows, BLOCK):
        tiles = _tiles(seq_lens, start + tl.arange(0, BLOCK), rows, window, TILE)
        counts += tl.sum((tiles[:, None] + sizes[None, :] - 1) // sizes[None, :], 0)
    fits = (counts * KV_HEADS <= turns * PROGRAMS) | (sizes * 10 <= least)
    size = tl.max(tl.where(fits, sizes, 1), 0)
    before = tl.zeros([], tl.int32)
    for start in range(0, rows, BLOCK):
        i = start + tl.arange(0, BLOCK)
        tiles = _tiles(seq_lens, i, rows, window, TILE)
        chunks = tl.where(i < rows, tl.maximum((tiles + size - 1) // size, 1), 0)  # a padding row's writes its zeros
        upto = before + tl.cumsum(chunks, 0)
        tl.store(first_chunk + i, upto - chunks, mask=i < rows)
        before += tl.sum(chunks, 0)
    tl.store(first_chunk + rows, before)
    for start in range(0, 1 + rows * KV_HEADS, BLOCK):
        i = start + tl.arange(0, BLOCK)
        tl.store(progress + i, tl.zeros([BLOCK], tl.int32), mask=i < 1 + rows * KV_HEADS)


@triton.jit
def _tiles(seq_lens, i, rows, window, TILE: tl.constexpr):
    """The number of tiles that each of the rows `i` sees; 0 beyond the last row."""
    length = tl.load(seq_lens + i, mask=i < rows, other=0)
    return (tl.where(window > 0, tl.minimum(length, window), length) + TILE - 1) // TILE


@triton.jit
def _attend_chunk(
    query, keys, values, table, start, end, scale, k_page, k_token, v_page, v_token, GROUP_PAD: tl.constexpr,
    DK: tl.constexpr, DK_PAD: tl.constexpr, DV: tl.constexpr, DV_PAD: tl.constexpr, PAGE: tl.constexpr,
    TILE: tl.constexpr, UPCASTS: tl.constexpr,
):  # fmt: skip
    """Softmax over keys `start` up to `end` in base 2: the weighted values, and log2 of the weights' sum.

    Zeros if there are no keys.
    """
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
    total = tl.maximum(total, 1.0)  # the likeliest key weighs 1, so only a chunk without keys has less
    return summed / total[:, None], greatest + tl.log2(total)


@triton.jit
def _merge(
    partial, weights, chunk, stop, heads, HEADS: tl.constexpr, FLAT: tl.constexpr, MERGED: tl.constexpr,
    DV: tl.constexpr, REAL: tl.constexpr,
):  # fmt: skip
    """The mean of chunks `chunk` up to `stop` by their weights: [FLAT], the heads of a group side by side.

    Read from L2: other programs wrote them.
    """
    e = tl.arange(0, FLAT)
    greatest = tl.full([FLAT], float("-inf"), tl.float32)
    total = tl.zeros([FLAT], tl.float32)
    summed = tl.zeros([FLAT], tl.float32)
    for start in tl.range(chunk, stop, MERGED, num_stages=1):
        some = start + tl.arange(0, MERGED)[:, None]
        there = (some < stop) & (e < REAL)[None, :]
        place = some * HEADS + heads
        weight = tl.load(weights + place + (e // DV)[None, :], mask=there, other=float("-inf"), cache_modifier=".cg")
        mean = tl.load(partial + place * DV + e[None, :], mask=there, other=0.0, cache_modifier=".cg")
        highest = tl.maximum(tl.maximum(greatest, tl.max(weight, 0)), -1e30)  # beyond the heads there are none
        kept = tl.exp2(greatest - highest)
        share = tl.exp2(weight - highest[None, :])
        summed = summed * kept + tl.sum(share * mean, 0)
        total = total * kept + tl.sum(share, 0)
        greatest = highest
    return summed / tl.maximum(total, 1.0)  # the likeliest chunk weighs 1


@triton.jit(do_not_specialize=["rows", "window", "table_row"], do_not_specialize_on_alignment=["tables", "seq_lens"])
def _decode(
    q, keys, values, tables, seq_lens, first_chunk, progress, partial, weights, out, rows, scale, window, q_row, q_head,
    k_page, k_token, k_head, v_page, v_token, v_head, out_row, out_head, table_row, KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, DK: tl.constexpr, DK_PAD: tl.constexpr, DV: tl.constexpr,
    DV_PAD: tl.constexpr, FLAT: tl.constexpr, MERGED: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr,
    UPCASTS: tl.constexpr,
):  # fmt: skip
    """Take pairs of a chunk and a KV head until there are none; the query heads of a group are matrix rows."""
    items = tl.load(first_chunk + rows) * KV_HEADS
    g = tl.arange(0, GROUP_PAD)
    dk = tl.arange(0, DK_PAD)
    dv = tl.arange(0, DV_PAD)
    item = tl.atomic_add(progress, 1, sem="relaxed")
    while item < items:
        head = item % KV_HEADS
        chunk = item // KV_HEADS
        row = row_of(first_chunk, chunk, rows, 1, 0)
        first = tl.load(first_chunk + row)
        stop = tl.load(first_chunk + row + 1)
        length = tl.load(seq_lens + row)
        seen = tl.minimum(length, window) if window > 0 else length
        tiles = (seen + TILE - 1) // TILE
        start = length - seen + (chunk - first) * tiles // (stop - first) * TILE
        end = tl.minimum(length - seen + (chunk - first + 1) * tiles // (stop - first) * TILE, length)
        heads = head * GROUP + g
        q_at = row * q_row + heads[:, None] * q_head + dk[None, :]
        query = tl.load(q + q_at, mask=(g[:, None] < GROUP) & (dk[None, :] < DK), other=0.0)
        mean, weight = _attend_chunk(
            query, keys + head * k_head, values + head * v_head, tables + row * table_row, start, end, scale,
            k_page, k_token, v_page, v_token, GROUP_PAD, DK, DK_PAD, DV, DV_PAD, PAGE, TILE, UPCASTS,
        )  # fmt: skip
        real = (g[:, None] < GROUP) & (dv[None, :] < DV)
        if stop - first == 1:
            out_at = row * out_row + heads[:, None] * out_head + dv[None, :]
            tl.store(out + out_at, mean.to(out.dtype.element_ty), mask=real)
        else:
            place = chunk * (KV_HEADS * GROUP) + heads
            tl.store(partial + place[:, None] * DV + dv[None, :], mean, mask=real)
            tl.store(weights + place, weight, mask=g < GROUP)
            tl.debug_barrier()  # all threads have written before one of them says so
            completed = progress + 1 + row * KV_HEADS + head
            if tl.atomic_add(completed, 1, sem="acq_rel", scope="gpu") == stop - first - 1:
                e = tl.arange(0, FLAT)
                merged = _merge(
                    partial, weights, first, stop, head * GROUP, KV_HEADS * GROUP, FLAT, MERGED, DV, GROUP * DV
                )
                out_at = row * out_row + (head * GROUP + e // DV) * out_head + e % DV
                tl.store(out + out_at, merged.to(out.dtype.element_ty), mask=e < GROUP * DV)
                tl.store(completed, 0)
        item = tl.atomic_add(progress, 1, sem="relaxed")
    if item == items + tl.num_programs(0) - 1:  # every program has taken one too many: the next launch starts afresh
        tl.store(progress, 0)
