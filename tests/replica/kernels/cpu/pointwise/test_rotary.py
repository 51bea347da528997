"""Cosines and sines of rotary embeddings equal float64."""

import pytest
import torch

from ...layouts import IMPLEMENTATIONS


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_equals_float64(implementation, dtype, device):
    """Also far into a text, where an angle is many turns; angles are rounded to float32 first, as models do."""
    positions = torch.tensor([0, 1, 17, 4095, 131071], device=device)
    frequencies = 1 / 500000 ** (torch.arange(0, 96, 2, device=device).float() / 96)
    angles = (positions[:, None].float() * frequencies).double()

    cos, sin = implementation().waves(positions, frequencies, dtype)

    tolerance = {torch.float32: 2e-7, torch.float16: 5e-4, torch.bfloat16: 4e-3}[dtype]
    torch.testing.assert_close(cos.double(), angles.cos(), rtol=0, atol=tolerance)
    torch.testing.assert_close(sin.double(), angles.sin(), rtol=0, atol=tolerance)
    assert cos.dtype == sin.dtype == dtype
