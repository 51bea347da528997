"""A KV file gives back what was put into it or says that it cannot, whatever happened to the process or the disk."""

import errno
import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from msgspec.structs import replace

from homing.replica.disk.disk_file import DiskFailure, DiskFile, open_file
from homing.replica.disk.file_format import DiskEntry, Identity, decode_header, encode_header

from .blocks import (
    BLOCK_BYTES,
    IDENTITY,
    READ_FAULTS,
    SLOTS,
    FaultyTransfers,
    entry,
    failing,
    flipped,
    kv_of,
)


def opened(path: Path, identity: Identity = IDENTITY, slots: int = SLOTS, transfers=None) -> DiskFile:
    file = open_file(path, identity, 0, slots, transfers)
    assert file is not None
    return file


def put(file: DiskFile, *entries: DiskEntry) -> None:
    for each in entries:
        file.put(each, memoryview(kv_of(each.block_hash)))


def got(file: DiskFile, wanted: DiskEntry) -> bytes:
    into = bytearray(BLOCK_BYTES)
    file.get(wanted.slot, wanted.generation, wanted.block_hash, memoryview(into))
    return bytes(into)


def failure(file: DiskFile, wanted: DiskEntry) -> str:
    """The kind of failure of a read, which must leave the buffer alone."""
    into = bytearray(b"x" * BLOCK_BYTES)
    with pytest.raises(DiskFailure) as error:
        file.get(wanted.slot, wanted.generation, wanted.block_hash, memoryview(into))
    assert into == b"x" * BLOCK_BYTES
    return error.value.kind


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "blocks.kv"


class Slots(RuleBasedStateMachine):
    """Any operations, with restarts in between, against a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(os.environ["DISK_FILE_TEST_FOLDER"])
        self.path = self.folder / f"{len(os.listdir(self.folder))}.kv"
        self.file = opened(self.path)
        self.held: dict[int, DiskEntry] = {}
        self.generation = 0

    @rule(name=st.integers(1, 50), slot=st.integers(0, SLOTS - 1))
    def put(self, name: int, slot: int) -> None:
        self.generation += 1
        self.held[slot] = entry(name, slot, self.generation)
        put(self.file, self.held[slot])

    @rule(slot=st.integers(0, SLOTS - 1))
    def drop(self, slot: int) -> None:
        self.file.drop(slot)
        self.held.pop(slot, None)

    @rule()
    def clear(self) -> None:
        self.file.clear()
        self.held.clear()

    @rule()
    def restart(self) -> None:
        self.file.close()
        self.file = opened(self.path)
        assert self.file.entries == [self.held[slot] for slot in sorted(self.held)]

    @invariant()
    def all_blocks_are_right(self) -> None:
        for each in self.held.values():
            assert got(self.file, each) == kv_of(each.block_hash)

    def teardown(self) -> None:
        self.file.close()
        self.path.unlink()


def test_any_operations_leave_what_was_put(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also over restarts, which find exactly the blocks that were there."""
    monkeypatch.setenv("DISK_FILE_TEST_FOLDER", str(tmp_path))
    from hypothesis.stateful import run_state_machine_as_test

    run_state_machine_as_test(Slots, settings=settings(max_examples=20, stateful_step_count=15, deadline=None))


@pytest.mark.cluster
def test_a_process_killed_anywhere_leaves_right_blocks(tmp_path: Path) -> None:
    """At 200 places: in the middle of erasing a record, of the KV and of the new record."""
    script = Path(__file__).with_name("killed_writer.py")
    run = subprocess.run(
        [sys.executable, script, tmp_path, "200"], capture_output=True, text=True, check=False, timeout=300
    )
    assert (run.returncode, run.stdout, run.stderr) == (0, "200\n", "")


