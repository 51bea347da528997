"""Uniform numbers by counter: the published answers, and nothing but (seed, position) counts."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from homing.replica.engine.philox import philox, uniforms


@pytest.mark.parametrize(
    ("counter", "key", "answer"),
    [
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([2**32 - 1] * 4, [2**32 - 1] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_known_answers(counter, key, answer):
    """The vectors of the Random123 library for philox4x32-10."""
    words = philox(tuple(np.array([w], np.uint64) for w in counter), tuple(np.array([w], np.uint64) for w in key))

    assert [int(word[0]) for word in words] == answer


@given(st.lists(st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**40)), min_size=1, max_size=8))
def test_number_depends_on_seed_and_position_alone(pairs):
    """Drawn together or alone, the number is the same; another replica can continue."""
    together = uniforms(*zip(*pairs, strict=True), 3)

    assert together.tolist() == [uniforms([seed], [position], 3)[0].tolist() for seed, position in pairs]
    assert ((together >= 0) & (together < 1)).all()


def test_numbers_are_uniform_over_positions_over_seeds_and_within_a_position():
    """Neighbouring counters and neighbouring keys must look unrelated: 100 equal bins, chi-square below 99.9 %."""
    count = 100_000
    for numbers in (
        uniforms([7] * count, range(count), 1),
        uniforms(range(count), [0] * count, 1),
        uniforms([7], [0], count),
    ):
        observed, _ = np.histogram(numbers, bins=100, range=(0, 1))
        assert ((observed - count / 100) ** 2 / (count / 100)).sum() < 149
