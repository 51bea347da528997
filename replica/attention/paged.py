"""A step's batch, the KV pool, and attention with kernels that read keys and values directly from their pages.

A step's rows may decode, prefill or both.

A step of any shape starts with `begin`, from lengths on the host. A captured decode step starts with `begin_decode`,
from tensors only: a replay reads their current contents.
"""

import contextlib
import mmap
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt
import torch

from ..engine.step_plan import RaggedBatch
from ..kernels.base import PagedRows, TorchKernels, as_moved, as_stored
from ..models.base import AttentionRule, Rotary
from ..models.spec import ModelSpec


def to_device(values: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """Copy without waiting: on CUDA through fresh pinned memory, which torch keeps until the copy has run.

    From pageable memory, a copy of more than 64 KiB would wait for all steps launched before it. CPUs share the array.
    """
    tensor = torch.from_numpy(values)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


@dataclass(slots=True, frozen=True)
class Batch:
    """A `RaggedBatch` on the device. `q_lens` and `kv_lens` stay on the host: they control Python code, not kernels."""

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


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor of zeros; on CPUs the system allocates its memory page by page on first write.

    torch.zeros writes all of it: 1.7 s of CPU time for 512 MiB on a virtual machine, at every replica start.
    """
    if device.type != "cpu" or not hasattr(mmap, "MAP_PRIVATE"):
        return torch.zeros(shape, dtype=dtype, device=device)
    pages = mmap.mmap(-1, prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without large pages
            pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=dtype).view(shape)


class KvPool:
    """Keys and values of all blocks, per layer: [blocks, block_size, kv_heads, dim], zeroed.

    Zeroed because plain torch also reads slots that it then hides, and is slow if they contain NaN
    (`kernels.base.weighted_sum`). All tensors of the same shape are slices of one tensor, so that a copy over all
    layers is one gather and one scatter instead of four kernels per layer.
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
            shape: zeros((count, num_blocks, block_size, *shape), dtype, device) for shape, count in counts.items()
        }
        parts = {shape: iter(stack) for shape, stack in stacks.items()}
        self.keys = [next(parts[shape]) for shape in keys]
        self.values = [next(parts[shape]) for shape in values]
        #: [tensors, slots, heads * dim]
        self._stacks = [as_moved(stack).flatten(1, 2).flatten(2) for stack in stacks.values()]
        self._flat_keys = [as_moved(tensor).flatten(0, 1) for tensor in self.keys]
        self._flat_values = [as_moved(tensor).flatten(0, 1) for tensor in self.values]

    def write(self, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store this step's keys and values [T, kv_heads, dim] in their slots."""
        for flat, pages, new in (
            (self._flat_keys, self.keys[layer], k),
            (self._flat_values, self.values[layer], v),
        ):
            flat[layer].index_copy_(0, slots, as_moved(as_stored(new, pages.dtype)))

    @property
    def block_bytes(self) -> int:
        """Bytes of one block's keys and values in all layers."""
        return sum(stack[:, : self.block_size].nbytes for stack in self._stacks)

    def copy_out(self, block_id: int, data: memoryview) -> None:
        """Copy a block's keys and values to `data`, of `block_bytes`; waits for steps that run."""
        self.copy_out_to(block_id, torch.frombuffer(data, dtype=torch.uint8))

    def copy_in(self, block_id: int, data: memoryview) -> None:
        """Inverse of `copy_out`."""
        self.copy_in_from(block_id, torch.frombuffer(data, dtype=torch.uint8))

    @torch.inference_mode()
    def copy_out_to(self, block_id: int, row: torch.Tensor) -> None:
        """Copy a block's keys and values to `row` [block_bytes] uint8, which may be written later if it is pinned."""
        for part, stack in self._parts(block_id, row):
            part.copy_(stack, non_blocking=True)

    @torch.inference_mode()
    def copy_in_from(self, block_id: int, row: torch.Tensor) -> None:
        """Inverse of `copy_out_to`."""
        for part, stack in self._parts(block_id, row):
            stack.copy_(part, non_blocking=True)

    def _parts(self, block_id: int, row: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """For each stack, the part of `row` that belongs to the block's slice of it, and that slice."""
        offset, begin = 0, block_id * self.block_size
        for stack in self._stacks:
            pages = stack[:, begin : begin + self.block_size]
            part = row[offset : offset + pages.nbytes].view(stack.dtype)
            yield part.view(pages.shape), pages
            offset += pages.nbytes

    def copy(self, slots: torch.Tensor, kernels: TorchKernels) -> None:
        """Copy KV from slots[0] to slots[1] (slots [2, C]) in all layers; reads all sources before it writes."""
        sources, targets = slots.unbind(0)
        for stack in self._stacks:
            kernels.write_slots(stack, targets, stack.index_select(1, sources))


@dataclass(slots=True, frozen=True)
class PagedStep:
    """A step in the form that kernels expect: first `decodes` rows of one token, then rows of any number of tokens."""

    slots: torch.Tensor  #: [T] int64
    tables: torch.Tensor
    seq_lens: torch.Tensor  #: [rows] int32
    decodes: int
    first_queries: torch.Tensor | None  #: [rows - decodes + 1] int32, from 0; None: all rows decode
    q_lens: list[int]  #: of the rows after the decodes
    kv_lens: list[int]


@dataclass(slots=True, frozen=True)
class MixedStep:
    """A padded step: decode and prefill attention both run over all tokens, and each token keeps its own result."""

    slots: torch.Tensor  #: [T] int64
    tables: torch.Tensor  #: [T, pages]
    seq_lens: torch.Tensor  #: [T] int32, 0 for tokens that do not decode
    prompts: PagedStep
    is_prompt: torch.Tensor  #: [T] bool: whether the token belongs to a prompt


class PagedAttention:
    """`models.base.QkvAttend` on top of kernels.

    A token's result does not depend on the contents of slots that it does not see, even if they are NaN.
    """

    #: Prompt lengths that together use every kernel that is compiled on first use and is not part of a graph.
    kernel_lengths: ClassVar[tuple[int, ...]] = ()
    #: Whether `begin_mixed` may be called. Subclasses that read lengths on the host do not support it.
    mixes: bool = True

    def __init__(self, pool: KvPool, kernels: TorchKernels) -> None:
        self._pool = pool
        self._kernels = kernels
        self._step: PagedStep | None = None
        self._mixed: MixedStep | None = None
        self._plans: dict[Any, Any] = {}

    def begin(self, batch: Batch) -> None:
        """Start a step. Leading rows of one token decode; a row of one token after a longer row is a short prefill."""
        decodes = next((row for row, count in enumerate(batch.q_lens) if count > 1), len(batch.q_lens))
        rest = batch.q_lens[decodes:]
        firsts = np.asarray([0, *accumulate(rest)], dtype=np.int32)
        first = to_device(firsts, batch.slots.device) if rest else None
        lengths = batch.kv_lens[decodes:]
        self._start(PagedStep(batch.slots, batch.block_tables, batch.seq_lens, decodes, first, rest, lengths))

    def begin_decode(self, slots: torch.Tensor, tables: torch.Tensor, seq_lens: torch.Tensor) -> None:
        """Start a step in which all rows decode, without reading anything back to the host.

        Padding rows have length 0 and write to the null block.
        """
        self._start(PagedStep(slots, tables, seq_lens, len(seq_lens), None, [], []))

    @property
    def device(self) -> torch.device:
        device: torch.device = self._pool.keys[0].device
        return device

    def begin_mixed(
        self,
        slots: torch.Tensor,
        tables: torch.Tensor,
        seq_lens: torch.Tensor,
        prompt_tables: torch.Tensor,
        prompt_lens: torch.Tensor,
        first_queries: torch.Tensor,
        is_prompt: torch.Tensor,
    ) -> None:
        """Start a step of decodes, prompts and padding, without reading anything back to the host.

        slots, tables, seq_lens and is_prompt have one entry per token; seq_lens are 0 for tokens that do not decode.
        The others have one row per prompt, after a first row that covers all decode tokens and reads the null block.
        """
        prompts = PagedStep(slots, prompt_tables, prompt_lens, 0, first_queries, [], [])
        self._step, self._mixed = None, MixedStep(slots, tables, seq_lens, prompts, is_prompt)
        self._plans.clear()

    def __call__(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rule: AttentionRule
    ) -> torch.Tensor:
        step = self._current()
        self._pool.write(layer, step.slots, k, v)
        return self._read(layer, q, rule, step)

    def from_qkv(self, layer: int, qkv: torch.Tensor, rotary: Rotary, rule: AttentionRule) -> torch.Tensor:
        step = self._current()
        pages = self._pool.keys[layer], self._pool.values[layer]
        return self._read(layer, self._kernels.rotate_and_store(qkv, rotary, step.slots, *pages), rule, step)

    def _start(self, step: PagedStep) -> None:
        self._step, self._mixed = step, None
        self._plans.clear()

    def _current(self) -> PagedStep | MixedStep:
        step = self._step or self._mixed
        assert step is not None, "attention was called before begin"
        return step

    def _read(self, layer: int, q: torch.Tensor, rule: AttentionRule, step: PagedStep | MixedStep) -> torch.Tensor:
        keys, values = self._pool.keys[layer], self._pool.values[layer]
        out = q.new_empty(q.shape[0], q.shape[1], values.shape[3])
        if isinstance(step, MixedStep):
            rows = PagedRows(keys, values, step.prompts.tables, step.prompts.seq_lens)
            self._prefill(q, rows, step.prompts, rule, out)
            decoded = torch.empty_like(out)
            self._decode(q, PagedRows(keys, values, step.tables, step.seq_lens), rule, decoded)
            return torch.where(step.is_prompt[:, None, None], out, decoded)  # padding decodes to 0
        split = step.decodes
        if split:
            rows = PagedRows(keys, values, step.tables[:split], step.seq_lens[:split])
            self._decode(q[:split], rows, rule, out[:split])
        if step.first_queries is not None:
            rows = PagedRows(keys, values, step.tables[split:], step.seq_lens[split:])
            self._prefill(q[split:], rows, step, rule, out[split:])
        return out

    def _decode(self, q: torch.Tensor, rows: PagedRows, rule: AttentionRule, out: torch.Tensor) -> None:
        key = (rows.keys.shape[2:], rows.values.shape[3], q.shape[1], rule.window)
        if key not in self._plans:
            self._plans[key] = self._kernels.plan_decode(rows, q.shape[1], rule.window)
        self._kernels.decode(q, rows, self._plans[key], rule, out)

    def _prefill(
        self, q: torch.Tensor, rows: PagedRows, step: PagedStep, rule: AttentionRule, out: torch.Tensor
    ) -> None:
        assert step.first_queries is not None
        self._kernels.prefill(q, rows, step.first_queries, rule, out)
