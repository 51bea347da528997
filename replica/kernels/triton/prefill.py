"""Prefill attention over pages: rows of different lengths in one launch, with or without a cached prefix.

Keys and values are already stored, so programs read only pages. A program processes consecutive queries of one row and
KV head: tokens in order, with all heads of the group for each token, so that short rows fill tiles and read their keys
once. The grid is an upper bound, so the host does not need the rows' lengths.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ...models.base import AttentionRule
from ..base import PagedRows
from .pages import LOG2E, dot, key_tile, pages_of, row_of, score_terms, scored, upcasts, value_tile


@dataclass(slots=True, frozen=True)
class Tiles:
    """Queries and keys per tile, and a program's warps and pipeline stages."""

    queries: int
    keys: int
    warps: int
    stages: int


def tiles_for(dtype: torch.dtype, dim: int) -> Tiles:
    """Tiles that neither spill registers nor exceed the shared memory of any GPU since sm_80 (99 KB on sm_86).

    Chosen by cross-compilation (tests/gpu/compile.py); not run. float32 products do not use tensor cores and hold whole
    rows of both operands in registers.
    """
    if dtype == torch.float32:
        return Tiles(16, 16, 4, 1) if dim > 128 else Tiles(16, 16 if dim > 64 else 32, 4, 2)
    if dim > 128:
        return Tiles(64, 32, 8, 2) if dim <= 256 else Tiles(32, 32, 8, 1)
    return Tiles(128, 64, 8, 3) if dim <= 64 else Tiles(128, 64, 8, 2)


