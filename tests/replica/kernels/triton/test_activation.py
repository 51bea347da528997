"""silu(gate) * up equals float64."""

import pytest
import torch

from ..layouts import IMPLEMENTATIONS, TOLERANCE, error


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("tokens", "features"), [(5, 96), (2, 3072), (0, 8)])
def test_equals_float64(implementation, dtype, tokens, features, device):
    """Covers features below and above a block, and no tokens at all."""
    gate_up = (3 * torch.randn(tokens, 2 * features)).to(device, dtype)
    gate, up = gate_up.double().chunk(2, -1)
    wanted = gate * torch.sigmoid(gate) * up

    got = implementation().silu_mul(gate_up)

    assert got.shape == wanted.shape
    assert not tokens or error(got, wanted.cpu()) < TOLERANCE[dtype]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # numpy's, in Triton's interpreter
def test_extreme_gates_close_or_open(implementation, dtype, device):
    """Half-precision weights occasionally cause extreme gates, whose exponential must not overflow into the answer."""
    gates = torch.tensor([[-1e38, -1e30, -200.0, -90.0, 0.0, 90.0, 1e30]], dtype=dtype)
    gate_up = torch.cat((gates, torch.ones_like(gates)), -1).to(device)

    got = implementation().silu_mul(gate_up)

    assert torch.allclose(got.cpu(), gates.clamp(min=0), atol=1e-30)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_slices_of_wider_tensors_are_read_by_their_rows(implementation, device):
    """Products return such slices."""
    wide = torch.randn(3, 200, device=device)

    got = implementation().silu_mul(wide[:, :90])

    gate, up = wide[:, :90].double().chunk(2, -1)
    assert error(got, (gate * torch.sigmoid(gate) * up).cpu()) < TOLERANCE[torch.float32]
