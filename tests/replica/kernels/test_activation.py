"""silu(gate) * up equals float64."""

import pytest
import torch

from .layouts import IMPLEMENTATIONS, TOLERANCE, error


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("tokens", "features"), [(5, 96), (2, 3072), (0, 8)])
def test_equals_float64(implementation, dtype, tokens, features, device):
    """Features below and above a block, and no tokens at all."""
    gate_up = (3 * torch.randn(tokens, 2 * features)).to(device, dtype)
    gate, up = gate_up.double().chunk(2, -1)
    wanted = gate * torch.sigmoid(gate) * up

    got = implementation().silu_mul(gate_up)

    assert got.shape == wanted.shape
    assert not tokens or error(got, wanted.cpu()) < TOLERANCE[dtype]
