"""A replica's load: what it reported, plus the requests sent since."""

import pytest

from homing.events.load_report import PrefillSums
from homing.events.wire.messages import PrefillCost, PrefillWork
from homing.router.routing.fleet import REFIT_EVERY_S, REFRESHED_AT_ONCE, Fleet
from homing.router.routing.joined_replica import InFlight

from ..fakes import description_of, report_of


@pytest.fixture
def fleet():
    fleet = Fleet("me", silence_s=3.0)
    fleet.join(description_of("r0"), now=0.0)
    yield fleet
    fleet.check()


def sent(request_id: int, uncached_tokens: int, blocks: int, prefill_s: float) -> InFlight:
    return InFlight(
        request_id=request_id,
        chain=(),
        start=0,
        uncached_tokens=uncached_tokens,
        blocks=blocks,
        prefill_s=prefill_s,
    )


def test_what_is_on_the_way_counts_at_once(fleet: Fleet) -> None:
    """Otherwise a burst would go to whichever replica had the best last report."""
    fleet.send("r0", sent(1, 100, 7, 0.1), now=0.0)
    fleet.send("r0", sent(2, 50, 4, 0.05), now=0.0)

    load = fleet.load("r0", now=0.0)

    assert (load.waiting, load.queued_prefill_tokens, load.free_blocks) == (2, 150, 989)


def test_what_the_replica_has_accepted_is_counted_once(fleet: Fleet) -> None:
    """The report names the highest request id that it includes."""
    fleet.send("r0", sent(1, 100, 7, 0.1), now=0.0)
    fleet.send("r0", sent(2, 50, 4, 0.05), now=0.0)

    fleet.report("r0", report_of(running=1, queued_prefill_tokens=90, accepted={"me": 1, "other": 9}), now=1.0)

    load = fleet.load("r0", now=1.0)
    assert (load.running, load.waiting, load.queued_prefill_tokens) == (1, 1, 140)
    assert len(fleet["r0"].requests) == 2


def test_a_replica_without_a_word_is_silent_until_it_is_heard_again(fleet: Fleet) -> None:
    """A replica whose publisher died must not look like the least loaded one forever."""
    assert not fleet.load("r0", now=3.0).silent
    assert fleet.load("r0", now=3.1).silent

    fleet.tokens_arrived("r0", now=3.2)

    assert not fleet.load("r0", now=4.0).silent


def test_a_replica_that_works_on_our_requests_without_a_word_is_stuck(fleet: Fleet) -> None:
    """Its process may still answer pings, but the requests sent to it make no progress."""
    fleet.join(description_of("r1"), now=0.0)
    fleet.send("r0", sent(1, 100, 7, 0.1), now=0.0)
    fleet.tokens_arrived("r1", now=4.0)

    assert fleet.stalled(now=2.9) == []
    assert fleet.stalled(now=4.0) == ["r0"]

    fleet.tokens_arrived("r0", now=4.1)

    assert fleet.stalled(now=4.2) == []


def test_a_report_that_is_repeated_is_no_sign_that_anything_moves(fleet: Fleet) -> None:
    """A publisher has its own thread, which keeps running when the engine hangs in a step."""
    fleet.join(description_of("r1"), now=0.0)
    fleet.send("r0", sent(1, 100, 7, 0.1), now=0.0)
    for tenth in range(1, 50):
        fleet.report("r0", report_of(step=3, ts=1.0), now=tenth / 10)
        fleet.report("r1", report_of(step=3, ts=tenth / 10), now=tenth / 10)

    assert fleet.stalled(now=4.9) == ["r0"]
    assert fleet.load("r0", now=4.9).silent
    assert not fleet.load("r1", now=4.9).silent
    assert [load.silent for load in fleet.loads(now=4.9)] == [True, False]


def test_a_step_may_take_as_long_as_its_budget_does(fleet: Fleet) -> None:
    """A slow replica in the middle of a long prompt is not stuck: 2,048 tokens at 200 per second take ten seconds."""
    fleet.join(description_of("r1"), now=0.0)
    fleet.report("r0", report_of(prefill_tokens_per_s=200.0), now=0.0)
    fleet.send("r0", sent(1, 100, 7, 0.1), now=0.0)
    longest_s = description_of("r0").max_batched_tokens / 200.0

    for now in (4.0, 3 * longest_s):
        fleet.tokens_arrived("r1", now)
        assert fleet.stalled(now) == []

    fleet.tokens_arrived("r1", 5 * longest_s)
    assert fleet.stalled(5 * longest_s) == ["r0"]


def test_nobody_is_stuck_where_all_are_silent_or_nothing_is_asked(fleet: Fleet) -> None:
    """If all are silent at once, the router itself was paused, or there is no other replica to move requests to."""
    fleet.join(description_of("r1"), now=0.0)
    fleet.send("r0", sent(1, 100, 7, 0.1), now=0.0)
    assert fleet.stalled(now=60.0) == []

    fleet.tokens_arrived("r0", now=60.0)

    assert fleet.stalled(now=60.0) == []


