"""Sums over ranks through memory that all ranks can read: in one launch, each rank adds up the data of all.

nccl's ring takes several exchanges, whose latency exceeds the transfer time of a decode step's few bytes. Uses torch's
symmetric memory; not run on a GPU yet. Where it is unavailable, the log says why and nccl sums.
"""

import logging
import os

import torch
from torch._C._distributed_c10d import Store

log = logging.getLogger(__name__)

NAME = "homing"
#: For larger tensors, nccl's ring moves fewer bytes. Not measured; vLLM's limit for two to eight H100 is of this order.
MAX_BYTES = 512 * 1024
DTYPES = (torch.bfloat16, torch.float32)
#: Only tensors whose size is a multiple of this are summed here: the kernel reads 16 bytes at once.
ALIGNED_BYTES = 16


class TorchMemory:
    """The parts of torch in use, so that tests can replace them."""

    def open(self, rank: int, size: int, store: Store, device: torch.device) -> torch.Tensor:
        """Map MAX_BYTES of memory, [bytes] uint8, that all ranks share. Raises RuntimeError where unsupported."""
        from torch._C._distributed_c10d import _SymmetricMemory

        # Each rank sees only its own GPU, as number 0, which torch would take for one GPU with several ranks.
        os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
        _SymmetricMemory.set_group_info(NAME, rank, size, store)
        memory: torch.Tensor = _SymmetricMemory.empty_strided_p2p((MAX_BYTES,), (1,), torch.uint8, device, NAME)
        _SymmetricMemory.rendezvous(memory, NAME)
        return memory

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Sum all ranks' data at the place of `x` in that memory. Waits for all ranks before and after."""
        found: torch.Tensor = torch.ops.symm_mem.one_shot_all_reduce(x, "sum", NAME)
        return found


class OneShotSums:
    def __init__(self, memory: TorchMemory, buffer: torch.Tensor) -> None:
        self._memory, self._buffer = memory, buffer

    @classmethod
    def open(
        cls, rank: int, size: int, store: Store, device: torch.device, memory: TorchMemory | None = None
    ) -> "OneShotSums | None":
        """Map the memory, or log why not and return None. All ranks must then agree on whether to use it."""
        memory = memory or TorchMemory()
        try:
            return cls(memory, memory.open(rank, size, store, device))
        except (RuntimeError, AttributeError, TypeError, ImportError) as error:
            log.info("one_shot_sums_unusable reason=%r", f"{type(error).__name__}: {' '.join(str(error).split())}")
            return None

    def fits(self, x: torch.Tensor) -> bool:
        return x.dtype in DTYPES and x.nbytes <= MAX_BYTES and x.nbytes % ALIGNED_BYTES == 0

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' x. Each of them must satisfy `fits`."""
        shared = self._buffer[: x.nbytes].view(x.dtype).view(x.shape)
        return self._memory.sum(shared.copy_(x))
