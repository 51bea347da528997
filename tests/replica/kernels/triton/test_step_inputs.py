"""A step reads its rows' tokens, positions, slots and lengths from the device's table of requests."""

import pytest
import torch

from homing.replica.kernels.base import TorchKernels
from homing.replica.kernels.triton.triton_kernels import TritonKernels

SIZE = 4


@pytest.mark.parametrize("rows", [[3, 1, 2, 0, 0], [2], [0, 0], []], ids=str)
def test_rows_are_read_from_the_table_and_go_on(rows, device):
    """Rows in any order, at a block's first and last token, and padding; the table's lengths grow by one."""
    found = []
    for kernels in (TorchKernels(), TritonKernels()):
        seq_lens = torch.tensor([0, 7, 8, 21], dtype=torch.int32, device=device)
        last_tokens = torch.tensor([0, 5, -1, 9], device=device)
        tables = torch.arange(24, dtype=torch.int32, device=device).view(4, 6) + 1
        places = torch.tensor(rows, dtype=torch.int64, device=device)
        step = kernels.decode_rows(places, last_tokens, seq_lens, tables, SIZE)
        lengths = step.seq_lens.tolist()
        used = [row[: -(-length // SIZE)] for row, length in zip(step.tables.tolist(), lengths, strict=True)]
        columns = (step.token_ids, step.positions, step.slots, step.seq_lens, seq_lens)
        found.append((used, *(column.tolist() for column in columns)))

    assert found[0] == found[1]
    if 2 in rows:
        assert found[0][1][rows.index(2)] == 0, "a token that could not be drawn"


def test_slots_are_written_in_every_layer(device):
    """No other slot may be written: a copy of KV must not affect its neighbours."""
    generator = torch.Generator().manual_seed(5)
    stack = torch.randn(3, 9, 1500, generator=generator).to(device)
    values, slots = torch.randn(3, 2, 1500, generator=generator).to(device), torch.tensor([7, 2], device=device)
    wanted = stack.clone()
    wanted[:, [7, 2]] = values

    TritonKernels().write_slots(stack, slots, values)

    assert torch.equal(stack, wanted)
