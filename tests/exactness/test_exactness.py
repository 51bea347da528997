"""Ours is exact after every fault."""

import pytest

from .drivers import OurDriver
from .faults import FAULTS, Fault
from .run import choice


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
async def test_the_prompt_goes_to_the_engine_that_computes_less(fault: Fault) -> None:
    """Whatever happened to the messages that say so."""
    assert await choice(fault, OurDriver()) == fault.winner
