"""Notes of which clusters this user runs on this machine: one small file per name, written by `homing serve`.

A note is only believed while the very process that wrote it lives; a stale one is swept away together with what that
process could not remove. Knows files and processes, nothing of Ray.
"""

import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import msgspec
import psutil

from .errors import AlreadyRunning, NotRunning

#: A process is the one that wrote the note when it started within this of what the note says (pids are reused).
START_TOLERANCE_S = 1.0


class Note(msgspec.Struct, frozen=True, kw_only=True):
    """What is known about one running cluster."""

    name: str
    pid: int
    started: float  #: when that process began, in seconds of the epoch
    phase: Literal["starting", "ready", "stopping"]
    url: str | None = None
    router_urls: tuple[str, ...] = ()  #: of each router alone, when there are several
    model: str = ""
    ray_address: str | None = None  #: of the Ray cluster, for Ray's own tools
    ray_token: bool = False  #: that cluster wants one
    run_dir: str | None = None  #: removed when the cluster ends
    log: str | None = None  #: of a detached cluster

    def process(self) -> psutil.Process | None:
        """The process that wrote this; None when it is gone."""
        try:
            process = psutil.Process(self.pid)
            same = abs(process.create_time() - self.started) < START_TOLERANCE_S
            return process if same and process.status() != psutil.STATUS_ZOMBIE else None
        except psutil.NoSuchProcess:
            return None


class Notebook:
    """The notes in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def make_folder(self) -> None:
        """Where it is not there. Nobody else may enter: a note says what is to be ended and removed."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def path(self, name: str) -> Path:
        """Where the note of `name` lies."""
        return self.folder / f"{name}.json"

    def log_path(self, name: str) -> Path:
        """Where the output of a detached cluster goes."""
        return self.folder / f"{name}.log"

    def read(self, name: str) -> Note | None:
        """The note as it stands, believed or not."""
        try:
            return msgspec.json.decode(self.path(name).read_bytes(), type=Note)
        except FileNotFoundError:
            return None
        except msgspec.DecodeError:
            return None  # written by another version: nobody can be found by it

    def running(self, name: str) -> Note:
        """The note of a cluster that lives. Raises NotRunning, after sweeping a stale note away."""
        note = self.read(name)
        if note is not None and note.process() is not None:
            return note
        self.sweep(name)
        others = self.others(name)
        remedy = f"there {addressed(others)}" if others else "start one with: homing serve"
        raise NotRunning(f"no cluster {name!r} is running; {remedy}")

    def others(self, name: str) -> list[Note]:
        """The notes of all clusters that live under other names."""
        notes = [self.read(path.stem) for path in sorted(self.folder.glob("*.json"))]
        return [note for note in notes if note is not None and note.name != name and note.process() is not None]

    def write(self, note: Note) -> None:
        """Replace the note, whole or not at all."""
        self._new_file(note).replace(self.path(note.name))

    @contextmanager
    def claim(self, note: Note) -> Iterator[None]:
        """Hold the name while the body runs. Raises AlreadyRunning."""
        self.make_folder()
        self._create(note)
        try:
            yield
        finally:
            self.path(note.name).unlink(missing_ok=True)

    def sweep(self, name: str) -> None:
        """Remove a note whose process is gone, and that process's folder."""
        note = self.read(name)
        if note is not None and note.run_dir:
            shutil.rmtree(note.run_dir, ignore_errors=True)
        self.path(name).unlink(missing_ok=True)

    def _create(self, note: Note) -> None:
        fresh = self._new_file(note)
        try:
            for _ in range(2):
                try:
                    os.link(fresh, self.path(note.name))  # fails when the name is taken, unlike a rename
                    return
                except FileExistsError:
                    self._refuse_or_sweep(note.name)
            raise AlreadyRunning(f"another homing is just starting as {note.name!r}")
        finally:
            fresh.unlink()

    def _refuse_or_sweep(self, name: str) -> None:
        old = self.read(name)
        if old is not None and old.process() is not None:
            raise AlreadyRunning(
                f"cluster {name!r} is running already (pid {old.pid}, {old.url or old.phase}); "
                "end it with homing stop, or start another one with --name"
            )
        self.sweep(name)

    def _new_file(self, note: Note) -> Path:
        handle, path = tempfile.mkstemp(dir=self.folder, prefix=".note-")
        with os.fdopen(handle, "wb") as file:
            file.write(msgspec.json.encode(note))
        return Path(path)


def addressed(notes: Sequence[Note]) -> str:
    """What runs, in words, each with the flag that chooses it."""
    places = [f"at {note.url}" if note.url else f"still {note.phase}" for note in notes]
    words = [f"{note.name} {place} (--name {note.name})" for note, place in zip(notes, places, strict=True)]
    return f"{'is' if len(words) == 1 else 'are'} {', '.join(words)}"


def own_note(name: str, model: str, log: str | None) -> Note:
    """A note of this very process, which is about to start a cluster."""
    started = psutil.Process().create_time()
    return Note(name=name, pid=os.getpid(), started=started, phase="starting", model=model, log=log)


def wait_gone(processes: list[psutil.Process], timeout_s: float) -> list[psutil.Process]:
    """Wait until these have ended; returns those that have not."""
    deadline = time.monotonic() + timeout_s
    alive = [process for process in processes if _alive(process)]
    while alive and time.monotonic() < deadline:
        time.sleep(0.05)
        alive = [process for process in alive if _alive(process)]
    return alive


def _alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
