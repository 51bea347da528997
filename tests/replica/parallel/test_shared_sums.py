"""Sums of a step use shared memory if all ranks have it; larger sums, and other groups, use torch's group."""

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from homing.replica.parallel.rank_group import RankGroup
from homing.replica.parallel.shared_sums import MAX_BYTES, SharedSums

CPU = torch.device("cpu")


class Doubling:
    """Shared memory in which both ranks hold the same values."""

    def __init__(self) -> None:
        self.sums: list[tuple[int, int]] = []  #: shots and bytes of each

    def open(self, rank, size, store, device):
        return torch.zeros(MAX_BYTES, dtype=torch.uint8)

    def sum_in_one_shot(self, x):
        self.sums.append((1, x.nbytes))
        return x + x

    def sum_in_two_shots(self, x):
        self.sums.append((2, x.nbytes))
        return (x + x).add_(x.zero_())


class Refused:
    def open(self, rank, size, store, device):
        raise RuntimeError("CUDASymmetricMemory: the GPUs are\n not connected")


class InnerGroup:
    """A torch group of two ranks, `able` of which have shared memory; its sums are marked by the value 1000."""

    def __init__(self, able: int) -> None:
        self.able = able

    def allreduce(self, tensors, options):
        tensors[0].copy_(torch.full_like(tensors[0], self.able if tensors[0].dtype == torch.int32 else 1000))


def group_with(memory, able: int, ranks: int = 2) -> RankGroup:
    group = RankGroup(0, ranks, InnerGroup(able))
    group.agree_on(SharedSums.open(0, ranks, HashStore(), CPU, memory), CPU)
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
    assert len(memory.sums) == 2


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("rows", [1, 16, 32, 64, 256])
def test_no_decode_step_of_a_large_model_waits_for_nccl(ranks, rows):
    """Of 70 billion parameters: rows of 8,192 numbers. Many bytes are summed in two shots, which read fewer."""
    memory = Doubling()
    x = torch.ones(rows, 8192, dtype=torch.bfloat16)

    found = group_with(memory, able=ranks, ranks=ranks).all_reduce(x)

    assert (found == 2).all()
    [(shots, size)] = memory.sums
    assert size == rows * 16384
    assert shots == (1 if size * (ranks - 1) <= 7 * 2**18 else 2)


def test_numbers_of_ranks_without_a_kernel_for_two_shots():
    memory = Doubling()
    group = group_with(memory, able=6, ranks=6)

    small, large = (group.all_reduce(torch.ones(rows, 8192, dtype=torch.bfloat16)) for rows in (16, 64))

    assert small.unique().tolist() == [2]
    assert large.unique().tolist() == [1000]


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
    assert "shared_sums_unusable reason='RuntimeError: CUDASymmetricMemory: the GPUs are not connected'" in caplog.text


def test_without_cuda_torch_says_so(caplog):
    """As on this machine, or with an older torch."""
    with caplog.at_level("INFO", logger="homing"):
        found = SharedSums.open(0, 1, HashStore(), CPU)

    assert found is None
    assert "shared_sums_unusable reason=" in caplog.text
