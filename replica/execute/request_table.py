"""The state of running requests as tensors by slot: what a decode step reads, and where it writes the drawn tokens.

`TableMirror` is the host's copy of the table: it computes from each plan what must change on the device. A steady
decode step needs no changes except its rows' slots: lengths grow and tokens are fed back on the device, and a row needs
a new block table entry only once per block. Every rank keeps a mirror and gets the same plans.

Slot 0 is for a batch's padding rows and stays empty. Changes are launched on the device in order with the steps.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ..attention.paged import to_device
from ..engine.step_plan import Int64s, SlotStart, StepPlan, block_ids
from ..kernels.base import SamplingInputs


@dataclass(slots=True, frozen=True)
class TableDelta:
    """Changes to the table, to be applied in field order before a step runs."""

    started: Sequence[SlotStart]
    pages: Int64s  #: [n, 3] slot, column, block
    seq_lens: Int64s  #: [n, 2] slot, tokens whose KV is computed before the step
    tokens: Int64s  #: [n, 2] slot, the token that the step's row computes


class TableMirror:
    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        #: By slot: number of pages that the device has, and number of tokens with computed KV.
        self._pages: dict[int, int] = {}
        self._seq_lens: dict[int, int] = {}

    def delta(self, plan: StepPlan) -> TableDelta:
        for start in plan.started:
            self._pages[start.slot] = 0
            self._seq_lens.pop(start.slot, None)  # left over from the slot's previous request
        pages: list[tuple[int, int, int]] = []
        seq_lens: list[tuple[int, int]] = []
        tokens: list[tuple[int, int]] = []
        fed = set(plan.fed)
        ends = np.cumsum(plan.q_lens, dtype=np.int64) - 1
        last_tokens: list[int] = np.frombuffer(plan.token_ids, dtype="<u4")[ends].tolist()
        for row, (slot, begin, count, table) in enumerate(
            zip(plan.slots, plan.starts, plan.q_lens, plan.block_tables, strict=True)
        ):
            known, end = self._pages[slot], begin + count
            needed = -(-end // self._block_size)
            if needed > known:
                ids: list[int] = block_ids(table)[known:needed].tolist()
                pages += [(slot, column, block) for column, block in enumerate(ids, known)]
                self._pages[slot] = needed
            if self._seq_lens.get(slot) != begin:
                seq_lens.append((slot, begin))
            self._seq_lens[slot] = end
            if row not in fed:
                tokens.append((slot, last_tokens[row]))
        return TableDelta(plan.started, _array(pages, 3), _array(seq_lens, 2), _array(tokens, 2))


def _array(entries: Sequence[tuple[int, ...]], width: int) -> Int64s:
    return np.asarray(entries, dtype=np.int64).reshape(-1, width)


class RequestTable:
    """Holds `slots` requests and the padding slot 0; block tables have at most `pages` blocks."""

    def __init__(self, slots: int, pages: int, device: torch.device) -> None:
        self._device = device
        count = slots + 1
        #: The last drawn token of each slot; below 0 if none could be drawn.
        self.last_tokens = torch.zeros(count, dtype=torch.int64, device=device)
        #: Number of tokens whose KV is computed.
        self.seq_lens = torch.zeros(count, dtype=torch.int32, device=device)
        self.block_tables = torch.zeros(count, pages, dtype=torch.int32, device=device)
        kinds = (torch.float32, torch.int32, torch.float64, torch.float32, torch.int64, torch.int64)
        #: Sampling parameters by slot, in the order of `SamplingInputs`. All 0 for padding, which is therefore greedy.
        self._sampling = [torch.zeros(count, dtype=kind, device=device) for kind in kinds]

    def apply(self, delta: TableDelta) -> None:
        if delta.started:
            slots = to_device(np.array([start.slot for start in delta.started], dtype=np.int64), self._device)
            columns = zip(*map(_sampling_of, delta.started), strict=True)
            for column, values in zip(self._sampling, columns, strict=True):
                told = torch.tensor(values, dtype=column.dtype).numpy()
                column.index_copy_(0, slots, to_device(told, self._device))
        if len(delta.pages):
            slots, places, blocks = to_device(delta.pages, self._device).unbind(1)
            self.block_tables.index_put_((slots, places), blocks.int())
        if len(delta.seq_lens):
            slots, lengths = to_device(delta.seq_lens, self._device).unbind(1)
            self.seq_lens.index_copy_(0, slots, lengths.int())
        if len(delta.tokens):
            slots, tokens = to_device(delta.tokens, self._device).unbind(1)
            self.last_tokens.index_copy_(0, slots, tokens)

    def sampling(self, rows: torch.Tensor) -> SamplingInputs:
        """The sampler's inputs for the next tokens of these slots."""
        temperatures, top_ks, top_ps, min_ps, seeds, prompts = self._sampling
        return SamplingInputs(
            rows, temperatures, top_ks, top_ps, min_ps, seeds, prompts, self.seq_lens, self.last_tokens
        )


def _sampling_of(start: SlotStart) -> tuple[float, ...]:
    """Sampling parameters in the order of `SamplingInputs`; the seed's 64 bits become a signed integer."""
    seed = start.seed - (start.seed >> 63 << 64)
    return start.temperature, start.top_k, start.top_p, start.min_p, seed, start.prompt_tokens
