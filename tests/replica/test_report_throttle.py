"""Load reports of decode-only steps are throttled; changes that matter for routing are reported at once."""

import pytest
from msgspec.structs import replace

from homing.events.wire.messages import CacheCounters, LoadReport
from homing.replica.server import QUIET_S, ReportThrottle

BEFORE = LoadReport(
    epoch=1,
    step=5,
    ts=0.0,
    running=2,
    waiting=0,
    queued_prefill_tokens=0,
    decode_context_tokens=100,
    free_blocks=50,
    cached_free_blocks=5,
    total_blocks=100,
    prefill_tokens_per_s=1000.0,
    decode_step_s=0.01,
    counters=CacheCounters(),
    accepted={"router": 7},
)


def test_the_first_step_is_told():
    """Routers have no load report yet."""
    assert ReportThrottle().due(BEFORE, 0.0)


def test_decoding_on_is_told_when_it_was_quiet_for_long_enough():
    """The interval starts at the last report sent, not at the last one suppressed."""
    throttle = ReportThrottle()
    throttle.due(BEFORE, 0.0)

    steps = [replace(BEFORE, step=step, decode_context_tokens=step) for step in range(9)]
    told = [throttle.due(load, load.step * QUIET_S / 4) for load in steps]

    assert told == [False, False, False, False, True, False, False, False, True]


@pytest.mark.parametrize(
    "changed",
    [
        {"running": 1},
        {"waiting": 1},
        {"queued_prefill_tokens": 64},
        {"accepted": {"router": 8}},
        {"draining": True},
        {"pinned_blocks": 1},
        {"counters": CacheCounters(preemptions=1)},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_what_a_choice_depends_on_is_told_at_once(changed):
    """Reported exactly once: the unchanged state is not sent again."""
    throttle = ReportThrottle()
    throttle.due(BEFORE, 0.0)

    assert throttle.due(replace(BEFORE, **changed), 0.001)
    assert not throttle.due(replace(BEFORE, **changed), 0.002)
