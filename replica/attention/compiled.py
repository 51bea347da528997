"""Paged attention on CPU with compiled kernels: rotation and store in one, decoding rows over pages where they lie.

Rows of several tokens stay with `ScratchAttention`: oneDNN's products of bfloat16 are faster than any loop. So do
softcap and sinks.
"""

from typing import ClassVar

import torch

from ..kernels.base import Kernels, PagedRows
from ..kernels.cpu.softmax import causal_softmax
from ..models.base import AttentionRule, Rotary
from .base import Batch, KvPool
from .cpu import PrefillItem, ScratchAttention, Tile, split_prefills


class CompiledAttention(ScratchAttention):
    """`AttentionBackend` and `models.base.QkvAttend`."""

    name: ClassVar[str] = "cpu-compiled"

    def __init__(self, pool: KvPool, kernels: Kernels) -> None:
        super().__init__(pool)
        self._kernels = kernels
        self._decodes = 0  #: leading rows of one token; a lone token behind them is a short prefill
        self._prefills: dict[int | None, list[PrefillItem]] = {}

    def begin(self, batch: Batch) -> None:
        super().begin(batch)
        self._prefills.clear()
        self._decodes = next((row for row, count in enumerate(batch.q_lens) if count > 1), len(batch.q_lens))

    def __call__(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rule: AttentionRule
    ) -> torch.Tensor:
        return self.attend(layer, q, k, v, rule)

    def from_qkv(self, layer: int, qkv: torch.Tensor, rotary: Rotary, rule: AttentionRule) -> torch.Tensor:
        pages = self._pool.keys[layer], self._pool.values[layer]
        slots = self._began.slots
        return self._read(layer, self._kernels.rotate_and_store(qkv, rotary, slots, *pages), rule)

    def _read(self, layer: int, q: torch.Tensor, rule: AttentionRule) -> torch.Tensor:
        if rule.softcap is not None or rule.sinks is not None:
            return super()._read(layer, q, rule)
        count, keys, values = self._decodes, self._pool.keys[layer], self._pool.values[layer]
        out = q.new_empty(q.shape[0], q.shape[1], values.shape[3])
        if count:
            rows = PagedRows(keys, values, self._began.block_tables[:count], self._began.seq_lens[:count])
            self._kernels.decode(q[:count], rows, None, rule, out[:count])
        for item in self._prefills_for(rule.window):
            self._prefill(layer, item, q, rule, out)
        return out

    def _weighed(self, scores: torch.Tensor, tile: Tile, rule: AttentionRule) -> torch.Tensor:
        if rule.softcap is not None or rule.sinks is not None:
            return super()._weighed(scores, tile, rule)
        return causal_softmax(scores, tile.stop - tile.first, rule.window)

    def _prefills_for(self, window: int | None) -> list[PrefillItem]:
        items = self._prefills.get(window)
        if self._decodes == len(self._began.q_lens):
            return []
        if items is None:
            items = split_prefills(self._began, self._pool.block_size, window, self._decodes)
            self._prefills[window] = items
        return items
