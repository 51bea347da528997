"""The engine's thread never waits for the disk: what does not fit into the queues is refused."""

import errno
import os
import threading
from pathlib import Path

import pytest

from homing.replica.disk.disk_file import DiskFile, Transfers, open_file
from homing.replica.disk.disk_worker import DiskWorker, Ended, Read, Write

from .blocks import BLOCK_BYTES, IDENTITY, SLOTS, FaultyTransfers, entry, failing, flipped, kv_of


class Gate(Transfers):
    """A disk that begins no transfer while it is closed."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.waits = threading.Event()
        self.open.set()

    def _pass(self) -> None:
        self.waits.set()
        self.open.wait()

    def read(self, file, into, offset):
        self._pass()
        return super().read(file, into, offset)

    def write(self, file, data, offset):
        self._pass()
        return super().write(file, data, offset)


@pytest.fixture
def gate() -> Gate:
    return Gate()


def opened(folder: Path, transfers: Transfers) -> DiskFile:
    file = open_file(folder / "blocks.kv", IDENTITY, 0, SLOTS, transfers)
    assert file is not None
    return file


def writing(name: int, slot: int, generation: int) -> Write:
    put = entry(name, slot, generation)
    return Write(put, memoryview(kv_of(put.block_hash)))


def reading(of: Write) -> Read:
    return Read(of.entry.slot, of.entry.generation, of.entry.block_hash, memoryview(bytearray(BLOCK_BYTES)))


def ended(worker: DiskWorker) -> list[tuple[int, str | None]]:
    assert worker.wait(60)
    return [(each.number, each.failure) for each in worker.ended()]


def test_blocks_are_written_and_read_in_the_thread(tmp_path: Path, gate: Gate) -> None:
    woken = threading.Event()
    worker = DiskWorker(opened(tmp_path, gate), wake=woken.set)
    write = writing(1, 3, 1)
    assert worker.start(write) == 1
    assert ended(worker) == [(1, None)]
    assert not woken.is_set()
    read = reading(write)
    assert worker.start(read) == 2
    assert ended(worker) == [(2, None)]
    assert read.into == kv_of(write.entry.block_hash)
    assert woken.wait(60)
    worker.close()
    assert worker.start(read) is None
    opened(tmp_path, gate).close()


def test_full_queues_refuse_and_reads_overtake_writes(tmp_path: Path, gate: Gate) -> None:
    worker = DiskWorker(opened(tmp_path, gate), max_writes=2, max_reads=1)
    first = writing(1, 0, 1)
    worker.start(first)
    assert ended(worker) == [(1, None)]
    gate.open.clear()
    gate.waits.clear()
    worker.start(writing(2, 1, 2))
    assert gate.waits.wait(60)

    assert [worker.start(writing(name, name, name)) for name in (3, 4, 5)] == [3, 4, None]
    assert worker.room == 0
    assert [worker.start(reading(first)) for _ in range(2)] == [5, None]
    gate.open.set()
    assert ended(worker) == [(2, None), (5, None), (3, None), (4, None)]
    worker.close()


def test_a_stalled_disk_gets_no_more_work(tmp_path: Path, gate: Gate) -> None:
    """Until it has finished; requests then compute instead of queueing behind it."""
    now = [0.0]
    worker = DiskWorker(opened(tmp_path, gate), clock=lambda: now[0])
    gate.open.clear()
    gate.waits.clear()
    write = writing(1, 0, 1)
    worker.start(write)
    assert gate.waits.wait(60)
    assert not worker.stalled
    now[0] = 2.0
    assert (worker.stalled, worker.room) == (True, 0)
    assert worker.start(reading(write)) is None
    gate.open.set()
    assert worker.wait(60)
    assert worker.ended() == [Ended(1, None, 2.0)]
    assert not worker.stalled
    worker.close()


def test_failures_end_transfers_not_the_thread(tmp_path: Path) -> None:
    transfers = FaultyTransfers()
    worker = DiskWorker(opened(tmp_path, transfers))
    write = writing(1, 3, 1)
    worker.start(write)
    assert ended(worker) == [(1, None)]
    transfers.read_fault = flipped
    worker.start(reading(write))
    assert ended(worker) == [(2, "disk_checksum")]

    def defect(file: int, into: memoryview, offset: int) -> int:
        raise ZeroDivisionError

    again = writing(2, 4, 2)
    worker.start(again)
    assert ended(worker) == [(3, None)]
    transfers.read_fault = defect
    worker.start(reading(again))
    assert ended(worker) == [(4, "disk_error")]
    transfers.read_fault = None
    worker.start(reading(again))
    assert ended(worker) == [(5, None)]
    worker.close()


def test_a_block_that_was_overwritten_before_it_was_copied_is_not_written(tmp_path: Path) -> None:
    """The host tier may reuse a slot while its block waits to be written."""
    worker = DiskWorker(opened(tmp_path, Transfers()))
    write = writing(1, 3, 1)
    worker.start(Write(write.entry, write.data, lambda: False))
    assert ended(worker) == [(1, "disk_stale")]
    worker.close()
    file = opened(tmp_path, Transfers())
    assert file.entries == []
    file.close()


def test_clearing_drops_what_is_queued_and_what_is_on_disk(tmp_path: Path, gate: Gate) -> None:
    worker = DiskWorker(opened(tmp_path, gate))
    worker.start(writing(1, 0, 1))
    assert ended(worker) == [(1, None)]
    gate.open.clear()
    gate.waits.clear()
    worker.start(writing(2, 1, 2))
    assert gate.waits.wait(60)
    worker.start(writing(3, 2, 3))
    worker.clear()
    after = writing(4, 0, 4)
    worker.start(after)
    gate.open.set()
    assert ended(worker) == [(3, "disk_stale"), (2, None), (4, None), (5, None)]
    worker.close()
    file = opened(tmp_path, gate)
    assert file.entries == [after.entry]
    file.close()


def test_a_clear_happens_though_the_end_comes_first(tmp_path: Path, gate: Gate) -> None:
    """A restart would otherwise serve what was cleared. What was queued after it is not written."""
    worker = DiskWorker(opened(tmp_path, gate))
    worker.start(writing(1, 0, 1))
    assert ended(worker) == [(1, None)]
    gate.open.clear()
    gate.waits.clear()
    worker.start(writing(2, 1, 2))
    assert gate.waits.wait(60)
    worker.clear()
    worker.start(writing(3, 2, 3))
    worker.close(timeout_s=0.01)
    gate.open.set()
    worker.close(timeout_s=60)
    assert [(each.number, each.failure) for each in worker.ended()] == [(2, None), (3, None), (4, "disk_behind")]
    file = opened(tmp_path, gate)
    assert file.entries == []
    file.close()


def test_a_clear_that_fails_is_reported(tmp_path: Path) -> None:
    transfers = FaultyTransfers()
    worker = DiskWorker(opened(tmp_path, transfers))
    transfers.write_fault = failing(errno.EIO)
    assert worker.clear() == 1
    assert ended(worker) == [(1, "disk_io")]
    transfers.write_fault = None
    worker.close()


def test_a_disk_that_hangs_does_not_hold_up_the_end(tmp_path: Path, gate: Gate) -> None:
    worker = DiskWorker(opened(tmp_path, gate))
    gate.open.clear()
    gate.waits.clear()
    worker.start(writing(1, 0, 1))
    assert gate.waits.wait(60)
    before = os.listdir("/proc/self/fd")
    worker.close(timeout_s=0.01)
    assert os.listdir("/proc/self/fd") == before, "the thread still uses the file"
    gate.open.set()
    worker.close()
