"""Number of blocks that fit in memory: known models, several ranks, and too little memory."""

import pytest

from homing.kvcache.errors import PoolTooSmall
from homing.kvcache.sizing import MemoryReading, blocks_that_fit, bytes_per_block, kv_budget_bytes, kv_heads_per_rank


def llama_70b(tensor_parallel_size: int = 1) -> int:
    return bytes_per_block(
        block_size=16,
        kv_heads=8,
        head_dim=128,
        dtype_bytes=2,
        layers=80,
        tensor_parallel_size=tensor_parallel_size,
    )


def test_a_block_of_llama_70b_takes_five_mebibytes():
    """The number commonly quoted for grouped-query attention with 8 heads in fp16."""
    assert llama_70b() == 5_242_880


def test_45_gigabytes_hold_8583_of_them():
    """Only whole blocks count."""
    assert blocks_that_fit(45_000_000_000, llama_70b()) == 8_583


@pytest.mark.parametrize(
    ("layers", "kv_heads", "ranks", "block_bytes", "blocks"),
    [(32, 8, 1, 2_097_152, 21_457), (40, 40, 1, 13_107_200, 3_433), (80, 8, 8, 655_360, 68_664)],
)
def test_blocks_of_common_models_are_those_worked_out_by_hand(
    layers: int, kv_heads: int, ranks: int, block_bytes: int, blocks: int
):
    """Llama 3 8B, Llama 2 13B, and Llama 3 70B over eight ranks: head size 128, two bytes, 45 GB."""
    found = bytes_per_block(
        block_size=16, kv_heads=kv_heads, head_dim=128, dtype_bytes=2, layers=layers, tensor_parallel_size=ranks
    )

    assert (found, blocks_that_fit(45_000_000_000, found)) == (block_bytes, blocks)


@pytest.mark.parametrize(("ranks", "share"), [(1, 8), (2, 4), (8, 1), (16, 1)])
def test_ranks_split_the_heads_down_to_one(ranks: int, share: int):
    """With more ranks than heads, each head is stored on several ranks."""
    assert kv_heads_per_rank(8, ranks) == share
    assert llama_70b(ranks) == 5_242_880 * share // 8


@pytest.mark.parametrize(("heads", "ranks"), [(8, 3), (8, 12), (0, 2), (8, 0)])
def test_heads_that_do_not_divide_are_refused(heads: int, ranks: int):
    """A rank with half a head would compute wrong attention."""
    with pytest.raises(ValueError, match="cannot be split"):
        kv_heads_per_rank(heads, ranks)


def test_the_budget_is_what_weights_and_the_largest_step_leave():
    """Utilization is a share of the total memory, as users set it."""
    reading = MemoryReading(total_bytes=1_000, free_bytes=450, held_bytes=500, peak_bytes=100)

    assert kv_budget_bytes(reading, 0.9) == 300


def test_no_more_is_taken_than_is_free():
    """Another process may use part of the memory that the setting grants."""
    reading = MemoryReading(total_bytes=1_000, free_bytes=250, held_bytes=500, peak_bytes=100)

    assert kv_budget_bytes(reading, 0.9) == 150


def test_ranks_on_halves_of_a_device_leave_each_other_theirs():
    """The first of the two ranks finds nearly all memory free, but may take only its share."""
    first = MemoryReading(total_bytes=1_000, free_bytes=700, held_bytes=200, peak_bytes=50)
    taken = kv_budget_bytes(first, 0.45)
    second = MemoryReading(total_bytes=1_000, free_bytes=500 - taken, held_bytes=200, peak_bytes=50)

    assert taken == kv_budget_bytes(second, 0.45) == 200


def test_a_budget_is_never_negative():
    """The error is raised later, when blocks are counted, with both numbers in its message."""
    assert kv_budget_bytes(MemoryReading(100, 100, 500, 0), 0.9) == 0


def test_memory_for_a_single_block_is_refused_with_advice():
    """Block 0 is never given to a request, so such a replica could not run anything."""
    with pytest.raises(PoolTooSmall, match="raise kv_cache_bytes"):
        blocks_that_fit(1_500, 1_000)
