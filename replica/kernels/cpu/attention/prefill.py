"""Attention for rows with several queries, over paged keys and values.

A tile of queries, with all heads of a group side by side, iterates over blocks of keys with a running softmax, so the
scores of a whole row are never in memory. Blocks start at the same tokens for every query, so a query's result depends
neither on other queries of the step nor on how its prompt was split. A thread processes several consecutive tiles
together, and they share a block's reordered values and copied keys.
"""

import functools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numba import carray, njit

from ....models.base import AttentionRule
from ...base import PagedRows
from ..linear.tile import VECTORS
from ..runtime.compilation import Kernel, kernel
from ..runtime.scalars import Storage, pointer, storage_of
from ..runtime.thread_team import run, threads_for
from ..runtime.tiles import configure_tiles, release_tiles, tiles_usable
from ..runtime.vectors import LANES, SINGLE, WORD, Dot, dot
from .prefill_loops import LOWEST, QUERIES, copy_of, product_of, rescale_sums, rows_of, transpose_of, weights_of

#: Tokens per block. 64 and 256 were equally fast on a Zen 4.
BLOCK = 128
#: Query tiles that share a block.
TILES = 8
#: What tokens and values of a block are padded to with zeros.
PADDING = 2 * LANES
#: Words of a query's state: its greatest score, the sum of its weights, its last visible token.
STATE = 3
#: The window of layers without one: more tokens than any row has.
NO_WINDOW = 1 << 30


