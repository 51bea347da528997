"""The small operations around the matrix products: step inputs, norm, rotation and KV store, activation."""

import torch
import triton
import triton.language as tl

from ...models.base import Rotary
from ..base import FP8_MAX, MIN_SCALE, ROUNDED_ROWS, DecodeRows
from .pages import stored

#: Elements per program or iteration.
BLOCK = 1024
#: Heads per program of `_rotate_and_store`. Not measured.
HEADS_PER_PROGRAM = 4


def decode_rows(
    rows: torch.Tensor, last_tokens: torch.Tensor, seq_lens: torch.Tensor, block_tables: torch.Tensor, block_size: int
) -> DecodeRows:
    count, device = len(rows), rows.device
    token_ids, positions, slots = (torch.empty(count, dtype=torch.int64, device=device) for _ in range(3))
    tables = torch.empty(count, block_tables.shape[1], dtype=torch.int32, device=device)
    lengths = torch.empty(count, dtype=torch.int32, device=device)
    if count:
        _decode_rows[(count,)](
            rows, last_tokens, seq_lens, block_tables, token_ids, positions, slots, tables, lengths,
            block_tables.stride(0), tables.stride(0), SIZE=block_size, BLOCK=BLOCK,
        )  # fmt: skip
    return DecodeRows(token_ids, positions, slots, tables, lengths)


