"""The code store returns machine code exactly as it was stored, or not at all."""

import os
import threading
from pathlib import Path

import pytest

from homing.replica.kernels.cpu.runtime.code_store import MAX_FILES, CodeStore, MachineCode, open_store

CODE = MachineCode("symbol", "library", b"code", b"bitcode")


@pytest.fixture
def store(tmp_path: Path) -> CodeStore:
    opened = open_store(tmp_path / "kernels")
    assert opened is not None
    return opened


def test_code_comes_back_under_its_words_alone(store):
    """Code made for another shape would read and write out of bounds."""
    store.put("norm of 64", CODE)

    assert store.get("norm of 64") == CODE
    assert store.get("norm of 65") is None


def test_another_process_of_the_same_user_finds_it(store):
    """The purpose of the store: every rank is a new process."""
    store.put("norm", CODE)

    again = open_store(store.folder)

    assert again is not None
    assert again.get("norm") == CODE


@pytest.mark.parametrize("left", [0, 20, 40])
def test_a_damaged_file_is_ignored(store, left):
    """The disk was full, or the machine lost power: damaged code must never be run."""
    store.put("norm", CODE)
    (file,) = store.folder.iterdir()
    file.write_bytes(file.read_bytes()[:left])

    assert store.get("norm") is None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_another_users_file_is_ignored(store):
    """The folder was once writable by others, and its mode has been corrected since."""
    store.put("norm", CODE)
    (file,) = store.folder.iterdir()
    os.chown(file, 12345, 12345)

    assert store.get("norm") is None


def test_turns_are_taken_one_after_the_other(store):
    """All ranks of a cluster start at once: one should compile, and the others should use its code."""
    together, compiled = threading.Barrier(4), []

    def start() -> None:
        together.wait()
        with store.lock("norm"):  # a lock belongs to an open file, so threads behave like processes here
            if store.get("norm") is None:
                compiled.append(threading.get_ident())
                store.put("norm", CODE)

    threads = [threading.Thread(target=start) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(compiled) == 1


def test_a_process_does_not_wait_for_ever_for_one_that_hangs(store):
    """A process that hangs while holding a lock delays the next one once; other kernels have other locks."""
    waiting = CodeStore(store.folder, lock_timeout_s=0.05)

    with store.lock("norm"), waiting.lock("gather"):
        assert waiting.lock_timeout_s == 0.05
        with waiting.lock("norm"):
            assert waiting.lock_timeout_s == 0.0


def test_without_a_lock_everybody_compiles(tmp_path, caplog):
    """The folder is not writable, but the replica must start."""
    with CodeStore(tmp_path / "gone").lock("norm"):
        assert "kernels_not_locked" in caplog.text


def test_a_folder_that_others_may_write_into_is_not_used(tmp_path):
    """Anyone able to put a file there could run code in every replica."""
    folder = tmp_path / "kernels"
    folder.mkdir()
    folder.chmod(0o777)

    assert open_store(folder) is None


def test_a_folder_that_cannot_be_made_is_done_without(tmp_path):
    """Kernels are then compiled in every process."""
    (tmp_path / "file").touch()

    assert open_store(tmp_path / "file" / "kernels") is None


def test_what_cannot_be_written_is_done_without(tmp_path):
    """A full disk must not prevent a replica from starting."""
    store = CodeStore(tmp_path / "gone")

    store.put("norm", CODE)

    assert store.get("norm") is None


def test_a_file_that_cannot_be_put_in_place_is_not_left_behind(store):
    """Nothing would ever delete it."""
    store.put("norm", CODE)
    (path,) = store.folder.iterdir()
    path.unlink()
    path.mkdir()

    store.put("norm", CODE)

    assert list(store.folder.iterdir()) == [path]


def test_files_are_bounded(store):
    """Every version of a kernel's source and of numba, and every CPU that uses the home folder, adds files."""
    for number in range(MAX_FILES + 10):
        store.put(f"kernel {number}", CODE)

    assert len(list(store.folder.iterdir())) == MAX_FILES
    assert store.get(f"kernel {MAX_FILES + 9}") == CODE
