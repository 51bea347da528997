"""Settings that cannot work are refused by name before anything is changed; replicas share a folder, not files."""

import errno
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from homing.replica.disk.disk_file import DiskFailure, DiskFile
from homing.replica.disk.file_format import Identity
from homing.replica.disk.folder import SEED_FILE, check_settings, cluster_seed, open_in_time, open_rank_file
from homing.replica.errors import DiskTierUnusable

from .blocks import IDENTITY, FaultyTransfers, entry, failing, kv_of

SIZE = 1 << 20


def checked(folder: object, size: int = SIZE, *, caches: bool = True, ranks: int = 1) -> None:
    check_settings(str(folder), size, prefix_caching=caches, ranks=ranks)


def opened(folder: Path, identity: Identity = IDENTITY, size: int = SIZE, **named: Any) -> tuple[DiskFile, int]:
    return open_rank_file(str(folder), size, identity, **named)


def refusal(action, *arguments, **named) -> str:
    with pytest.raises(DiskTierUnusable) as error:
        action(*arguments, **named)
    return str(error.value)


def test_bad_settings_are_named(tmp_path: Path) -> None:
    """Each message begins with the setting to change; nothing in the folder is changed."""
    (tmp_path / "file").write_text("mine")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    bad: dict[str, tuple[tuple[object, ...], dict[str, int]]] = {
        "disk_kv_size is set, but not disk_kv": (("",), {}),
        "disk_kv_size 0: set the bytes": ((tmp_path, 0), {}),
        "disk_kv needs prefix_caching": ((tmp_path,), {"caches": False}),
        "replicas of 2 ranks cannot": ((tmp_path,), {"ranks": 2}),
        "bytes; lower it": ((tmp_path, 1 << 60), {}),
        "file: it is not a folder": ((tmp_path / "file",), {}),
        "dangling: it is not a folder": ((tmp_path / "dangling",), {}),
        "file is not a folder; create it first": ((tmp_path / "file" / "below",), {}),
        "it must be an absolute path": (("blocks",), {}),
        "cannot write there: No such": (("/proc/none",), {}),
        "a path cannot have a null character": ((f"{tmp_path}/a\0b",), {}),
        "cannot write there: File name too long": ((tmp_path / ("n" * 300),), {}),
    }
    for message, (arguments, named) in bad.items():
        text = refusal(checked, *arguments, **named)
        assert message in text
        assert text.startswith("disk_kv"), text
    assert sorted(os.listdir(tmp_path)) == ["dangling", "file"]


def test_files_in_the_folder_that_no_replica_may_use_are_named(tmp_path: Path) -> None:
    """Before a model is loaded, and again when it is; nothing in the folder is changed."""
    file, _ = opened(tmp_path)
    file.close()
    name = file.path.name
    file.path.rename(tmp_path / "moved")
    (tmp_path / "theirs").mkdir()
    makers = {
        f"{name} is a link": lambda: file.path.symlink_to(tmp_path / "moved"),
        f"{name}: it is also linked": lambda: file.path.hardlink_to(tmp_path / "moved"),
        f"{name}: not a regular file": lambda: file.path.mkdir(),
    }
    if os.geteuid() == 0:
        makers[f"{name}: it belongs to user 4242"] = lambda: (file.path.touch(), os.chown(file.path, 4242, -1))
    for message, make in makers.items():
        make()
        text = refusal(checked, tmp_path)
        assert message in text
        assert text.startswith("disk_kv: "), text
        assert str(file.path) in refusal(opened, tmp_path)
        assert os.path.lexists(file.path)
        file.path.rmdir() if file.path.is_dir() and not file.path.is_symlink() else file.path.unlink()
    checked(tmp_path)
    (tmp_path / SEED_FILE).write_text("17")
    (tmp_path / SEED_FILE).chmod(0o600)
    assert "does not hold a seed" in refusal(checked, tmp_path)