def prefill(
    q: torch.Tensor,
    rows: PagedRows,
    first_queries: torch.Tensor,
    rule: AttentionRule,
    out: torch.Tensor,
    tiles: Tiles | None = None,
) -> None:
    """`base.TorchKernels.prefill`."""
    count, heads, key_dim = q.shape
    kv_heads, value_dim, batch = rows.keys.shape[2], rows.values.shape[3], len(rows.seq_lens)
    group = heads // kv_heads
    tiles = tiles or tiles_for(q.dtype, max(key_dim, value_dim))
    _prefill[(count * group // tiles.queries + batch, kv_heads)](
        q, rows.keys, rows.values, rows.tables, first_queries, rows.seq_lens, out,
        q if rule.sinks is None else rule.sinks, batch, *score_terms(rule), rule.window or 0, *q.stride()[:2],
        *rows.keys.stride()[:3], *rows.values.stride()[:3], *out.stride()[:2], rows.tables.stride(0),
        CAPS=rule.softcap is not None, SINKS=rule.sinks is not None, GROUP=group, DK=key_dim,
        DK_PAD=triton.next_power_of_2(key_dim), DV=value_dim, DV_PAD=triton.next_power_of_2(value_dim),
        PAGE=rows.keys.shape[1], QUERIES=tiles.queries, TILE=tiles.keys, UPCASTS=upcasts(q), num_warps=tiles.warps,
        num_stages=tiles.stages,
    )  # fmt: skip


@triton.jit
def _attend_tiles(
    greatest, total, summed, query, positions, keys, values, table, start, end, scale, softcap, window, k_page, k_token,
    v_page, v_token, MASKED: tl.constexpr, CAPS: tl.constexpr, DK: tl.constexpr, DK_PAD: tl.constexpr, DV: tl.constexpr,
    DV_PAD: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr, UPCASTS: tl.constexpr,
) -> tuple[tl.tensor, ...]:  # fmt: skip
    """Online softmax in base 2 over keys `start` up to `end`. Not MASKED: every query sees every key."""
    for at in range(start, end, TILE):
        token = at + tl.arange(0, TILE)
        there = token < end
        page = pages_of(table, token, there, PAGE)
        key = key_tile(keys, page, token, there, k_page, k_token, DK, DK_PAD, PAGE).to(query.dtype)
        scores = scored(dot(query, key, UPCASTS), scale, softcap, CAPS)
        if MASKED:
            seen = there[None, :] & (token[None, :] <= positions[:, None])
            if window > 0:
                seen = seen & (token[None, :] > positions[:, None] - window)
            scores = tl.where(seen, scores, float("-inf"))
        highest = tl.maximum(greatest, tl.max(scores, 1))
        finite = tl.where(highest == float("-inf"), 0.0, highest)  # -inf: no key is visible yet
        weights = tl.exp2(scores - finite[:, None])
        kept = tl.exp2(greatest - finite)
        total = total * kept + tl.sum(weights, 1)
        value = value_tile(values, page, token, there, v_page, v_token, DV, DV_PAD, PAGE).to(query.dtype)
        if MASKED:  # 0 * NaN is NaN, but NaN may only affect queries that see it
            odd = tl.max(tl.where(tl.abs(value.to(tl.float32)) < float("inf"), 0, 1), 1)
            value = tl.where(odd[:, None] > 0, tl.zeros_like(value), value)
            reached = tl.max(tl.where(seen & (odd[None, :] > 0), 1, 0), 1)
            summed = tl.where(reached[:, None] > 0, float("nan"), summed)
        summed = summed * kept[:, None] + dot(weights.to(value.dtype), value, UPCASTS)
        greatest = highest
    return greatest, total, summed


@triton.jit(
    do_not_specialize=["rows", "window", "table_row"],
    do_not_specialize_on_alignment=["tables", "first_queries", "seq_lens"],
)
def _prefill(
    q, keys, values, tables, first_queries, seq_lens, out, sinks, rows, scale, softcap, window, q_token, q_head, k_page,
    k_token, k_head, v_page, v_token, v_head, out_token, out_head, table_row, CAPS: tl.constexpr, SINKS: tl.constexpr,
    GROUP: tl.constexpr, DK: tl.constexpr, DK_PAD: tl.constexpr, DV: tl.constexpr, DV_PAD: tl.constexpr,
    PAGE: tl.constexpr, QUERIES: tl.constexpr, TILE: tl.constexpr, UPCASTS: tl.constexpr,
) -> None:  # fmt: skip
    tile = tl.program_id(0)
    head = tl.program_id(1)
    row = row_of(first_queries, tile, rows, GROUP, QUERIES)
    first = tl.load(first_queries + row)
    count = tl.load(first_queries + row + 1) - first
    offset = (tile - (first * GROUP // QUERIES + row)) * QUERIES
    if offset >= count * GROUP:
        return
    length = tl.load(seq_lens + row)
    token = offset // GROUP
    index = offset - token * GROUP + tl.arange(0, QUERIES)
    lowest = length - count + token
    positions = lowest + index // GROUP
    q_at = index // GROUP * q_token + (head * GROUP + index % GROUP) * q_head
    dk = tl.arange(0, DK_PAD)
    q += (first + token).to(tl.int64) * q_token
    query = tl.load(q + q_at[:, None] + dk[None, :], mask=(positions[:, None] < length) & (dk[None, :] < DK), other=0.0)
    keys += head * k_head
    values += head * v_head
    table = tables + row * table_row
    greatest = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    if SINKS:
        greatest = tl.load(sinks + head * GROUP + index % GROUP).to(tl.float32) * LOG2E
        total += 1.0
    summed = tl.zeros([QUERIES, DV_PAD], tl.float32)
    start = 0
    whole = (lowest + 1) // TILE * TILE  # every query sees all keys before `whole`
    if window > 0:
        start = tl.maximum(lowest - window + 1, 0) // TILE * TILE
        whole = start
    end = tl.minimum(length - count + (offset + QUERIES - 1) // GROUP + 1, length)
    greatest, total, summed = _attend_tiles(
        greatest, total, summed, query, positions, keys, values, table, start, whole, scale, softcap, window,
        k_page, k_token, v_page, v_token, False, CAPS, DK, DK_PAD, DV, DV_PAD, PAGE, TILE, UPCASTS,
    )  # fmt: skip
    greatest, total, summed = _attend_tiles(
        greatest, total, summed, query, positions, keys, values, table, whole, end, scale, softcap, window,
        k_page, k_token, v_page, v_token, True, CAPS, DK, DK_PAD, DV, DV_PAD, PAGE, TILE, UPCASTS,
    )  # fmt: skip
    dv = tl.arange(0, DV_PAD)
    mean = (summed / tl.maximum(total, 1e-30)[:, None]).to(out.dtype.element_ty)
    out_at = index // GROUP * out_token + (head * GROUP + index % GROUP) * out_head
    out += (first + token).to(tl.int64) * out_token
    tl.store(out + out_at[:, None] + dv[None, :], mean, mask=(positions[:, None] < length) & (dv[None, :] < DV))
