"""The plan of one engine step: rows of tokens, where their KV is written, which logits are returned.

Rank 0 makes a `StepPlan` and sends it to all ranks, and each rank lays out the same `RaggedBatch` from it. All rows are
joined along one token axis, without padding. Pure numpy: no torch, no sockets, no requests.
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
    """One request's share of a step: compute `token_ids`, the first of which is at position `start`."""

    token_ids: Sequence[int]
    start: int
    block_table: Sequence[int]  #: covers position 0 to at least this step's last token; fastest as an array("i")


class BlockCopy(NamedTuple):
    """Copy the KV of the first `tokens` tokens of block `source` to block `target`, at the same offsets."""

    source: int
    target: int
    tokens: int


class Save(NamedTuple):
    """Copy the KV of block `block_id` to a slot of host memory, as this generation of the slot."""

    block_id: int
    slot: int
    generation: int


class Load(NamedTuple):
    """Copy this generation of a slot of host memory to block `block_id`."""

    slot: int
    generation: int
    block_id: int


class Move(NamedTuple):
    """Blocks to move between two steps: all saves are read before any load is written."""

    saves: list[Save]
    loads: list[Load]


class SlotStart(NamedTuple):
    """Assigns a slot of the device's request table to a request; holds its sampling parameters."""

    slot: int
    prompt_tokens: int
    seed: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float


class StepPlan(msgspec.Struct, frozen=True, array_like=True):
    """One step as rank 0 sends it to all ranks: one msgpack message. `check` states its invariants."""

    step: int
    token_ids: bytes  #: uint32 LE, all rows joined
    q_lens: list[int]  #: tokens to compute per row, each at least 1
    starts: list[int]  #: position of each row's first token of this step
    block_tables: list[bytes]  #: int32 LE; bytes because a row has hundreds of blocks
    logits_at: list[int]  #: flat token indexes whose logits are returned, in order
    #: Made before the forward pass. All sources are read before any target is written, as a block may be both.
    copies: list[BlockCopy] = []
    #: Each row's slot in the device's request table (execute/request_table.py); empty without a table.
    slots: list[int] = []
    #: Slots whose next token the device draws; their logits come first in `logits_at`.
    drawn: list[int] = []
    #: Indexes of rows whose last token is the one that the device drew last for their slot.
    fed: list[int] = []
    #: Slots that get a new request with this step.
    started: list[SlotStart] = []
    #: Whether rank 0 draws only once it has the `DrawTerms` that depend on the previous step's tokens.
    held: bool = False

    def check(self) -> None:
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
    """Join rows into a plan. `logits_at` defaults to each row's last token."""
    q_lens = [len(row.token_ids) for row in rows]
    if logits_at is None:
        logits_at = [int(end) - 1 for end in np.cumsum(q_lens)]
    return StepPlan(
        step=step,
        token_ids=b"".join([token_bytes(row.token_ids) for row in rows]),
        q_lens=q_lens,
        starts=[row.start for row in rows],
        block_tables=[(table if isinstance(table, array) else array("i", table)).tobytes() for _, _, table in rows],
        logits_at=list(logits_at),
        copies=list(copies),
    )


def block_ids(table: bytes) -> Int32s:
    """Decode one row of `StepPlan.block_tables`."""
    return np.frombuffer(table, dtype="<i4")


@dataclass(slots=True, frozen=True)
class RaggedBatch:
    """A plan laid out as arrays, with T tokens in N rows."""

    token_ids: Int64s  #: [T]
    positions: Int64s  #: [T]
    slots: Int64s  #: [T] where each token's KV is written: block * block_size + offset
    q_lens: list[int]  #: [N]
    kv_lens: list[int]  #: [N] tokens that a row's last token attends to, itself included
    block_tables: Int32s  #: [N, longest] cut to the blocks in use and padded with the null block 0
    logits_at: Int64s  #: [L]
    copied_slots: Int64s  #: [2, C] source and target slots of the KV copied before anything is written


def lay_out(plan: StepPlan, block_size: int) -> RaggedBatch:
    """Lay out a plan as arrays. Asserts that each row's block table covers its tokens."""
    plan.check()
    q_lens = np.asarray(plan.q_lens, dtype=np.int64)
    starts = np.asarray(plan.starts, dtype=np.int64)
    kv_lens = starts + q_lens
    used = (-(-kv_lens // block_size)).tolist()
    tables = np.zeros((len(used), max(used, default=0)), dtype=np.int32)
    for row, (table, count) in enumerate(zip(plan.block_tables, used, strict=True)):
        ids = block_ids(table)
        assert count <= len(ids), f"row {row} needs {count} blocks, its table has {len(ids)}"
        tables[row, :count] = ids[:count]
    row_of, positions = np.arange(len(used)), starts
    if not (q_lens == 1).all():  # in most steps, they all are
        row_of, first = np.repeat(row_of, q_lens), np.repeat(np.cumsum(q_lens) - q_lens, q_lens)
        positions = np.arange(len(row_of)) - first + starts[row_of]
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


def _copied_slots(copies: Sequence[BlockCopy], block_size: int) -> Int64s:
    assert all(copy.tokens < block_size for copy in copies), (copies, block_size)
    blocks = np.asarray([(copy.source, copy.target) for copy in copies], dtype=np.int64).reshape(-1, 2).T
    counts = [copy.tokens for copy in copies]
    offsets = np.fromiter((offset for count in counts for offset in range(count)), dtype=np.int64, count=sum(counts))
    return np.repeat(blocks * block_size, counts, axis=1) + offsets
