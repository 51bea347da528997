"""Each token is multiplied by the weights of its chosen experts."""

import pytest
import torch

from ..layouts import IMPLEMENTATIONS, TOLERANCE, error


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("counts", [[3, 0, 17, 1], [0, 0, 40, 0], [70, 65, 64, 80], [0, 0, 0, 0]], ids=str)
@pytest.mark.parametrize("ordered", [True, False])
def test_equals_float64(implementation, dtype, counts, ordered, device):
    """Experts with no tokens, with one, and with several tiles; sizes that no tile divides."""
    generator = torch.Generator().manual_seed(1)
    choices = sum(counts)
    rows = None if ordered else torch.randint(0, 9, (choices,), generator=generator)
    x = torch.randn(choices if ordered else 9, 80, generator=generator).to(dtype)
    weights = torch.randn(len(counts), 70, 80, generator=generator).to(dtype)
    firsts = torch.tensor([0, *counts]).cumsum(0).int()

    found = implementation().expert_products(
        x.to(device), weights.to(device), firsts.to(device), None if rows is None else rows.to(device)
    )

    expert = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    taken = (x if rows is None else x[rows]).double()
    assert found.shape == (choices, 70)
    assert not choices or error(found, torch.einsum("ci,coi->co", taken, weights.double()[expert])) < TOLERANCE[dtype]
