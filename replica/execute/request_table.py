"""The requests of a replica as tensors by slot: what a decode step reads, and where it writes what it drew.

Slot 0 belongs to the padding rows of a batch: it stays empty. Every change is a launch on the device, in order with
the steps.
"""

import numpy as np
import torch

from ..kernels.base import SamplingInputs
from .staging import to_device
from .table_mirror import TableDelta


class RequestTable:
    """`slots` requests and the padding slot 0; block tables of at most `pages` blocks."""

    def __init__(self, slots: int, pages: int, device: torch.device) -> None:
        self._device = device
        count = slots + 1
        self.last_tokens = torch.zeros(count, dtype=torch.int64, device=device)
        #: Tokens whose KV is there.
        self.seq_lens = torch.zeros(count, dtype=torch.int32, device=device)
        self.block_tables = torch.zeros(count, pages, dtype=torch.int32, device=device)
        #: [slots, 3] prompt tokens, seed, top_k
        self._integers = torch.zeros(count, 3, dtype=torch.int64, device=device)
        #: [slots, 3] temperature (0 for padding: greedy), top_p, min_p
        self._floats = torch.zeros(count, 3, dtype=torch.float64, device=device)

    def apply(self, delta: TableDelta) -> None:
        """Make the changes, those of which there are any."""
        if delta.started:
            self._start(delta)
        if len(delta.pages):
            slots, columns, blocks = to_device(delta.pages, self._device).unbind(1)
            self.block_tables.index_put_((slots, columns), blocks.int())
        if len(delta.seq_lens):
            slots, lengths = to_device(delta.seq_lens, self._device).unbind(1)
            self.seq_lens.index_copy_(0, slots, lengths.int())
        if len(delta.tokens):
            slots, tokens = to_device(delta.tokens, self._device).unbind(1)
            self.last_tokens.index_copy_(0, slots, tokens)

    def sampling(self, slots: torch.Tensor, seq_lens: torch.Tensor) -> SamplingInputs:
        """How the tokens after `seq_lens` tokens are drawn, for these slots."""
        prompts, seeds, top_ks = self._integers[slots].unbind(1)
        temperatures, top_ps, min_ps = self._floats[slots].unbind(1)
        return SamplingInputs(
            temperatures=temperatures.float(),
            top_ks=top_ks.int(),
            top_ps=top_ps.contiguous(),
            min_ps=min_ps.float(),
            seeds=seeds.contiguous(),
            positions=(seq_lens - prompts).clamp(min=0),
        )

    def _start(self, delta: TableDelta) -> None:
        integers = [
            (start.slot, start.prompt_tokens, start.seed - (start.seed >> 63 << 64), start.top_k)
            for start in delta.started
        ]
        floats = [(start.temperature, start.top_p, start.min_p) for start in delta.started]
        moved = to_device(np.asarray(integers, dtype=np.int64), self._device)
        self._integers.index_copy_(0, moved[:, 0], moved[:, 1:])
        self._floats.index_copy_(0, moved[:, 0], to_device(np.asarray(floats, dtype=np.float64), self._device))