def test_a_drained_replica_says_so_whoever_decided_it(fleet: Fleet) -> None:
    """The controller may drain it, or the replica itself may report that it is draining."""
    fleet.report("r0", report_of(draining=True), now=0.0)
    assert fleet.load("r0", now=0.0).draining

    fleet.report("r0", report_of(), now=0.0)
    fleet.set_unavailable("r0", "draining")

    assert fleet.load("r0", now=0.0).draining


def test_a_replica_that_warms_up_rests_until_it_is_let_go(fleet: Fleet) -> None:
    """It is not draining: it is about to start serving, not to leave."""
    fleet.set_unavailable("r0", "warming")
    warming = fleet.load("r0", now=0.0)
    fleet.set_unavailable("r0", None)

    assert (warming.warming, warming.draining) == (True, False)
    assert not fleet.load("r0", now=0.0).warming


def test_a_finished_request_leaves_no_load(fleet: Fleet) -> None:
    """This includes a request that never appeared in a report."""
    fleet.send("r0", sent(1, 100, 7, 0.1), now=0.0)

    fleet.ended("r0", 1)

    assert fleet.load("r0", now=0.0).queued_prefill_tokens == 0
    assert len(fleet["r0"].requests) == 0


def test_the_rates_of_warm_up_count_until_others_are_measured(fleet: Fleet) -> None:
    """A replica that has not worked yet reports rates of zero; dividing by one would raise."""
    fleet.report("r0", report_of(prefill_tokens_per_s=0.0, decode_step_s=0.0), now=0.0)

    load = fleet.load("r0", now=0.0)

    assert (load.prefill_tokens_per_s, load.decode_step_s) == (10_000.0, 0.002)


def test_a_replica_where_nothing_runs_is_as_fast_as_at_its_warm_up(fleet: Fleet) -> None:
    """Its last steps had a load that is gone. Considered slow, it would get no requests and measure nothing new."""
    steps_s = []
    for running in (3, 0):
        fleet.report("r0", report_of(running=running, decode_step_s=0.05), now=0.0)
        steps_s.append(fleet.load("r0", now=0.0).decode_step_s)

    assert steps_s == [0.05, 0.002]


def test_a_queue_is_worked_down_while_nothing_is_heard(fleet: Fleet) -> None:
    """A step of a long prompt takes most of a second, so work left at the last report may be done by now."""
    fleet.report("r0", report_of(step=1, queued_prefill_tokens=9, queued_prefill_s=2.0), now=10.0)
    fleet.send("r0", sent(1, 100, 7, 0.5), now=11.0)

    assert fleet.load("r0", now=11.0).busy_until == 12.5


def test_what_is_sent_to_an_idle_replica_begins_then(fleet: Fleet) -> None:
    """Its last report may be old: none of the time since then was spent on this request."""
    fleet.report("r0", report_of(step=1), now=10.0)
    fleet.send("r0", sent(1, 100, 7, 0.5), now=60.0)

    assert fleet.load("r0", now=60.0).busy_until == 60.5


def test_a_request_that_is_taken_back_is_not_waited_for(fleet: Fleet) -> None:
    """An idle replica repeats its report, so no report would show that the time is free again."""
    fleet.send("r0", sent(1, 10_000, 625, 10.0), now=1.0)
    fleet.ended("r0", 1)

    assert fleet.load("r0", now=1.0).busy_until <= 1.0


def test_a_report_says_anew_how_long_the_queue_is(fleet: Fleet) -> None:
    """Accepted requests are included in the report; requests still on the way are added to it."""
    fleet.send("r0", sent(1, 100, 7, 0.1), now=0.0)
    fleet.send("r0", sent(2, 50, 4, 0.05), now=0.0)

    report = report_of(step=1, queued_prefill_tokens=90, queued_prefill_s=0.4, accepted={"me": 1})
    fleet.report("r0", report, now=1.0)

    assert fleet.load("r0", now=1.0).busy_until == 1.0 + 0.4 + 0.05


def test_a_heartbeat_that_repeats_a_report_does_not_undo_what_was_worked_since(fleet: Fleet) -> None:
    """It arrives in the middle of a long step, with the numbers from before the step."""
    report = report_of(step=1, queued_prefill_tokens=9, queued_prefill_s=2.0)
    fleet.report("r0", report, now=10.0)
    fleet.report("r0", report, now=11.0)

    assert fleet.load("r0", now=11.0).busy_until == 12.0


def test_a_replica_that_does_not_say_how_long_its_queue_takes_is_taken_at_its_rate(fleet: Fleet) -> None:
    """External engines do not report it, and neither do replicas of an earlier version."""
    fleet.report("r0", report_of(step=1, queued_prefill_tokens=5000), now=1.0)

    assert fleet.load("r0", now=1.0).busy_until == 1.5


