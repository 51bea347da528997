"""Sums over ranks through memory that all ranks can read, in one launch each.

For the few bytes of a decode step, each rank reads the data of all (one shot). For more, each rank adds up its own part
and then reads the others' sums (two shots), which moves about `2 / ranks` of the bytes. nccl's ring takes several
exchanges, whose latency exceeds the transfer of a step's few megabytes. Uses torch's symmetric memory; not run on a GPU
yet. Where it is unavailable, the log says why and nccl sums.

Ranks see only their own GPU, so torch does not set up multicast, which would add on the switch.
"""

import logging
import os

import torch
from torch._C._distributed_c10d import Store

log = logging.getLogger(__name__)

NAME = "homing"
#: For larger tensors, such as those of long prompts, nccl's throughput counts more than its latency. Not measured; the
#: limit is vLLM's. A step of 512 rows of 8,192 numbers in bfloat16 fits.
MAX_BYTES = 8 * 2**20
#: The most bytes that a rank reads from others in one shot: 256 KiB each from 7. Not measured; vLLM's limits for 4 and
#: 8 ranks are of this order.
ONE_SHOT_READS = 7 * 256 * 1024
#: Numbers of ranks that torch's kernel of two shots is compiled for.
TWO_SHOT_RANKS = (2, 4, 8)
DTYPES = (torch.bfloat16, torch.float32)
#: Only tensors whose size is a multiple of this are summed here: the kernels read 16 bytes at once.
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

    def sum_in_one_shot(self, x: torch.Tensor) -> torch.Tensor:
        """Sum all ranks' data at the place of `x` in that memory. Waits for all ranks before and after."""
        found: torch.Tensor = torch.ops.symm_mem.one_shot_all_reduce(x, "sum", NAME)
        return found

    def sum_in_two_shots(self, x: torch.Tensor) -> torch.Tensor:
        """The same for TWO_SHOT_RANKS. Overwrites `x`, and waits for all ranks in between as well."""
        found: torch.Tensor = torch.ops.symm_mem.two_shot_all_reduce_out(x, "sum", NAME, torch.empty_like(x))
        return found


class SharedSums:
    def __init__(self, memory: TorchMemory, buffer: torch.Tensor, ranks: int) -> None:
        self._memory, self._buffer = memory, buffer
        self._one_shot_bytes = ONE_SHOT_READS // max(1, ranks - 1)
        self._max_bytes = MAX_BYTES if ranks in TWO_SHOT_RANKS else self._one_shot_bytes

    @classmethod
    def open(
        cls, rank: int, size: int, store: Store, device: torch.device, memory: TorchMemory | None = None
    ) -> "SharedSums | None":
        """Map the memory, or log why not and return None. All ranks must then agree on whether to use it."""
        memory = memory or TorchMemory()
        try:
            return cls(memory, memory.open(rank, size, store, device), size)
        except (RuntimeError, AttributeError, TypeError, ImportError) as error:
            log.info("shared_sums_unusable reason=%r", f"{type(error).__name__}: {' '.join(str(error).split())}")
            return None

    def fits(self, x: torch.Tensor) -> bool:
        return x.dtype in DTYPES and x.nbytes <= self._max_bytes and x.nbytes % ALIGNED_BYTES == 0

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' x. Each of them must satisfy `fits`."""
        shared = self._buffer[: x.nbytes].view(x.dtype).view(x.shape)
        one_shot = x.nbytes <= self._one_shot_bytes
        return (self._memory.sum_in_one_shot if one_shot else self._memory.sum_in_two_shots)(shared.copy_(x))
