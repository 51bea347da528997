"""Registry entries of running clusters: valid only while their process runs, and unique by name."""

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import psutil
import pytest

from homing.cluster.errors import AlreadyRunning, NotRunning, SettingsError
from homing.cluster.registry import ClusterRegistry, ProcessMark, RegistryEntry, own_entry


@pytest.fixture
def registry(tmp_path: Path) -> ClusterRegistry:
    return ClusterRegistry(tmp_path / "state")


def dead_entry(run_dir: Path) -> RegistryEntry:
    """An entry as a killed process would leave it."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return RegistryEntry(name="default", pid=process.pid, started=0.0, boot="", phase="ready", run_dir=str(run_dir))


def test_a_name_is_held_while_its_cluster_runs(registry: ClusterRegistry) -> None:
    """The name is free again afterwards."""
    with registry.claim(own_entry("default", "demo", None)):
        assert registry.running("default").pid == os.getpid()
        with pytest.raises(AlreadyRunning, match="running already"), registry.claim(own_entry("default", "demo", None)):
            pass

    with pytest.raises(NotRunning):
        registry.running("default")
    assert list(registry.folder.iterdir()) == []


def test_a_stale_entry_is_removed_with_the_folder_of_its_process(registry: ClusterRegistry, tmp_path: Path) -> None:
    """A killed cluster must neither block its name nor leave its folder behind forever."""
    left = tmp_path / "homing-k_ill3d0"
    left.mkdir()
    registry.folder.mkdir()
    registry.write(dead_entry(left))

    with pytest.raises(NotRunning):
        registry.running("default")
    assert not left.exists()


@pytest.mark.parametrize("folder", ["documents", "homing-mine", "relative/homing-k_ill3d0", "homing-l1nked00"])
def test_no_folder_is_removed_that_a_cluster_did_not_make(
    registry: ClusterRegistry, tmp_path: Path, folder: str
) -> None:
    """`--state-dir` may name a folder with unrelated files, and an entry in it may name any folder."""
    named = tmp_path / folder.removeprefix("relative/")
    kept = tmp_path / "kept"
    kept.mkdir()
    named.symlink_to(kept) if named.name == "homing-l1nked00" else named.mkdir()
    entry = dead_entry(Path(os.path.relpath(named)) if folder.startswith("relative/") else named)
    registry.make_folder()
    registry.write(entry)

    with pytest.raises(NotRunning):
        registry.running("default")

    assert kept.is_dir()
    assert named.is_dir()


@pytest.mark.parametrize("kind", ["another program's", "not text", "another name's", "writable by others", "a link"])
def test_a_file_that_is_not_our_entry_is_neither_believed_nor_removed(
    registry: ClusterRegistry, tmp_path: Path, kind: str
) -> None:
    """It could otherwise name any process to kill and any folder to remove."""
    registry.make_folder()
    run_dir = tmp_path / "homing-k_ill3d0"
    run_dir.mkdir()
    path, content = registry.path("default"), msgspec.json.encode(dead_entry(run_dir))
    if kind == "a link":
        (tmp_path / "elsewhere.json").write_bytes(content)
        path.symlink_to(tmp_path / "elsewhere.json")
    else:
        other = content.replace(b'"default"', b'"blue"')
        foreign = {"another program's": b"{}", "not text": b'{"name":"\xff"}', "another name's": other}
        path.write_bytes(foreign.get(kind, content))
        path.chmod(0o666 if kind == "writable by others" else 0o600)

    with pytest.raises(NotRunning):
        registry.running("default")
    with (
        pytest.raises(SettingsError, match="not an entry that this user wrote"),
        registry.claim(own_entry("default", "demo", None)),
    ):
        pass

    assert path.exists()
    assert run_dir.is_dir()


def test_other_users_cannot_write_entries(registry: ClusterRegistry) -> None:
    """An entry determines which process is stopped and which folder is removed."""
    with registry.claim(own_entry("default", "demo", None)):
        assert registry.folder.stat().st_mode & 0o777 == 0o700
        assert registry.path("default").stat().st_mode & 0o777 == 0o600


def test_a_name_that_is_not_running_is_answered_by_those_that_are(registry: ClusterRegistry) -> None:
    """Without `--name`, commands look for `default`, which may not be running."""
    with pytest.raises(NotRunning, match=r"no cluster 'default' is running; start one with: homing serve$"):
        registry.running("default")

    with registry.claim(own_entry("blue", "demo", None)), registry.claim(own_entry("green", "demo", None)):
        registry.write(msgspec.structs.replace(own_entry("green", "demo", None), url="http://h:1"))
        with pytest.raises(NotRunning) as caught:
            registry.running("default")
        assert registry.running("green").url == "http://h:1"
        assert [entry.name for entry in registry.others("green")] == ["blue"]

    assert str(caught.value).endswith("running: blue still starting (--name blue), green at http://h:1 (--name green)")


def test_a_reused_pid_is_not_taken_for_the_cluster(registry: ClusterRegistry) -> None:
    """`homing stop` must never kill another process."""
    mark = ProcessMark.of(psutil.Process())

    assert mark.process() is not None
    assert msgspec.structs.replace(mark, started=mark.started - 60).process() is None
    assert msgspec.structs.replace(mark, boot="an earlier start of the machine").process() is None


def test_a_cluster_still_runs_after_the_clock_was_set(
    registry: ClusterRegistry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel then reports another start time of day for every process; the sockets of a running cluster stay."""
    run_dir, shifted = tmp_path / "homing-k_ill3d0", psutil.boot_time() + 3600
    run_dir.mkdir()
    with registry.claim(own_entry("default", "demo", None)):
        registry.write(msgspec.structs.replace(own_entry("default", "demo", None), run_dir=str(run_dir)))
        monkeypatch.setattr("psutil._psplatform.boot_time", lambda: shifted)

        assert registry.running("default").pid == os.getpid()
    assert run_dir.is_dir()
