"""homing's routing is exact after every fault."""

import pytest

from .drivers import OurDriver
from .faults import FAULTS, Fault
from .run import choice


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
async def test_the_prompt_goes_to_the_engine_that_computes_less(fault: Fault) -> None:
    """Lost, late, repeated or reordered messages must not change the choice."""
    assert await choice(fault, OurDriver()) == fault.winner
