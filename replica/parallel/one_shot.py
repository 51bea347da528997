"""Sums over ranks through memory that all ranks can read: one launch in which each rank adds up what all have written.

nccl's ring takes several exchanges, which cost more than the bytes of a decode step. Uses torch's symmetric memory; not
run on a GPU yet. Where it cannot be used, the log says why and nccl sums.
"""

import logging
import os

import torch
from torch._C._distributed_c10d import Store

log = logging.getLogger(__name__)

NAME = "homing"
#: Of a larger tensor nccl's ring moves fewer bytes. Not measured: vLLM's limit for two to eight H100 is of this order.
MOST_BYTES = 512 * 1024
DTYPES = (torch.bfloat16, torch.float32)
#: Sizes are rounded up to this: the kernel reads 16 bytes at once.
ALIGNED_BYTES = 16


class TorchMemory:
    """What of torch is used; tests have a stand-in."""

    def open(self, rank: int, size: int, store: Store, device: torch.device) -> torch.Tensor:
        """MOST_BYTES of memory [bytes] uint8 that all ranks have mapped. Raises RuntimeError where there is none."""
        from torch._C._distributed_c10d import _SymmetricMemory

        # Each rank sees its own GPU alone, as number 0, which torch would take for one GPU with several ranks.
        os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
        _SymmetricMemory.set_group_info(NAME, rank, size, store)
        memory: torch.Tensor = _SymmetricMemory.empty_strided_p2p((MOST_BYTES,), (1,), torch.uint8, device, NAME)
        _SymmetricMemory.rendezvous(memory, NAME)
        return memory

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of what all ranks hold at the place of `x` in that memory; waits for all before and after it."""
        found: torch.Tensor = torch.ops.symm_mem.one_shot_all_reduce(x, "sum", NAME)
        return found


class OneShotSums:
    def __init__(self, memory: TorchMemory, buffer: torch.Tensor) -> None:
        self._memory, self._buffer = memory, buffer

    @classmethod
    def open(
        cls, rank: int, size: int, store: Store, device: torch.device, memory: TorchMemory | None = None
    ) -> "OneShotSums | None":
        """Map the memory, or say in the log why not. All ranks must then agree on whether to use it."""
        memory = memory or TorchMemory()
        try:
            return cls(memory, memory.open(rank, size, store, device))
        except (RuntimeError, AttributeError, TypeError, ImportError) as error:
            log.info("one_shot_sums_unusable reason=%r", f"{type(error).__name__}: {' '.join(str(error).split())}")
            return None

    def fits(self, x: torch.Tensor) -> bool:
        return x.dtype in DTYPES and x.nbytes <= MOST_BYTES and x.nbytes % ALIGNED_BYTES == 0

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' x, each of which `fits`."""
        shared = self._buffer[: x.nbytes].view(x.dtype).view(x.shape)
        return self._memory.sum(shared.copy_(x))