@pytest.mark.parametrize("case", READ_FAULTS)
def test_a_failed_read_is_named_and_ends_the_block(path: Path, case: str) -> None:
    """Also over a restart, which would otherwise try the same bad block each time. Others can be read."""
    fault, kind = READ_FAULTS[case]
    transfers, one, two = FaultyTransfers(), entry(1, 3, 1), entry(2, 4, 2)
    file = opened(path, transfers=transfers)
    put(file, one, two)

    transfers.read_fault = fault
    assert failure(file, one) == kind
    transfers.read_fault = None
    assert failure(file, one) == "disk_stale"
    assert got(file, two) == kv_of(two.block_hash)
    file.close()
    file = opened(path)
    assert file.entries == [two]
    file.close()


def test_a_failed_read_ends_the_block_though_its_record_cannot_be_erased(path: Path) -> None:
    """It is erased when the slot is used again, before new KV is written."""
    transfers, one, new = FaultyTransfers(), entry(1, 3, 1), entry(2, 3, 2)
    file = opened(path, transfers=transfers)
    put(file, one)
    transfers.read_fault, transfers.write_fault = flipped, failing(errno.EIO)
    assert [failure(file, one), failure(file, one)] == ["disk_checksum", "disk_stale"]

    transfers.write_fault = lambda fd, data, at: (
        failing(errno.EIO)(fd, data, at) if len(data) > 8192 else os.pwrite(fd, data, at)
    )
    with pytest.raises(DiskFailure):
        put(file, new)
    file.close()
    file = opened(path)
    assert file.entries == []
    file.close()


@pytest.mark.parametrize("later", ["a block", "the end", "a restart"])
@pytest.mark.parametrize("fault", [failing(errno.EIO), lambda fd, data, at: os.pwrite(fd, data[:20], at) and 0])
def test_a_clear_that_fails_is_made_up_for_before_anything_is_written(path: Path, fault, later: str) -> None:
    """Nothing from before it may come back, and nothing after it may get lost by a number that is not on disk."""
    transfers, old, new = FaultyTransfers(), entry(1, 3, 1), entry(2, 4, 2)
    file = opened(path, transfers=transfers)
    put(file, old)
    transfers.write_fault = fault
    with pytest.raises(DiskFailure):
        file.clear()
    assert failure(file, old) == "disk_stale"
    with pytest.raises(DiskFailure):
        put(file, new)

    if later != "a restart":
        transfers.write_fault = None
    if later == "a block":
        put(file, new)
        assert got(file, new) == kv_of(new.block_hash)
    file.close()
    file = opened(path)
    assert file.entries == ([new] if later == "a block" else [])
    assert [got(file, each) for each in file.entries] == [kv_of(each.block_hash) for each in file.entries]
    file.close()


def test_a_clear_is_on_disk_before_it_is_done(path: Path) -> None:
    """After a power cut, the blocks from before it would come back."""
    transfers = FaultyTransfers()
    file = opened(path, transfers=transfers)
    assert transfers.synced == 1
    transfers.sync_fault = failing(errno.EIO)
    with pytest.raises(DiskFailure):
        file.clear()
    transfers.sync_fault = None
    put(file, entry(1, 3, 1))
    assert transfers.synced == 3
    file.close()


def test_records_that_cannot_be_read_cost_their_blocks_only(path: Path) -> None:
    """Reads may also end early, and then go on."""
    transfers, one = FaultyTransfers(), entry(1, 3, 1)
    file = opened(path)
    put(file, one)
    file.close()
    transfers.read_fault = lambda fd, into, at: os.preadv(fd, [into[:100]], at)
    file = opened(path, transfers=transfers)
    assert (file.entries, file.failures) == ([one], {})
    file.close()
    transfers.read_fault = lambda fd, into, at: 0
    with pytest.raises(OSError, match="only 0 bytes of"):
        opened(path, transfers=transfers)
    transfers.read_fault = lambda fd, into, at: (failing(errno.EIO) if at else os.preadv)(fd, [into], at)
    file = opened(path, transfers=transfers)
    assert (file.entries, file.failures) == ([], {"disk_io": 1})
    file.close()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
