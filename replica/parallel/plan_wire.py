"""How plans travel to the other ranks: of each block table only what a rank does not have.

A row with a slot keeps its block table while the slot is its own, and the table only grows, so both ends remember it by
slot. A long prompt's table is sent once, and a steady decode step costs a few bytes per row at any length.
"""

import msgspec

from ..engine.step_plan import StepPlan


class PlanEncoder:
    """Rank 0's end. Every plan that it encodes must reach every rank, in order."""

    def __init__(self) -> None:
        self._sent: dict[int, int] = {}  #: bytes of the block table that the ranks have, by slot

    def encode(self, plan: StepPlan) -> bytes:
        if plan.slots:
            self._sent |= dict.fromkeys((start.slot for start in plan.started), 0)
            new = []
            for slot, table in zip(plan.slots, plan.block_tables, strict=True):
                assert len(table) >= self._sent[slot], f"the block table in slot {slot} has shrunk"
                new.append(table[self._sent[slot] :])
                self._sent[slot] = len(table)
            plan = msgspec.structs.replace(plan, block_tables=new)
        return msgspec.msgpack.encode(plan)


class PlanDecoder:
    """The other ranks' end."""

    def __init__(self) -> None:
        self._tables: dict[int, bytes] = {}

    def decode(self, payload: bytes) -> StepPlan:
        """The plan as rank 0 has it. Raises msgspec.MsgspecError for anything else, KeyError for an unknown slot."""
        plan = msgspec.msgpack.decode(payload, type=StepPlan)
        if not plan.slots:
            return plan
        self._tables |= dict.fromkeys((start.slot for start in plan.started), b"")
        for slot, new in zip(plan.slots, plan.block_tables, strict=True):
            if new:
                self._tables[slot] += new
        return msgspec.structs.replace(plan, block_tables=[self._tables[slot] for slot in plan.slots])
