"""What the host knows of the device's request table, and what a plan must tell the device. Pure numpy.

A steady decode step tells it nothing but the rows' slots: lengths grow and tokens are fed back on the device, and a row
needs a new table entry once a block. Every rank keeps a mirror and works from the same plans.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ..engine.step_plan import Int64s, SlotStart, StepPlan, block_ids


@dataclass(slots=True, frozen=True)
class TableDelta:
    """Changes of the table, to be made in this order before a step runs."""

    started: Sequence[SlotStart]
    pages: Int64s  #: [n, 3] slot, column, block
    seq_lens: Int64s  #: [n, 2] slot, tokens whose KV is there before the step
    tokens: Int64s  #: [n, 2] slot, the token that the step's row computes


@dataclass(slots=True)
class Known:
    """What the device's table holds for one slot."""

    pages: int = 0
    seq_len: int | None = None  #: None: another request's


@dataclass(slots=True)
class TableMirror:
    """By slot."""

    block_size: int
    _known: dict[int, Known] = field(default_factory=dict)

    def delta(self, plan: StepPlan) -> TableDelta:
        """What the device must be told for this plan; afterwards it is known."""
        for occupant in plan.started:
            self._known[occupant.slot] = Known()
        pages: list[tuple[int, int, int]] = []
        seq_lens: list[tuple[int, int]] = []
        tokens: list[tuple[int, int]] = []
        fed = set(plan.fed)
        last_tokens = self._last_tokens(plan)
        for row, (slot, start, count, table) in enumerate(
            zip(plan.slots, plan.starts, plan.q_lens, plan.block_tables, strict=True)
        ):
            known, end = self._known[slot], start + count
            needed = -(-end // self.block_size)
            if needed > known.pages:
                ids: list[int] = block_ids(table)[known.pages : needed].tolist()
                pages += [(slot, column, block) for column, block in enumerate(ids, known.pages)]
                known.pages = needed
            if known.seq_len != start:
                seq_lens.append((slot, start))
            known.seq_len = end
            if row not in fed:
                tokens.append((slot, last_tokens[row]))
        return TableDelta(plan.started, _array(pages, 3), _array(seq_lens, 2), _array(tokens, 2))

    def _last_tokens(self, plan: StepPlan) -> list[int]:
        ids = np.frombuffer(plan.token_ids, dtype="<u4")
        ends = np.cumsum(plan.q_lens, dtype=np.int64) - 1
        last: list[int] = ids[ends].tolist()
        return last


def _array(entries: Sequence[tuple[int, ...]], width: int) -> Int64s:
    return np.asarray(entries, dtype=np.int64).reshape(-1, width)
