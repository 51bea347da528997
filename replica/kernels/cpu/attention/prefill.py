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
from ..linear.tile import OUTPUTS, ROWS
from ..runtime.compilation import Kernel, kernel
from ..runtime.scalars import Storage, pointer, storage_of
from ..runtime.thread_team import run, threads_for
from ..runtime.vectors import SINGLE, WORD, Dot, dot
from .prefill_loops import KEYS, LOWEST, QUERIES, scores_of, sums_of, weights_of

#: Tokens per block. 64 and 256 were equally fast on a Zen 4.
BLOCK = 128
#: Query tiles that share a block.
TILES = 8
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
        """Length of a query's sums: `value_dim`, padded to whole vectors."""
        return -(-self.value_dim // OUTPUTS) * OUTPUTS

    @property
    def tile(self) -> int:
        """Bytes of one tile: its queries, sums and state."""
        return QUERIES * (self.key_words + self.width + STATE) * WORD

    @property
    def scratch(self) -> int:
        """Bytes of the tiles, and of a block's scores, values, rescaling factors and keys."""
        block = BLOCK * (QUERIES + self.key_words) + BLOCK // self.numbers * self.width + QUERIES
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
    compiled = _compiled(storage, sizes, dot() if sizes.numbers == 2 else SINGLE)
    run(compiled, tensors, (*counts, rule.scale * math.log2(math.e)), threads)


@functools.cache
def _compiled(storage: Storage, sizes: Sizes, dot: Dot) -> Kernel:
    size, key_dim, value_dim, group = storage.size, sizes.key_dim, sizes.value_dim, sizes.group
    attend, scratch_size = _attend(storage, sizes, dot), sizes.scratch

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
    def end_tile(scratch, out, out_step, tile, queries) -> None:
        sums = carray(pointer(scratch + QUERIES * key_words * WORD), (QUERIES, width), np.float32)
        totals = carray(pointer(scratch + QUERIES * (key_words + width + 1) * WORD), (QUERIES,), np.float32)
        for lane in range(min(QUERIES, queries * group - tile * QUERIES)):
            number = tile * QUERIES + lane
            token, head = number // group, number % group
            target = carray(pointer(out + token * out_step + head * value_dim * size), (value_dim,), kind)
            inverse = np.float32(1) / totals[lane]
            for i in range(value_dim):
                target[i] = narrow(sums[lane, i] * inverse)

    return begin_tile, end_tile


def _block_copies(sizes: Sizes) -> tuple[Any, Any]:
    """The functions that copy a block's values and keys."""
    numbers, key_words, width, value_dim = sizes.numbers, sizes.key_words, sizes.width, sizes.value_dim
    bits = np.uint16 if numbers == 2 else np.uint32

    @njit(error_model="numpy")
    def gather(values, step, blocks, page, first, tokens, ordered) -> None:
        """Copy values from token `first` on, consecutive tokens in one word; pad with zeros to a multiple of `KEYS`."""
        words = carray(pointer(ordered), (BLOCK // numbers, width), np.uint32)
        for word in range((tokens + numbers - 1) // numbers):
            token = first + word * numbers
            low = carray(pointer(values + _slot(blocks, page, token) * step), (value_dim,), bits)
            if numbers == 1:
                for i in range(value_dim):
                    words[word, i] = low[i]
            else:
                lone = word * numbers + 1 == tokens
                following = token if lone else token + 1
                high = carray(pointer(values + _slot(blocks, page, following) * step), (value_dim,), bits)
                mask = np.uint32(0 if lone else 0xFFFF0000)
                for i in range(value_dim):
                    words[word, i] = np.uint32(low[i]) | (np.uint32(np.uint32(high[i]) << np.uint32(16)) & mask)
        for word in range((tokens + numbers - 1) // numbers, (tokens + KEYS - 1) // KEYS * KEYS // numbers):
            for i in range(value_dim):
                words[word, i] = np.uint32(0)

    @njit(error_model="numpy")
    def copy(keys, step, blocks, page, first, tokens, copied) -> None:
        """Copy the keys of `tokens` tokens from `first` on. What follows them in `copied` is never visible."""
        words = carray(pointer(copied), (BLOCK, key_words), np.uint32)
        for token in range(tokens):
            source = carray(pointer(keys + _slot(blocks, page, first + token) * step), (key_words,), np.uint32)
            for word in range(key_words):
                words[token, word] = source[word]

    return gather, copy


def _attend(storage: Storage, sizes: Sizes, dot: Dot) -> Any:
    key_size, value_size, group = sizes.key_words * WORD, sizes.value_dim * storage.size, sizes.group
    tile_size, scores_at = sizes.tile, sizes.tile * TILES
    values_at = scores_at + BLOCK * QUERIES * WORD
    rescale_at = values_at + BLOCK // sizes.numbers * sizes.width * WORD
    keys_at = rescale_at + QUERIES * WORD
    begin_tile, end_tile = _tile_ends(storage, sizes)
    gather, copy = _block_copies(sizes)
    add_block = _add_block(storage, sizes, dot)

    @njit(error_model="numpy")
    def attend(tiles, addresses, pages, shape, row, scale) -> None:
        query, query_step, out, out_step, scratch = addresses
        keys, values, table = pages
        kv_heads, head, page = shape
        queries, length, window = row
        buffers = scratch + scores_at, scratch + keys_at, scratch + values_at, scratch + rescale_at
        for tile in range(tiles[0], tiles[1]):
            begin_tile(scratch + (tile - tiles[0]) * tile_size, query, query_step, tile, queries, length)
        begin = max(np.int64(0), _ends(tiles[0], queries, length, group)[0] + 1 - window)
        end = _ends(tiles[1] - 1, queries, length, group)[1] + 1
        blocks = carray(pointer(table), ((end + page - 1) // page,), np.int32)
        for block in range(begin - begin % BLOCK, end, BLOCK):
            tokens = min(end - block, BLOCK)
            gather(values + head * value_size, kv_heads * value_size, blocks, page, block, tokens, buffers[2])
            copy(keys + head * key_size, kv_heads * key_size, blocks, page, block, tokens, buffers[1])
            for tile in range(tiles[0], tiles[1]):
                first, last = _ends(tile, queries, length, group)
                if block <= last and block + BLOCK > first + 1 - window:
                    at, lanes = scratch + (tile - tiles[0]) * tile_size, queries * group - tile * QUERIES
                    add_block(at, buffers, block, (first, last, window), lanes, scale)
        for tile in range(tiles[0], tiles[1]):
            end_tile(scratch + (tile - tiles[0]) * tile_size, out, out_step, tile, queries)

    return attend


def _add_block(storage: Storage, sizes: Sizes, dot: Dot) -> Any:
    kind, widen, value_dim = storage.kind, storage.widen, sizes.value_dim
    numbers, width, key_size = sizes.numbers, sizes.width, sizes.key_words * WORD
    sums_at = QUERIES * sizes.key_words * WORD
    state_at = sums_at + QUERIES * width * WORD
    score, add = scores_of(dot, sizes.key_words), sums_of(dot, width)
    weigh, weigh_visible = weights_of(numbers, masked=False), weights_of(numbers, masked=True)
    high, low = np.uint32(0x7F800000), np.uint32(0x7F80 if numbers == 2 else 0xFFFFFFFF)

    @njit(error_model="numpy")
    def are_finite(ordered, count) -> bool:
        """Whether the values of the first `count` tokens contain neither NaN nor infinity."""
        words = carray(pointer(ordered), (BLOCK // numbers, width), np.uint32)
        non_finite = np.uint32(0)
        for word in range(count // numbers):
            for i in range(value_dim):
                value = words[word, i]
                non_finite |= np.uint32((value & high) == high) | np.uint32((value & low) == low)
        return non_finite == 0

    @njit(error_model="numpy")
    def add_visible(scores, ordered, block, count, rescale, tile_sums, state, window) -> None:
        """Like `prefill_loops.sums_of`, but skips the keys that a query does not see, as 0 * NaN would be NaN."""
        weights = carray(pointer(scores), (BLOCK // numbers, QUERIES, numbers), kind)
        values = carray(pointer(ordered), (BLOCK // numbers, width, numbers), kind)
        rescales = carray(pointer(rescale), (QUERIES,), np.float32)
        sums = carray(pointer(tile_sums), (QUERIES, width), np.float32)
        lasts = carray(pointer(state + 2 * QUERIES * WORD), (QUERIES,), np.int32)
        for lane in range(QUERIES):
            for i in range(value_dim):
                sums[lane, i] *= rescales[lane]
            last = np.int64(lasts[lane])
            for key in range(max(np.int64(0), last + 1 - window - block), min(count, last + 1 - block)):
                word, part = key // numbers, key % numbers
                weight = widen(weights[word, lane, part])
                for i in range(value_dim):
                    sums[lane, i] += weight * widen(values[word, i, part])

    @njit(fastmath=False, error_model="numpy")  # fast math would remove `power`'s rounding by addition
    def add_block(tile, buffers, block, visible, lanes, scale) -> None:
        scores, keys, ordered, rescale = buffers
        first, last, window = visible
        count = min((last - block) // KEYS * KEYS + KEYS, BLOCK)
        for key in range(0, count, KEYS):
            score(keys + key * key_size, np.int64(key_size), tile, scores + key * QUERIES * WORD)
        if block + count - 1 <= first and block > last - window:
            weigh(scores, count, scale, tile + state_at, rescale, block, window)
        else:
            weigh_visible(scores, count, scale, tile + state_at, rescale, block, window)
            if not are_finite(ordered, count):
                add_visible(scores, ordered, block, count, rescale, tile + sums_at, tile + state_at, window)
                return
        for lane in range(0, min(QUERIES, lanes), ROWS):
            for chunk in range(0, width, OUTPUTS):
                sums, values = tile + sums_at + (lane * width + chunk) * WORD, ordered + chunk * WORD
                weights, rescales = scores + lane * WORD, rescale + lane * WORD
                add(weights, values, count // numbers, rescales, sums, np.int64(width * WORD))

    return add_block


@njit(error_model="numpy")
def _slot(blocks, page, token) -> np.int64:
    return np.int64(blocks[token // page]) * page + token % page
