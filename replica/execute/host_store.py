"""One rank's host memory for KV blocks: copies blocks out of its pool and back, and verifies what comes back.

Does not know what a block means. Each slot has a checksum and the generation that it was saved with, so a load of
damaged bytes, or of another block than the caller expects, fails instead of giving wrong KV. On CUDA, copies run in the
order of the device's stream and checksums are taken once a save has ended. Not run on a GPU yet.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import xxhash

from ..attention.paged import KvPool, zeros
from ..engine.step_plan import Load, Save
from ..errors import StartupError

#: Why a load failed; codes are places in this tuple, plus 1.
FAILURES = ("host_stale", "host_corrupt")
STALE, CORRUPT = 1, 2


def _memory(slots: int, block_bytes: int, device: torch.device) -> torch.Tensor:
    """[slots, block_bytes] uint8: pinned for a GPU, else taken from the system page by page on first write."""
    try:
        if device.type == "cuda":
            return torch.empty((slots, block_bytes), dtype=torch.uint8, pin_memory=True)
        return zeros((slots, block_bytes), torch.uint8, device)
    except (OSError, RuntimeError, ValueError) as error:
        raise StartupError(
            f"host_kv_memory: a rank cannot get {slots * block_bytes:,} bytes of host memory: {error}"
        ) from error


class DeviceEvent(Protocol):
    """The part of `torch.cuda.Event` in use."""

    def record(self) -> None:
        """Mark this place in the device's stream."""

    def synchronize(self) -> None:
        """Wait until the device has come to that place."""


class HostStore:
    """Slots for the blocks of one pool. Raises StartupError if the system does not give the memory."""

    def __init__(self, slots: int, pool: KvPool, new_event: Callable[[], DeviceEvent] | None = None) -> None:
        """`new_event`: makes an event of the device; None: a GPU's, and none on CPUs, which copy at once."""
        self._pool = pool
        device = pool.keys[0].device
        self._new_event = torch.cuda.Event if new_event is None and device.type == "cuda" else new_event
        #: [slots, bytes of a block] uint8.
        self.rows = _memory(slots, pool.block_bytes, device)
        self._generations = [0] * slots
        self._sums: list[int | None] = [None] * slots
        #: Slots whose save may still be under way on the device.
        self._saving: set[int] = set()
        self._saved: DeviceEvent | None = None

    def move(self, saves: Sequence[Save], loads: Sequence[Load]) -> list[int]:
        """Copy blocks out of the pool, then others into it; later steps see the result. A code for each load: 0, or why
        it failed, which leaves its block as it was.
        """
        self._settle()
        for save in saves:
            self._pool.copy_out_to(save.block_id, self.rows[save.slot])
            self._generations[save.slot], self._sums[save.slot] = save.generation, None
            self._saving.add(save.slot)
        if self._new_event is not None:
            self._saved = self._new_event()
            self._saved.record()
        if self._new_event is None or any(load.slot in self._saving for load in loads):
            self._settle()
        return [self._load(load) for load in loads]

    def _load(self, load: Load) -> int:
        if self._generations[load.slot] != load.generation:
            return STALE
        if self._sum(load.slot) != self._sums[load.slot]:
            return CORRUPT
        self._pool.copy_in_from(load.block_id, self.rows[load.slot])
        return 0

    def _settle(self) -> None:
        """Wait until saves have ended, which they have unless they were started just now, and take their checksums."""
        if self._saved is not None:
            self._saved.synchronize()
            self._saved = None
        for slot in self._saving:
            self._sums[slot] = self._sum(slot)
        self._saving.clear()

    def _sum(self, slot: int) -> int:
        return xxhash.xxh3_64_intdigest(self.rows[slot].numpy().data)
