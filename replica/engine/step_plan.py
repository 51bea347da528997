"""What one engine step runs: rows of tokens, where their KV goes, whose logits are wanted.

Rank 0 makes a `StepPlan` and sends it to all ranks; each rank lays out the same `RaggedBatch` from it. Pure numpy:
knows no torch, no sockets and nothing of requests. All rows are joined along one token axis, without padding.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from ...kvcache.hashing import token_bytes

Int64s = npt.NDArray[np.int64]
Int32s = npt.NDArray[np.int32]


class PlanRow(NamedTuple):
    """One request's share of a step: compute `token_ids`, the first of which stands at position `start`."""

    token_ids: Sequence[int]
    start: int
    block_table: Sequence[int]  #: from position 0 on, at least as far as this step's last token; best an array("i")


class BlockCopy(NamedTuple):
    """The KV of the first `tokens` tokens of block `source` is put into block `target`, at the same offsets."""

    source: int
    target: int
    tokens: int


class SlotStart(NamedTuple):
    """A request takes a slot of the device's table: all that its sampling needs beyond its length."""

    slot: int
    prompt_tokens: int
    seed: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float


class StepPlan(msgspec.Struct, frozen=True, array_like=True):
    """What rank 0 tells all ranks about one step; one msgpack message. `check` says what always holds."""

    step: int
    token_ids: bytes  #: uint32 LE, all rows joined
    q_lens: list[int]  #: tokens to compute per row, each at least 1
    starts: list[int]  #: position of each row's first token of this step
    block_tables: list[bytes]  #: int32 LE: a row has hundreds of blocks, and each step tells them all
    logits_at: list[int]  #: flat token indexes whose logits are wanted, in order
    #: Done before the forward; all are read before the first is written, as one's target may be another's source.
    copies: list[BlockCopy] = []
    #: Each row's slot in the device's table of requests (resident/table.py); empty where there is no table.
    slots: list[int] = []
    #: Slots whose next token is drawn on the device; their logits are the first of `logits_at`.
    drawn: list[int] = []
    #: Rows whose last token is the one that the device drew last for their slot.
    fed: list[int] = []
    #: Slots that belong to another request from this step on.
    started: list[SlotStart] = []

    def check(self) -> None:
        """Assert that the fields agree with each other."""
        tokens, rows = len(self.token_ids) // 4, len(self.q_lens)
        assert rows == len(self.starts) == len(self.block_tables), (rows, len(self.starts), len(self.block_tables))
        assert len(self.token_ids) == 4 * sum(self.q_lens), (len(self.token_ids), sum(self.q_lens))
        assert all(length > 0 for length in self.q_lens), self.q_lens
        assert all(0 <= index < tokens for index in self.logits_at), (self.logits_at, tokens)
        assert not self.slots or len(self.slots) == rows, (len(self.slots), rows)
        assert len(self.drawn) <= len(self.logits_at), (len(self.drawn), len(self.logits_at))
        assert all(copy.source and copy.target and copy.tokens > 0 for copy in self.copies), self.copies


def plan_of_rows(
    step: int, rows: Sequence[PlanRow], logits_at: Sequence[int] | None = None, copies: Sequence[BlockCopy] = ()
) -> StepPlan:
    """Join rows into a plan. Without `logits_at` the logits of each row's last token are wanted."""
    q_lens = [len(row.token_ids) for row in rows]
    if logits_at is None:
        logits_at = [int(end) - 1 for end in np.cumsum(q_lens)]
    return StepPlan(
        step=step,
        token_ids=b"".join([token_bytes(row.token_ids) for row in rows]),
        q_lens=q_lens,
        starts=[row.start for row in rows],
        block_tables=[_table_bytes(row.block_table) for row in rows],
        logits_at=list(logits_at),
        copies=list(copies),
    )


def _table_bytes(table: Sequence[int]) -> bytes:
    ids = table if isinstance(table, array) else array("i", table)
    return ids.tobytes()


def block_ids(table: bytes) -> Int32s:
    """One row of `StepPlan.block_tables`."""
    return np.frombuffer(table, dtype="<i4")


@dataclass(slots=True, frozen=True)
class RaggedBatch:
    """A plan laid out as arrays: T tokens of N rows."""

    token_ids: Int64s  #: [T]
    positions: Int64s  #: [T]
    slots: Int64s  #: [T] block * block_size + offset: where each token's KV is written
    q_lens: list[int]  #: [N]
    kv_lens: list[int]  #: [N] tokens a row's last token sees, itself included
    block_tables: Int32s  #: [N, longest], cut to the blocks in use, padded with the null block 0
    logits_at: Int64s  #: [L]
    copied_slots: Int64s  #: [2, C] from where to where KV is copied before anything is written


def lay_out(plan: StepPlan, block_size: int) -> RaggedBatch:
    """The batch that a plan describes. Asserts that each row's block table covers its tokens."""
    plan.check()
    q_lens = np.asarray(plan.q_lens, dtype=np.int64)
    starts = np.asarray(plan.starts, dtype=np.int64)
    kv_lens = starts + q_lens
    tables = _padded_tables(plan.block_tables, [int(-(-length // block_size)) for length in kv_lens])
    row_of, positions = _tokens(q_lens, starts)
    blocks = tables[row_of, positions // block_size].astype(np.int64)
    return RaggedBatch(
        token_ids=np.frombuffer(plan.token_ids, dtype="<u4").astype(np.int64),
        positions=positions,
        slots=blocks * block_size + positions % block_size,
        q_lens=plan.q_lens,
        kv_lens=kv_lens.tolist(),
        block_tables=tables,
        logits_at=np.asarray(plan.logits_at, dtype=np.int64),
        copied_slots=_copied_slots(plan.copies, block_size),
    )


def _tokens(q_lens: Int64s, starts: Int64s) -> tuple[Int64s, Int64s]:
    """The row and the position of each token."""
    rows = np.arange(len(q_lens))
    if (q_lens == 1).all():  # most steps
        return rows, starts
    row_of, first = np.repeat(rows, q_lens), np.repeat(np.cumsum(q_lens) - q_lens, q_lens)
    return row_of, np.arange(len(row_of)) - first + starts[row_of]


def _copied_slots(copies: Sequence[BlockCopy], block_size: int) -> Int64s:
    assert all(copy.tokens < block_size for copy in copies), (copies, block_size)
    blocks = np.asarray([(copy.source, copy.target) for copy in copies], dtype=np.int64).reshape(-1, 2).T
    counts = [copy.tokens for copy in copies]
    offsets = np.fromiter((offset for count in counts for offset in range(count)), dtype=np.int64, count=sum(counts))
    return np.repeat(blocks * block_size, counts, axis=1) + offsets


def _padded_tables(tables: Sequence[bytes], used: Sequence[int]) -> Int32s:
    """Block tables as one array, each cut to the number of blocks it uses."""
    padded = np.zeros((len(tables), max(used, default=0)), dtype=np.int32)
    for row, (table, count) in enumerate(zip(tables, used, strict=True)):
        ids = block_ids(table)
        assert count <= len(ids), f"row {row} needs {count} blocks, its table has {len(ids)}"
        padded[row, :count] = ids[:count]
    return padded
