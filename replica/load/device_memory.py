"""What a rank's device says of its memory. Decides nothing: sizes are worked out from readings (kvcache/sizing.py)."""

import gc
from typing import Protocol

import torch

from ...kvcache.sizing import MemoryReading


class DeviceMemory(Protocol):
    """A device's account of this process's memory, and of all that it has."""

    def begin(self) -> None:
        """Whatever is held now stays; from here on the peak counts."""
        ...

    def read(self) -> MemoryReading:
        """What is held, and the peak above what was held at `begin`."""
        ...


class CudaMemory:
    """torch's account of one CUDA device. Not run on a GPU yet."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._allocated = 0

    def begin(self) -> None:
        gc.collect()  # a pool that was given up must not count as held
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)
        self._allocated = torch.cuda.memory_allocated(self._device)

    def read(self) -> MemoryReading:
        torch.cuda.synchronize(self._device)
        peak = torch.cuda.max_memory_allocated(self._device) - self._allocated
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self._device)
        # Reserved, not allocated: graphs keep the memory of their steps, in which no tensor lives between replays.
        return MemoryReading(total, free, torch.cuda.memory_reserved(self._device), peak)


def memory_of(device: torch.device) -> DeviceMemory | None:
    """None where nothing is measured: on a CPU, whose memory others share."""
    return CudaMemory(device) if device.type == "cuda" else None
