"""Blocks come back after a restart with the KV that they had, in a pool whose invariants hold."""

import threading
from pathlib import Path

import pytest

from homing.replica.disk.disk_file import Transfers

from .blocks import FaultyTransfers, failing, flipped
from .kept_cache import KeptCache


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "blocks.kv"


def test_what_was_cached_is_cached_after_a_restart(path: Path) -> None:
    """Also branches of a prefix, and without any warning to the replica: here it is not even closed."""
    first = KeptCache(path)
    first.run(1, 2, 3)
    first.run(1, 2, 4)
    first.run(5)
    first.settle()
    first.keeper._file.close()

    again = KeptCache(path)
    assert again.restored == 5
    assert [again.run(1, 2, 3), again.run(1, 2, 4), again.run(5), again.run(6)] == [3, 3, 1, 0]
    again.end()
    last = KeptCache(path)
    assert last.restored == 6
    last.end()


def test_closing_writes_what_is_left(path: Path) -> None:
    first = KeptCache(path)
    first.run(*range(10))
    first.end()
    again = KeptCache(path)
    assert again.run(*range(10)) == 10
    again.end()


def test_a_smaller_pool_gets_the_newest_chains_whole(path: Path) -> None:
    """A block without those before it could not be used."""
    first = KeptCache(path, blocks=33)
    for start in (0, 100, 200):
        first.run(*range(start, start + 8))
        first.settle()
    first.end()
    again = KeptCache(path, blocks=13)
    assert again.restored == 12
    assert [again.run(*range(start, start + 8)) for start in (200, 100)] == [8, 4]
    again.end()


def test_restored_blocks_are_evicted_oldest_chain_first(path: Path) -> None:
    first = KeptCache(path)
    for start in (0, 100):
        first.run(*range(start, start + 8))
        first.settle()
    first.end()
    again = KeptCache(path)
    again.run(*range(200, 204))
    assert (again.run(*range(100, 108)), again.run(*range(8))) == (8, 4)
    again.check()
    again.end()


def test_a_full_file_gives_up_the_ends_of_old_chains(path: Path) -> None:
    first = KeptCache(path, blocks=33, slots=16)
    for start in (0, 100, 200):
        first.run(*range(start, start + 6))
        first.settle()
    first.end()
    again = KeptCache(path, blocks=33, slots=16)
    assert [again.run(*range(start, start + 6)) for start in (0, 100, 200)] == [4, 6, 6]
    again.end()


@pytest.mark.parametrize(("fault", "kind"), [(flipped, "disk_checksum"), (failing(5), "disk_io")])
def test_a_block_that_cannot_be_read_is_dropped_with_its_followers(path: Path, fault, kind: str) -> None:
    """Computing them again gives the right KV, and the next restart finds it."""
    first = KeptCache(path)
    first.run(1, 2, 3)
    first.run(1, 2, 4)
    first.end()
    transfers = FaultyTransfers()
    faults = iter([None, None, None, fault])  # the header, the records, a block, the next one
    transfers.read_fault = lambda fd, into, at: (next(faults, None) or Transfers().read)(fd, into, at)
    again = KeptCache(path, transfers=transfers)
    assert (again.restored, dict(again.keeper.failures)) == (1, {kind: 1})
    again.end()
    rest = KeptCache(path)
    assert (rest.restored, dict(rest.keeper.failures)) == (1, {}), "a bad block is tried only once"
    assert [rest.run(1, 2, 3), rest.run(1, 2, 4)] == [1, 2]
    rest.end()
    last = KeptCache(path)
    assert [last.run(1, 2, 3), last.run(1, 2, 4)] == [3, 3]
    last.end()


def test_a_disk_that_takes_nothing_only_costs_the_blocks(path: Path) -> None:
    transfers = FaultyTransfers()
    first = KeptCache(path, transfers=transfers)
    transfers.write_fault = failing(28)
    first.run(1, 2, 3)
    first.settle()
    assert first.run(1, 2, 3) == 3
    assert dict(first.keeper.failures) == {"disk_full": 3}
    first.end()
    again = KeptCache(path)
    assert again.restored == 0
    again.end()


def test_blocks_that_are_evicted_before_their_turn_are_counted(path: Path) -> None:
    first = KeptCache(path, blocks=9)
    first.run(*range(8))
    first.run(*range(100, 108))
    first.settle()
    assert dict(first.keeper.failures) == {"disk_behind": 8}
    first.end()
    again = KeptCache(path, blocks=9)
    assert again.run(*range(100, 108)) == 8
    again.end()


def test_a_reset_clears_the_disk(path: Path) -> None:
    """A restart must not bring back what an administrator has cleared."""
    first = KeptCache(path)
    first.run(1, 2, 3)
    first.settle()
    first.run(4, 5)
    first.keeper.work(1)
    assert first.cache.reset()
    first.run(6)
    first.end()
    again = KeptCache(path)
    assert [again.run(1, 2, 3), again.run(4, 5), again.run(6)] == [0, 0, 1]
    again.end()


def test_a_reset_that_the_disk_refuses_is_counted_and_clears_it_all_the_same(path: Path) -> None:
    """The next block that is written, or the end, makes up for it."""
    transfers = FaultyTransfers()
    first = KeptCache(path, transfers=transfers)
    first.run(1, 2, 3)
    first.settle()
    transfers.write_fault = failing(5)
    assert first.cache.reset()
    first.settle()
    assert dict(first.keeper.failures) == {"disk_io": 1}
    first.run(7)
    first.settle()
    assert dict(first.keeper.failures) == {"disk_io": 2}
    transfers.write_fault = None
    first.run(8)
    first.end()
    again = KeptCache(path)
    assert [again.run(1, 2, 3), again.run(7), again.run(8)] == [0, 0, 1]
    again.end()


class Slow(Transfers):
    """A disk that holds up reads of blocks from the n-th on until it is opened."""

    def __init__(self, good: int) -> None:
        self.good, self.open = good, threading.Event()

    def read(self, file, into, offset):
        if len(into) > 8192:
            self.good -= 1
            if self.good < 0:
                self.open.wait()
        return super().read(file, into, offset)


def test_a_start_does_not_wait_for_a_disk_that_hangs(path: Path) -> None:
    """The replica starts with what was read, and keeps blocks again once the disk answers."""
    first = KeptCache(path)
    first.run(1, 2, 3, 4, 5, 6)
    first.run(11)
    first.end()
    slow = Slow(3)
    again = KeptCache(path, transfers=slow, patience_s=0.05)
    assert (again.restored, dict(again.keeper.failures)) == (3, {"disk_slow": 4})
    assert [again.run(11), again.run(1, 2, 3, 4, 5, 6)] == [1, 2]
    slow.open.set()
    again.run(12)
    again.settle()
    again.end()
    last = KeptCache(path)
    assert last.restored == 8
    last.end()


def test_long_salts_are_not_kept(path: Path) -> None:
    """Their blocks have no room for them; blocks without a salt on the stream would be taken for other tenants'."""
    first = KeptCache(path)
    commit = first.cache.commit
    first.cache.commit = lambda *given: commit(*given[:-1], "s" * 129)
    first.run(1, 2)
    first.end()
    again = KeptCache(path)
    assert again.restored == 0
    again.end()
