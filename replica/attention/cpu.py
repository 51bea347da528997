"""Paged attention on CPU with stock torch: pages are gathered into reused buffers, then scaled_dot_product_attention.

Measured on an AMD EPYC core (32 rows of 1k tokens, 4 KV heads of 64): fresh gathers of tens of megabytes fault pages
in and cost 2 to 6 times more than a reused buffer; decode rows in groups whose keys and values fit about 2 MB equal a
plain C++ kernel.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.nn.functional import scaled_dot_product_attention

from ..models.base import AttentionRule
from .base import Batch, KvPool
from .reference import attention, visible

#: Bytes of keys and values that one group of decode rows may gather; see the module's docstring.
GROUP_BYTES = 2 << 20


@dataclass(slots=True, frozen=True)
class PrefillItem:
    """One row that computes several tokens."""

    start: int  #: its first token in the batch
    q_len: int
    kv_len: int  #: gathered keys that count; the rest of the last page is cut off
    blocks: torch.Tensor  #: [pages]
    seen: torch.Tensor | None  #: [q_len, kv_len]; None: plain causal over equally many queries and keys


@dataclass(slots=True, frozen=True)
class DecodeItem:
    """A group of rows that compute one token each, padded to the longest."""

    tokens: torch.Tensor  #: [rows] their tokens in the batch
    rows: int
    pages: int  #: per row
    blocks: torch.Tensor  #: [rows * pages]
    seen: torch.Tensor | None  #: [rows, pages * block_size]; None: all


@dataclass(slots=True, frozen=True)
class Work:
    """A step's attention for one window; all layers that share the window share it."""

    prefills: list[PrefillItem]
    decodes: list[DecodeItem]
    most_pages: int


@dataclass(slots=True, frozen=True)
class _Row:
    """Pages first..last of one row's table, which hold what its tokens see."""

    index: int
    start: int
    q_len: int
    kv_len: int
    first_page: int
    pages: int


