"""The registry of this user's clusters on this machine: one small file per name, written by `homing serve`.

An entry is valid only while the process that wrote it runs; a stale one is removed together with that process's folder.
`--state-dir` may name any folder, so entries and folders that this user did not create are neither trusted nor removed.
Uses files and processes only; does not depend on Ray.
"""

import errno
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

import msgspec
import psutil

from .errors import AlreadyRunning, NotRunning, SettingsError

#: Process ids are reused, so a process counts as an entry's writer only if it started this close to the recorded time.
START_TOLERANCE_S = 1.0
#: Contains a random id of this start of the machine; exists on Linux only.
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
#: Name prefix of the folders that clusters create for their sockets and files.
RUN_FOLDER_PREFIX = "homing-"
#: The prefix and the characters that `tempfile.mkdtemp` appends.
_RUN_FOLDER_NAME = re.compile(re.escape(RUN_FOLDER_PREFIX) + r"[a-z0-9_]{8}")


class ProcessMark(msgspec.Struct, frozen=True):
    """Identifies a process even if its id is reused later, or the clock is set."""

    pid: int
    started: float  #: seconds since the start of the machine
    boot: str  #: identifies that start

    @classmethod
    def of(cls, process: psutil.Process) -> "ProcessMark":
        boot = BOOT_ID.read_text().strip() if BOOT_ID.is_file() else ""
        # Both times are relative to the clock as it is set now, their difference is not.
        return cls(process.pid, process.create_time() - psutil.boot_time(), boot)

    def process(self) -> psutil.Process | None:
        """Return the process, or None if it has ended."""
        try:
            process = psutil.Process(self.pid)
            found = ProcessMark.of(process)
            same = found.boot == self.boot and abs(found.started - self.started) < START_TOLERANCE_S
            return process if same and process.status() != psutil.STATUS_ZOMBIE else None
        except psutil.NoSuchProcess:
            return None


