"""Paged attention on CPU with stock torch: pages are gathered into reused buffers, then matrix products and a softmax.

For what compiled.py has no kernels for, and where none can be compiled. Measured on an AMD EPYC core in bfloat16, 12
query heads on 4 KV heads of 64, CPU time: a prefill of 2,048 tokens takes 65 ms a layer and 115 with
`scaled_dot_product_attention`, 64 tokens after 1,024 cached ones 2.0 and 3.7 ms. Decoding rows have too few queries for
one KV head to fill a product, so several KV heads go into one: queries stand in blocks along a diagonal, zeros beside
them (16 rows of 320: 0.7 ms and 1.4). Fresh gathers of tens of megabytes fault pages in and cost 2 to 6 times more than
a reused buffer.

Decoding rows whose block tables begin alike (a shared prompt) read that part once for all of them.
"""

from dataclasses import dataclass
from math import gcd, inf
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch

from ..models.base import AttentionRule
from .base import Batch, KvPool
from .reference import visible, weighed

#: Bytes of keys and values that one group of decode rows may gather; see the module's docstring.
GROUP_BYTES = 2 << 20
#: Queries of a prefill in one product: 64 and 128 were equally fast, 256 a tenth slower.
TILE = 128
#: KV heads in one product of decoding rows. More waste arithmetic, fewer are more products.
HEADS_AT_ONCE = 4
#: Pages that sharing must save in a step to be worth some more calls. Not tuned.
SHARING_PAGES = 16

Tables = npt.NDArray[np.int32]


@dataclass(slots=True, frozen=True)
class Tile:
    """Some queries of a prefill and the keys they see."""

    first: int  #: within the row's queries
    stop: int
    first_key: int  #: within the row's gathered keys
    stop_key: int
    hidden: torch.Tensor  #: [queries, the last so many keys] True where a query does not see a key


@dataclass(slots=True, frozen=True)
class PrefillItem:
    """One row that computes several tokens."""

    start: int  #: its first token in the batch
    q_len: int
    blocks: torch.Tensor  #: [pages]
    tiles: list[Tile]


@dataclass(slots=True, frozen=True)
class DecodeItem:
    """A group of rows that compute one token each, padded to the longest; first the pages that all of them share."""

    tokens: torch.Tensor | slice  #: the rows' tokens in the batch; a slice where they follow each other
    shared: torch.Tensor  #: [pages]
    rows: int
    blocks: torch.Tensor  #: [rows * pages of each]
    hidden: torch.Tensor | None  #: [rows, keys of each]; None: all are seen


@dataclass(slots=True, frozen=True)
class Work:
    """A step's attention for one window; all layers that share the window share it."""

    prefills: list[PrefillItem]
    decodes: list[DecodeItem]


@dataclass(slots=True, frozen=True)
class _Row:
    """Pages first_page up to first_page + pages of one row's table, which hold what its tokens see."""

    index: int
    start: int
    q_len: int
    kv_len: int
    first_page: int
    pages: int
    sees_all: bool  #: no key is hidden by a window


