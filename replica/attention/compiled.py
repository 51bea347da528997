"""Paged attention on CPU with compiled kernels: rotation and store in one, all rows over pages where they lie.

Softcap, sinks and dtypes that no kernel is compiled for stay with `ScratchAttention`.
"""

from typing import ClassVar

import torch

from ..kernels.base import Kernels, PagedRows
from ..kernels.cpu.attention.prefill import fits
from ..models.base import AttentionRule, Rotary
from .base import Batch, KvPool
from .cpu import ScratchAttention
from .paged import PagedStep, step_of_batch


class CompiledAttention(ScratchAttention):
    """`AttentionBackend` and `models.base.QkvAttend`."""

    name: ClassVar[str] = "cpu-compiled"

    def __init__(self, pool: KvPool, kernels: Kernels) -> None:
        super().__init__(pool)
        self._kernels = kernels
        self._step: PagedStep | None = None

    def begin(self, batch: Batch) -> None:
        super().begin(batch)
        self._step = step_of_batch(batch)

    def __call__(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rule: AttentionRule
    ) -> torch.Tensor:
        return self.attend(layer, q, k, v, rule)

    def from_qkv(self, layer: int, qkv: torch.Tensor, rotary: Rotary, rule: AttentionRule) -> torch.Tensor:
        pages = self._pool.keys[layer], self._pool.values[layer]
        slots = self._began.slots
        return self._read(layer, self._kernels.rotate_and_store(qkv, rotary, slots, *pages), rule)

    def _read(self, layer: int, q: torch.Tensor, rule: AttentionRule) -> torch.Tensor:
        if not fits(q, rule):
            return super()._read(layer, q, rule)
        step = self._step
        assert step is not None, "attend before begin"
        split, keys, values = step.decodes, self._pool.keys[layer], self._pool.values[layer]
        out = q.new_empty(q.shape[0], q.shape[1], values.shape[3])
        if split:
            rows = PagedRows(keys, values, step.tables[:split], step.seq_lens[:split])
            self._kernels.decode(q[:split], rows, None, rule, out[:split])
        if step.first_queries is not None:
            rows = PagedRows(keys, values, step.tables[split:], step.seq_lens[split:])
            self._kernels.prefill(q[split:], rows, step.first_queries, rule, out[split:])
        return out
