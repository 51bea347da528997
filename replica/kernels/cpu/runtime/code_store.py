"""A folder with the machine code of kernels, each stored under a key that contains everything it was compiled from.

Loaded code runs as part of this program, so only this user may be able to write to the folder. Files may be deleted at
any time: a file that cannot be read or written costs one compilation and a log line. Does not depend on numba.
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
#: A model has about ten files of 20 to 60 KB. Beyond the limit, the oldest files are deleted.
MAX_FILES = 256
LOCK = ".lock"
#: Compiling a kernel takes a second. A process that was suspended while compiling must not delay every start.
LOCK_TIMEOUT_S, LOCK_RETRY_S = 20.0, 0.02
WRITABLE_BY_OTHERS = 0o022


class MachineCode(msgspec.Struct, frozen=True):
    """One kernel's compiled code."""

    symbol: str  #: the function to call
    library: str  #: numba's name for the library
    code: bytes  #: an object file
    bitcode: bytes  #: for code that inlines the kernel


@dataclass(slots=True)
class CodeStore:
    """One user's folder on one machine, shared by that user's processes."""

    folder: Path
    #: How long to wait for another process's lock; set to 0 after the first timeout.
    lock_timeout_s: float = LOCK_TIMEOUT_S

    @contextmanager
    def lock(self, key: str) -> Iterator[None]:
        """Hold a kernel's lock while compiling it: ranks start together, and all but the first load what it stored.

        After the timeout, or if locking fails, the process continues without the lock and compiles for itself.
        """
        with ExitStack() as held:
            try:
                file = held.enter_context(self._path(key).with_suffix(LOCK).open("ab"))
                self._wait_for(file.fileno())
            except OSError as error:
                log.warning("kernels_not_locked folder=%s reason=%s", self.folder, error)
            yield

    def _wait_for(self, lock: int) -> None:
        deadline = time.monotonic() + self.lock_timeout_s
        while True:
            try:
                return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    self.lock_timeout_s = 0.0
                    return None
            time.sleep(LOCK_RETRY_S)

    def get(self, key: str) -> MachineCode | None:
        path = self._path(key)
        try:
            with path.open("rb") as file:
                if os.fstat(file.fileno()).st_uid != os.geteuid():  # possible if others could once write to the folder
                    log.warning("kernel_not_ours file=%s", path)
                    return None
                content = file.read()
        except FileNotFoundError:
            return None
        except OSError as error:
            log.warning("kernel_not_read file=%s reason=%s", path, error)
            return None
        digest, data = content[:DIGEST_BYTES], content[DIGEST_BYTES:]
        if sha256(data).digest() != digest:
            log.warning("kernel_damaged file=%s", path)
            return None
        return msgspec.msgpack.decode(data, type=MachineCode)

    def put(self, key: str, code: MachineCode) -> None:
        """Store the code atomically, and delete the oldest files beyond `MAX_FILES`."""
        data = msgspec.msgpack.encode(code)
        try:
            with NamedTemporaryFile(dir=self.folder, delete=False) as file, ExitStack() as stack:
                stack.callback(Path(file.name).unlink, missing_ok=True)
                file.write(sha256(data).digest() + data)
                file.flush()
                Path(file.name).replace(self._path(key))
            by_age = sorted(self.folder.glob(f"*{SUFFIX}"), key=lambda path: path.stat().st_mtime)
            for path in by_age[:-MAX_FILES]:
                path.unlink(missing_ok=True)
                path.with_suffix(LOCK).unlink(missing_ok=True)
        except OSError as error:
            log.warning("kernel_not_kept folder=%s reason=%s", self.folder, error)

    def _path(self, key: str) -> Path:
        return self.folder / (sha256(key.encode()).hexdigest()[:DIGEST_BYTES] + SUFFIX)


def open_store(folder: Path) -> CodeStore | None:
    """The store in this folder, which is created if missing; None, with a log line, if that fails or is not safe."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        status = folder.stat()
    except OSError as error:
        log.warning("kernels_not_kept folder=%s reason=%s", folder, error)
        return None
    if status.st_uid != os.geteuid() or status.st_mode & WRITABLE_BY_OTHERS:
        log.warning("kernels_not_kept folder=%s reason='other users can write to it: chmod 700'", folder)
        return None
    return CodeStore(folder)
