"""Notes of running clusters: believed only while their writer lives, and never two of one name."""

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from homing.cluster.errors import AlreadyRunning, NotRunning
from homing.cluster.registry import Note, Notebook, own_note


@pytest.fixture
def notebook(tmp_path: Path) -> Notebook:
    return Notebook(tmp_path / "state")


def dead_note(run_dir: Path) -> Note:
    """As a process would leave it that was killed."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return Note(name="default", pid=process.pid, started=0.0, phase="ready", run_dir=str(run_dir))


def test_a_name_is_held_while_its_cluster_runs(notebook: Notebook) -> None:
    """And free again afterwards."""
    with notebook.claim(own_note("default", "demo", None)):
        assert notebook.running("default").pid == os.getpid()
        with pytest.raises(AlreadyRunning, match="running already"), notebook.claim(own_note("default", "demo", None)):
            pass

    with pytest.raises(NotRunning):
        notebook.running("default")
    assert list(notebook.folder.iterdir()) == []


def test_a_stale_note_is_swept_away_with_what_its_process_left(notebook: Notebook, tmp_path: Path) -> None:
    """A killed cluster must not block its name, nor leave its folder for ever."""
    left = tmp_path / "homing-left"
    left.mkdir()
    notebook.folder.mkdir()
    notebook.write(dead_note(left))

    with pytest.raises(NotRunning):
        notebook.running("default")
    assert not left.exists()


def test_nobody_else_may_write_notes(notebook: Notebook) -> None:
    """A note says which process is to be ended, and which folder to be removed with it."""
    with notebook.claim(own_note("default", "demo", None)):
        assert notebook.folder.stat().st_mode & 0o777 == 0o700
        assert notebook.path("default").stat().st_mode & 0o777 == 0o600


def test_who_asks_for_a_name_that_does_not_run_is_told_what_does(notebook: Notebook) -> None:
    """Without `--name` one asks for `default`, which nobody may have started."""
    with pytest.raises(NotRunning, match=r"no cluster 'default' is running; start one with: homing serve$"):
        notebook.running("default")

    with notebook.claim(own_note("blue", "demo", None)), notebook.claim(own_note("green", "demo", None)):
        notebook.write(msgspec.structs.replace(own_note("green", "demo", None), url="http://h:1"))
        with pytest.raises(NotRunning) as caught:
            notebook.running("default")
        assert notebook.running("green").url == "http://h:1"
        assert [note.name for note in notebook.others("green")] == ["blue"]

    assert str(caught.value).endswith("there are blue still starting (--name blue), green at http://h:1 (--name green)")


def test_a_reused_pid_is_not_taken_for_the_cluster(notebook: Notebook) -> None:
    """`homing stop` must never end somebody else's process."""
    note = own_note("default", "demo", None)

    assert note.process() is not None
    assert msgspec.structs.replace(note, started=note.started - 60).process() is None
