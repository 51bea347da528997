"""Registry entries of running clusters: valid only while their process runs, and never two of one name."""

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from homing.cluster.errors import AlreadyRunning, NotRunning
from homing.cluster.registry import ClusterRegistry, RegistryEntry, own_entry


@pytest.fixture
def registry(tmp_path: Path) -> ClusterRegistry:
    return ClusterRegistry(tmp_path / "state")


def dead_entry(run_dir: Path) -> RegistryEntry:
    """As a process would leave it that was killed."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return RegistryEntry(name="default", pid=process.pid, started=0.0, phase="ready", run_dir=str(run_dir))


def test_a_name_is_held_while_its_cluster_runs(registry: ClusterRegistry) -> None:
    """And free again afterwards."""
    with registry.claim(own_entry("default", "demo", None)):
        assert registry.running("default").pid == os.getpid()
        with pytest.raises(AlreadyRunning, match="running already"), registry.claim(own_entry("default", "demo", None)):
            pass

    with pytest.raises(NotRunning):
        registry.running("default")
    assert list(registry.folder.iterdir()) == []


def test_a_stale_entry_is_removed_with_the_folder_of_its_process(registry: ClusterRegistry, tmp_path: Path) -> None:
    """A killed cluster must not block its name, nor leave its folder for ever."""
    left = tmp_path / "homing-left"
    left.mkdir()
    registry.folder.mkdir()
    registry.write(dead_entry(left))

    with pytest.raises(NotRunning):
        registry.running("default")
    assert not left.exists()


def test_other_users_cannot_write_entries(registry: ClusterRegistry) -> None:
    """An entry says which process to end and which folder to remove."""
    with registry.claim(own_entry("default", "demo", None)):
        assert registry.folder.stat().st_mode & 0o777 == 0o700
        assert registry.path("default").stat().st_mode & 0o777 == 0o600


def test_a_name_that_is_not_running_is_answered_by_those_that_are(registry: ClusterRegistry) -> None:
    """Without `--name` the name is `default`, which may not be running."""
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
    """`homing stop` must never end another process."""
    entry = own_entry("default", "demo", None)

    assert entry.process() is not None
    assert msgspec.structs.replace(entry, started=entry.started - 60).process() is None
