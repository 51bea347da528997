"""Attention for rows with one query each, over paged keys and values.

A unit of work is a row, KV heads with all query heads of their groups, and a part of the row's tokens. Part boundaries
depend only on the row. Each unit stores its sums and softmax state, and the thread that completes a row's last part
merges them in order, so a row's result depends neither on the other rows nor on the threads.

Units are ordered by KV head, then by part, so that rows that share a prompt find its keys and values in the core's
cache. Rows that share none read all heads of a page together.
"""

import functools
from typing import Any

import numpy as np
import torch
from numba import carray, njit

from ....models.base import AttentionRule
from ...base import PagedRows
from ..runtime.compilation import Kernel, kernel
from ..runtime.scalars import (
    FAST_MATH,
    ONE,
    Storage,
    count_up,
    exponential,
    number_of,
    order_of,
    pointer,
    storage_of,
)
from ..runtime.thread_team import run, threads_for
from ..runtime.vectors import LANES, WORD, Dot, dot
from .decode_loops import PART, Loops, Sizes, fills_vectors, loops_of_pairs, plain_loops
from .prefill_loops import LOWEST

#: Words of a query's softmax state: its greatest score and the sum of its weights.
STATE = 2
#: Most query heads that a thread attends to at once: their scores are 128 KB.
MAX_HEADS = 64
#: Units of work for each thread, so that all end at about the same time.
UNITS = 4
#: How many heads ahead keys and values are prefetched: 16 tokens of two heads are a fifth of a core's L1 cache.
AHEAD = 2


