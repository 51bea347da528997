"""The fused sum and norm equal float64."""

import pytest
import torch

from ..layouts import IMPLEMENTATIONS, TOLERANCE, error


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("features", [48, 64, 5120])
@pytest.mark.parametrize("adds", [True, False])
def test_equals_float64(implementation, dtype, features, adds, device):
    """With and without an addend; features that are no power of two."""
    x, delta = (torch.randn(5, features).to(device, dtype) for _ in range(2))
    weight = torch.randn(features).to(device, dtype)
    total = x.double() + (delta.double() if adds else 0)
    wanted = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + 1e-6) * weight.double()

    summed, normed = implementation().add_rms_norm(x.clone(), delta if adds else None, weight, 1e-6)

    assert error(summed, total.cpu()) < TOLERANCE[dtype]
    assert error(normed, wanted.cpu()) < TOLERANCE[dtype]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_no_tokens_are_no_error(implementation, device):
    """A step may need no logits at all."""
    x = torch.empty(0, 64, device=device)

    _, normed = implementation().add_rms_norm(x, x, torch.ones(64, device=device), 1e-6)

    assert normed.shape == (0, 64)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_slices_of_wider_tensors_are_read_by_their_rows(implementation, device):
    """Callers pass views."""
    wide = torch.randn(3, 200, device=device)

    _, normed = implementation().add_rms_norm(wide[:, :64], wide[:, 64:128], torch.ones(64, device=device), 1e-6)

    total = wide[:, :64].double() + wide[:, 64:128].double()
    wanted = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + 1e-6)
    assert error(normed, wanted.cpu()) < TOLERANCE[torch.float32]
