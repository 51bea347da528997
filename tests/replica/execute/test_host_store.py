"""Blocks come back from host memory byte for byte, or not at all."""

from collections.abc import Callable

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


class Stream:
    """A pool whose copies happen in order, but only when an event is waited for, as on a GPU that is busy."""

    def __init__(self, pool: KvPool) -> None:
        self.pool, self.keys, self.block_bytes = pool, pool.keys, pool.block_bytes
        self.queue: list[Callable[[], None]] = []
        self.waits = 0

    def copy_out_to(self, block: int, row: torch.Tensor) -> None:
        self.queue.append(lambda: self.pool.copy_out_to(block, row))

    def copy_in_from(self, block: int, row: torch.Tensor) -> None:
        self.queue.append(lambda: self.pool.copy_in_from(block, row))

    def event(self) -> "Stream":
        return self

    def record(self) -> None:
        """An event at the end of the queue."""

    def synchronize(self) -> None:
        self.waits += 1
        while self.queue:
            self.queue.pop(0)()


def test_copies_that_a_device_makes_later_come_back_as_well() -> None:
    """A move with saves only does not wait; the next one does. A slot saved and loaded in one move is waited for."""
    pool = filled(torch.float32)
    stream = Stream(pool)
    before = [content(pool, block) for block in range(BLOCKS)]
    store = HostStore(3, stream, stream.event)

    store.move([Save(1, 0, 1), Save(2, 1, 2)], [])
    assert stream.waits == 0
    assert store.move([Save(3, 2, 3)], [Load(0, 1, 4), Load(1, 2, 1)]) == [0, 0]
    assert stream.waits == 1
    assert store.move([Save(4, 0, 4), Save(5, 1, 5)], [Load(0, 4, 2), Load(1, 5, 3), Load(2, 3, 5)]) == [0, 0, 0]
    assert stream.waits == 3
    stream.synchronize()

    after = [content(pool, block) for block in range(BLOCKS)]
    assert after == [before[0], before[2], before[1], before[5], before[1], before[3]]


def test_memory_that_the_system_does_not_have_is_named() -> None:
    with pytest.raises(StartupError, match=r"host_kv_memory: a rank cannot get [\d,]+ bytes of host memory"):
        HostStore(1 << 44, filled(torch.float32))
