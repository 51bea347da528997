"""The data that attention works on: a step's batch as tensors, and the pool of keys and values."""

from collections import Counter
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch

from ..engine.step_plan import RaggedBatch
from ..models.spec import ModelSpec


def to_device(values: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """Copy without waiting: from fresh pinned memory on CUDA, which torch keeps until the copy has run.

    From pageable memory a copy of more than 64 KiB would wait for all steps launched before it. On CPU: the array.
    """
    tensor = torch.from_numpy(values)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


@dataclass(slots=True, frozen=True)
class Batch:
    """A `RaggedBatch` on the device. Lengths stay on the host: they control Python code, not kernels."""

    token_ids: torch.Tensor  #: [T] int64
    positions: torch.Tensor  #: [T] int64
    slots: torch.Tensor  #: [T] int64
    q_lens: list[int]
    kv_lens: list[int]
    seq_lens: torch.Tensor  #: [N] int32, `kv_lens` on the device
    block_tables: torch.Tensor  #: [N, longest] int32
    logits_at: torch.Tensor  #: [L] int64
    copied_slots: torch.Tensor  #: [2, C] int64

    @classmethod
    def on_device(cls, ragged: RaggedBatch, device: torch.device) -> Self:
        return cls(
            token_ids=to_device(ragged.token_ids, device),
            positions=to_device(ragged.positions, device),
            slots=to_device(ragged.slots, device),
            q_lens=ragged.q_lens,
            kv_lens=ragged.kv_lens,
            seq_lens=to_device(np.asarray(ragged.kv_lens, dtype=np.int32), device),
            block_tables=to_device(ragged.block_tables, device),
            logits_at=to_device(ragged.logits_at, device),
            copied_slots=to_device(ragged.copied_slots, device),
        )


class KvPool:
    """Keys and values of all blocks, per layer: [blocks, block_size, kv_heads, dim], zeroed.

    Zeroed, because plain torch reads slots that it then hides, and is slow where they hold NaN
    (`kernels.base.weighted_sum`). All tensors of one shape are slices of one tensor, so that a copy over all layers is
    one gather and one scatter instead of four kernels for each layer.
    """

    __slots__ = ("_flat_keys", "_flat_values", "_stacks", "block_size", "keys", "num_blocks", "values")

    def __init__(
        self, spec: ModelSpec, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size

        keys = [(shape.kv_heads, shape.key_dim) for shape in spec.kv_shapes]
        values = [(shape.kv_heads, shape.value_dim) for shape in spec.kv_shapes]
        counts = Counter(keys + values)
        stacks = {
            shape: torch.zeros(count, num_blocks, block_size, *shape, dtype=dtype, device=device)
            for shape, count in counts.items()
        }
        parts = {shape: iter(stack) for shape, stack in stacks.items()}
        self.keys = [next(parts[shape]) for shape in keys]
        self.values = [next(parts[shape]) for shape in values]
        #: [tensors, slots, heads * dim]
        self._stacks = [stack.flatten(1, 2).flatten(2) for stack in stacks.values()]
        self._flat_keys = [tensor.flatten(0, 1) for tensor in self.keys]
        self._flat_values = [tensor.flatten(0, 1) for tensor in self.values]

    def write(self, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store this step's keys and values [T, kv_heads, dim] in their slots."""
        self._flat_keys[layer].index_copy_(0, slots, k)
        self._flat_values[layer].index_copy_(0, slots, v)

    def copy(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Copy the KV of slots in all layers; every source is read before any target is written."""
        for stack in self._stacks:
            stack.index_copy_(1, targets, stack.index_select(1, sources))
