"""Decode attention over pages: split-KV with a plan that is computed on the device, so one launch fits any lengths.

The plan sorts rows by their pages and packs as many neighbours as fill a matrix product with their query heads. The
prefix that a pack's rows share is one span of keys, read once for all of them; each row's remaining keys are a span of
their own. Spans are cut into equal chunks, the longest with which the step's work can still be distributed evenly.

A fixed number of programs takes pairs of a chunk and a KV head from a counter, so programs with short chunks take more
of them. The program that completes the last chunk of a row and head merges the chunks in order. So one row of 32k
tokens among many short ones keeps every multiprocessor busy, the host does not need the lengths, and equal steps give
equal bits. A row's chunks, and with them its rounding, depend on the other rows of the step.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ...models.base import AttentionRule
from ..base import PagedRows
from .pages import LOG2E, dot, key_tile, pages_of, row_of, score_terms, scored, upcasts, value_tile

#: Number of programs on devices other than CUDA.
_OTHER_PROGRAMS = 6
#: Rows that the plan kernel reads per iteration. Constant, because each new size would compile the kernel again.
PLAN_ROWS = 256
#: Most chunks per program if each is at least a tenth of the program's work, which the plan ensures, in whole tiles.
MAX_SHARES = 19
#: Rows that a program of `_sort` places, and rows that it compares them with per iteration.
SORTED, COMPARED = 16, 64
#: Registers of a multiprocessor; a thread gets a multiple of eight.
REGISTERS = 65536
#: Numbers that a merge reads per iteration.
MERGED = 2048
#: Fewest matrix rows of a product; the query heads of several rows may fill them.
MIN_ROWS = 16
#: Fewest keys that rows must share to be read once; with fewer, the additional chunks cost more. Not measured.
MIN_SHARED = 128
#: Fewest keys of a chunk, if a row has as many: shorter ones take longer to merge than they save. On an H200, layers
#: of 16 heads took 16 us for one row of 1,024 tokens, 25 us with 16 and 18 us with 128; 4,096 tokens: 27, 27 and 25 us.
MIN_CHUNK = 64
#: More keys than any row has.
NOTHING = 1 << 30


@dataclass(slots=True, frozen=True)
class Tiles:
    """Keys per iteration of the inner loop, and a program's resources."""

    keys: int
    stages: int
    programs: int  #: per multiprocessor; its registers are divided among them
    shared: int  #: upper bound on a program's shared memory in bytes
    warps: int = 4


def tiles_for(dtype: torch.dtype, dim: int) -> Tiles:
    """Tiles that do not spill, with two buffers of keys and values, or one for large rows.

    Chosen by cross-compilation (tests/gpu/compile.py); not run. Two of the stages load page numbers. Only float32 rows
    of more than 256 elements spill, up to 240 bytes: they need all registers.
    """
    if dim > 256:
        return Tiles(16, 3, 1, 98 * 1024, 8) if dtype == torch.float32 else Tiles(16, 3, 2, 49 * 1024, 8)
    if dtype == torch.float32:
        if dim > 64:
            return Tiles(16, 3, 2, 50 * 1024, 8) if dim > 128 else Tiles(16, 5, 2, 42 * 1024, 8)
        return Tiles(16, 5, 4, 22 * 1024)
    if dim > 128:
        return Tiles(16, 5, 3, 42 * 1024)
    return Tiles(32, 5, 4, 38 * 1024) if dim > 64 else Tiles(32, 5, 4, 20 * 1024)