@pytest.mark.parametrize("failed", [0, 1, 2])
def test_a_failed_write_leaves_the_slot_empty_or_as_it_was(path: Path, number: int, failed: int) -> None:
    """The old record is erased, then the KV is written, then the new record."""
    transfers, old, new, other = FaultyTransfers(), entry(1, 3, 1), entry(2, 3, 2), entry(3, 4, 3)
    file = opened(path, transfers=transfers)
    put(file, old)
    writes = iter(range(9))
    fail = failing(number)
    transfers.write_fault = lambda fd, data, at: (
        fail(fd, data, at) if next(writes) == failed else os.pwrite(fd, data, at)
    )

    with pytest.raises(DiskFailure) as error:
        put(file, new)

    assert error.value.kind == ("disk_io" if number == errno.EIO else "disk_full")
    assert failure(file, new) == "disk_stale"
    transfers.write_fault = None
    put(file, other)
    file.close()
    file = opened(path)
    assert file.entries == ([old, other] if failed == 0 else [other])
    assert all(got(file, each) == kv_of(each.block_hash) for each in file.entries)
    file.close()


def test_a_write_in_pieces_is_complete_and_one_of_nothing_fails(path: Path) -> None:
    """The kernel may write less than asked, in multiples of a page where the cache is bypassed."""
    transfers, one, two = FaultyTransfers(), entry(1, 3, 1), entry(2, 4, 2)
    file = opened(path, transfers=transfers)
    transfers.write_fault = lambda fd, data, at: os.pwrite(fd, data[:4096], at)
    put(file, one)
    assert got(file, one) == kv_of(one.block_hash)

    transfers.write_fault = lambda fd, data, at: 0
    with pytest.raises(DiskFailure, match="0 bytes written"):
        put(file, two)
    file.close()