class RegistryEntry(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    pid: int  #: of the process that wrote this entry; with the next two fields, its `ProcessMark`
    started: float
    boot: str
    phase: Literal["starting", "ready", "stopping"]
    url: str | None = None
    router_urls: tuple[str, ...] = ()  #: URL of each router, if there are several
    model: str = ""
    sources: tuple[tuple[str, str], ...] = ()  #: each served model: its name, and its folder or Hugging Face name
    ray_address: str | None = None  #: address of the Ray cluster, for Ray's own tools
    ray_token: bool = False  #: whether that Ray cluster requires a token
    run_dir: str | None = None  #: removed when the cluster ends
    log: str | None = None  #: log file of a detached cluster
    ray: tuple[ProcessMark, ...] = ()  #: processes of a local Ray; all other processes of the cluster end with them

    def process(self) -> psutil.Process | None:
        """Return the process that wrote this entry, or None if it has ended."""
        return ProcessMark(self.pid, self.started, self.boot).process()


class ClusterRegistry:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def make_folder(self) -> None:
        """Create the folder. It is private, because entries determine which processes to end and folders to remove."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def path(self, name: str) -> Path:
        return self.folder / f"{name}.json"

    def log_path(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def log_folder(self, name: str) -> Path:
        """Return the folder for the logs of the cluster's parts, which are kept after it ends."""
        return self.folder / f"{name}.logs"

    def read(self, name: str) -> RegistryEntry | None:
        """Return the entry, valid or stale; None if the file is not an entry of this name or others can write to it."""
        try:
            entry = msgspec.json.decode(_read_own(self.path(name)), type=RegistryEntry)
        except (OSError, msgspec.DecodeError, UnicodeDecodeError):
            return None
        return entry if entry.name == name else None

    def live(self, name: str) -> RegistryEntry | None:
        """Return the entry of a running cluster, or None if it does not run."""
        entry = self.read(name)
        return entry if entry is not None and entry.process() is not None else None

    def running(self, name: str) -> RegistryEntry:
        """Return the entry of a running cluster. Otherwise, remove a stale entry and raise NotRunning."""
        if entry := self.live(name):
            return entry
        self.remove(name)
        others = self.others(name)
        remedy = f"running: {describe_running(others)}" if others else "start one with: homing serve"
        raise NotRunning(f"no cluster {name!r} is running; {remedy}")

    def others(self, name: str) -> list[RegistryEntry]:
        entries = [self.live(path.stem) for path in sorted(self.folder.glob("*.json"))]
        return [entry for entry in entries if entry is not None and entry.name != name]

    def write(self, entry: RegistryEntry) -> None:
        self._new_file(entry).replace(self.path(entry.name))

    @contextmanager
    def claim(self, entry: RegistryEntry) -> Iterator[None]:
        """Reserve the entry's name while the body runs. Raises AlreadyRunning, and SettingsError for a foreign file."""
        self.make_folder()
        self._create(entry)
        try:
            yield
        finally:
            if os.getpid() == entry.pid:  # not in a child process that leaves the body as well
                self.path(entry.name).unlink(missing_ok=True)

    def remove(self, name: str) -> None:
        """Remove an entry and what its process left behind: its Ray and its folder. Other files stay."""
        entry = self.read(name)
        if entry is None:
            return
        kill([process for mark in entry.ray if (process := mark.process()) is not None])
        if entry.run_dir and _is_run_folder(Path(entry.run_dir)):
            shutil.rmtree(entry.run_dir, ignore_errors=True)
        self.path(name).unlink(missing_ok=True)

    def _create(self, entry: RegistryEntry) -> None:
        new_file = self._new_file(entry)
        try:
            for _ in range(2):
                with suppress(FileExistsError):
                    os.link(new_file, self.path(entry.name))  # fails when the name is taken, unlike a rename
                    return
                if old := self.live(entry.name):
                    raise AlreadyRunning(
                        f"cluster {entry.name!r} is running already (pid {old.pid}, {old.url or old.phase}); "
                        "stop it with homing stop, or start another one with --name"
                    )
                self.remove(entry.name)
            path = self.path(entry.name)
            if path.is_symlink() or (path.exists() and self.read(entry.name) is None):
                raise SettingsError(f"{path} is not an entry that this user wrote; remove it, or choose --state-dir")
            raise AlreadyRunning(f"another homing is starting as {entry.name!r} right now")
        finally:
            new_file.unlink()

    def _new_file(self, entry: RegistryEntry) -> Path:
        handle, path = tempfile.mkstemp(dir=self.folder, prefix=".entry-")
        with os.fdopen(handle, "wb") as file:
            file.write(msgspec.json.encode(entry))
        return Path(path)


def _read_own(path: Path) -> bytes:
    """Read a regular file that only this user can write. Follows no link. Raises OSError."""
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
            raise PermissionError(errno.EPERM, "others can write to it", str(path))
        return file.read()


def _is_run_folder(folder: Path) -> bool:
    """Return whether, by name and owner, one of this user's clusters created this folder. False for a link to one."""
    try:
        found = folder.lstat()
    except OSError:
        return False
    named = folder.is_absolute() and _RUN_FOLDER_NAME.fullmatch(folder.name) is not None
    return named and stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()


def describe_running(entries: Sequence[RegistryEntry]) -> str:
    """List running clusters, each with the flag that selects it."""
    places = [f"at {entry.url}" if entry.url else f"still {entry.phase}" for entry in entries]
    return ", ".join(f"{e.name} {place} (--name {e.name})" for e, place in zip(entries, places, strict=True))


def own_entry(name: str, model: str, log: str | None) -> RegistryEntry:
    """Return an entry for this process, which is about to start a cluster."""
    mark = ProcessMark.of(psutil.Process())
    return RegistryEntry(
        name=name, pid=mark.pid, started=mark.started, boot=mark.boot, phase="starting", model=model, log=log
    )


def kill(processes: Sequence[psutil.Process]) -> None:
    """Kill these processes, except those of other users."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            if process.uids().real == os.getuid():
                process.kill()


def wait_gone(processes: list[psutil.Process], timeout_s: float) -> list[psutil.Process]:
    """Wait until these processes have ended. Returns those that have not ended in time."""
    deadline = time.monotonic() + timeout_s
    alive = [process for process in processes if is_alive(process)]
    while alive and time.monotonic() < deadline:
        time.sleep(0.05)
        alive = [process for process in alive if is_alive(process)]
    return alive


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
