"""Rows of a table are copies of them, bit for bit."""

import pytest
import torch

from ...layouts import IMPLEMENTATIONS


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("places", [[], [3], [8, 0, 0, 7, 8]])
def test_takes_what_stands_there(implementation, dtype, places, device):
    """In any order and several times, none at all, and of a table that is a part of a wider one."""
    table = torch.randn(9, 70, device=device).to(dtype)[:, 3:50]
    places = torch.tensor(places, dtype=torch.int64, device=device)

    taken = implementation().take(table, places)

    assert torch.equal(taken, table[places])