def changed(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as raw:
        raw.seek(offset)
        raw.write(data)


@pytest.mark.parametrize("restarted", [False, True])
def test_changed_kv_is_never_taken_for_right(path: Path, restarted: bool) -> None:
    """A flipped bit, another slot's KV, or what an older file held at this place."""
    one, two = entry(1, 3, 1), entry(2, 4, 2)
    file = opened(path)
    put(file, one, two)
    layout = file.layout
    raw = path.read_bytes()
    changed(path, layout.data_at(3) + 77, bytes([raw[layout.data_at(3) + 77] ^ 1]))
    changed(path, layout.data_at(4), raw[layout.data_at(3) : layout.data_at(4)])
    if restarted:
        file.close()
        file = opened(path)

    assert [failure(file, one), failure(file, two)] == ["disk_checksum", "disk_checksum"]
    file.close()


def test_changed_records_are_left_out(path: Path) -> None:
    """Torn, damaged in any byte, in another slot, or of the contents before the file was cleared."""
    one, two = entry(1, 3, 1), entry(3, 4, 2)
    file = opened(path)
    put(file, one, two)
    file.close()
    layout, raw = file.layout, path.read_bytes()
    at, size = layout.record_at(3), layout.record_bytes
    for place in range(size):
        changed(path, at + place, bytes([raw[at + place] ^ 16]))
        file = opened(path)
        assert file.entries == [two], f"byte {place} of the record is not checked"
        file.close()
        changed(path, at + place, raw[at + place : at + place + 1])
    changed(path, layout.record_at(5), raw[at : at + size])
    file = opened(path)
    assert file.entries == [one, two]
    file.clear()
    changed(path, at, raw[at : at + size])
    file.close()
    file = opened(path)
    assert file.entries == []
    file.close()


def test_a_file_that_was_cut_off_gives_short_reads_and_is_formatted_at_the_next_start(path: Path) -> None:
    one = entry(1, SLOTS - 1, 1)
    file = opened(path)
    put(file, one)
    os.truncate(path, file.layout.data_at(SLOTS - 1) + 4096)
    assert failure(file, one) == "disk_short_read"
    file.close()
    file = opened(path)
    assert file.entries == []
    file.close()


OTHER = {
    "model": replace(IDENTITY, root="00" * 16),
    "seed": replace(IDENTITY, seed="00" * 8),
    "layout": replace(IDENTITY, layout="float8"),
    "ranks": replace(IDENTITY, ranks=2),
    "block size": replace(IDENTITY, block_size=8),
    "block bytes": replace(IDENTITY, block_bytes=10_001),
}


@pytest.mark.parametrize("other", OTHER)
def test_a_file_of_another_identity_is_named_and_left_as_it_is(path: Path, other: str) -> None:
    """Files are named after their identity, so somebody has moved it here."""
    file = opened(path)
    put(file, entry(1, 3, 1))
    file.close()
    with pytest.raises(OSError, match="it holds blocks of another") as error:
        opened(path, OTHER[other])
    assert other in str(error.value).replace("_", " ").replace("root", "model")
    file = opened(path)
    assert len(file.entries) == 1
    file.close()


@pytest.mark.parametrize(("field", "value"), [("version", 2), ("rank", 1)])
def test_a_file_of_another_version_or_rank_is_named_and_left_as_it_is(path: Path, field: str, value: int) -> None:
    file = opened(path)
    file.close()
    page = encode_header(replace(file.header, **{field: value}))
    changed(path, 0, page)
    with pytest.raises(OSError, match=f"it holds blocks of another {field}"):
        opened(path)
    assert path.read_bytes()[:4096] == page


def test_a_damaged_header_or_another_size_drops_the_blocks(path: Path) -> None:
    file = opened(path)
    put(file, entry(1, 3, 1))
    file.close()
    page = path.read_bytes()[:4096]
    assert decode_header(page)
    assert not decode_header(page[:100])
    changed(path, 30, b"\xff")
    assert decode_header(path.read_bytes()[:4096]) is None
    file = opened(path)
    assert file.entries == []
    put(file, entry(1, 3, 1))
    file.close()
    file = opened(path, slots=SLOTS + 1)
    assert (file.entries, file.slots) == ([], SLOTS + 1)
    file.close()


def test_a_file_is_used_by_one_process(path: Path) -> None:
    file = opened(path)
    put(file, entry(1, 3, 1))
    assert open_file(path, IDENTITY, 0, SLOTS) is None
    file.close()
    file = opened(path)
    assert len(file.entries) == 1
    file.close()


def test_files_that_are_not_ours_are_left_as_they_are(path: Path, tmp_path: Path) -> None:
    target = tmp_path / "letter.txt"
    target.write_text("dear reader")
    makers = {
        "not a KV file": lambda: path.write_text("something else"),
        "Too many levels": lambda: path.symlink_to(target),
        "linked under another name": lambda: path.hardlink_to(target),
        "Is a directory": lambda: path.mkdir(),
        "not a regular file": lambda: os.mkfifo(path),
    }
    for reason, make in makers.items():
        make()
        with pytest.raises(OSError, match=reason):
            opened(path)
        assert target.read_text() == "dear reader"
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()


def test_a_file_that_does_not_fit_keeps_what_it_holds(path: Path) -> None:
    """A size that is too large by mistake must not cost the blocks under the right one."""
    file = opened(path)
    put(file, entry(1, 3, 1))
    file.close()
    with pytest.raises(OSError, match="bytes are needed"):
        opened(path, slots=1 << 50)
    file = opened(path)
    assert len(file.entries) == 1
    file.close()


def test_no_file_stays_open_after_an_error(path: Path) -> None:
    before = os.listdir("/proc/self/fd")
    path.write_text("something else")
    with pytest.raises(OSError, match="not a KV file"):
        opened(path)
    with path.open() as locked:
        fcntl.flock(locked, fcntl.LOCK_EX)
        assert open_file(path, IDENTITY, 0, SLOTS) is None
    assert os.listdir("/proc/self/fd") == before
