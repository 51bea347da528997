"""Uniform numbers per (seed, position): Philox 4x32 with ten rounds, vectorised in numpy.

A counter-based generator: the key is the seed, the counter is the position, and nothing is remembered between calls.
Source of algorithm and constants: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011);
held to the known answers of their Random123 library by a test.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]  #: 32-bit words, kept in 64 bits so that products do not overflow

ROUNDS = 10
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_STEPS = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


def philox(counter: tuple[Words, Words, Words, Words], key: tuple[Words, Words]) -> tuple[Words, Words, Words, Words]:
    """Four random words for each counter and key; all arrays are of one shape."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        first, second = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (second >> _HALF) ^ c1 ^ k0, second & _LOW, (first >> _HALF) ^ c3 ^ k1, first & _LOW
        k0, k1 = (k0 + _KEY_STEPS[0]) & _LOW, (k1 + _KEY_STEPS[1]) & _LOW
    return c0, c1, c2, c3


def uniforms(seeds: Sequence[int], positions: Sequence[int], count: int) -> npt.NDArray[np.float64]:
    """`count` numbers in [0, 1) with 53 random bits for each pair of a 64-bit seed and a 64-bit position."""
    shape = (len(seeds), count)
    seed, position, number = (
        np.broadcast_to(words, shape)
        for words in (
            np.array(seeds, dtype=np.uint64)[:, None],
            np.array(positions, dtype=np.uint64)[:, None],
            np.arange(count, dtype=np.uint64),
        )
    )
    zero = np.zeros_like(number)
    high, low, _, _ = philox((position & _LOW, position >> _HALF, number, zero), (seed & _LOW, seed >> _HALF))
    bits = (high >> np.uint64(5)) * np.uint64(1 << 26) + (low >> np.uint64(6))
    return bits.astype(np.float64) / float(1 << 53)
