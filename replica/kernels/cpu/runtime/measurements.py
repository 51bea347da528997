"""Which of two ways to compute the same is faster on this machine: ours, or the library's.

Measured when a replica first needs to know, in CPU time of one thread, so a busy machine does not decide. The result is
kept in the user's folder of compiled kernels: ranks and later starts read it instead of measuring again. It is measured
anew when our kernels or the library change. Noise must not change a choice, so the library has to be clearly faster to
be chosen, and slower than ours to lose its place.
"""

import functools
import logging
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from tempfile import NamedTemporaryFile

import msgspec
import torch

from .compilation import processor_name, software, store

log = logging.getLogger(__name__)

#: How many times as fast as ours the library must be to be chosen, and to stay chosen.
TO_CHOOSE, TO_KEEP = 1.25, 1.0
REPEATS = 3


class Comparison(msgspec.Struct, frozen=True):
    speed: float  #: how many times as fast as ours the library is
    library: bool  #: whether the library is chosen
    software: str = ""  #: digest of the kernels and the library that were compared


def compared(speed: float, before: Comparison | None = None, software: str = "") -> Comparison:
    """The choice that follows from a speed, and from the choice `before` it."""
    return Comparison(speed, speed >= (TO_KEEP if before is not None and before.library else TO_CHOOSE), software)


@dataclass(slots=True)
class Measurements:
    """One machine's comparisons, by name, in a JSON file; `path=None` keeps none."""

    path: Path | None
    software: str
    clock: Callable[[], float] = time.thread_time

    def compare(self, name: str, ours: Callable[[], object], library: Callable[[], object]) -> Comparison:
        """The comparison under this name: the kept one if nothing has changed since, else a new one."""
        before = self._read().get(name)
        if before is not None and before.software == self.software:
            return before
        own_s, library_s = self._seconds(ours, library)
        found = compared(own_s / max(library_s, 1e-9), before, self.software)
        self._keep(name, found)
        log.info("kernels_compared name='%s' library_is_faster_by=%.2f library=%s", name, found.speed, found.library)
        return found

    def _seconds(self, *runs: Callable[[], object]) -> list[float]:
        """Each run's least time of a few in turn, after one that loads and compiles what it needs."""
        times: list[list[float]] = [[] for _ in runs]
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            for _ in range(1 + REPEATS):
                for run, own in zip(runs, times, strict=True):
                    started = self.clock()
                    run()
                    own.append(self.clock() - started)
        finally:
            torch.set_num_threads(threads)
        return [min(each[1:]) for each in times]

    def _read(self) -> Mapping[str, Comparison]:
        if self.path is None:
            return {}
        try:
            return msgspec.json.decode(self.path.read_bytes(), type=dict[str, Comparison])
        except FileNotFoundError:
            return {}
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            log.warning("comparisons_not_read file=%s reason=%s", self.path, error)
            return {}

    def _keep(self, name: str, comparison: Comparison) -> None:
        """Add a comparison. If two processes add at once, one of theirs is lost, and measured again later."""
        if self.path is None:
            return
        data = msgspec.json.encode({**self._read(), name: comparison})
        try:
            with NamedTemporaryFile(dir=self.path.parent, delete=False) as file, ExitStack() as stack:
                stack.callback(Path(file.name).unlink, missing_ok=True)
                file.write(data)
                file.flush()
                Path(file.name).replace(self.path)
        except OSError as error:
            log.warning("comparisons_not_kept file=%s reason=%s", self.path, error)


@functools.cache
def measurements() -> Measurements:
    """This machine's, in the folder of compiled kernels; a shared home has a file per kind of processor."""
    kept = store()
    machine = sha256(processor_name().encode()).hexdigest()[:16]
    path = kept.folder / f"faster-{machine}.json" if kept is not None else None
    return Measurements(path, sha256(f"{software()} {torch.__version__}".encode()).hexdigest()[:16])
