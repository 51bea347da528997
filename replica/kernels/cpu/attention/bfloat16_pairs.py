"""Decode attention in bfloat16 by instructions that multiply pairs of numbers.

For head dims that fill vectors and pages that hold whole vectors of tokens (`fits`); decode.py computes all others.
"""

import numpy as np
from numba import carray, njit

from ..runtime.scalars import FAST_MATH, Storage, pointer
from ..runtime.vectors import HALF, LANES, WORD, Dot
from .decode_loops import CHUNK, MOST_SUMS, scores_of, sums_of
from .softmax import softmax_of_heads


def fits(storage: Storage, key_dim: int, value_dim: int, page: int) -> bool:
    """Whether `attend_of` supports these sizes."""
    return storage.kind is np.uint16 and not (key_dim % CHUNK or value_dim % CHUNK or page % LANES)


def attend_of(storage: Storage, dot: Dot, key_dim: int, value_dim: int, group: int):
    """The compiled function. Its parameters are those of `decode._attend`."""
    kind, narrow = storage.kind, storage.narrow
    chunks = value_dim // CHUNK
    heads_at_once = _greatest_divisor(group, MOST_SUMS // 4)
    chunks_at_once = _greatest_divisor(chunks, MOST_SUMS // 2 // heads_at_once)
    score, add = scores_of(dot, key_dim), sums_of(heads_at_once, chunks_at_once)

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