def split_work(batch: Batch, block_size: int, group_pages: int, window: int | None) -> Work:
    """Group a batch's rows; a group of decode rows gathers at most `group_pages`, unless its only row needs more."""
    rows = _rows(batch, block_size, window)
    tables = batch.block_tables.numpy()
    prefills = [_prefill_item(row, batch, block_size, window) for row in rows if row.q_len > 1]
    decodes: list[DecodeItem] = []
    for members, shared in _families([row for row in rows if row.q_len == 1], tables):
        members.sort(key=lambda row: row.pages)  # alike rows: little padding
        while members:
            count = min(len(members), max(1, group_pages // max(members[-1].pages - shared, 1)))
            group = [members.pop() for _ in range(count)]
            decodes.append(_decode_item(group, shared, tables, block_size, window))
    return Work(prefills, decodes)


def _rows(batch: Batch, block_size: int, window: int | None) -> list[_Row]:
    rows, start = [], 0
    for index, (q_len, kv_len) in enumerate(zip(batch.q_lens, batch.kv_lens, strict=True)):
        first_seen = 0 if window is None else max(0, kv_len - q_len - window + 1)
        first_page = first_seen // block_size
        pages = -(-kv_len // block_size) - first_page
        rows.append(_Row(index, start, q_len, kv_len, first_page, pages, sees_all=not first_seen))
        start += q_len
    return rows


def _families(rows: list[_Row], tables: Tables) -> list[tuple[list[_Row], int]]:
    """Rows that begin with the same pages, with the number of these; and all others, who share nothing.

    Shared pages are read without hiding any key, so a row whose window begins inside its first page is alone, too.
    """
    by_block: dict[int, list[_Row]] = {}
    for row in rows:
        if row.sees_all:
            by_block.setdefault(int(tables[row.index, 0]), []).append(row)
    alone = [row for row in rows if not row.sees_all]
    families = []
    for members in by_block.values():
        shared = _shared_pages(members, tables)
        if shared * (len(members) - 1) >= SHARING_PAGES:
            families.append((members, shared))
        else:
            alone += members
    return [*families, (alone, 0)]


def _shared_pages(members: list[_Row], tables: Tables) -> int:
    """Leading pages that all have; a row's newest token is never in one of them."""
    full = min(row.pages for row in members) - 1
    own = tables[[row.index for row in members], :full]
    alike = (own == own[0]).all(axis=0)
    return full if alike.all() else int(alike.argmin())


def _prefill_item(row: _Row, batch: Batch, block_size: int, window: int | None) -> PrefillItem:
    skipped = row.first_page * block_size
    before = row.kv_len - row.q_len - skipped
    tiles = []
    for first in range(0, row.q_len, TILE):
        stop = min(row.q_len, first + TILE)
        first_key = 0 if window is None else max(0, before + first - window + 1)
        # Without a window only keys beside the tile's own queries can be hidden: those after each.
        hidden_from = before + first if window is None else first_key
        queries, keys = torch.arange(before + first, before + stop), torch.arange(hidden_from, before + stop)
        tiles.append(Tile(first, stop, first_key, before + stop, ~visible(queries, keys, window)))
    blocks = batch.block_tables[row.index, row.first_page : row.first_page + row.pages].contiguous()
    return PrefillItem(row.start, row.q_len, blocks, tiles)


def _decode_item(group: list[_Row], shared: int, tables: Tables, block_size: int, window: int | None) -> DecodeItem:
    pages = group[0].pages - shared  # of the longest
    group.sort(key=lambda row: row.start)
    starts = [row.start for row in group]
    follow = starts[-1] - starts[0] == len(starts) - 1
    first_pages = np.array([row.first_page + shared for row in group])[:, None]
    # A window makes rows start at different pages; a table too short for all `pages` is padded by its last entries,
    # whose keys lie beyond the row's end and are hidden.
    columns = np.minimum(first_pages + np.arange(pages), tables.shape[1] - 1)
    indexes = np.array([row.index for row in group])
    positions = first_pages * block_size + np.arange(pages * block_size)
    last = np.array([row.kv_len - 1 for row in group])[:, None]
    hidden = positions > last
    if window is not None:
        hidden |= positions <= last - window
    return DecodeItem(
        tokens=slice(starts[0], starts[-1] + 1) if follow else torch.tensor(starts),
        shared=torch.from_numpy(tables[group[0].index, :shared].copy()),
        rows=len(group),
        blocks=torch.from_numpy(tables[indexes[:, None], columns].ravel()),
        hidden=torch.from_numpy(hidden) if hidden.any() else None,
    )


class ScratchAttention:
    """Attention over pages gathered into scratch buffers that all layers and steps reuse."""

    name: ClassVar[str] = "cpu-scratch"

    def __init__(self, pool: KvPool, group_bytes: int = GROUP_BYTES) -> None:
        self._pool = pool
        self._group_bytes = group_bytes
        self._batch: Batch | None = None
        self._work: dict[int | None, Work] = {}
        self._scratch: dict[str, torch.Tensor] = {}

    def begin(self, batch: Batch) -> None:
        self._batch = batch
        self._work.clear()

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rule: AttentionRule
    ) -> torch.Tensor:
        self._pool.write(layer, self._began.slots, k, v)
        return self._read(layer, q, rule)

    @property
    def _began(self) -> Batch:
        assert self._batch is not None, "attend before begin"
        return self._batch

    def _read(self, layer: int, q: torch.Tensor, rule: AttentionRule) -> torch.Tensor:
        """Attention over what is stored by now."""
        work = self._work_for(layer, self._began, rule.window)
        out = q.new_empty(q.shape[0], q.shape[1], self._pool.values[layer].shape[3])
        for prefill in work.prefills:
            self._prefill(layer, prefill, q, rule, out)
        for decode in work.decodes:
            out[decode.tokens] = self._decode(layer, decode, q[decode.tokens], rule)
        return out

    def _work_for(self, layer: int, batch: Batch, window: int | None) -> Work:
        work = self._work.get(window)
        if work is None:
            page_bytes = self._pool.keys[layer][0].nbytes + self._pool.values[layer][0].nbytes
            group_pages = self._group_bytes // page_bytes
            work = self._work[window] = split_work(batch, self._pool.block_size, group_pages, window)
        return work

    def _prefill(self, layer: int, item: PrefillItem, q: torch.Tensor, rule: AttentionRule, out: torch.Tensor) -> None:
        """One row's part of the queries [T, heads, dim], tile by tile, all heads at once."""
        q, out = (x[item.start : item.start + item.q_len] for x in (q, out))
        k, v = self._gather(layer, item.blocks, "")
        kv_heads = k.shape[1]
        keys, values = k.permute(1, 2, 0), v.transpose(0, 1)
        grouped = (q * rule.scale).view(item.q_len, kv_heads, -1, q.shape[2])
        answers = out.view(item.q_len, kv_heads, -1, v.shape[2])
        for tile in item.tiles:
            count, seen = tile.stop - tile.first, slice(tile.first_key, tile.stop_key)
            queries = grouped[tile.first : tile.stop].permute(1, 2, 0, 3)  # [kv heads, group, queries, dim]
            scores = self._buffer("scores", (kv_heads, queries.shape[1] * count, seen.stop - seen.start), q)
            torch.bmm(queries.flatten(1, 2), keys[:, :, seen], out=scores)
            by_query = scores.view(kv_heads, -1, count, scores.shape[2])
            _hide(by_query, tile.hidden, rule.softcap)
            weights = _weights(by_query, None if rule.sinks is None else rule.sinks.view(kv_heads, -1, 1, 1))
            found = weighed(weights.flatten(1, 2), values[:, seen])
            answers[tile.first : tile.stop] = found.view(kv_heads, -1, count, v.shape[2]).permute(2, 0, 1, 3)

    def _decode(self, layer: int, item: DecodeItem, q: torch.Tensor, rule: AttentionRule) -> torch.Tensor:
        """One query of each row: [rows, heads, dim]; some KV heads at a time."""
        kv_heads = self._pool.keys[layer].shape[2]
        parts = gcd(kv_heads, HEADS_AT_ONCE)
        own = self._gather(layer, item.blocks, "")
        shared = self._gather(layer, item.shared, "shared ") if len(item.shared) else None
        grouped = q.view(item.rows, kv_heads, -1, q.shape[2])
        found = []
        for first in range(0, kv_heads, parts):
            heads = slice(first, first + parts)
            queries = self._diagonal(grouped[:, heads], rule.scale)
            k, v = (x[:, heads].reshape(item.rows, -1, parts * x.shape[2]) for x in own)
            common = [x[:, heads].flatten(1) for x in shared] if shared else None
            sinks = None if rule.sinks is None else rule.sinks.view(kv_heads, -1)[heads].reshape(1, -1, 1)
            found.append(_decode_heads(queries, k, v, common, item.hidden, rule.softcap, sinks))
        return torch.cat([_from_diagonal(each, parts) for each in found], 1).flatten(1, 2)

    def _diagonal(self, q: torch.Tensor, scale: float) -> torch.Tensor:
        """[rows, parts, group, dim] as [rows, parts * group, parts * dim]: each head's queries where its keys are."""
        rows, parts, group, dim = q.shape
        # Zeros beside the diagonal stay from layer to layer.
        blocks = self._buffer(f"queries {q.shape}", (rows, parts, group, parts, dim), q, zeroed=True)
        torch.mul(q.permute(0, 2, 3, 1), scale, out=blocks.diagonal(dim1=1, dim2=3))
        return blocks.view(rows, parts * group, parts * dim)

    def _gather(self, layer: int, blocks: torch.Tensor, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of these blocks, [slots, heads, dim], until the next call of the kind overwrites them."""
        keys, values = self._pool.keys[layer], self._pool.values[layer]
        k = self._buffer(f"{kind}keys", (len(blocks), *keys.shape[1:]), keys)
        v = self._buffer(f"{kind}values", (len(blocks), *values.shape[1:]), values)
        torch.index_select(keys, 0, blocks, out=k)
        torch.index_select(values, 0, blocks, out=v)
        return k.flatten(0, 1), v.flatten(0, 1)

    def _buffer(self, kind: str, shape: tuple[int, ...], like: torch.Tensor, *, zeroed: bool = False) -> torch.Tensor:
        size = int(np.prod(shape))
        buffer = self._scratch.get(kind)
        if buffer is None or len(buffer) < size:
            buffer = self._scratch[kind] = like.new_zeros(size) if zeroed else like.new_empty(size)
        return buffer[:size].view(shape)


def _decode_heads(
    queries: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    shared: list[torch.Tensor] | None,
    hidden: torch.Tensor | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """queries [rows, heads, parts * dim], own keys and values [rows, keys, parts * dim], shared ones [keys, ...]."""
    rows, heads, _ = queries.shape
    scores = torch.bmm(queries, k.transpose(1, 2))
    _hide(scores, None if hidden is None else hidden[:, None], softcap)
    count = 0
    if shared is not None:
        common = torch.mm(queries.flatten(0, 1), shared[0].T).view(rows, heads, -1)
        _hide(common, None, softcap)
        count = common.shape[2]
        scores = torch.cat((common, scores), -1)
    weights = _weights(scores, sinks)
    found = weighed(weights[:, :, count:], v)
    if shared is not None:
        found += torch.mm(weights[:, :, :count].flatten(0, 1), shared[1]).view_as(found)
    return found


def _from_diagonal(found: torch.Tensor, parts: int) -> torch.Tensor:
    """[rows, parts * group, parts * dim] as [rows, parts, group, dim]: of each head what its own values gave."""
    rows = len(found)
    blocks = found.view(rows, parts, found.shape[1] // parts, parts, found.shape[2] // parts)
    return blocks.diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2)


def _hide(scores: torch.Tensor, hidden: torch.Tensor | None, softcap: float | None) -> None:
    """Cap the scores where the rule asks for it, and hide keys: `hidden` covers the last ones."""
    if softcap is not None:
        scores.div_(softcap).tanh_().mul_(softcap)
    if hidden is not None:
        scores[..., -hidden.shape[-1] :].masked_fill_(hidden, -inf)


def _weights(scores: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Softmax over the keys, in place; sinks [..., 1] take part in it."""
    if sinks is None:
        return torch.softmax(scores, -1, out=scores)
    column = sinks.to(scores.dtype).expand(*scores.shape[:-1], 1)
    return torch.cat((scores, column), -1).softmax(-1)[..., :-1]
