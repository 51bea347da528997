"""Measures the memory of a rank's CUDA device. Decides nothing: kvcache/sizing.py computes sizes from the readings."""

import gc

import torch

from ...kvcache.sizing import MemoryReading


class CudaMemory:
    """torch's account of one CUDA device. Not run on a GPU yet."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._allocated = 0

    def begin(self) -> None:
        """Start to measure the peak above the memory that is held now."""
        gc.collect()  # a pool that was freed must not count as held
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)
        self._allocated = torch.cuda.memory_allocated(self._device)

    def read(self) -> MemoryReading:
        """The memory held now, and the peak above the memory held at `begin`."""
        torch.cuda.synchronize(self._device)
        peak = torch.cuda.max_memory_allocated(self._device) - self._allocated
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self._device)
        # Reserved, not allocated: graphs keep the memory of their steps, in which no tensor lives between replays.
        return MemoryReading(total, free, torch.cuda.memory_reserved(self._device), peak)
