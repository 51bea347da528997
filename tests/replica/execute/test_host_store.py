"""Blocks come back from host memory byte for byte, or not at all."""

import pytest
import torch

from homing.replica.attention.paged import KvPool
from homing.replica.engine.step_plan import Load, Save
from homing.replica.errors import StartupError
from homing.replica.execute.host_store import CORRUPT, STALE, HostStore
from homing.replica.models.spec import KvShape

BLOCKS, BLOCK = 6, 4


class Spec:
    """Layers of two shapes, as in models whose keys and values differ."""

    kv_shapes = (KvShape(2, 8, 8), KvShape(2, 8, 4), KvShape(1, 8, 8))


def filled(dtype: torch.dtype) -> KvPool:
    pool = KvPool(Spec(), BLOCKS, BLOCK, dtype, torch.device("cpu"))
    generator = torch.Generator().manual_seed(1)
    for tensor in (*pool.keys, *pool.values):
        tensor.copy_(torch.randn(tensor.shape, generator=generator).to(dtype))
    return pool


def content(pool: KvPool, block: int) -> bytes:
    data = bytearray(pool.block_bytes)
    pool.copy_out(block, memoryview(data))
    return bytes(data)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_a_block_comes_back_as_it_was(dtype: torch.dtype) -> None:
    """Saves of a move are read before its loads are written: block 1 is saved and overwritten by block 2 in one."""
    pool = filled(dtype)
    store = HostStore(3, pool)
    before = [content(pool, block) for block in range(BLOCKS)]
    store.move([Save(2, 0, 1)], [])

    assert store.move([Save(1, 2, 2)], [Load(0, 1, 1), Load(2, 2, 5)]) == [0, 0]

    after = [content(pool, block) for block in range(BLOCKS)]
    assert after == [before[0], before[2], before[2], before[3], before[4], before[1]]
    assert len(set(before)) == BLOCKS


@pytest.mark.parametrize("bit", [0, 7, 777, -1])
def test_a_flipped_bit_is_found_and_the_block_left_as_it_was(bit: int) -> None:
    pool = filled(torch.float32)
    store = HostStore(2, pool)
    before = content(pool, 3)
    store.move([Save(1, 0, 1), Save(2, 1, 2)], [])
    store.rows[0][bit // 8] ^= 1 << bit % 8

    assert store.move([], [Load(0, 1, 3), Load(1, 2, 4)]) == [CORRUPT, 0]
    assert content(pool, 3) == before
    assert content(pool, 4) == content(pool, 2)


def test_a_slot_that_was_never_saved_or_has_other_content_is_stale() -> None:
    pool = filled(torch.float32)
    store = HostStore(2, pool)
    store.move([Save(1, 0, 1)], [])
    store.move([Save(2, 0, 2)], [])

    assert store.move([], [Load(0, 1, 3), Load(1, 3, 3), Load(0, 2, 3)]) == [STALE, STALE, 0]


def test_memory_that_the_system_does_not_have_is_named() -> None:
    with pytest.raises(StartupError, match=r"host_kv_memory: a rank cannot get [\d,]+ bytes of host memory"):
        HostStore(1 << 44, filled(torch.float32))
