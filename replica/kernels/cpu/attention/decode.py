"""Attention of rows with one query each, over keys and values in their pages.

The unit of work is a row and a KV head, with all query heads of its group. Threads take units in the order of the KV
heads: rows that share a prompt then find its keys and values in the cache of the core.
"""

import functools

import numpy as np
import torch
from numba import carray, njit

from ....models.base import AttentionRule
from ...base import PagedRows
from ..runtime.compilation import kernel
from ..runtime.scalars import FAST_MATH, Storage, pointer, softmax_of_heads, storage_of
from ..runtime.thread_team import run, threads_for
from ..runtime.vectors import Dot, dot
from .bfloat16_pairs import attend_of, fits


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
    pairs = dot() if fits(storage, key_dim, value_dim, page) else None
    compiled = _compiled(storage, key_dim, value_dim, group, pairs)
    run(compiled, tensors, (*counts, float(rule.scale), float(rule.softcap or 0.0)), threads)


@functools.cache
def _compiled(storage: Storage, key_dim: int, value_dim: int, group: int, pairs: Dot | None):
    size, own_words, sizes = storage.size, group * (key_dim + value_dim), (key_dim, value_dim, group)
    attend = _attend(storage, *sizes) if pairs is None else attend_of(storage, pairs, *sizes)

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