def test_a_file_of_another_model_under_this_ones_name_is_left_alone(tmp_path: Path) -> None:
    file, _ = opened(tmp_path)
    file.close()
    other = replace(IDENTITY, root="00" * 16)
    moved = file.path.rename(tmp_path / f"homing-{other.digest().hex()}-0-rank0.kv")
    assert f"disk_kv: cannot use {moved}: it holds blocks of another root" in refusal(opened, tmp_path, other)
    moved.rename(file.path)
    opened(tmp_path)[0].close()


def test_good_settings_change_nothing(tmp_path: Path) -> None:
    checked("", 0)
    checked(tmp_path)
    checked(tmp_path / "new")
    assert os.listdir(tmp_path) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    assert "cannot write there: Permission denied" in refusal(checked, tmp_path)


def test_a_tier_of_a_few_blocks_is_refused_with_the_least_size(tmp_path: Path) -> None:
    text = refusal(opened, tmp_path, size=100_000)
    assert "disk_kv_size 100,000: it holds only 7 blocks of 10,000 bytes; set at least" in text
    least = int(text.rpartition(" ")[2].replace(",", ""))
    file, _ = opened(tmp_path, size=least)
    assert file.slots == 16
    file.close()


def test_replicas_of_one_folder_use_files_of_their_own(tmp_path: Path) -> None:
    """Each takes the first file that is free, so that a replica started again finds blocks."""
    first, number_of_first = opened(tmp_path)
    second, number_of_second = opened(tmp_path)
    assert (number_of_first, number_of_second) == (0, 1)
    block = entry(1, 3, 1)
    second.put(block, memoryview(kv_of(block.block_hash)))
    second.close()
    again, number = opened(tmp_path)
    assert (number, again.entries) == (1, [block])
    assert "is in use by another process" in refusal(opened, tmp_path, number=0)
    for file in (first, again):
        file.close()
    assert all(path.stat().st_mode & 0o077 == 0 for path in tmp_path.iterdir())


def test_ranks_use_files_of_their_own_under_one_number(tmp_path: Path) -> None:
    two = replace(IDENTITY, ranks=2)
    files = [opened(tmp_path, two, rank=rank, number=0)[0] for rank in (0, 1)]
    assert files[0].path != files[1].path
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= SIZE
    for file in files:
        file.close()


def test_another_identity_has_a_file_of_its_own(tmp_path: Path) -> None:
    """So trying another model or dtype does not cost the blocks of the former one."""
    block = entry(1, 3, 1)
    file, _ = opened(tmp_path)
    file.put(block, memoryview(kv_of(block.block_hash)))
    file.close()
    other, _ = opened(tmp_path, replace(IDENTITY, root="00" * 16))
    assert other.entries == []
    other.close()
    file, _ = opened(tmp_path)
    assert file.entries == [block]
    file.close()


def test_unused_files_of_other_identities_give_way_when_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oldest first, never one in use, and none if that would not suffice either."""
    others = [replace(IDENTITY, root=f"{name:02x}" * 16) for name in range(3)]
    files = [opened(tmp_path, each)[0] for each in others]
    for age, file in enumerate(files):
        os.utime(file.path, (1000 + age, 1000 + age))
    for file in files[1:]:
        file.close()
    paths = [file.path for file in files]
    assert paths[0].stat().st_blocks * 512 >= SIZE // 2
    monkeypatch.setattr("homing.replica.disk.folder._free_bytes", lambda folder: 0)

    opened(tmp_path, size=8 * SIZE)[0].close()  # what is there would not suffice, so the disk decides
    assert [path.exists() for path in paths] == [True, True, True]
    file, _ = opened(tmp_path, replace(IDENTITY, root="ff" * 16))
    assert [path.exists() for path in paths] == [True, False, True]
    for each in (file, files[0]):
        each.close()


def test_a_disk_that_hangs_or_is_broken_is_told_from_wrong_settings(tmp_path: Path) -> None:
    """The replica then starts without. A file that is opened too late is released for the next start."""
    transfers, go = FaultyTransfers(), threading.Event()
    transfers.read_fault = failing(errno.EIO)
    with pytest.raises(DiskFailure, match="Input/output error") as error:
        open_in_time(lambda: opened(tmp_path, transfers=transfers)[0])
    assert error.value.kind == "disk_io"

    def hanging(file: int, into: memoryview, offset: int) -> int:
        go.wait()
        return os.preadv(file, [into], offset)

    transfers.read_fault = hanging
    threads = set(threading.enumerate())
    with pytest.raises(DiskFailure, match=r"did not open the file in 0\.01 s") as error:
        open_in_time(lambda: opened(tmp_path, transfers=transfers)[0], timeout_s=0.01)
    assert error.value.kind == "disk_slow"
    go.set()
    for each in set(threading.enumerate()) - threads:
        each.join(60)
    file, number = opened(tmp_path)
    assert number == 0
    file.close()
    assert "it holds only" in refusal(open_in_time, lambda: opened(tmp_path, size=4096)[0])
    assert open_in_time(lambda: opened(tmp_path)[0]).close() is None


def test_room_is_made_for_a_file_that_grows_or_was_never_filled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A start that found no space leaves an empty file; the next one must not take that for its space."""
    other, _ = opened(tmp_path, replace(IDENTITY, root="00" * 16))
    other.close()
    monkeypatch.setattr("homing.replica.disk.folder._free_bytes", lambda folder: 0)
    digest = IDENTITY.digest().hex()
    (tmp_path / f"homing-{digest}-0-rank0.kv").touch()
    file, _ = opened(tmp_path)
    assert not other.path.exists()
    file.close()


