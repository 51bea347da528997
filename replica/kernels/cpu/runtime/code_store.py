"""A folder with the machine code of kernels, each under the words that say all of what it was compiled from.

What is in there runs as the program's own code does, so the folder has to belong to this user alone. Knows no numba.
Files may be deleted at any time; what cannot be read or written costs its compilation, and a line in the log.
"""

import fcntl
import logging
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from tempfile import NamedTemporaryFile

import msgspec

log = logging.getLogger(__name__)

SUFFIX = ".kernel"
DIGEST_BYTES = 32
#: A model has about ten, of 20 to 60 KB; the oldest files go first.
MOST_FILES = 256
LOCK = "lock"
#: Compiling one kernel takes a second; one who was stopped meanwhile must not hold up every start.
PATIENCE_S, LOOK_EVERY_S = 20.0, 0.02
WRITABLE_BY_OTHERS = 0o022


class MachineCode(msgspec.Struct, frozen=True):
    """One kernel as LLVM made it."""

    symbol: str  #: what to call
    library: str  #: numba's name of it
    code: bytes  #: an object file
    bitcode: bytes  #: for code that would take it in


@dataclass(slots=True)
class CodeStore:
    """The folder of one user on one machine, which its processes share."""

    folder: Path
    #: How long to wait for another's turn to end; 0 from when one hung.
    patience_s: float = PATIENCE_S

    @contextmanager
    def turn(self) -> Iterator[None]:
        """For who is about to compile: ranks start at once, and the next finds here what the one before put."""
        with ExitStack() as held:
            try:
                file = held.enter_context((self.folder / LOCK).open("ab"))
                self._wait_for(file.fileno())
            except OSError as error:
                log.warning("kernels_not_locked folder=%s reason=%s", self.folder, error)
            yield

    def _wait_for(self, lock: int) -> None:
        until = time.monotonic() + self.patience_s
        while not _locked(lock):
            if time.monotonic() >= until:
                self.patience_s = 0.0
                return
            time.sleep(LOOK_EVERY_S)

    def get(self, words: str) -> MachineCode | None:
        """What was kept under these words."""
        path = self._path(words)
        try:
            with path.open("rb") as file:
                if os.fstat(file.fileno()).st_uid != os.geteuid():  # the folder was open to others once
                    log.warning("kernel_not_ours file=%s", path)
                    return None
                kept = file.read()
        except FileNotFoundError:
            return None
        except OSError as error:
            log.warning("kernel_not_read file=%s reason=%s", path, error)
            return None
        digest, data = kept[:DIGEST_BYTES], kept[DIGEST_BYTES:]
        if sha256(data).digest() != digest:
            log.warning("kernel_damaged file=%s", path)
            return None
        return msgspec.msgpack.decode(data, type=MachineCode)

    def put(self, words: str, code: MachineCode) -> None:
        """Keep it, whole or not at all."""
        data = msgspec.msgpack.encode(code)
        try:
            with NamedTemporaryFile(dir=self.folder, delete=False) as file:
                file.write(sha256(data).digest() + data)
            Path(file.name).replace(self._path(words))
            self._forget_the_oldest()
        except OSError as error:
            log.warning("kernel_not_kept folder=%s reason=%s", self.folder, error)

    def _path(self, words: str) -> Path:
        return self.folder / (sha256(words.encode()).hexdigest()[:DIGEST_BYTES] + SUFFIX)

    def _forget_the_oldest(self) -> None:
        by_age = sorted(self.folder.glob(f"*{SUFFIX}"), key=lambda path: path.stat().st_mtime)
        for path in by_age[:-MOST_FILES]:
            path.unlink(missing_ok=True)


def _locked(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def open_store(folder: Path) -> CodeStore | None:
    """The store in this folder, which is made; None, with a line in the log, where it cannot be trusted or made."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        found = folder.stat()
    except OSError as error:
        log.warning("kernels_not_kept folder=%s reason=%s", folder, error)
        return None
    if found.st_uid != os.geteuid() or found.st_mode & WRITABLE_BY_OTHERS:
        log.warning("kernels_not_kept folder=%s reason='others could write into it: chmod 700'", folder)
        return None
    return CodeStore(folder)
