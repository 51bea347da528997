"""Attention of rows with one query each, over keys and values in their pages.

The unit of work is a row and a KV head, with all query heads of its group. Threads take units in the order of the KV
heads: rows that share a prompt then find its keys and values in the cache of the core.
"""

import functools
from itertools import chain
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import carray, njit, types
from numba.extending import intrinsic

from ....models.base import AttentionRule
from ...base import PagedRows
from ..runtime import vectors as v
from ..runtime.compilation import kernel
from ..runtime.scalars import FAST_MATH, Storage, pointer, softmax_of_heads, storage_of
from ..runtime.thread_team import run, threads_for
from ..runtime.vectors import FLOAT, FLOATS, HALF, INT64, LANES, WORD, WORDS, Dot, dot

#: Numbers in one vector of words.
CHUNK = 2 * LANES
#: Vectors of sums in one loop: half of AVX-512's registers.
MOST_SUMS = 16


def decode(q: torch.Tensor, rows: PagedRows, rule: AttentionRule, out: torch.Tensor) -> None:
    storage = storage_of(q.dtype, rows.keys.dtype, rows.values.dtype, out.dtype)
    q = q.flatten(1).unflatten(1, q.shape[1:])  # transformers' models pass heads that are not contiguous
    page, kv_heads, key_dim = rows.keys.shape[1:]
    group, value_dim, longest = q.shape[1] // kv_heads, rows.values.shape[3], rows.tables.shape[1] * page
    threads = threads_for(len(q) * longest * kv_heads * (key_dim + value_dim) * storage.size)
    # For each thread: the group's queries, its scores, its sums.
    scratch = torch.empty(threads, group * (key_dim + longest + value_dim), dtype=torch.float32)
    sinks = scratch if rule.sinks is None else rule.sinks.float()
    tensors = q, rows.keys, rows.values, rows.tables, rows.seq_lens, out, scratch, sinks
    strides = q.stride(0), out.stride(0), rows.tables.stride(0)
    counts = len(q), kv_heads, page, longest, *strides, rule.window or 0, int(rule.sinks is not None)
    pairs = dot() if fills_vectors(storage, key_dim, value_dim, page) else None
    compiled = _compiled(storage, key_dim, value_dim, group, pairs)
    run(compiled, tensors, (*counts, float(rule.scale), float(rule.softcap or 0.0)), threads)


@functools.cache
def _compiled(storage: Storage, key_dim: int, value_dim: int, group: int, pairs: Dot | None):
    size, own_words, sizes = storage.size, group * (key_dim + value_dim), (key_dim, value_dim, group)
    attend = _attend(storage, *sizes) if pairs is None else _attend_pairs(storage, pairs, *sizes)

    @kernel
    def decode(data, thread, threads):
        given, floats = carray(data, (19,), np.int64), carray(data, (19,), np.float64)
        scale, softcap = np.float32(floats[17]), np.float32(floats[18])
        rows, kv_heads, page, longest, window = given[8], given[9], given[10], given[11], given[15]
        lengths = carray(pointer(given[4]), (rows,), np.int32)
        own = given[6] + thread * (own_words + group * longest) * 4
        whole, done = np.int64(0), np.int64(0)
        for row in range(rows):
            whole += (lengths[row] + 1) * kv_heads
        for head in range(kv_heads):
            rule = scale, softcap, given[7] + head * group * 4 if given[16] else np.int64(0)
            for row in range(rows):
                mine = done * threads // whole == thread
                done += lengths[row] + 1
                if mine:
                    length = np.int64(lengths[row])
                    first = max(np.int64(0), length - window) if window else np.int64(0)
                    query = given[0] + (row * given[12] + head * group * key_dim) * size
                    found = given[5] + (row * given[13] + head * group * value_dim) * size
                    pages = given[1], given[2], given[3] + row * given[14] * 4
                    attend(query, found, own, pages, (kv_heads, head, page, longest), first, length, rule)

    return decode


