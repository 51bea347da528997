"""The transition table of a request."""

from itertools import product
from typing import get_args

import pytest

from homing.kvcache.hashing import BlockHash
from homing.router.flow.request_state import TRANSITIONS, Event, HashedTokens, Phase, RequestId, RequestState

from ..fakes import request_of

TABLE = {(each.before, each.event): each.after for each in TRANSITIONS}


def in_phase(phase: Phase) -> RequestState:
    request, root = request_of([1]), BlockHash(bytes(16))
    return RequestState(
        RequestId(1), request, 0.0, 1.0, 1, HashedTokens(root, request.token_ids, b"", (), 1), phase=phase
    )


@pytest.mark.parametrize(("phase", "event"), list(product(Phase, get_args(Event))))
def test_only_the_tables_transitions_are_possible(phase: Phase, event: Event) -> None:
    """Any other transition is a bug in the flow and must not pass silently."""
    request = in_phase(phase)

    if (after := TABLE.get((phase, event))) is not None:
        request.advance(event)
        assert request.phase is after
    else:
        with pytest.raises(AssertionError, match=f"no transition '{event}' from phase '{phase.value}'"):
            request.advance(event)


def test_each_transition_is_listed_once_and_nothing_follows_the_end() -> None:
    """With two rows for one event, the next phase would be ambiguous."""
    assert len(TABLE) == len(TRANSITIONS)
    assert all(each.before is not Phase.OVER for each in TRANSITIONS)
    assert {each.after for each in TRANSITIONS} == set(Phase) - {Phase.NEW}
