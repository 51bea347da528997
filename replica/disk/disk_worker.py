"""The thread that reads and writes a KV file, so that the engine never waits for a disk.

The engine's thread starts transfers and later collects those that ended. Both queues are bounded: what finds its queue
full is not started, and the engine goes on without (a block is not kept, or is computed). Reads go first, as requests
wait for them.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from ...kvcache.hashing import BlockHash
from .disk_file import DiskFailure, DiskFile
from .file_format import DiskEntry

log = logging.getLogger(__name__)

#: Blocks that may wait to be written or read. Not tuned.
MAX_WRITES, MAX_READS = 64, 256
#: A disk that takes longer over one block gets no more work until it is done.
STALLED_S = 0.5
#: Failures of one kind are logged no more often; all are counted.
LOG_EVERY_S = 10.0


@dataclass(slots=True, frozen=True)
class Write:
    """Write `data` as `entry`; `unchanged` says, once the data is copied, whether it was still the block's."""

    entry: DiskEntry
    data: memoryview
    unchanged: Callable[[], bool] = lambda: True


@dataclass(slots=True, frozen=True)
class Read:
    slot: int
    generation: int
    block_hash: BlockHash
    into: memoryview  #: nobody else may use it until the read has ended


@dataclass(slots=True, frozen=True)
class Clear:
    """Forget all blocks."""


@dataclass(slots=True, frozen=True)
class Ended:
    """The end of a transfer, by the number that `start` returned."""

    number: int
    failure: str | None  #: the kind; None: it succeeded
    seconds: float  #: in the thread


Transfer = Write | Read | Clear


class DiskWorker:
    """A KV file and its thread. All methods are the engine's thread's."""

    def __init__(
        self,
        file: DiskFile,
        *,
        max_writes: int = MAX_WRITES,
        max_reads: int = MAX_READS,
        clock: Callable[[], float] = time.monotonic,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        """`wake` is called in the thread when a read has ended."""
        self._file = file
        self._clock, self._wake = clock, wake
        self._limits = {Write: max_writes, Read: max_reads}
        self._queues: dict[type[Write | Read], deque[tuple[int, Transfer]]] = {Write: deque(), Read: deque()}
        self._ended: deque[Ended] = deque()
        self._busy_since: float | None = None
        self._numbers = 0
        self._logged: dict[str, float] = {}
        self._closing = False
        self._more = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="disk-kv", daemon=True)
        self._thread.start()

    def start(self, transfer: Write | Read) -> int | None:
        """Queue a transfer and return its number; None if its queue is full, or the disk is stalled."""
        if self.stalled:
            return None
        with self._more:
            queue = self._queues[type(transfer)]
            if self._closing or len(queue) >= self._limits[type(transfer)]:
                return None
            self._numbers += 1
            queue.append((self._numbers, transfer))
            self._more.notify_all()
            return self._numbers

    @property
    def stalled(self) -> bool:
        """Whether the disk takes unusually long over one block."""
        since = self._busy_since
        return since is not None and self._clock() - since > STALLED_S

    @property
    def room(self) -> int:
        """Number of writes that can be queued."""
        return 0 if self.stalled else self._limits[Write] - len(self._queues[Write])

    def ended(self) -> list[Ended]:
        """The transfers that ended since the last call, oldest first."""
        ended = self._ended
        return [ended.popleft() for _ in range(len(ended))]

    def wait_for_end(self, timeout_s: float) -> bool:
        """Wait until `ended` has something to tell. False after `timeout_s`."""
        with self._more:
            return self._more.wait_for(lambda: bool(self._ended), max(0.0, timeout_s))

    def clear(self) -> int:
        """Forget all blocks: what is queued never happens, and what is in the file is dropped by the thread, even if
        `close` comes first. Returns its number.
        """
        with self._more:
            for queue in self._queues.values():
                while queue:
                    self._ended.append(Ended(queue.popleft()[0], "disk_stale", 0.0))
            self._numbers += 1
            self._queues[Write].append((self._numbers, Clear()))
            self._more.notify_all()
            return self._numbers

    def wait(self, timeout_s: float) -> bool:
        """Wait until nothing is queued or under way. False after `timeout_s`."""
        with self._more:
            return self._more.wait_for(self._is_idle, max(0.0, timeout_s))

    def close(self, timeout_s: float = 5.0) -> None:
        """End the thread after the transfer under way and a clear that waits; it closes the file. If the disk hangs,
        leave both to the exit of the process.
        """
        with self._more:
            self._closing = True
            self._more.notify_all()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            log.error("disk_kv_hangs file=%s", self._file.path)

    # Everything below runs in the thread.

    def _run(self) -> None:
        while (work := self._next()) is not None:
            number, transfer = work
            began = self._clock()
            failure = self._transfer(transfer)
            ended = Ended(number, failure, self._clock() - began)
            with self._more:
                self._ended.append(ended)
                self._busy_since = None
                self._more.notify_all()
            if isinstance(transfer, Read):
                self._wake()
        self._file.close()

    def _next(self) -> tuple[int, Transfer] | None:
        with self._more:
            self._more.wait_for(lambda: self._closing or any(self._queues.values()))
            if self._closing:  # a clear is in front of the writes, if there is one
                for queue in self._queues.values():
                    while queue and not isinstance(queue[0][1], Clear):
                        self._ended.append(Ended(queue.popleft()[0], "disk_behind", 0.0))
            queue = self._queues[Read] or self._queues[Write]
            if not queue:
                self._more.notify_all()
                return None
            self._busy_since = self._clock()
            return queue.popleft()

    def _transfer(self, transfer: Transfer) -> str | None:
        try:
            if isinstance(transfer, Read):
                self._file.get(transfer.slot, transfer.generation, transfer.block_hash, transfer.into)
            elif isinstance(transfer, Write):
                self._file.put(transfer.entry, transfer.data, transfer.unchanged)
            else:
                self._file.clear()
        except DiskFailure as error:
            if self._clock() - self._logged.get(error.kind, -LOG_EVERY_S) >= LOG_EVERY_S:
                self._logged[error.kind] = self._clock()
                log.warning("disk_kv_failed kind=%s error=%s", error.kind, error)
            return error.kind
        except Exception:  # a defect must not end the thread, which would leave requests waiting
            log.exception("disk_kv_failed kind=disk_error")
            return "disk_error"
        return None

    def _is_idle(self) -> bool:
        return self._busy_since is None and not any(self._queues.values())