def decode(q: torch.Tensor, rows: PagedRows, rule: AttentionRule, out: torch.Tensor) -> None:
    storage = storage_of(q.dtype, rows.keys.dtype, rows.values.dtype, out.dtype)
    q = q.flatten(1).unflatten(1, q.shape[1:])  # contiguous heads, unlike those that transformers models pass
    page, kv_heads, key_dim = rows.keys.shape[1:]
    sizes = Sizes(key_dim, rows.values.shape[3], q.shape[1] // kv_heads)
    longest = rows.tables.shape[1] * page
    visible = longest if rule.window is None else min(longest, rule.window + LANES)
    parts = -(-visible // PART)
    threads = threads_for(len(q) * visible * kv_heads * (key_dim + sizes.value_dim) * storage.size)
    heads = _heads_at_once(kv_heads, sizes.group, len(q) * parts, threads)
    scores = torch.empty(threads, heads * sizes.group * PART, dtype=torch.float32)
    partials = torch.empty(len(q), kv_heads, parts, sizes.group * (STATE + sizes.value_dim), dtype=torch.float32)
    with torch._C._DisableTorchDispatch():  # keep it out of recorded steps: the kernel resets it to zeros
        complete = torch.zeros(len(q) * kv_heads, dtype=torch.int32)
    sinks = partials if rule.sinks is None else rule.sinks.float()
    tensors = q, rows.keys, rows.values, rows.tables, rows.seq_lens, out, scores, partials, complete, sinks
    strides = q.stride(0), out.stride(0), rows.tables.stride(0)
    counts = len(q), kv_heads, page, parts, *strides, rule.window or 0, int(rule.sinks is not None), heads
    pairs = dot() if fills_vectors(storage, key_dim, sizes.value_dim, page) else None
    run(_compiled(storage, sizes, pairs), tensors, (*counts, float(rule.scale), float(rule.softcap or 0.0)), threads)


def _heads_at_once(kv_heads: int, group: int, units: int, threads: int) -> int:
    """How many KV heads of a part one thread may attend to page by page, of `units` parts of rows.

    Pages are then read as they are in memory: with 8 KV heads, 1.3 times as fast.
    """
    wanted = kv_heads if threads == 1 else kv_heads * units // (UNITS * threads)
    most = max(1, min(wanted, MAX_HEADS // group))
    return max(each for each in range(1, most + 1) if kv_heads % each == 0)


@njit(error_model="numpy")
def _share_pages(tables, table_stride, lengths) -> bool:
    """Whether a row begins with the same page as the first row or the one before it."""
    first, last = np.int32(-1), np.int32(-1)
    for row in range(len(lengths)):
        page = carray(pointer(tables + row * table_stride * 4), (1,), np.int32)[0]
        if lengths[row] > 0:  # else a padding row
            if page in (first, last):
                return True
            first, last = (page if first < 0 else first), page
    return False


@functools.cache
def _compiled(storage: Storage, sizes: Sizes, pairs: Dot | None) -> Kernel:
    size, key_dim, value_dim, group = storage.size, sizes.key_dim, sizes.value_dim, sizes.group
    loops = plain_loops(storage, sizes) if pairs is None else loops_of_pairs(storage, sizes, pairs)
    attend, merge = _attend(size, sizes, loops), _merge(sizes, loops)
    align, part_size = loops.align, group * (STATE + value_dim) * WORD

    @kernel
    def decode(data, thread, threads) -> None:
        args, floats = carray(data, (22,), np.int64), carray(data, (22,), np.float64)
        q, all_keys, all_values, tables, out = args[0], args[1], args[2], args[3], args[5]
        partials, complete, has_sinks = args[7], args[8], args[18]
        rows, kv_heads, page, max_parts, window = args[10], args[11], args[12], args[13], args[17]
        q_stride, out_stride, table_stride = args[14], args[15], args[16]
        heads, rule = args[19], (np.float32(floats[20]), np.float32(floats[21]))
        steps = kv_heads * key_dim * size, kv_heads * value_dim * size
        lengths = carray(pointer(args[4]), (rows,), np.int32)
        scores = args[6] + thread * heads * group * PART * WORD
        if _share_pages(tables, table_stride, lengths):
            heads = np.int64(1)  # the rows find a head's keys in the core's cache
        whole, done = np.int64(0), np.int64(0)
        for row in range(rows):
            first, _, parts = _extent(np.int64(lengths[row]), window, align)
            whole += kv_heads // heads * (lengths[row] - first + parts)
        for head in range(0, kv_heads, heads):
            keys, values = all_keys + head * key_dim * size, all_values + head * value_dim * size
            for part in range(max_parts):
                for row in range(rows):
                    first, begin, parts = _extent(np.int64(lengths[row]), window, align)
                    if part >= parts:
                        continue
                    begin += part * PART
                    first, end = max(first, begin), min(begin + PART, np.int64(lengths[row]))
                    mine = done * threads // whole == thread
                    done += end - first + 1
                    if mine:
                        unit = row * kv_heads + head
                        query = q + (row * q_stride + head * group * key_dim) * size
                        partial = partials + unit * max_parts * part_size
                        pages = tables + row * table_stride * 4, page, keys, values, steps
                        own = partial + part * part_size, max_parts * part_size
                        attend(query, scores, own, pages, (begin, first, end), heads, rule)
                        if parts == 1 or count_up(complete + unit * 4) == parts - 1:
                            carray(pointer(complete + unit * 4), (1,), np.int32)[0] = 0
                            for each in range(heads):
                                sinks = args[9] + (head + each) * group * WORD if has_sinks else np.int64(0)
                                target = out + (row * out_stride + (head + each) * group * value_dim) * size
                                merge(partial + each * max_parts * part_size, parts, sinks, target)

    return decode


@njit(error_model="numpy")
def _extent(length, window, align) -> tuple[np.int64, np.int64, np.int64]:
    """A row's first visible token, the aligned token at or before it, and the number of parts (at least one)."""
    first = max(np.int64(0), length - window) if window else np.int64(0)
    begin = first - first % align
    return first, begin, max(np.int64(1), (length - begin + PART - 1) // PART)


def _attend(size: int, sizes: Sizes, loops: Loops) -> Any:
    key_dim, value_dim, group, score, add = sizes.key_dim, sizes.value_dim, sizes.group, loops.score, loops.add
    key_size, value_size = key_dim * size, value_dim * size
    query_size, scores_size = group * key_size, group * PART * WORD

    @njit(fastmath=FAST_MATH, error_model="numpy")
    def attend(query, scores, partial, pages, part, heads, rule) -> None:
        """Attend to tokens `first` up to `end` with `heads` KV heads, page by page.

        `begin` is the aligned token at or before `first`. `partial`: the address of the first head's results, and the
        distance to the next head's.
        """
        table, page, keys, values, (key_step, value_step) = pages
        begin, first, end = part
        scale, softcap = rule
        distance = min(AHEAD, heads)
        blocks = carray(pointer(table), ((end + page - 1) // page,), np.int32)
        sums, sums_step = partial[0] + group * STATE * WORD, partial[1]
        for head in range(heads):
            zeroed = carray(pointer(sums + head * sums_step), (group * value_dim,), np.float32)
            for i in range(group * value_dim):
                zeroed[i] = np.float32(0)
        at, last = begin, (end - 1) // page
        while at < end:
            tokens, start = min(page - at % page, end - at), np.int64(blocks[at // page]) * page
            key, own = keys + (start + at % page) * key_step, scores + (at - begin) * WORD
            # Less this page's heads, which are counted first.
            ahead = keys + np.int64(blocks[min(at // page + 1, last)]) * page * key_step - heads * key_size
            for head in range(heads):
                given, found, next_head = query + head * query_size, own + head * scores_size, head + distance
                later = (key if next_head < heads else ahead) + next_head * key_size
                score(key + head * key_size, key_step, tokens, given, scale, found, later)
            at += tokens
        for head in range(heads):
            own = scores + (first - begin) * WORD + head * scores_size
            _weigh(own, group, end - first, softcap, partial[0] + head * sums_step)
        at = first
        while at < end:
            tokens, start = min(page - at % page, end - at), np.int64(blocks[at // page]) * page
            value, own = values + (start + at % page) * value_step, scores + (at - begin) * WORD
            ahead = values + np.int64(blocks[min(at // page + 1, last)]) * page * value_step - heads * value_size
            for head in range(heads):
                weights, next_head = own + head * scores_size, head + distance
                later = (value if next_head < heads else ahead) + next_head * value_size
                add(value + head * value_size, value_step, tokens, weights, sums + head * sums_step, later)
            at += tokens

    return attend


@njit(fastmath=FAST_MATH, error_model="numpy")
def _weigh(scores, group, count, softcap, states) -> None:
    """Replace the scores of `count` visible tokens with their weights, and write the state of each head."""
    for head in range(group):
        row = carray(pointer(scores + head * PART * WORD), (count,), np.float32)
        state = carray(pointer(states + head * STATE * WORD), (STATE,), np.float32)
        if softcap > 0:
            for i in range(count):
                # softcap * tanh(score / softcap)
                row[i] = softcap - 2 * softcap / (exponential(2 * row[i] / softcap) + ONE)
        greatest = order_of(np.float32(LOWEST))
        for i in range(count):
            greatest = max(greatest, order_of(row[i]))
        top, total = number_of(greatest), np.float32(0)
        for i in range(count):
            weight = exponential(row[i] - top)  # a NaN makes the sum NaN
            row[i] = weight
            total += weight
        state[0], state[1] = top, total


def _merge(sizes: Sizes, loops: Loops) -> Any:
    value_dim, group, store = sizes.value_dim, sizes.group, loops.store
    sums_at, words = group * STATE * WORD, group * (STATE + value_dim)

    @njit(fastmath=FAST_MATH, error_model="numpy")
    def merge(partials, parts, sinks, out) -> None:
        """Merge a row's parts into the first and store it. `sinks`: address of the heads' float32 sinks; 0: none."""
        for head in range(group):
            # Part i has its state at `words * i`.
            states = carray(pointer(partials + head * STATE * WORD), (parts * words,), np.float32)
            top, total = np.float32(LOWEST), np.float32(0)
            if sinks:
                top = carray(pointer(sinks + head * WORD), (1,), np.float32)[0]
                total = ONE
            for part in range(parts):
                own_top, own_total, known = states[part * words], states[part * words + 1], top
                top = own_top if own_top > top else top
                total = total * exponential(known - top) + own_total * exponential(own_top - top)
            inverse = ONE / total if total != 0 else np.float32(0)  # a padding row
            sums = carray(pointer(partials + sums_at + head * value_dim * WORD), (parts * words,), np.float32)
            for part in range(parts):
                factor = exponential(states[part * words] - top) * inverse
                for i in range(value_dim):
                    sums[i] = (sums[i] if part else np.float32(0)) + sums[part * words + i] * factor
        store(partials + sums_at, out)

    return merge
