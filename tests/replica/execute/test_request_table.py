"""Deltas tell the device exactly what it does not know: a table updated by deltas alone matches the plans."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from homing.replica.engine.step_plan import PlanRow, SlotStart, StepPlan, plan_of_rows
from homing.replica.execute.request_table import RequestTable, TableMirror

SIZE = 4
CPU = torch.device("cpu")


def started(slot: int, **params) -> SlotStart:
    values = {"prompt_tokens": 3, "seed": 1, "temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | params
    return SlotStart(slot, **values)


def plan(rows: list[PlanRow], slots: list[int], begun: list[int] = [], fed: list[int] = []) -> StepPlan:  # noqa: B006
    made = plan_of_rows(0, rows)
    return StepPlan(
        step=0,
        token_ids=made.token_ids,
        q_lens=made.q_lens,
        starts=made.starts,
        block_tables=made.block_tables,
        logits_at=made.logits_at,
        slots=slots,
        drawn=slots,
        fed=fed,
        started=[started(slot) for slot in begun],
    )


def test_steady_decode_tells_nothing_but_a_page_now_and_then():
    """Otherwise the host would copy all tables in every step; only an occasional new page is sent."""
    mirror = TableMirror(SIZE)
    mirror.delta(plan([PlanRow([5, 6, 7], 0, [9])], [1], begun=[1]))

    deltas = [mirror.delta(plan([PlanRow([0], 3 + step, [9, 8])], [1], fed=[0])) for step in range(3)]

    assert [delta.pages.tolist() for delta in deltas] == [[], [[1, 1, 8]], []]
    assert not any(len(delta.seq_lens) or len(delta.tokens) or delta.started for delta in deltas)


def test_token_that_the_host_knows_is_told():
    """After steps that were not launched ahead, the device's last token is outdated."""
    mirror = TableMirror(SIZE)
    mirror.delta(plan([PlanRow([5, 6, 7], 0, [9])], [1], begun=[1]))

    delta = mirror.delta(plan([PlanRow([42], 5, [9, 8])], [1]))

    assert delta.tokens.tolist() == [[1, 42]]
    assert delta.seq_lens.tolist() == [[1, 5]]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 6), st.booleans()), min_size=1, max_size=25))
def test_deltas_rebuild_what_the_plans_say(steps):
    """Slots are reused and rows compute one or more tokens; before each step the table must hold the row's state."""
    mirror, table = TableMirror(SIZE), RequestTable(4, 64, CPU)
    blocks: dict[int, list[int]] = {}
    lengths: dict[int, int] = {}
    next_block = 1
    for slot, count, restart in steps:
        begun = [slot] if restart or slot not in blocks else []
        if begun:
            blocks[slot], lengths[slot] = [], 0
        start = lengths[slot]
        while len(blocks[slot]) * SIZE < start + count:
            blocks[slot].append(next_block)
            next_block += 1
        ids = list(range(start, start + count))

        table.apply(mirror.delta(plan([PlanRow(ids, start, blocks[slot])], [slot], begun=begun)))

        held = len(blocks[slot])
        assert table.block_tables[slot, :held].tolist() == blocks[slot]
        assert int(table.seq_lens[slot]) == start
        assert int(table.last_tokens[slot]) == ids[-1]
        assert not table.seq_lens[0]
        lengths[slot] = start + count
        table.seq_lens[slot] = lengths[slot]  # as the step would do


@pytest.mark.parametrize("seed", [0, 1, (1 << 64) - 1, 1 << 63])
def test_sampling_numbers_arrive_whole(seed):
    """A seed has 64 bits and top-p exceeds float32 precision; the CPU's sampler must get the same numbers."""
    table = RequestTable(2, 4, CPU)
    mirror = TableMirror(SIZE)
    step = plan([PlanRow([1, 2, 3], 0, [1])], [2])
    step.started.append(started(2, seed=seed, temperature=0.7, top_p=0.9, top_k=5, min_p=0.25))

    table.apply(mirror.delta(step))

    inputs = table.sampling(torch.tensor([2]))
    assert int(inputs.seeds[2]) % (1 << 64) == seed
    assert float(inputs.top_ps[2]) == 0.9
    assert (int(inputs.top_ks[2]), float(inputs.min_ps[2]), int(inputs.prompts[2])) == (5, 0.25, 3)
