"""Rows of a table are copies of them, bit for bit."""

import pytest
import torch

from .layouts import IMPLEMENTATIONS


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("places", [[], [3], [8, 0, 0, 7, 8]])
def test_takes_what_stands_there(implementation, dtype, places, device):
    """In any order and several times, none at all, and of a table that is a part of a wider one."""
    table = torch.randn(9, 70, device=device).to(dtype)[:, 3:50]
    places = torch.tensor(places, dtype=torch.int64, device=device)

    taken = implementation().take(table, places)

    assert torch.equal(taken, table[places])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_waves_equal_float64(implementation, dtype, device):
    """Also far into a text, where an angle is many turns; angles are rounded to float32 first, as models do."""
    positions = torch.tensor([0, 1, 17, 4095, 131071], device=device)
    frequencies = 1 / 500000 ** (torch.arange(0, 96, 2, device=device).float() / 96)
    angles = (positions[:, None].float() * frequencies).double()

    cos, sin = implementation().waves(positions, frequencies, dtype)

    tolerance = {torch.float32: 2e-7, torch.float16: 5e-4, torch.bfloat16: 4e-3}[dtype]
    torch.testing.assert_close(cos.double(), angles.cos(), rtol=0, atol=tolerance)
    torch.testing.assert_close(sin.double(), angles.sin(), rtol=0, atol=tolerance)
    assert cos.dtype == sin.dtype == dtype
