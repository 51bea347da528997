"""The ranks get the plan that rank 0 has, and long contexts add nothing to a steady step."""

from array import array

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from homing.replica.engine.step_plan import PlanRow, SlotStart, StepPlan, plan_of_rows
from homing.replica.parallel.plan_wire import PlanDecoder, PlanEncoder

ROWS = 64
BLOCK = 16


def plan(rows: list[PlanRow], slots: list[int], begun: list[int] = [], fed: list[int] = []) -> StepPlan:  # noqa: B006
    started = [SlotStart(slot, 3, 1, 0.0, 0, 1.0, 0.0) for slot in begun]
    return msgspec.structs.replace(plan_of_rows(7, rows), slots=slots, drawn=slots, fed=fed, started=started)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(st.tuples(st.integers(1, 4), st.booleans(), st.integers(0, 3)), max_size=4), max_size=12))
def test_what_is_decoded_is_what_was_encoded(steps: list[list[tuple[int, bool, int]]]) -> None:
    """Over any order of steps, rows and reused slots, growing by any number of blocks."""
    encoder, decoder = PlanEncoder(), PlanDecoder()
    tables: dict[int, list[int]] = {}
    blocks = iter(range(1, 1000))
    for step in steps:
        rows = {slot: (restarts, grows) for slot, restarts, grows in step}
        begun = [slot for slot, (restarts, _) in rows.items() if restarts or slot not in tables]
        tables |= {slot: [] for slot in begun}
        for slot, (_, grows) in rows.items():
            tables[slot] += [next(blocks) for _ in range(grows)]
        made = plan([PlanRow([5], 0, tables[slot]) for slot in rows], list(rows), begun)

        assert decoder.decode(encoder.encode(made)) == made


def test_plans_without_slots_are_sent_whole() -> None:
    """Without a table on the device, as on CPUs, rows have no identity from step to step."""
    made = plan_of_rows(0, [PlanRow([1], 40, [7, 8, 9])])
    encoder, decoder = PlanEncoder(), PlanDecoder()

    assert [decoder.decode(encoder.encode(made)) for _ in range(2)] == [made, made]


@pytest.mark.parametrize("context", [1_000, 32_000])
def test_steady_decode_step_costs_a_few_bytes_per_row(context: int) -> None:
    """A table of 2,000 blocks in each of 64 rows is half a megabyte, encrypted for each rank in each step."""
    encoder, slots = PlanEncoder(), [*range(1, ROWS + 1)]
    table = array("i", range(1, context // BLOCK + 3))
    encoder.encode(plan([PlanRow([0] * 4, 0, table)] * ROWS, slots, begun=slots))

    sizes = [
        len(encoder.encode(plan([PlanRow([0], context + step, table)] * ROWS, slots, fed=[*range(ROWS)])))
        for step in range(BLOCK)
    ]

    assert max(sizes) <= 16 * ROWS + 32, sizes
