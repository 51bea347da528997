"""Paged attention by kernels that read keys and values in their pages. A step's rows may decode, prefill or both.

A step of any shape starts with `begin`, from lengths on the host. A captured decode step starts with `begin_decode`,
from tensors alone: a replay of the step reads what they hold then.
"""

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from ..kernels.base import PagedRows, TorchKernels
from ..models.base import AttentionRule, Rotary
from .base import Batch, KvPool, to_device


@dataclass(slots=True, frozen=True)
class PagedStep:
    """A step as the kernels take it: first `decodes` rows of one token, then rows of any number of tokens."""

    slots: torch.Tensor  #: [T] int64
    tables: torch.Tensor
    seq_lens: torch.Tensor  #: [rows] int32
    decodes: int
    first_queries: torch.Tensor | None  #: [rows - decodes + 1] int32, from 0; None: all rows decode
    q_lens: list[int]  #: of the rows after the decodes
    kv_lens: list[int]


class PagedAttention:
    """`models.base.QkvAttend` over kernels.

    The contents of slots that a token does not see, NaN included, do not change its result.
    """

    def __init__(self, pool: KvPool, kernels: TorchKernels) -> None:
        self._pool = pool
        self._kernels = kernels
        self._step: PagedStep | None = None
        self._plans: dict[tuple[int, int | None], Any] = {}

    def begin(self, batch: Batch) -> None:
        """Start a step. Leading rows of one token decode; one token after a longer row is a short prefill."""
        decodes = next((row for row, count in enumerate(batch.q_lens) if count > 1), len(batch.q_lens))
        rest = batch.q_lens[decodes:]
        firsts = np.asarray([0, *accumulate(rest)], dtype=np.int32)
        first = to_device(firsts, batch.slots.device) if rest else None
        lengths = batch.kv_lens[decodes:]
        self._start(PagedStep(batch.slots, batch.block_tables, batch.seq_lens, decodes, first, rest, lengths))

    def begin_decode(self, slots: torch.Tensor, tables: torch.Tensor, seq_lens: torch.Tensor) -> None:
        """Start a step in which all rows decode; nothing is read on the host.

        Padding rows have a length of 0 and write into the null block.
        """
        self._start(PagedStep(slots, tables, seq_lens, len(seq_lens), None, [], []))

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
        self._step = step
        self._plans.clear()

    def _current(self) -> PagedStep:
        assert self._step is not None, "attention was called before begin"
        return self._step

    def _read(self, layer: int, q: torch.Tensor, rule: AttentionRule, step: PagedStep) -> torch.Tensor:
        keys, values = self._pool.keys[layer], self._pool.values[layer]
        out = q.new_empty(q.shape[0], q.shape[1], values.shape[3])
        split = step.decodes
        if split:
            rows = PagedRows(keys, values, step.tables[:split], step.seq_lens[:split])
            key = keys.shape[2], rule.window
            if key not in self._plans:  # layers with the same KV heads and window share a plan
                self._plans[key] = self._kernels.plan_decode(rows.seq_lens, *key)
            self._kernels.decode(q[:split], rows, self._plans[key], rule, out[:split])
        if step.first_queries is not None:
            rows = PagedRows(keys, values, step.tables[split:], step.seq_lens[split:])
            self._prefill(q[split:], rows, step, rule, out[split:])
        return out

    def _prefill(
        self, q: torch.Tensor, rows: PagedRows, step: PagedStep, rule: AttentionRule, out: torch.Tensor
    ) -> None:
        assert step.first_queries is not None
        self._kernels.prefill(q, rows, step.first_queries, rule, out)
