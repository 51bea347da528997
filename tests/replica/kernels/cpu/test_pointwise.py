"""Gathered rows are exact copies, rotary tables equal float64, and masks hide exactly the disallowed tokens."""

import pytest
import torch

from homing.replica.kernels.choice import COMPILED_DTYPES

from ..layouts import IMPLEMENTATIONS

PAIRS = [
    (implementation, dtype)
    for implementation in IMPLEMENTATIONS
    for dtype in (torch.float32, torch.bfloat16, torch.float16)
    if implementation.name != "compiled" or dtype in COMPILED_DTYPES
]


@pytest.mark.parametrize(("implementation", "dtype"), PAIRS)
@pytest.mark.parametrize("places", [[], [3], [8, 0, 0, 7, 8]])
def test_taken_rows_equal_the_table(implementation, dtype, places, device):
    """Covers any order, repetition, no rows at all, and a table that is a slice of a wider one."""
    table = torch.randn(9, 70, device=device).to(dtype)[:, 3:50]
    places = torch.tensor(places, dtype=torch.int64, device=device)

    taken = implementation().take(table, places)

    assert torch.equal(taken, table[places])


@pytest.mark.parametrize(("implementation", "dtype"), PAIRS)
def test_a_decoder_begins_with_embeddings_and_rotary_tables(implementation, dtype, device):
    """Late positions have angles of many turns; as in models, angles are rounded to float32 first."""
    positions = torch.tensor([0, 1, 17, 4095, 131071], device=device)
    frequencies = 1 / 500000 ** (torch.arange(0, 96, 2, device=device).float() / 96)
    angles = (positions[:, None].float() * frequencies).double()
    table, ids = torch.randn(7, 1500, device=device).to(dtype), torch.tensor([6, 0, 2, 6, 1], device=device)

    x, cos, sin = implementation().embed(table, ids, positions, frequencies)

    assert torch.equal(x, table[ids])
    tolerance = {torch.float32: 2e-7, torch.float16: 5e-4, torch.bfloat16: 4e-3}[dtype]
    torch.testing.assert_close(cos.double(), angles.cos(), rtol=0, atol=tolerance)
    torch.testing.assert_close(sin.double(), angles.sin(), rtol=0, atol=tolerance)
    assert cos.dtype == sin.dtype == dtype


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("vocab", [1, 31, 32, 97, 5000])
def test_masks_hide_what_they_do_not_allow_in_their_rows_alone(implementation, vocab, device):
    """Words that allow all, no and some tokens, and a last word that extends beyond the vocabulary."""
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(5, vocab, generator=generator).to(device)
    allowed = torch.rand(3, vocab, generator=generator) < 0.5
    allowed[1] = torch.arange(vocab) // 32 % 2 == 0
    words = -(-vocab // 32)
    padded = torch.nn.functional.pad(allowed, (0, words * 32 - vocab), value=True).view(3, words, 32)
    bits = (padded.long() << torch.arange(32)).sum(-1).int()
    rows = torch.tensor([3, 0, 4])
    wanted = logits.cpu().clone()
    wanted[rows] = wanted[rows].masked_fill(~allowed, float("-inf"))

    implementation().mask(logits, rows.to(device), bits.to(device))

    assert torch.equal(logits.cpu(), wanted)
