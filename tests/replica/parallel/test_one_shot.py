"""Small sums use shared memory if all ranks have it; larger sums, and other groups, use torch's group."""

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from homing.replica.parallel.one_shot import MAX_BYTES, OneShotSums
from homing.replica.parallel.rank_group import RankGroup

CPU = torch.device("cpu")


class Doubling:
    """Shared memory in which both ranks hold the same values."""

    def __init__(self) -> None:
        self.sums = 0

    def open(self, rank, size, store, device):
        return torch.zeros(MAX_BYTES, dtype=torch.uint8)

    def sum(self, x):
        self.sums += 1
        return x + x


class Refused:
    def open(self, rank, size, store, device):
        raise RuntimeError("CUDASymmetricMemory: the GPUs are\n not connected")

    def sum(self, x):
        raise AssertionError("never opened")


class InnerGroup:
    """A torch group of two ranks, `able` of which have shared memory; its sums are marked by the value 1000."""

    def __init__(self, able: int) -> None:
        self.able = able

    def allreduce(self, tensors, options):
        tensors[0].copy_(torch.full_like(tensors[0], self.able if tensors[0].dtype == torch.int32 else 1000))


def group_with(memory, able: int) -> RankGroup:
    group = RankGroup(0, 2, InnerGroup(able))
    group.agree_on(OneShotSums.open(0, 2, HashStore(), CPU, memory), CPU)
    return group


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_small_tensors_are_summed_in_shared_memory(dtype):
    """Twice in a row with several shapes, because the shared memory is reused."""
    memory = Doubling()
    group = group_with(memory, able=2)

    first = group.all_reduce(torch.full((3, 16), 2, dtype=dtype))
    second = group.all_reduce(torch.full((8,), 3, dtype=dtype))

    assert first.shape == (3, 16)
    assert first.unique().tolist() == [4]
    assert second.tolist() == [6] * 8
    assert memory.sums == 2


@pytest.mark.parametrize(
    "x",
    [torch.zeros(MAX_BYTES // 4 + 4), torch.zeros(3), torch.zeros(16, dtype=torch.float16)],
    ids=["large", "not a multiple of 16 bytes", "float16"],
)
def test_what_does_not_fit_goes_through_the_group(x):
    """A prefill's tensors are larger, and the kernel supports only two dtypes."""
    assert group_with(Doubling(), able=2).all_reduce(x).unique().tolist() == [1000]


def test_all_ranks_use_it_or_none(caplog):
    """A rank that waits in shared memory while another waits in nccl would wait forever."""
    with caplog.at_level("INFO", logger="homing"):
        refused = group_with(Refused(), able=1)
    alone = group_with(Doubling(), able=1)

    assert refused.all_reduce(torch.zeros(4)).tolist() == [1000] * 4
    assert alone.all_reduce(torch.zeros(4)).tolist() == [1000] * 4
    assert (
        "one_shot_sums_unusable reason='RuntimeError: CUDASymmetricMemory: the GPUs are not connected'" in caplog.text
    )


def test_without_cuda_torch_says_so(caplog):
    """As on this machine, or with an older torch."""
    with caplog.at_level("INFO", logger="homing"):
        found = OneShotSums.open(0, 1, HashStore(), CPU)

    assert found is None
    assert "one_shot_sums_unusable reason=" in caplog.text