def split_work(batch: Batch, block_size: int, group_pages: int, window: int | None) -> Work:
    """Group a batch's rows; a group of decode rows gathers at most `group_pages`, unless its only row needs more."""
    rows = _rows(batch, block_size, window)
    prefills = [_prefill_item(row, batch, block_size, window) for row in rows if row.q_len > 1]
    decoding = sorted((row for row in rows if row.q_len == 1), key=lambda row: row.pages)  # alike rows: little padding
    decodes = []
    while decoding:
        longest = decoding[-1].pages
        count = min(len(decoding), max(1, group_pages // longest))
        group = [decoding.pop() for _ in range(count)]
        decodes.append(_decode_item(group, batch, block_size, window))
    sizes = [len(item.blocks) for item in prefills] + [len(item.blocks) for item in decodes]
    return Work(prefills, decodes, max(sizes, default=0))


def _rows(batch: Batch, block_size: int, window: int | None) -> list[_Row]:
    rows, start = [], 0
    for index, (q_len, kv_len) in enumerate(zip(batch.q_lens, batch.kv_lens, strict=True)):
        first_seen = 0 if window is None else max(0, kv_len - q_len - window + 1)
        first_page = first_seen // block_size
        rows.append(_Row(index, start, q_len, kv_len, first_page, -(-kv_len // block_size) - first_page))
        start += q_len
    return rows


def _prefill_item(row: _Row, batch: Batch, block_size: int, window: int | None) -> PrefillItem:
    skipped = row.first_page * block_size
    plain = row.q_len == row.kv_len and (window is None or row.kv_len <= window)
    keys = torch.arange(skipped, row.kv_len)
    return PrefillItem(
        start=row.start,
        q_len=row.q_len,
        kv_len=row.kv_len - skipped,
        blocks=batch.block_tables[row.index, row.first_page : row.first_page + row.pages].contiguous(),
        seen=None if plain else visible(keys[-row.q_len :], keys, window),
    )


def _decode_item(group: list[_Row], batch: Batch, block_size: int, window: int | None) -> DecodeItem:
    pages = group[0].pages
    # A window makes rows start at different pages; a table too short for all `pages` is padded by its last entries,
    # whose keys lie beyond the row's end and are masked.
    columns = torch.tensor([row.first_page for row in group])[:, None] + torch.arange(pages)
    columns.clamp_(max=batch.block_tables.shape[1] - 1)
    tables = batch.block_tables[torch.tensor([row.index for row in group])]
    offsets = torch.tensor([row.first_page * block_size for row in group])[:, None]
    positions = offsets + torch.arange(pages * block_size)
    last = torch.tensor([row.kv_len - 1 for row in group])[:, None]
    seen = positions <= last
    if window is not None:
        seen &= positions > last - window
    return DecodeItem(
        tokens=torch.tensor([row.start for row in group]),
        rows=len(group),
        pages=pages,
        blocks=tables.gather(1, columns).flatten(),
        seen=None if bool(seen.all()) else seen,
    )


class ScratchAttention:
    """Attention over pages gathered into scratch buffers that all layers and steps reuse."""

    name: ClassVar[str] = "cpu-scratch"

    def __init__(self, pool: KvPool, group_bytes: int = GROUP_BYTES) -> None:
        self._pool = pool
        self._group_bytes = group_bytes
        self._batch: Batch | None = None
        self._work: dict[int | None, Work] = {}
        self._scratch: dict[tuple[str, int, int], torch.Tensor] = {}

    def begin(self, batch: Batch) -> None:
        self._batch = batch
        self._work.clear()

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rule: AttentionRule
    ) -> torch.Tensor:
        assert self._batch is not None, "attend before begin"
        self._pool.write(layer, self._batch.slots, k, v)
        work = self._work_for(layer, self._batch, rule.window)
        out = q.new_empty(q.shape[0], q.shape[1], v.shape[2])
        for prefill in work.prefills:
            end = prefill.start + prefill.q_len
            out[prefill.start : end] = self._prefill(layer, prefill, q[prefill.start : end], rule, work.most_pages)
        for decode in work.decodes:
            out[decode.tokens] = self._decode(layer, decode, q[decode.tokens], rule, work.most_pages)
        return out

    def _work_for(self, layer: int, batch: Batch, window: int | None) -> Work:
        work = self._work.get(window)
        if work is None:
            page_bytes = self._pool.keys[layer][0].nbytes + self._pool.values[layer][0].nbytes
            group_pages = self._group_bytes // page_bytes
            work = self._work[window] = split_work(batch, self._pool.block_size, group_pages, window)
        return work

    def _prefill(self, layer: int, item: PrefillItem, q: torch.Tensor, rule: AttentionRule, most: int) -> torch.Tensor:
        k, v = (x.flatten(0, 1)[: item.kv_len] for x in self._gather(layer, item.blocks, most))
        if rule.softcap is not None or rule.sinks is not None:
            seen = item.seen if item.seen is not None else torch.ones(item.q_len, item.q_len, dtype=torch.bool).tril()
            return attention(q, k, v, seen, rule)
        query, key, value = (x.transpose(0, 1)[None] for x in (q, k, v))
        out = scaled_dot_product_attention(
            query, key, value, attn_mask=item.seen, is_causal=item.seen is None, scale=rule.scale, enable_gqa=True
        )
        return out[0].transpose(0, 1)

    def _decode(self, layer: int, item: DecodeItem, q: torch.Tensor, rule: AttentionRule, most: int) -> torch.Tensor:
        k, v = (x.view(item.rows, -1, *x.shape[2:]) for x in self._gather(layer, item.blocks, most))
        if rule.softcap is not None or rule.sinks is not None:
            seen = item.seen if item.seen is not None else torch.ones(k.shape[:2], dtype=torch.bool)
            rows = (attention(q[i : i + 1], k[i], v[i], seen[i : i + 1], rule) for i in range(item.rows))
            return torch.cat(list(rows))
        # The query heads that share a KV head stand as query rows: a mask with enable_gqa took three times as long.
        grouped = q.view(item.rows, k.shape[2], -1, q.shape[2])
        mask = None if item.seen is None else item.seen[:, None, None, :]
        out = scaled_dot_product_attention(
            grouped, k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask, scale=rule.scale
        )
        return out.flatten(1, 2)

    def _gather(self, layer: int, blocks: torch.Tensor, most: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of these blocks, in buffers that the next call overwrites: [len(blocks), block_size, ...]."""
        keys, values = self._pool.keys[layer], self._pool.values[layer]
        k, v = self._buffer("keys", keys, most)[: len(blocks)], self._buffer("values", values, most)[: len(blocks)]
        torch.index_select(keys, 0, blocks, out=k)
        torch.index_select(values, 0, blocks, out=v)
        return k, v

    def _buffer(self, kind: str, pages: torch.Tensor, most: int) -> torch.Tensor:
        key = (kind, pages.shape[2], pages.shape[3])
        buffer = self._scratch.get(key)
        if buffer is None or len(buffer) < most:
            buffer = self._scratch[key] = pages.new_empty(most, *pages.shape[1:])
        return buffer