def test_a_file_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    file, _ = opened(tmp_path)
    file.close()
    file.path.unlink()
    file.path.symlink_to(tmp_path / "elsewhere")
    assert f"disk_kv: {file.path} is a link" in refusal(opened, tmp_path)
    file.path.unlink()
    file.path.write_text("a letter")
    assert "it is not a KV file; remove it" in refusal(opened, tmp_path)
    assert file.path.read_text() == "a letter"
    file.path.unlink()
    assert "disk_kv_size 1,152,921,504,606,846,976" in refusal(opened, tmp_path, size=1 << 60)
    assert not file.path.exists() or file.path.stat().st_size == 0


def test_the_seed_is_drawn_once_and_for_its_owner_only(tmp_path: Path) -> None:
    folder = tmp_path / "new"
    seed = cluster_seed(str(folder))
    assert cluster_seed(str(folder)) == seed < 1 << 64
    assert os.listdir(folder) == [SEED_FILE]
    assert (folder / SEED_FILE).stat().st_mode & 0o777 == 0o600
    assert folder.stat().st_mode & 0o777 == 0o700
    assert cluster_seed(str(tmp_path)) != seed


def test_models_with_folders_of_their_own_share_a_seed_in_any_order(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """So each model finds its blocks again if it is served first, alone, or with others."""
    folders = [str(tmp_path / name) for name in "abc"]
    seed = cluster_seed(*folders[:2])
    assert cluster_seed(folders[2], folders[1]) == cluster_seed(folders[2]) == seed

    other = cluster_seed(str(tmp_path / "other"))
    assert not caplog.records
    assert cluster_seed(*folders, str(tmp_path / "other")) == seed
    assert "its seed is not that of" in caplog.text
    assert cluster_seed(str(tmp_path / "other")) == other, "blocks there can still be used alone"


def test_a_seed_that_others_could_read_or_have_made_is_refused(tmp_path: Path) -> None:
    """Tenants' isolation rests on it: with a known seed, colliding prompts can be searched for."""
    cluster_seed(str(tmp_path))
    path = tmp_path / SEED_FILE
    path.chmod(0o644)
    assert f"others may read {path}" in refusal(cluster_seed, str(tmp_path))
    path.chmod(0o600)
    path.write_text("17")
    assert "does not hold a seed" in refusal(cluster_seed, str(tmp_path))
    path.rename(tmp_path / "moved")
    path.symlink_to(tmp_path / "moved")
    assert f"cannot use {path}" in refusal(cluster_seed, str(tmp_path))
    path.unlink()
    path.hardlink_to(tmp_path / "moved")
    assert "it is also linked under another name" in refusal(cluster_seed, str(tmp_path))