def resident(tiles: Tiles, shared: int) -> int:
    """Programs that a multiprocessor with `shared` bytes of shared memory runs at once; it reserves 1 KB for each."""
    return min(tiles.programs, shared // (tiles.shared + 1024))


@dataclass(slots=True, frozen=True)
class DecodePlan:
    """The chunks of a step. Span i has chunks `first_chunk[i]` up to `first_chunk[i + 1]`, equal to within a tile.

    The first spans are the rows' own, ordered by `order`; the others are the packs' shared spans.
    """

    first_chunk: torch.Tensor  #: [rows + packs + 1] int32
    #: [1 + rows * KV heads] int32: pairs taken; chunks completed per row and head. Zero before and after a launch
    progress: torch.Tensor
    order: torch.Tensor  #: [rows] int32
    shared: torch.Tensor  #: [packs] int32 number of shared keys
    pack: int  #: rows per pack; 1: no packs, and `order` is not used
    tiles: Tiles
    programs: int
    max_chunks: int
    window: int | None


def programs_of(device: torch.device, tiles: Tiles) -> int:
    """The number of programs that the device runs at once."""
    if device.type != "cuda":
        return _OTHER_PROGRAMS
    about = torch.cuda.get_device_properties(device)
    return about.multi_processor_count * resident(tiles, about.shared_memory_per_multiprocessor)


def plan_decode(
    rows: PagedRows,
    heads: int,
    window: int | None,
    tiles: Tiles | None = None,
    programs: int | None = None,
    min_shared: int = MIN_SHARED,
    min_chunk: int = MIN_CHUNK,
) -> DecodePlan:
    """Split the rows' keys into chunks without reading lengths back. `heads` is the number of query heads.

    Rows share no keys in layers with a window, because each row sees different ones.
    """
    count, device = len(rows.seq_lens), rows.seq_lens.device
    page, kv_heads, key_dim = rows.keys.shape[1:]
    tiles = tiles or tiles_for(rows.keys.dtype, max(key_dim, rows.values.shape[3]))
    programs = programs or programs_of(device, tiles)
    pack = max(1, MIN_ROWS * kv_heads // heads)
    packs = -(-count // pack) if pack > 1 else 0
    spans = count + packs
    first_chunk, progress, order, shared = (
        torch.empty(size, dtype=torch.int32, device=device) for size in (spans + 1, 1 + count * kv_heads, count, packs)
    )
    tables = rows.tables, rows.seq_lens, rows.tables.stride(0)
    if packs:
        _sort[(-(-count // SORTED),)](*tables, order, progress, count, PAGE=page, SORTED=SORTED, BLOCK=COMPARED)
    _plan[(max(packs, 1),)](
        *tables, first_chunk, progress, order, shared, count, window or 0, NOTHING if window else min_shared,
        PAGE=page, PACK=pack, PROGRAMS=programs, KV_HEADS=kv_heads, TILE=tiles.keys,
        LEAST=max(1, min_chunk // tiles.keys), BLOCK=PLAN_ROWS,
    )  # fmt: skip
    most = (spans + MAX_SHARES * programs // kv_heads) * pack
    return DecodePlan(first_chunk, progress, order, shared, pack, tiles, programs, most, window)


def decode(q: torch.Tensor, rows: PagedRows, plan: DecodePlan, rule: AttentionRule, out: torch.Tensor) -> None:
    """`base.TorchKernels.decode`."""
    count, heads, key_dim = q.shape
    kv_heads, value_dim = rows.keys.shape[2], rows.values.shape[3]
    group = heads // kv_heads
    flat = triton.next_power_of_2(group * value_dim)
    partial = torch.empty(plan.max_chunks, heads, value_dim, dtype=torch.float32, device=q.device)
    weights = torch.empty(plan.max_chunks, heads, dtype=torch.float32, device=q.device)
    _decode[(plan.programs,)](
        q, rows.keys, rows.values, rows.tables, rows.seq_lens, plan.first_chunk, plan.progress, plan.order, plan.shared,
        partial, weights, out, q if rule.sinks is None else rule.sinks, count, *score_terms(rule), plan.window or 0,
        *q.stride()[:2], *rows.keys.stride()[:3], *rows.values.stride()[:3], *out.stride()[:2], rows.tables.stride(0),
        CAPS=rule.softcap is not None, SINKS=rule.sinks is not None, KV_HEADS=kv_heads, GROUP=group,
        GROUP_PAD=max(MIN_ROWS, triton.next_power_of_2(group)), PACK=plan.pack, DK=key_dim,
        DK_PAD=triton.next_power_of_2(key_dim), DV=value_dim, DV_PAD=triton.next_power_of_2(value_dim), FLAT=flat,
        MERGED=max(1, MERGED // flat), PAGE=rows.keys.shape[1], TILE=plan.tiles.keys, UPCASTS=upcasts(q),
        num_warps=plan.tiles.warps, num_stages=plan.tiles.stages,
        maxnreg=min(255, REGISTERS // (32 * plan.tiles.warps * plan.tiles.programs)) // 8 * 8,
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows", "table_row"], do_not_specialize_on_alignment=["tables", "seq_lens"])
def _sort(
    tables, seq_lens, table_row, order, arrived, rows, PAGE: tl.constexpr, SORTED: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    """Sort rows by their pages 0, 1, 3, 7 and so on, so that rows that share more pages are closer. Padding is last.

    Each program counts, for SORTED rows, the rows that precede them. Sets `arrived` to 0 for `_plan`.
    """
    if tl.program_id(0) == 0:
        tl.store(arrived, 0)
    i = tl.program_id(0) * SORTED + tl.arange(0, SORTED)
    before = tl.zeros([SORTED], tl.int32)
    for start in range(0, rows, BLOCK):
        j = start + tl.arange(0, BLOCK)
        less = tl.zeros([SORTED, BLOCK], tl.int1)
        equal = (i[:, None] < rows) & (j[None, :] < rows)
        for level in tl.static_range(16):
            of_i = _page_at(tables, seq_lens, table_row, i, rows, 2**level - 1, PAGE)[:, None]
            of_j = _page_at(tables, seq_lens, table_row, j, rows, 2**level - 1, PAGE)[None, :]
            less = less | (equal & (of_j < of_i))
            equal = equal & (of_j == of_i)
        before += tl.sum((less | (equal & (j[None, :] < i[:, None]))).to(tl.int32), 1)
    tl.store(order + before, i, mask=i < rows)


@triton.jit
def _page_at(tables, seq_lens, table_row, i, rows, column, PAGE: tl.constexpr) -> tl.tensor:
    """The page of rows `i` in this column; -1 if it is not full, and the greatest int32 for padding rows."""
    length = tl.load(seq_lens + i, mask=i < rows, other=0)
    page = tl.load(tables + i * table_row + column, mask=(i < rows) & (column < length // PAGE), other=-1)
    return tl.where(length > 0, page, 2147483647)


@triton.jit
def _shared_keys(
    tables, seq_lens, table_row, order, rows, PAGE: tl.constexpr, PACK: tl.constexpr, BLOCK: tl.constexpr
) -> tl.tensor:
    """The number of leading keys that all rows of this program's pack share: whole pages, never a row's last key."""
    first = tl.program_id(0) * PACK
    leader = tl.load(order + first)
    most = tl.load(seq_lens + leader)
    for member in range(first + 1, tl.minimum(first + PACK, rows)):
        most = tl.minimum(most, tl.load(seq_lens + tl.load(order + member)))
    pages = tl.maximum(most - 1, 0) // PAGE if first + 1 < rows else 0
    for member in range(first + 1, tl.minimum(first + PACK, rows)):
        row = tl.load(order + member)
        start = 0
        while start < pages:
            column = start + tl.arange(0, BLOCK)
            ours = tl.load(tables + leader * table_row + column, mask=column < pages, other=0)
            theirs = tl.load(tables + row * table_row + column, mask=column < pages, other=0)
            pages = tl.minimum(pages, tl.min(tl.where(ours == theirs, pages, column), 0))
            start += BLOCK
    return pages * PAGE


@triton.jit(
    do_not_specialize=["rows", "window", "table_row", "least"], do_not_specialize_on_alignment=["tables", "seq_lens"]
)
def _plan(
    tables, seq_lens, table_row, first_chunk, progress, order, shared, rows, window, least, PAGE: tl.constexpr,
    PACK: tl.constexpr, PROGRAMS: tl.constexpr, KV_HEADS: tl.constexpr, TILE: tl.constexpr, LEAST: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Each program finds the keys that a pack shares. The last one cuts all spans into chunks and sums their numbers.

    Chunks are the longest with which no attention program has more than a tenth of additional work. If idle programs
    take n chunks of at most c tiles in any order, the last one finishes after at most c * ceil(n / programs) tiles, and
    after at most c more than an equal share. No chunk is shorter than LEAST, unless its span is. Lengths are in tiles.
    """
    spans = rows
    if PACK > 1:
        keys = _shared_keys(tables, seq_lens, table_row, order, rows, PAGE, PACK, BLOCK)
        tl.store(shared + tl.program_id(0), tl.where(keys >= least, keys, 0))
        tl.debug_barrier()  # all threads must have written before one reports it
        if tl.atomic_add(progress, 1, sem="acq_rel", scope="gpu") < tl.num_programs(0) - 1:
            return
        spans += tl.num_programs(0)
    total = tl.zeros([], tl.int64)
    for start in range(0, spans, BLOCK):
        i = start + tl.arange(0, BLOCK)
        total += tl.sum(_tiles(seq_lens, order, shared, i, rows, spans, window, PACK, TILE).to(tl.int64), 0)
    each = ((total * KV_HEADS + PROGRAMS - 1) // PROGRAMS).to(tl.int32)
    turns = 1 + tl.arange(0, 16)
    sizes = tl.maximum((each + each // 10) // turns, LEAST)
    counts = tl.zeros([16], tl.int32)
    for start in range(0, spans, BLOCK):
        tiles = _tiles(seq_lens, order, shared, start + tl.arange(0, BLOCK), rows, spans, window, PACK, TILE)
        counts += tl.sum((tiles[:, None] + sizes[None, :] - 1) // sizes[None, :], 0)
    fits = (counts * KV_HEADS <= turns * PROGRAMS) | (sizes * 10 <= each)
    size = tl.max(tl.where(fits, sizes, LEAST), 0)
    before = tl.zeros([], tl.int32)
    for start in range(0, spans, BLOCK):
        i = start + tl.arange(0, BLOCK)
        chunks = (_tiles(seq_lens, order, shared, i, rows, spans, window, PACK, TILE) + size - 1) // size
        upto = before + tl.cumsum(chunks, 0)
        tl.store(first_chunk + i, upto - chunks, mask=i < spans)
        before += tl.sum(chunks, 0)
    tl.store(first_chunk + spans, before)
    for start in range(0, 1 + rows * KV_HEADS, BLOCK):
        i = start + tl.arange(0, BLOCK)
        tl.store(progress + i, tl.zeros([BLOCK], tl.int32), mask=i < 1 + rows * KV_HEADS)


@triton.jit
def _tiles(seq_lens, order, shared, i, rows, spans, window, PACK: tl.constexpr, TILE: tl.constexpr) -> tl.tensor:
    """The number of tiles of spans `i`; 0 beyond the last one."""
    row = i
    if PACK > 1:
        row = tl.load(order + i, mask=i < rows, other=0)
    length = tl.load(seq_lens + row, mask=i < rows, other=0)
    seen = tl.where(window > 0, tl.minimum(length, window), length)
    if PACK > 1:
        pack = tl.where(i < rows, i // PACK, i - rows)
        keys = tl.load(shared + pack, mask=i < spans, other=0, cache_modifier=".cg")  # other programs wrote them
        seen = tl.where(i < rows, seen - keys, keys)
    return (seen + TILE - 1) // TILE


@triton.jit
def _attend_chunk(
    query, keys, values, table, start, end, scale, softcap, sink, k_page, k_token, v_page, v_token, CAPS: tl.constexpr,
    GROUP_PAD: tl.constexpr, DK: tl.constexpr, DK_PAD: tl.constexpr, DV: tl.constexpr, DV_PAD: tl.constexpr,
    PAGE: tl.constexpr, TILE: tl.constexpr, UPCASTS: tl.constexpr,
) -> tuple[tl.tensor, ...]:  # fmt: skip
    """Softmax over keys `start` up to `end` in base 2: the weighted mean of values, and log2 of the weights' sum.

    `sink` is each matrix row's score of no value; -inf: none. The mean is zero if there are no keys.
    """
    greatest = sink
    total = tl.where(sink > float("-inf"), 1.0, 0.0)
    summed = tl.zeros([GROUP_PAD, DV_PAD], tl.float32)
    for at in range(start, end, TILE):
        token = at + tl.arange(0, TILE)
        there = token < end
        page = pages_of(table, token, there, PAGE)
        key = key_tile(keys, page, token, there, k_page, k_token, DK, DK_PAD, PAGE).to(query.dtype)
        scores = scored(dot(query, key, UPCASTS), scale, softcap, CAPS)
        scores = tl.where(there[None, :], scores, float("-inf"))
        highest = tl.maximum(greatest, tl.max(scores, 1))
        weights = tl.exp2(scores - highest[:, None])
        kept = tl.exp2(greatest - highest)
        total = total * kept + tl.sum(weights, 1)
        value = value_tile(values, page, token, there, v_page, v_token, DV, DV_PAD, PAGE).to(query.dtype)
        summed = summed * kept[:, None] + dot(weights.to(value.dtype), value, UPCASTS)
        greatest = highest
    total = tl.maximum(total, 1.0)  # the highest score weighs 1, so only a chunk without keys and sink has less
    return summed / total[:, None], greatest + tl.log2(total)


@triton.jit
def _merge(
    partial, weights, shared_first, own_first, shared_count, step, count, heads, HEADS: tl.constexpr,
    FLAT: tl.constexpr, MERGED: tl.constexpr, DV: tl.constexpr, REAL: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The weighted mean of `count` chunks: [FLAT], a group's heads side by side.

    The first `shared_count` are at `shared_first`, `step` apart, the rest from `own_first` on. Read from L2: other
    programs wrote them.
    """
    e = tl.arange(0, FLAT)
    greatest = tl.full([FLAT], float("-inf"), tl.float32)
    total = tl.zeros([FLAT], tl.float32)
    summed = tl.zeros([FLAT], tl.float32)
    for start in tl.range(0, count, MERGED, num_stages=1):
        some = start + tl.arange(0, MERGED)[:, None]
        there = (some < count) & (e < REAL)[None, :]
        chunk = tl.where(some < shared_count, shared_first + some * step, own_first + some - shared_count)
        at = chunk * HEADS + heads
        weight = tl.load(weights + at + (e // DV)[None, :], mask=there, other=float("-inf"), cache_modifier=".cg")
        mean = tl.load(partial + at * DV + e[None, :], mask=there, other=0.0, cache_modifier=".cg")
        highest = tl.maximum(tl.maximum(greatest, tl.max(weight, 0)), -1e30)  # there are no weights beyond the heads
        kept = tl.exp2(greatest - highest)
        share = tl.exp2(weight - highest[None, :])
        summed = summed * kept + tl.sum(share * mean, 0)
        total = total * kept + tl.sum(share, 0)
        greatest = highest
    return summed / tl.maximum(total, 1.0)  # the chunk with the greatest weight has share 1


@triton.jit
def _rows_of_span(span, rows, first_chunk, shared, own_chunks, PACK: tl.constexpr) -> tuple[tl.tensor, ...]:
    """A span's first row (in plan order) and row count; its pack's shared keys, first shared chunk and chunk count."""
    place = span
    members = 1
    begin = 0
    shared_before = own_chunks
    shared_chunks = 0
    if PACK > 1:
        pack = tl.where(span < rows, span // PACK, span - rows)
        place = tl.where(span < rows, span, pack * PACK)
        members = tl.where(span < rows, 1, tl.minimum(PACK, rows - place))
        begin = tl.load(shared + pack)
        shared_before = tl.load(first_chunk + rows + pack)
        shared_chunks = tl.load(first_chunk + rows + pack + 1) - shared_before
    return place, members, begin, shared_before, shared_chunks


@triton.jit
def _keys_of_chunk(number, chunks, begin, length, window, is_shared, TILE: tl.constexpr) -> tuple[tl.tensor, ...]:
    """The first key, and the end, of a span's chunk: its own keys from `begin` on, or the shared ones before it."""
    if window > 0:
        begin = tl.maximum(length - window, 0)
    if is_shared:
        length = begin
        begin = 0
    tiles = (length - begin + TILE - 1) // TILE
    start = begin + number * tiles // chunks * TILE
    return start, tl.minimum(begin + (number + 1) * tiles // chunks * TILE, length)


@triton.jit
def _query_rows(q, at, g, dk, used, DK: tl.constexpr) -> tl.tensor:
    return tl.load(q + at[:, None] + dk[None, :], mask=(g[:, None] < used) & (dk[None, :] < DK), other=0.0)


@triton.jit
def _sinks_of(sinks, heads, is_first, SINKS: tl.constexpr, GROUP_PAD: tl.constexpr) -> tl.tensor:
    """The sinks' scores in bits. They are part of a row's first own chunk, and -inf in the others."""
    found = tl.full([GROUP_PAD], float("-inf"), tl.float32)
    if SINKS:
        found = tl.load(sinks + heads, mask=is_first, other=float("-inf")).to(tl.float32) * LOG2E
    return found


@triton.jit
def _store_partial(partial, weights, mean, weight, at, g, dv, used, DV: tl.constexpr) -> None:
    """Store the results of a chunk that is merged with others; `used` matrix rows hold query heads."""
    tl.store(partial + at[:, None] * DV + dv[None, :], mean, mask=(g[:, None] < used) & (dv[None, :] < DV))
    tl.store(weights + at, weight, mask=g < used)
    tl.debug_barrier()  # all threads must have written before one reports it


@triton.jit
def _merge_completed(
    partial, weights, out, progress, first_chunk, order, place, members, head, own_chunks, shared_before,
    shared_chunks, out_row, out_head, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, PACK: tl.constexpr,
    FLAT: tl.constexpr, MERGED: tl.constexpr, DV: tl.constexpr,
) -> None:  # fmt: skip
    """Count a completed chunk for the `members` rows from `place` on, and merge each row that is now complete."""
    for each in tl.range(place, place + members, num_stages=1):
        own_before = tl.load(first_chunk + each)
        count = tl.load(first_chunk + each + 1) - own_before + shared_chunks
        completed = progress + 1 + each * KV_HEADS + head
        if tl.atomic_add(completed, 1, sem="acq_rel", scope="gpu") == count - 1:
            merged = _merge(
                partial, weights, own_chunks + (shared_before - own_chunks) * PACK + each % PACK, own_before,
                shared_chunks, PACK, count, head * GROUP, KV_HEADS * GROUP, FLAT, MERGED, DV, GROUP * DV,
            )  # fmt: skip
            e = tl.arange(0, FLAT)
            target = each
            if PACK > 1:
                target = tl.load(order + each)
            out_at = target * out_row + (head * GROUP + e // DV) * out_head + e % DV
            tl.store(out + out_at, merged.to(out.dtype.element_ty), mask=e < GROUP * DV)
            tl.store(completed, 0)


@triton.jit
def _store_zeros(out, out_head, heads, HEADS: tl.constexpr, DV: tl.constexpr, DV_PAD: tl.constexpr) -> None:
    dv = tl.arange(0, DV_PAD)
    for start in tl.range(0, heads, HEADS, num_stages=1):
        head = start + tl.arange(0, HEADS)
        at = head[:, None] * out_head + dv[None, :]
        real = (head[:, None] < heads) & (dv[None, :] < DV)
        tl.store(out + at, tl.zeros([HEADS, DV_PAD], out.dtype.element_ty), mask=real)


@triton.jit(do_not_specialize=["rows", "window", "table_row"], do_not_specialize_on_alignment=["tables", "seq_lens"])
def _decode(
    q, keys, values, tables, seq_lens, first_chunk, progress, order, shared, partial, weights, out, sinks, rows, scale,
    softcap, window, q_row, q_head, k_page, k_token, k_head, v_page, v_token, v_head, out_row, out_head, table_row,
    CAPS: tl.constexpr, SINKS: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr,
    PACK: tl.constexpr, DK: tl.constexpr, DK_PAD: tl.constexpr, DV: tl.constexpr, DV_PAD: tl.constexpr,
    FLAT: tl.constexpr, MERGED: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr, UPCASTS: tl.constexpr,
) -> None:  # fmt: skip
    """Take pairs of a chunk and a KV head until none is left; a group's query heads are the matrix rows.

    Rows are identified by their place in the plan's order. Padding rows have no chunks; they are set to zero first.
    """
    for padding in tl.range(tl.program_id(0), rows, tl.num_programs(0), num_stages=1):
        if tl.load(seq_lens + padding) == 0:
            _store_zeros(out + padding * out_row, out_head, KV_HEADS * GROUP, GROUP_PAD, DV, DV_PAD)
    spans = rows
    if PACK > 1:
        spans += (rows + PACK - 1) // PACK
    own_chunks = tl.load(first_chunk + rows)
    items = tl.load(first_chunk + spans) * KV_HEADS
    g = tl.arange(0, GROUP_PAD)
    dk = tl.arange(0, DK_PAD)
    dv = tl.arange(0, DV_PAD)
    item = tl.atomic_add(progress, 1, sem="relaxed")
    while item < items:
        head = item % KV_HEADS
        chunk = item // KV_HEADS
        span = row_of(first_chunk, chunk, spans, 1, 0)
        chunks_before = tl.load(first_chunk + span)
        chunks = tl.load(first_chunk + span + 1) - chunks_before
        place, members, begin, shared_before, shared_chunks = _rows_of_span(
            span, rows, first_chunk, shared, own_chunks, PACK
        )
        row = span
        in_order = span + g // GROUP
        if PACK > 1:
            row = tl.load(order + place)
            in_order = tl.load(order + place + g // GROUP, mask=g < GROUP * members, other=0)
        length = tl.load(seq_lens + row)
        start, end = _keys_of_chunk(chunk - chunks_before, chunks, begin, length, window, span >= rows, TILE)
        heads = head * GROUP + g % GROUP
        query = _query_rows(q, in_order * q_row + heads * q_head, g, dk, GROUP * members, DK)
        is_first = (g < GROUP) & (span < rows) & (chunk == chunks_before)
        sink = _sinks_of(sinks, heads, is_first, SINKS, GROUP_PAD)
        mean, weight = _attend_chunk(
            query, keys + head * k_head, values + head * v_head, tables + row * table_row, start, end, scale, softcap,
            sink, k_page, k_token, v_page, v_token, CAPS, GROUP_PAD, DK, DK_PAD, DV, DV_PAD, PAGE, TILE, UPCASTS,
        )  # fmt: skip
        if (span < rows) & (chunks + shared_chunks == 1):
            out_at = row * out_row + heads[:, None] * out_head + dv[None, :]
            real = (g[:, None] < GROUP * members) & (dv[None, :] < DV)
            tl.store(out + out_at, mean.to(out.dtype.element_ty), mask=real)
        else:
            slot = tl.where(span < rows, chunk, own_chunks + (chunk - own_chunks) * PACK + g // GROUP)
            _store_partial(
                partial, weights, mean, weight, slot * (KV_HEADS * GROUP) + heads, g, dv, GROUP * members, DV
            )
            _merge_completed(
                partial, weights, out, progress, first_chunk, order, place, members, head, own_chunks, shared_before,
                shared_chunks, out_row, out_head, KV_HEADS, GROUP, PACK, FLAT, MERGED, DV,
            )  # fmt: skip
        item = tl.atomic_add(progress, 1, sem="relaxed")
    if item == items + tl.num_programs(0) - 1:  # every program took one too many; the last resets the count
        tl.store(progress, 0)
