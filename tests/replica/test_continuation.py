"""A request that continues elsewhere from its generated ids yields the same remaining tokens."""

from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest

from .schedules import SAMPLINGS, Ask, Schedule, Setup, oracle_of, runner_of

KINDS = tuple(product(("native", "transformers"), (False, True)))
PROMPT = (*range(40, 61), 3, 4)


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_continued_request_goes_on_as_if_it_had_never_moved(checkpoint: Callable[..., Path], sampling: str) -> None:
    """Holds from any position, for both providers and engines and any sampling, next to other continuations."""
    ask = Ask(PROMPT, sampling, max_tokens=8, steps_before=0, choices=1)
    schedules = {kind: Schedule(runner_of(checkpoint("llama"), *kind), Setup(budget=30, blocks=30)) for kind in KINDS}
    whole = oracle_of(checkpoint("llama")).answer(ask)
    tokens = whole.tokens
    undisturbed = [next(iter(schedule.run([ask]).values())) for schedule in schedules.values()]
    assert [got.tokens for got in undisturbed] == [tokens] * len(KINDS)

    for kind, schedule in schedules.items():
        numbers = {cut: schedule.add(ask, generated=tokens[:cut]) for cut in range(1, len(tokens))}
        schedule.finish()

        for cut, number in numbers.items():
            got = schedule.got[number]
            assert (tokens[:cut] + got.tokens, got.finish_reason) == (tokens, whole.finish_reason), (kind, cut)