def _attend(storage: Storage, key_dim: int, value_dim: int, group: int):
    kind, size, widen, narrow = storage.kind, storage.size, storage.widen, storage.narrow

    @njit(fastmath=FAST_MATH, error_model="numpy")
    def score(keys, step, tokens, queries, scores, longest):
        """The scores of one page's tokens, for each query of the group."""
        token = 0
        while token + 4 <= tokens:
            k0 = carray(pointer(keys + token * step), (key_dim,), kind)
            k1 = carray(pointer(keys + (token + 1) * step), (key_dim,), kind)
            k2 = carray(pointer(keys + (token + 2) * step), (key_dim,), kind)
            k3 = carray(pointer(keys + (token + 3) * step), (key_dim,), kind)
            for head in range(group):
                s0 = s1 = s2 = s3 = np.float32(0)
                for i in range(key_dim):
                    query = queries[head * key_dim + i]
                    s0 += query * widen(k0[i])
                    s1 += query * widen(k1[i])
                    s2 += query * widen(k2[i])
                    s3 += query * widen(k3[i])
                found = carray(pointer(scores + (head * longest + token) * 4), (4,), np.float32)
                found[0], found[1], found[2], found[3] = s0, s1, s2, s3
            token += 4
        while token < tokens:
            k0 = carray(pointer(keys + token * step), (key_dim,), kind)
            for head in range(group):
                s0 = np.float32(0)
                for i in range(key_dim):
                    s0 += queries[head * key_dim + i] * widen(k0[i])
                carray(pointer(scores + (head * longest + token) * 4), (1,), np.float32)[0] = s0
            token += 1

    @njit(fastmath=FAST_MATH, error_model="numpy")
    def add(values, step, tokens, weights, longest, sums):
        """Add the weighted values of one page's tokens to each query's sums."""
        token = 0
        while token + 4 <= tokens:
            v0 = carray(pointer(values + token * step), (value_dim,), kind)
            v1 = carray(pointer(values + (token + 1) * step), (value_dim,), kind)
            v2 = carray(pointer(values + (token + 2) * step), (value_dim,), kind)
            v3 = carray(pointer(values + (token + 3) * step), (value_dim,), kind)
            for head in range(group):
                weight = carray(pointer(weights + (head * longest + token) * 4), (4,), np.float32)
                w0, w1, w2, w3 = weight[0], weight[1], weight[2], weight[3]
                for i in range(value_dim):
                    sums[head * value_dim + i] += (w0 * widen(v0[i]) + w1 * widen(v1[i])) + (
                        w2 * widen(v2[i]) + w3 * widen(v3[i])
                    )
            token += 4
        while token < tokens:
            v0 = carray(pointer(values + token * step), (value_dim,), kind)
            for head in range(group):
                w0 = carray(pointer(weights + (head * longest + token) * 4), (1,), np.float32)[0]
                for i in range(value_dim):
                    sums[head * value_dim + i] += w0 * widen(v0[i])
            token += 1

    @njit(fastmath=FAST_MATH, error_model="numpy")
    def attend(query, found, own, pages, shape, first, length, rule):
        """Attention of one row's queries of one KV head to its tokens from `first` to `length`."""
        keys, values, table = pages
        kv_heads, head, page, longest = shape
        scale, softcap, sinks = rule
        queries = carray(pointer(own), (group * key_dim,), np.float32)
        sums = carray(pointer(own + group * key_dim * 4), (group * value_dim,), np.float32)
        scores = own + group * (key_dim + value_dim) * 4
        given = carray(pointer(query), (group * key_dim,), kind)
        blocks = carray(pointer(table), (longest,), np.int32)
        for i in range(group * key_dim):
            queries[i] = widen(given[i]) * scale
        at = first
        while at < length:
            tokens = min(page - at % page, length - at)
            place = (np.int64(blocks[at // page]) * page + at % page) * kv_heads + head
            step = kv_heads * key_dim * size
            score(keys + place * key_dim * size, step, tokens, queries, scores + (at - first) * 4, longest)
            at += tokens
        softmax_of_heads(scores, group, length - first, longest, softcap, sinks)
        for i in range(group * value_dim):
            sums[i] = np.float32(0)
        at = first
        while at < length:
            tokens = min(page - at % page, length - at)
            place = (np.int64(blocks[at // page]) * page + at % page) * kv_heads + head
            step = kv_heads * value_dim * size
            add(values + place * value_dim * size, step, tokens, scores + (at - first) * 4, longest, sums)
            at += tokens
        out = carray(pointer(found), (group * value_dim,), kind)
        for i in range(group * value_dim):
            out[i] = narrow(sums[i])

    return attend


def fills_vectors(storage: Storage, key_dim: int, value_dim: int, page: int) -> bool:
    """Whether `_attend_pairs` supports these sizes: heads of whole vectors, pages of whole vectors of tokens."""
    return storage.kind is np.uint16 and not (key_dim % CHUNK or value_dim % CHUNK or page % LANES)


def _attend_pairs(storage: Storage, dot: Dot, key_dim: int, value_dim: int, group: int):
    """As `_attend`, by instructions that multiply pairs of numbers."""
    kind, narrow = storage.kind, storage.narrow
    chunks = value_dim // CHUNK
    heads_at_once = _greatest_divisor(group, MOST_SUMS // 4)
    chunks_at_once = _greatest_divisor(chunks, MOST_SUMS // 2 // heads_at_once)
    score, add = _scores_of(dot, key_dim), _sums_of(heads_at_once, chunks_at_once)

    @njit(fastmath=FAST_MATH, error_model="numpy")
    def attend(query, found, own, pages, shape, first, length, rule):
        keys, values, table = pages
        kv_heads, head, page, longest = shape
        scale, softcap, sinks = rule
        sums = carray(pointer(own + group * key_dim * WORD), (group * value_dim,), np.float32)
        scores = own + group * (key_dim + value_dim) * WORD
        blocks = carray(pointer(table), (longest,), np.int32)
        step = kv_heads * key_dim * HALF
        # Whole vectors of tokens: the hidden tokens among them are in the same pages, and their scores are not used.
        begin = first - first % LANES
        for at in range(begin, length, LANES):
            place = (np.int64(blocks[at // page]) * page + at % page) * step + head * key_dim * HALF
            for one in range(group):
                score(
                    keys + place,
                    step,
                    query + one * key_dim * HALF,
                    scale,
                    scores + (one * longest + at - begin) * WORD,
                )
        softmax_of_heads(scores + (first - begin) * WORD, group, length - first, longest, softcap, sinks)
        for i in range(group * value_dim):
            sums[i] = np.float32(0)
        step, at = kv_heads * value_dim * HALF, first
        while at < length:
            tokens = min(page - at % page, length - at)
            place = (np.int64(blocks[at // page]) * page + at % page) * step + head * value_dim * HALF
            for one in range(0, group, heads_at_once):
                weights = scores + (one * longest + at - begin) * WORD
                for chunk in range(0, chunks, chunks_at_once):
                    target = own + (group * key_dim + one * value_dim + chunk * CHUNK) * WORD
                    read = values + place + chunk * CHUNK * HALF
                    add(read, step, tokens, weights, longest * WORD, target, np.int64(value_dim * WORD))
            at += tokens
        out = carray(pointer(found), (group * value_dim,), kind)
        for chunk in range(group * chunks):
            for i in range(LANES):
                out[chunk * CHUNK + 2 * i] = narrow(sums[chunk * CHUNK + i])
                out[chunk * CHUNK + 2 * i + 1] = narrow(sums[chunk * CHUNK + LANES + i])

    return attend


def _greatest_divisor(number: int, limit: int) -> int:
    return max(divisor for divisor in range(1, limit + 1) if number % divisor == 0)


def _scores_of(dot: Dot, dim: int) -> Any:
    """(keys, step, query, scale, scores): the scores of `LANES` keys, `step` bytes apart, with one query.

    All but `scale`, a float32, are int64. Writes `LANES` float32.
    """

    @intrinsic
    def score(_context, _keys, _step, _query, _scale, _scores):
        def generate(context, builder, _signature, arguments):
            keys, step, query, scale, scores = arguments
            parts = range(0, dim * HALF, CHUNK * HALF)
            factors = [dot.factor(builder, _words(builder, query, part)) for part in parts]
            sums = []
            for key in v.strided(builder, keys, step, LANES):
                found = ir.Constant(FLOATS, [0.0] * LANES)
                for part, factor in zip(parts, factors, strict=True):
                    found = dot.add(builder, found, _words(builder, key, part), factor)
                sums.append(found)
            total = builder.fmul(_totals(builder, sums), v.splat(builder, scale))
            v.store(builder, total, scores, WORD)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 3, types.float32, types.int64), generate

    return score


def _totals(builder: Any, vectors: list[Any]) -> Any:
    """The sum of each of `LANES` vectors: adds and merges pairs of vectors until one is left."""
    width = 1
    while len(vectors) > 1:
        lanes = range(0, LANES, 2 * width)
        first = [lane + i for start in lanes for lane in (start, LANES + start) for i in range(width)]
        second = [lane + width for lane in first]
        pairs = zip(vectors[::2], vectors[1::2], strict=True)
        masks = [ir.Constant(WORDS, which) for which in (first, second)]
        vectors = [builder.fadd(*(builder.shuffle_vector(*pair, mask) for mask in masks)) for pair in pairs]
        width *= 2
    return vectors[0]


def _sums_of(heads: int, chunks: int) -> Any:
    """(values, step, tokens, weights, weights_step, sums, sums_step): add weighted values to the sums of some heads.

    All are int64. Reads `chunks` chunks of each of `tokens` values, `step` bytes apart. Weights and sums are float32;
    the sums of each chunk are first those of its even numbers, then those of its odd ones.
    """
    assert heads * chunks * 2 <= MOST_SUMS, f"{heads} heads of {chunks} chunks"

    @intrinsic
    def add(_context, _values, _step, _tokens, _weights, _weights_step, _sums, _sums_step):
        def generate(context, builder, _signature, arguments):
            values, step, tokens, weights, weights_step, sums, sums_step = arguments
            places = [
                builder.add(head, ir.Constant(INT64, vector * LANES * WORD))
                for head in v.strided(builder, sums, sums_step, heads)
                for vector in range(2 * chunks)
            ]

            def weigh(token, held):
                value = builder.add(values, builder.mul(token, step))
                weight = builder.add(weights, builder.mul(token, ir.Constant(INT64, WORD)))
                parts = [v.widen_pairs(builder, _words(builder, value, part * CHUNK * HALF)) for part in range(chunks)]
                numbers = list(chain(*parts))
                own = [v.load(builder, place, FLOAT, WORD) for place in v.strided(builder, weight, weights_step, heads)]
                factors = [factor for each in own for factor in [v.splat(builder, each)] * len(numbers)]
                return [v.multiply_add(builder, *each) for each in zip(held, numbers * heads, factors, strict=True)]

            found = v.loop(builder, tokens, [v.load(builder, place, FLOATS, WORD) for place in places], weigh)
            for total, place in zip(found, places, strict=True):
                v.store(builder, total, place, WORD)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 7), generate

    return add


def _words(builder: Any, start: Any, offset: int) -> Any:
    return v.load(builder, builder.add(start, ir.Constant(INT64, offset)), WORDS, HALF)