def test_a_queue_is_priced_by_what_all_replicas_have_measured(fleet: Fleet) -> None:
    """A replica's own fit may be seconds off for a long prompt; it is used only if there is nothing better."""
    work, sums = PrefillWork(1, 100, 0.0, 0.0), PrefillSums()
    for _ in range(100):
        sums.observe(work, 0.1)
    own = PrefillCost(0.0, 1.0, 0.0)
    fleet.report("r0", report_of(step=1, prefill_cost=own, prefill_sums=sums.values), now=0.0)
    cost = fleet.load("r0", now=REFIT_EVERY_S).prefill_cost

    report = report_of(step=2, queued_prefill_tokens=100, queued_prefill_s=100.0, queued_prefill=work, prefill_cost=own)
    fleet.report("r0", report, now=2.0)

    assert cost.seconds(0, 100) == pytest.approx(0.1, rel=0.02)
    assert fleet.load("r0", now=2.0).busy_until == pytest.approx(2.1, rel=0.01)


def test_a_warm_up_that_was_disturbed_does_not_count_against_a_replica(fleet: Fleet) -> None:
    """Equal replicas that warm up at the same time measure different rates; the slower one would get no requests."""
    fleet.join(description_of("r1", decode_step_s=0.003), now=0.0)
    fleet.report("r1", report_of(decode_step_s=0.004), now=0.0)

    assert [fleet.load(name, now=0.0).decode_step_s for name in ("r0", "r1")] == [0.002, 0.002]

    fleet.leave("r0")
    assert fleet.load("r1", now=0.0).decode_step_s == 0.003


def test_a_replica_whose_steps_take_longer_decodes_as_much_slower(fleet: Fleet) -> None:
    """It runs on a slower device."""
    fleet.join(description_of("r1", decode_step_s=0.006), now=0.0)
    for name, seconds in (("r0", 0.1), ("r1", 0.3)):
        sums = PrefillSums()
        for _ in range(100):
            sums.observe(PrefillWork(1, 100, 0.0, 0.0), seconds)
        fleet.report(name, report_of(step=1, decode_step_s=0.0, prefill_sums=sums.values), now=0.0)

    fast, slow = (fleet.load(name, now=REFIT_EVERY_S).decode_step_s for name in ("r0", "r1"))

    assert fast == pytest.approx(0.002)
    assert 2 * fast < slow <= 0.006


@pytest.mark.parametrize(
    "wrong",
    [
        {"running": -1},
        {"free_blocks": -5},
        {"decode_step_s": float("nan")},
        {"prefill_tokens_per_s": float("inf")},
        {"queued_prefill_s": -0.1},
        {"queued_prefill": PrefillWork(1, 10, float("nan"), 0.0)},
    ],
)
def test_a_report_that_no_replica_can_send_is_ignored(fleet: Fleet, wrong: dict[str, object]) -> None:
    """Every cost would be infinite or negative, and requests would be sent there, or nowhere."""
    fleet.report("r0", report_of(step=1, running=2), now=0.0)
    before = fleet.load("r0", now=0.0)

    assert not fleet.report("r0", report_of(step=2, **wrong), now=1.0)

    assert fleet.load("r0", now=1.0) == before


def test_a_cost_that_no_replica_can_have_is_not_used(fleet: Fleet) -> None:
    """Its own rate is known nevertheless, and a cached prefix never makes the rest dearer."""
    fleet.report("r0", report_of(step=1, prefill_cost=PrefillCost(0.0, float("nan"), 0.0, 0.0)), now=0.0)
    assert fleet.load("r0", now=0.0).prefill_cost == PrefillCost(0.0, 1e-4, 0.0)

    fleet.report("r0", report_of(step=2, prefill_cost=PrefillCost(0.0, 1e-4, 1e-9, 5e-6)), now=0.0)
    assert fleet.load("r0", now=0.0).prefill_cost == PrefillCost(0.0, 1e-4, 1e-9, 1e-9)


def test_no_call_does_work_for_a_whole_large_fleet() -> None:
    """The router has one thread: a fit of all costs, or an update of all loads, would delay every request."""
    fleet, replicas = Fleet("me", silence_s=1e9), 600
    work = PrefillWork(1, 100, 0.0, 0.0)
    for number in range(replicas):
        fleet.join(description_of(f"r{number}"), now=0.0)
        sums = PrefillSums()
        for _ in range(100):
            sums.observe(work, 0.1)
        fleet.report(f"r{number}", report_of(step=1, running=1, prefill_sums=sums.values), now=0.0)

    def changed(now: float) -> int:
        before = [joined.load for joined in fleet]
        fleet.refresh(now)
        return sum(joined.load is not load for joined, load in zip(fleet, before, strict=True))

    slices = [changed(now=0.0) for _ in range(200)]

    assert max(slices) <= REFRESHED_AT_ONCE < replicas
    fitted = [joined.load.prefill_cost.seconds(0, 100) for joined in fleet]
    assert fitted == [pytest.approx(0.1, rel=0.02)] * replicas, "all are fitted in the end"
    assert fleet.load("r599", now=0.0).running == 1
    fleet.check()
