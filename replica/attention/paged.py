"""Paged attention by kernels: reads pages where they lie, whether a step's rows decode, prefill or both.

A step of any shape starts with `begin`, from lengths that the host knows. A captured decode step starts with
`begin_decode`, from tensors alone: what they hold is read when the step is replayed.
"""

from dataclasses import dataclass
from itertools import accumulate
from typing import Any, ClassVar

import numpy as np
import torch

from ..kernels.base import Kernels, PagedRows
from ..models.base import AttentionRule, Rotary
from .base import Batch, KvPool, to_device


@dataclass(slots=True, frozen=True)
class DecodeRows:
    """Rows of one token each, on the device; as many as the batch's padded size."""

    slots: torch.Tensor  #: [rows] int64 where each token's KV goes; padding rows write into the null block
    tables: torch.Tensor  #: [rows, longest] int32
    seq_lens: torch.Tensor  #: [rows] int32, 0 for padding


@dataclass(slots=True, frozen=True)
class PagedStep:
    """A step as the kernels take it: `decodes` rows of one token, then rows of any number."""

    slots: torch.Tensor  #: [T] int64
    tables: torch.Tensor
    seq_lens: torch.Tensor  #: [rows] int32
    decodes: int
    first_queries: torch.Tensor | None  #: [rows - decodes + 1] int32, from 0; None: all rows decode
    q_lens: list[int]  #: of the rows after the decodes
    kv_lens: list[int]


def step_of_batch(batch: Batch) -> PagedStep:
    """Leading rows of one token decode; a lone token behind them is a short prefill."""
    device = batch.slots.device
    decodes = next((row for row, count in enumerate(batch.q_lens) if count > 1), len(batch.q_lens))
    rest = batch.q_lens[decodes:]
    first = to_device(np.asarray([0, *accumulate(rest)], dtype=np.int32), device) if rest else None
    return PagedStep(batch.slots, batch.block_tables, batch.seq_lens, decodes, first, rest, batch.kv_lens[decodes:])


class PagedAttention:
    """`AttentionBackend` and `models.base.QkvAttend` over `Kernels`."""

    name: ClassVar[str] = "triton"

    def __init__(self, pool: KvPool, kernels: Kernels) -> None:
        self._pool = pool
        self._kernels = kernels
        self._step: PagedStep | None = None
        self._plans: dict[tuple[int, int | None], Any] = {}

    def begin(self, batch: Batch) -> None:
        self._start(step_of_batch(batch))

    def begin_decode(self, rows: DecodeRows) -> None:
        """A step in which all rows decode; nothing is read on the host."""
        self._start(PagedStep(rows.slots, rows.tables, rows.seq_lens, len(rows.seq_lens), None, [], []))

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rule: AttentionRule
    ) -> torch.Tensor:
        step = self._current()
        self._pool.write(layer, step.slots, k, v)
        return self._read(layer, q, rule, step)

    __call__ = attend

    def from_qkv(self, layer: int, qkv: torch.Tensor, rotary: Rotary, rule: AttentionRule) -> torch.Tensor:
        step = self._current()
        pages = self._pool.keys[layer], self._pool.values[layer]
        return self._read(layer, self._kernels.rotate_and_store(qkv, rotary, step.slots, *pages), rule, step)

    def _start(self, step: PagedStep) -> None:
        self._step = step
        self._plans.clear()

    def _current(self) -> PagedStep:
        assert self._step is not None, "attend before begin"
        return self._step

    def _read(self, layer: int, q: torch.Tensor, rule: AttentionRule, step: PagedStep) -> torch.Tensor:
        keys, values = self._pool.keys[layer], self._pool.values[layer]
        out = q.new_empty(q.shape[0], q.shape[1], values.shape[3])
        split = step.decodes
        if split:
            rows = PagedRows(keys, values, step.tables[:split], step.seq_lens[:split])
            self._kernels.decode(q[:split], rows, self._plan(rows, rule.window), rule, out[:split])
        if step.first_queries is not None:
            rows = PagedRows(keys, values, step.tables[split:], step.seq_lens[split:])
            self._prefill(q[split:], rows, step, rule, out[split:])
        return out

    def _plan(self, rows: PagedRows, window: int | None) -> Any:
        """Layers with the same KV heads and window share a plan."""
        key = (rows.keys.shape[2], window)
        if key not in self._plans:
            self._plans[key] = self._kernels.plan_decode(rows.seq_lens, *key)
        return self._plans[key]

    def _prefill(
        self, q: torch.Tensor, rows: PagedRows, step: PagedStep, rule: AttentionRule, out: torch.Tensor
    ) -> None:
        assert step.first_queries is not None
        self._kernels.prefill(q, rows, step.first_queries, rule, out)