@dataclass(slots=True, frozen=True)
class Sizes:
    key_dim: int
    value_dim: int
    group: int
    numbers: int  #: numbers per word: 1 float32 or 2 bfloat16

    @property
    def key_words(self) -> int:
        return self.key_dim // self.numbers

    @property
    def width(self) -> int:
        """Length of a query's sums: `value_dim`, padded to whole vectors of words, and to whole products."""
        return -(-self.value_dim // PADDING) * PADDING

    @property
    def tile(self) -> int:
        """Bytes of one tile: its queries, sums and state."""
        return QUERIES * (self.key_words + self.width + STATE) * WORD

    @property
    def scratch(self) -> int:
        """Bytes of the tiles, and of a block's scores, keys, values before and after transposing, rescaling factors."""
        block = BLOCK * (QUERIES + self.key_words) + 2 * BLOCK // self.numbers * self.width + QUERIES
        return TILES * self.tile + block * WORD


def fits(q: torch.Tensor, rule: AttentionRule) -> bool:
    """Whether `prefill` supports the rule and the head dim; each head of a query must fill whole words."""
    return rule.softcap is None and rule.sinks is None and q.shape[-1] * q.itemsize % WORD == 0


def prefill(
    q: torch.Tensor, rows: PagedRows, first_queries: torch.Tensor, rule: AttentionRule, out: torch.Tensor
) -> None:
    """`base.TorchKernels.prefill` for arguments for which `fits` is true."""
    assert rule.scale > 0, f"a scale of {rule.scale}: the greatest score would not have the greatest weight"
    storage = storage_of(q.dtype, rows.keys.dtype, rows.values.dtype, out.dtype)
    q = q.flatten(1).unflatten(1, q.shape[1:])  # contiguous heads, unlike those that transformers models pass
    page, kv_heads, key_dim = rows.keys.shape[1:]
    sizes = Sizes(key_dim, rows.values.shape[3], q.shape[1] // kv_heads, WORD // storage.size)
    longest = rows.tables.shape[1] * page
    threads = threads_for(len(rows.seq_lens) * longest * kv_heads * (key_dim + sizes.value_dim) * storage.size)
    scratch = torch.empty(threads, sizes.scratch // WORD, dtype=torch.float32)
    tensors = q, rows.keys, rows.values, rows.tables, rows.seq_lens, first_queries, out, scratch
    strides = q.stride(0), out.stride(0), rows.tables.stride(0)
    counts = len(rows.seq_lens), kv_heads, page, *strides, rule.window or NO_WINDOW
    compiled = _compiled(storage, sizes, _dot(sizes))
    run(compiled, tensors, (*counts, rule.scale * math.log2(math.e)), threads)


def _dot(sizes: Sizes) -> Dot | None:
    """How words are multiplied; None: by matrix registers, which take whole registers of words."""
    if sizes.numbers == 1:
        return SINGLE
    return None if sizes.key_dim % PADDING == 0 and tiles_usable() else dot()


@functools.cache
def _compiled(storage: Storage, sizes: Sizes, dot: Dot | None) -> Kernel:
    size, key_dim, value_dim, group = storage.size, sizes.key_dim, sizes.value_dim, sizes.group
    attend, scratch_size, tiled = _attend(storage, sizes, dot), sizes.scratch, dot is None

    @kernel
    def prefill(data, thread, threads) -> None:
        args = carray(data, (16,), np.int64)
        scale = np.float32(carray(data, (16,), np.float64)[15])
        q, keys, values, tables, all_out = args[0], args[1], args[2], args[3], args[6]
        rows, kv_heads, page, window = args[8], args[9], args[10], args[14]
        q_stride, out_stride, table_stride = args[11], args[12], args[13]
        lengths = carray(pointer(args[4]), (rows,), np.int32)
        firsts = carray(pointer(args[5]), (rows + 1,), np.int32)
        scratch = args[7] + thread * scratch_size
        if tiled:
            configure_tiles(scratch)
        whole, done = np.int64(0), np.int64(0)
        for row in range(rows):
            queries, length = np.int64(firsts[row + 1] - firsts[row]), np.int64(lengths[row])
            for tile in range(tiles_of(queries, group)):
                whole += kv_heads * _cost(tile, queries, length, group, window)
        for head in range(kv_heads):
            for row in range(rows):
                queries, length = np.int64(firsts[row + 1] - firsts[row]), np.int64(lengths[row])
                first = stop = np.int64(0)
                for tile in range(tiles_of(queries, group)):
                    cost = _cost(tile, queries, length, group, window)
                    if (2 * done + cost) * threads // (2 * whole) == thread:
                        first = first if stop else np.int64(tile)
                        stop = np.int64(tile + 1)
                    done += cost
                query = q + (firsts[row] * q_stride + head * group * key_dim) * size
                out = all_out + (firsts[row] * out_stride + head * group * value_dim) * size
                addresses = query, q_stride * size, out, out_stride * size, scratch
                pages = keys, values, tables + row * table_stride * 4
                for tile in range(first, stop, TILES):
                    tiles = tile, min(tile + TILES, stop)
                    attend(tiles, addresses, pages, (kv_heads, head, page), (queries, length, window), scale)
        if tiled:
            release_tiles()

    return prefill


@njit(error_model="numpy")
def tiles_of(queries, group) -> np.int64:
    return (queries * group + QUERIES - 1) // QUERIES


@njit(error_model="numpy")
def _ends(tile, queries, length, group) -> tuple[np.int64, np.int64]:
    """Token positions of the tile's first and last query."""
    before = length - queries
    last = min((tile + 1) * QUERIES - 1, queries * group - 1)
    return before + tile * QUERIES // group, before + last // group


@njit(error_model="numpy")
def _cost(tile, queries, length, group, window) -> np.int64:
    """The estimated cost of a tile in keys, with a fixed cost of `QUERIES` keys."""
    first, last = _ends(tile, queries, length, group)
    return last + 1 - max(np.int64(0), first + 1 - window) + QUERIES


def _tile_ends(storage: Storage, sizes: Sizes) -> tuple[Any, Any]:
    """The functions that set up a tile of queries and store its results."""
    kind, narrow, size, value_dim = storage.kind, storage.narrow, storage.size, sizes.value_dim
    group, key_words, width = sizes.group, sizes.key_words, sizes.width
    transpose = transpose_of(1)

    @njit(error_model="numpy")
    def begin_tile(scratch, query, query_step, tile, queries, length) -> None:
        """Copy queries into lanes, padded with the last query, and reset sums and state."""
        lanes = carray(pointer(scratch), (key_words, QUERIES), np.uint32)
        sums = carray(pointer(scratch + QUERIES * key_words * WORD), (QUERIES * width,), np.float32)
        state = scratch + QUERIES * (key_words + width) * WORD
        tops, totals = carray(pointer(state), (2, QUERIES), np.float32)
        lasts = carray(pointer(state + 2 * QUERIES * WORD), (QUERIES,), np.int32)
        for lane in range(QUERIES):
            number = min(tile * QUERIES + lane, queries * group - 1)
            token, head = number // group, number % group
            tops[lane], totals[lane] = np.float32(LOWEST), np.float32(0)
            lasts[lane] = length - queries + token
            source = carray(pointer(query + token * query_step + head * key_words * WORD), (key_words,), np.uint32)
            for word in range(key_words):
                lanes[word, lane] = source[word]
        for i in range(QUERIES * width):
            sums[i] = np.float32(0)

    @njit(error_model="numpy")
    def end_tile(scratch, out, out_step, tile, queries, ordered) -> None:
        """Divide the sums by the weights' totals. `ordered` is overwritten by the sums of one query after the other."""
        sums_at = scratch + QUERIES * key_words * WORD
        for i in range(0, width, LANES):
            for lane in range(0, QUERIES, LANES):
                source, target = sums_at + (i * QUERIES + lane) * WORD, ordered + (lane * width + i) * WORD
                transpose(source, np.int64(QUERIES * WORD), target, np.int64(width * WORD))
        sums = carray(pointer(ordered), (QUERIES, width), np.float32)
        totals = carray(pointer(sums_at + (width + 1) * QUERIES * WORD), (QUERIES,), np.float32)
        for lane in range(min(QUERIES, queries * group - tile * QUERIES)):
            number = tile * QUERIES + lane
            token, head = number // group, number % group
            target = carray(pointer(out + token * out_step + head * value_dim * size), (value_dim,), kind)
            inverse = np.float32(1) / totals[lane]
            for i in range(value_dim):
                target[i] = narrow(sums[lane, i] * inverse)

    return begin_tile, end_tile


def _block_copies(sizes: Sizes) -> tuple[Any, Any, Any]:
    """The functions that copy a block's keys and values, and that transpose the copied values."""
    numbers, width, size = sizes.numbers, sizes.width, WORD // sizes.numbers
    bits = np.uint16 if numbers == 2 else np.uint32
    transpose = transpose_of(numbers)

    def rows_copy(length: int, row: int) -> Any:
        copy = copy_of(length * size)

        @njit(error_model="numpy")
        def copy_rows(source, step, blocks, page, first, tokens, copied) -> None:
            """Copy `length` numbers of each token from `first` on, into rows of `row` numbers."""
            for token in range(first, first + tokens):
                slot = np.int64(blocks[token // page]) * page + token % page
                copy(source + slot * step, copied + (token - first) * row * size)

        return copy_rows

    @njit(error_model="numpy")
    def transpose_values(copied, tokens, ordered) -> None:
        """Store the copied values of a block by dimension; those of missing tokens are 0, because NaN * 0 is NaN."""
        rows = carray(pointer(copied), (BLOCK, width), bits)
        padded = (tokens + PADDING - 1) // PADDING * PADDING
        for token in range(tokens, padded):
            for i in range(width):
                rows[token, i] = bits(0)
        for token in range(0, padded, LANES):
            for i in range(0, width, LANES * numbers):
                source, target = copied + (token * width + i) * size, ordered + (i * BLOCK + token) * size
                transpose(source, np.int64(width * size), target, np.int64(BLOCK * size))

    return rows_copy(sizes.key_dim, sizes.key_dim), rows_copy(sizes.value_dim, width), transpose_values


def _attend(storage: Storage, sizes: Sizes, dot: Dot | None) -> Any:
    key_size, value_size, group = sizes.key_words * WORD, sizes.value_dim * storage.size, sizes.group
    tile_size, scores_at = sizes.tile, sizes.tile * TILES
    values_at = scores_at + BLOCK * QUERIES * WORD
    ordered_at = values_at + BLOCK // sizes.numbers * sizes.width * WORD
    keys_at = ordered_at + BLOCK // sizes.numbers * sizes.width * WORD
    rescale_at = keys_at + BLOCK * key_size
    begin_tile, end_tile = _tile_ends(storage, sizes)
    copy_keys, copy_values, transpose_values = _block_copies(sizes)
    add_block = _add_block(storage, sizes, dot)

    @njit(error_model="numpy")
    def attend(tiles, addresses, pages, shape, row, scale) -> None:
        query, query_step, out, out_step, scratch = addresses
        keys, values, table = pages
        kv_heads, head, page = shape
        queries, length, window = row
        copied, ordered = scratch + values_at, scratch + ordered_at
        buffers = scratch + scores_at, scratch + keys_at, copied, ordered, scratch + rescale_at
        for tile in range(tiles[0], tiles[1]):
            begin_tile(scratch + (tile - tiles[0]) * tile_size, query, query_step, tile, queries, length)
        begin = max(np.int64(0), _ends(tiles[0], queries, length, group)[0] + 1 - window)
        end = _ends(tiles[1] - 1, queries, length, group)[1] + 1
        blocks = carray(pointer(table), ((end + page - 1) // page,), np.int32)
        for block in range(begin - begin % BLOCK, end, BLOCK):
            tokens = min(end - block, BLOCK)
            copy_keys(keys + head * key_size, kv_heads * key_size, blocks, page, block, tokens, buffers[1])
            copy_values(values + head * value_size, kv_heads * value_size, blocks, page, block, tokens, copied)
            transpose_values(copied, tokens, ordered)
            for tile in range(tiles[0], tiles[1]):
                first, last = _ends(tile, queries, length, group)
                if block <= last and block + BLOCK > first + 1 - window:
                    at, lanes = scratch + (tile - tiles[0]) * tile_size, queries * group - tile * QUERIES
                    add_block(at, buffers, block, (first, last, window), lanes, scale)
        for tile in range(tiles[0], tiles[1]):
            end_tile(scratch + (tile - tiles[0]) * tile_size, out, out_step, tile, queries, copied)

    return attend


def _product(dot: Dot | None, adds: bool) -> Any:
    few, all_lanes = product_of(dot, 1, adds), product_of(dot, VECTORS, adds)
    of_few, of_all = rows_of(dot, 1), rows_of(dot, VECTORS)

    @njit(error_model="numpy")
    def multiply(rows, step, count, lanes, words, out, used) -> None:
        """Like `prefill_loops.product_of`, for at least `count` rows and the first `used` lanes."""
        if used <= LANES:
            for row in range(0, count, of_few):
                few(rows + row * step, step, lanes, words, out + row * QUERIES * WORD)
        else:
            for row in range(0, count, of_all):
                all_lanes(rows + row * step, step, lanes, words, out + row * QUERIES * WORD)

    return multiply


def _add_block(storage: Storage, sizes: Sizes, dot: Dot | None) -> Any:
    kind, widen, value_dim = storage.kind, storage.widen, sizes.value_dim
    numbers, width, key_words, key_size = sizes.numbers, sizes.width, sizes.key_words, sizes.key_words * WORD
    sums_at = QUERIES * key_words * WORD
    state_at = sums_at + QUERIES * width * WORD
    score, add, together = _product(dot, adds=False), _product(dot, adds=True), rows_of(dot, 1)
    weigh, weigh_visible = weights_of(numbers, masked=False), weights_of(numbers, masked=True)
    bits, non_finite = (np.uint16, np.uint16(0x7F80)) if numbers == 2 else (np.uint32, np.uint32(0x7F800000))

    @njit(error_model="numpy")
    def are_finite(copied, count) -> bool:
        """Whether the values of the first `count` tokens contain neither NaN nor infinity."""
        values = carray(pointer(copied), (BLOCK, width), bits)
        found = np.int32(0)
        for token in range(count):
            for i in range(value_dim):
                found |= np.int32((values[token, i] & non_finite) == non_finite)
        return found == 0

    @njit(error_model="numpy")
    def add_visible(scores, copied, block, count, tile_sums, state, window) -> None:
        """Like the product, but skips the keys that a query does not see, as 0 * NaN would be NaN."""
        weights = carray(pointer(scores), (BLOCK // numbers, QUERIES, numbers), kind)
        values = carray(pointer(copied), (BLOCK, width), kind)
        sums = carray(pointer(tile_sums), (value_dim, QUERIES), np.float32)
        lasts = carray(pointer(state + 2 * QUERIES * WORD), (QUERIES,), np.int32)
        for lane in range(QUERIES):
            last = np.int64(lasts[lane])
            for key in range(max(np.int64(0), last + 1 - window - block), min(count, last + 1 - block)):
                weight = widen(weights[key // numbers, lane, key % numbers])
                for i in range(value_dim):
                    sums[i, lane] += weight * widen(values[key, i])

    @njit(fastmath=False, error_model="numpy")  # fast math would remove `power`'s rounding by addition
    def add_block(tile, buffers, block, visible, lanes, scale) -> None:
        scores, keys, copied, ordered, rescale = buffers
        first, last, window = visible
        sums, state = tile + sums_at, tile + state_at
        count = min((last - block) // together * together + together, BLOCK)
        score(keys, np.int64(key_size), count, tile, np.int64(key_words), scores, lanes)
        sees_all = block + count - 1 <= first and block > last - window
        if sees_all:
            weigh(scores, count, scale, state, rescale, block, window)
        else:
            weigh_visible(scores, count, scale, state, rescale, block, window)
        rescale_sums(sums, np.int64(value_dim), rescale)
        if not sees_all and not are_finite(copied, count):
            add_visible(scores, copied, block, count, sums, state, window)
            return
        add(ordered, np.int64(BLOCK * WORD // numbers), value_dim, scores, count // numbers, sums, lanes)

    return add_block
