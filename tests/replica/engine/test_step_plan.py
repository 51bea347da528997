"""The memory layout that every rank derives from a step plan."""

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from homing.replica.engine.step_plan import BlockCopy, PlanRow, StepPlan, lay_out, plan_of_rows

BLOCK = 4


@st.composite
def rows(draw):
    """Rows with disjoint block tables that are long enough for their tokens."""
    shapes = draw(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 11), st.integers(0, 2)), min_size=1, max_size=5))
    free = draw(st.permutations(range(1, 60)))
    made = []
    for length, start, spare in shapes:
        count = -(-(start + length) // BLOCK) + spare
        table, free = free[:count], free[count:]
        made.append(PlanRow(draw(st.lists(st.integers(0, 2**32 - 1), min_size=length, max_size=length)), start, table))
    return made


@given(rows())
def test_each_token_goes_where_its_row_says(rows):
    """Oracle, token by token: position p of a row lies in its block p // size at offset p % size."""
    expected = [
        (token, row.start + index, row.block_table[(row.start + index) // BLOCK] * BLOCK + (row.start + index) % BLOCK)
        for row in rows
        for index, token in enumerate(row.token_ids)
    ]

    batch = lay_out(plan_of_rows(0, rows), BLOCK)

    assert list(zip(batch.token_ids.tolist(), batch.positions.tolist(), batch.slots.tolist(), strict=True)) == expected
    assert batch.q_lens == [len(row.token_ids) for row in rows]
    assert batch.kv_lens == [row.start + len(row.token_ids) for row in rows]
    assert batch.logits_at.tolist() == (np.cumsum(batch.q_lens) - 1).tolist()


@given(rows())
def test_tables_hold_the_used_blocks_then_the_null_block(rows):
    """Padding is only read under a mask, and block 0 belongs to no request."""
    batch = lay_out(plan_of_rows(0, rows), BLOCK)

    for row, length, table in zip(rows, batch.kv_lens, batch.block_tables.tolist(), strict=True):
        used = -(-length // BLOCK)
        assert table[:used] == list(row.block_table[:used])
        assert not any(table[used:])


COPIES = st.lists(st.builds(BlockCopy, st.integers(1, 60), st.integers(1, 60), st.integers(1, BLOCK - 1)), max_size=4)


@given(COPIES)
def test_copies_go_from_slot_to_slot_at_equal_offsets(copies):
    """A key encodes its position, so a token may only move to the same offset of another block."""
    plan = plan_of_rows(0, [PlanRow([1], 0, [7])], copies=copies)
    expected = [
        (copy.source * BLOCK + offset, copy.target * BLOCK + offset) for copy in copies for offset in range(copy.tokens)
    ]

    sources, targets = lay_out(plan, BLOCK).copied_slots.tolist()

    assert list(zip(sources, targets, strict=True)) == expected


@given(rows(), st.integers(0, 2**40), COPIES)
def test_plan_survives_the_wire(rows, step, copies):
    """Every rank must derive the same layout as rank 0."""
    plan = plan_of_rows(step, rows, logits_at=[0], copies=copies)

    assert msgspec.msgpack.decode(msgspec.msgpack.encode(plan), type=StepPlan) == plan


@pytest.mark.parametrize(
    "changes",
    [{"token_ids": b"\0" * 8}, {"starts": []}, {"q_lens": [0]}, {"logits_at": [3]}, {"block_tables": [b"\5\0\0\0"]}]
    + [{"copies": [BlockCopy(*copy)]} for copy in ((0, 7, 1), (7, 0, 1), (7, 8, 0), (7, 8, BLOCK))],
)
def test_plan_that_contradicts_itself_is_caught(changes):
    """A wrong plan would overwrite another request's blocks, so it must fail the step."""
    plan = plan_of_rows(0, [PlanRow([1, 2, 3], 2, [7, 8])])

    with pytest.raises(AssertionError):
        lay_out(msgspec.structs.replace(plan, **changes), BLOCK)