@triton.jit
def _decode_rows(
    rows, last_tokens, seq_lens, block_tables, token_ids, positions, slots, tables, lengths, from_row, to_row,
    SIZE: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """One row. Copies only the entries of its block table that the step reads."""
    row = tl.program_id(0)
    slot = tl.load(rows + row)
    start = tl.load(seq_lens + slot)
    tl.debug_barrier()  # all threads must have read the length before one of them overwrites it
    length = tl.where(slot > 0, start + 1, 0)
    tl.store(token_ids + row, tl.maximum(tl.load(last_tokens + slot), 0))
    tl.store(positions + row, start.to(tl.int64))
    tl.store(lengths + row, length)
    tl.store(seq_lens + slot, length)  # padding rows share slot 0, and all write 0
    table = block_tables + slot * from_row
    block = tl.load(table + start // SIZE).to(tl.int64)
    tl.store(slots + row, tl.where(slot > 0, block * SIZE + start % SIZE, 0))
    for first in range(0, (length + SIZE - 1) // SIZE, BLOCK):
        i = first + tl.arange(0, BLOCK)
        there = i < (length + SIZE - 1) // SIZE
        tl.store(tables + row * to_row + i, tl.load(table + i, mask=there, other=0), mask=there)


def embed(
    table: torch.Tensor, ids: torch.Tensor, positions: torch.Tensor, frequencies: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    tokens, features, half = len(ids), table.shape[1], len(frequencies)
    x, cos, sin = (torch.empty(tokens, width, dtype=table.dtype, device=ids.device) for width in (features, half, half))
    if tokens:
        _embed[(tokens, triton.cdiv(features, BLOCK))](
            table, ids, positions, frequencies, x, cos, sin, table.stride(0), FEATURES=features, HALF=half,
            HALF_PAD=triton.next_power_of_2(half), BLOCK=BLOCK,
        )  # fmt: skip
    return x, cos, sin


@triton.jit
def _embed(
    table, ids, positions, frequencies, x, cos, sin, table_row, FEATURES: tl.constexpr, HALF: tl.constexpr,
    HALF_PAD: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """A block of one token's embedding; the first block's program also computes the token's cos and sin."""
    token = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    source = table + tl.load(ids + token) * table_row
    tl.store(x + token * FEATURES + i, tl.load(source + i, mask=i < FEATURES), mask=i < FEATURES)
    if tl.program_id(1) == 0:
        wave = tl.arange(0, HALF_PAD)
        angle = tl.load(positions + token).to(tl.float32) * tl.load(frequencies + wave, mask=wave < HALF, other=0.0)
        kind = cos.dtype.element_ty
        tl.store(cos + token * HALF + wave, tl.cos(angle).to(kind), mask=wave < HALF)
        tl.store(sin + token * HALF + wave, tl.sin(angle).to(kind), mask=wave < HALF)


def add_rms_norm(
    x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, features = x.shape
    normed = torch.empty_like(x)
    summed = x if delta is None else torch.empty_like(x)
    block = triton.next_power_of_2(features)
    if tokens:
        _add_rms_norm[(tokens,)](
            x, x if delta is None else delta, weight, summed, normed, epsilon, x.stride(0),
            x.stride(0) if delta is None else delta.stride(0), FEATURES=features, BLOCK=block, ADDS=delta is not None,
            num_warps=8 if block >= 4096 else 4,
        )  # fmt: skip
    return summed, normed


@triton.jit
def _add_rms_norm(
    x, delta, weight, summed, normed, epsilon, x_row, delta_row, FEATURES: tl.constexpr, BLOCK: tl.constexpr,
    ADDS: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    there = i < FEATURES
    kind = summed.dtype.element_ty
    value = tl.load(x + row * x_row + i, mask=there, other=0.0).to(tl.float32)
    if ADDS:
        value += tl.load(delta + row * delta_row + i, mask=there, other=0.0).to(tl.float32)
        rounded = value.to(kind)
        tl.store(summed + row * FEATURES + i, rounded, mask=there)
        value = rounded.to(tl.float32)  # normalize the rounded sum, which the next layer gets
    inverse = 1.0 / tl.sqrt_rn(tl.sum(value * value, 0) / FEATURES + epsilon)
    scaled = value * inverse * tl.load(weight + i, mask=there, other=0.0).to(tl.float32)
    tl.store(normed + row * FEATURES + i, scaled.to(kind), mask=there)


def rotate_and_store(
    qkv: torch.Tensor, rotary: Rotary, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> torch.Tensor:
    _, page, kv_heads, dim = keys.shape
    tokens, heads = len(qkv), qkv.shape[1] // dim - 2 * kv_heads
    queries = torch.empty(tokens, heads, dim, dtype=qkv.dtype, device=qkv.device)
    every, norms = heads + 2 * kv_heads, rotary.q_norm is not None and rotary.k_norm is not None
    if tokens:
        _rotate_and_store[(tokens, triton.cdiv(every, HEADS_PER_PROGRAM))](
            qkv, rotary.q_norm if norms else qkv, rotary.k_norm if norms else qkv, rotary.cos, rotary.sin, slots,
            queries, keys, values, rotary.epsilon, qkv.stride(0), *keys.stride()[:3], *values.stride()[:3], HEADS=heads,
            KV_HEADS=kv_heads, DIM=dim, HALF_PAD=triton.next_power_of_2(dim // 2), PAGE=page, NORMS=norms,
            BATCH=HEADS_PER_PROGRAM, num_warps=2,
        )  # fmt: skip
    return queries


@triton.jit
def _rotate_and_store(
    qkv, q_norm, k_norm, cos, sin, slots, queries, keys, values, epsilon, qkv_row, k_page, k_token, k_head, v_page,
    v_token, v_head, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, HALF_PAD: tl.constexpr,
    PAGE: tl.constexpr, NORMS: tl.constexpr, BATCH: tl.constexpr,
) -> None:  # fmt: skip
    """BATCH heads of one token; element i of a head's first half rotates with element i of the second."""
    HALF: tl.constexpr = DIM // 2
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BATCH + tl.arange(0, BATCH)
    i = tl.arange(0, HALF_PAD)
    there = (head[:, None] < HEADS + 2 * KV_HEADS) & (i[None, :] < HALF)
    at = qkv + token * qkv_row + head[:, None] * DIM + i[None, :]
    kind = qkv.dtype.element_ty
    first = tl.load(at, mask=there, other=0.0).to(tl.float32)
    second = tl.load(at + HALF, mask=there, other=0.0).to(tl.float32)
    is_query = head < HEADS
    turns = (head < HEADS + KV_HEADS)[:, None]
    if NORMS:
        mean = (tl.sum(first * first, 1) + tl.sum(second * second, 1)) / DIM
        inverse = tl.where(turns, (1.0 / tl.sqrt_rn(mean + epsilon))[:, None], 1.0)
        first *= inverse * _norm_weights(q_norm, k_norm, is_query, turns, i, there)
        second *= inverse * _norm_weights(q_norm + HALF, k_norm + HALF, is_query, turns, i, there)
    wave = tl.where(i < HALF, i, 0)
    c = tl.where(turns, tl.load(cos + token * HALF + wave).to(tl.float32)[None, :], 1.0)
    s = tl.where(turns, tl.load(sin + token * HALF + wave).to(tl.float32)[None, :], 0.0)
    turned = (first * c - second * s).to(kind)
    other = (second * c + first * s).to(kind)

    q_at = queries + (token * HEADS + head[:, None]) * DIM + i[None, :]
    tl.store(q_at, turned, mask=there & is_query[:, None])
    tl.store(q_at + HALF, other, mask=there & is_query[:, None])
    slot = tl.load(slots + token)
    page = slot // PAGE
    offset = slot % PAGE
    kept = there & (slot >= 0)
    is_key = turns & (head[:, None] >= HEADS)
    k_at = keys + page * k_page + offset * k_token + (head[:, None] - HEADS) * k_head + i[None, :]
    tl.store(k_at, stored(turned, keys), mask=kept & is_key)
    tl.store(k_at + HALF, stored(other, keys), mask=kept & is_key)
    v_at = values + page * v_page + offset * v_token + (head[:, None] - HEADS - KV_HEADS) * v_head + i[None, :]
    tl.store(v_at, stored(turned, values), mask=kept & (turns == 0))
    tl.store(v_at + HALF, stored(other, values), mask=kept & (turns == 0))


@triton.jit
def _norm_weights(q_norm, k_norm, is_query, turns, i, there) -> tl.tensor:
    """Each head's norm weights; 1 for values, which are not normalized."""
    query = tl.load(q_norm + i[None, :], mask=there & is_query[:, None], other=1.0).to(tl.float32)
    key = tl.load(k_norm + i[None, :], mask=there & turns & (is_query == 0)[:, None], other=1.0).to(tl.float32)
    return query * key


def write_slots(stack: torch.Tensor, slots: torch.Tensor, values: torch.Tensor) -> None:
    """Copy in one launch; for stacks over 2 GiB torch would need one launch per layer."""
    layers, count, features = values.shape
    if count:
        _write_slots[(count, layers)](stack, slots, values, features, *stack.stride()[:2], BLOCK=BLOCK)


@triton.jit(do_not_specialize_on_alignment=["slots"])  # the targets of an odd number of copies are not aligned
def _write_slots(stack, slots, values, features, layer_stride, slot_stride, BLOCK: tl.constexpr) -> None:
    number = tl.program_id(0)
    layer = tl.program_id(1).to(tl.int64)
    target = stack + layer * layer_stride + tl.load(slots + number) * slot_stride
    source = values + (layer * tl.num_programs(0) + number) * features
    for first in range(0, features, BLOCK):
        i = first + tl.arange(0, BLOCK)
        tl.store(target + i, tl.load(source + i, mask=i < features), mask=i < features)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    tokens, features = len(gate_up), gate_up.shape[1] // 2
    out = torch.empty(tokens, features, dtype=gate_up.dtype, device=gate_up.device)
    if tokens:
        _silu_mul[(tokens, triton.cdiv(features, BLOCK))](
            gate_up, out, features, gate_up.stride(0), BLOCK=BLOCK, num_warps=4
        )
    return out


@triton.jit
def _silu_mul(gate_up, out, features, row_stride, BLOCK: tl.constexpr) -> None:
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = i < features
    gate = tl.load(gate_up + row * row_stride + i, mask=there, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * row_stride + features + i, mask=there, other=0.0).to(tl.float32)
    product = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * features + i, product.to(out.dtype.element_ty), mask=there)


def round_rows(x: torch.Tensor, features: int) -> tuple[torch.Tensor, torch.Tensor]:
    rows, parts = -(-len(x) // ROUNDED_ROWS) * ROUNDED_ROWS, triton.cdiv(x.shape[1], features)
    rounded = torch.empty(rows, x.shape[1], dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(parts, rows, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(features)
    if rows:
        _round_rows[(rows, parts)](
            x, rounded, scales, len(x), rows, x.shape[1], features, x.stride(0), MOST=FP8_MAX, LEAST=MIN_SCALE,
            BLOCK=block, num_warps=8 if block >= 4096 else 4 if block > 128 else 1,
        )  # fmt: skip
    return rounded, scales.t()


@triton.jit(do_not_specialize=["count", "rows"])
def _round_rows(
    x, rounded, scales, count, rows, every, features, x_row, MOST: tl.constexpr, LEAST: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """The features of one row that share a scale; padding rows are zeros."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    i = part * features + tl.arange(0, BLOCK)
    there = (tl.arange(0, BLOCK) < features) & (i < every)
    value = tl.load(x + row * x_row + i, mask=there & (row < count), other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(value), 0) / MOST, LEAST)
    tl.store(scales + part * rows + row, scale)
    tl.store(rounded + row * every + i, stored(value / scale, rounded), mask=there)
