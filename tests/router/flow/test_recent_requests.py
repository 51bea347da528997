"""The recent requests and failures that are kept for the live page."""

import msgspec

from homing.router.flow.recent_requests import MAX_FAILED, MAX_PLACED, MAX_TRACE_ID

from ..fakes import replica_of, request_of
from .test_request_flow import World


def test_the_newest_decision_comes_first_with_what_came_of_it() -> None:
    """Each request shows the table as of its decision: the first request found nothing cached."""
    world = World()
    prompt = list(range(200))
    world.submit(request_of(prompt))
    world.settle()
    world.submit(request_of(prompt))

    newest, oldest = world.flow.recent.routed()

    assert (oldest.state, newest.state) == ("finished", "sent")
    assert [row.held_blocks for row in oldest.explanation.replicas] == [0, 0]
    assert max(row.held_blocks for row in newest.explanation.replicas) == oldest.explanation.prompt_blocks
    assert oldest.generated_tokens > 0
    world.settle()


def test_a_few_requests_are_kept_and_none_of_their_prompts() -> None:
    """A busy router whose page is never opened must not grow, nor keep tenants' prompts."""
    world = World()
    for number in range(2 * MAX_PLACED):
        world.submit(msgspec.structs.replace(request_of([number] * 100), trace_id="x" * 1000))
        world.settle()

    kept = world.flow.recent.routed()

    assert len(kept) == MAX_PLACED
    assert all(len(each.trace_id) == MAX_TRACE_ID for each in kept)
    world.flow.recent.check()


def test_a_request_that_moves_shows_its_last_decision() -> None:
    """It is listed once, as one request."""
    world = World()
    request_id = world.submit(request_of(list(range(200))))
    first = replica_of(world.flow, request_id)
    assert first is not None
    world.lose(first)
    world.wait(1.0)

    [shown] = world.flow.recent.routed()

    assert shown.explanation.chosen not in (None, first)
    assert shown.continuations == 1
    world.settle()


def test_failures_are_bounded_and_the_newest_comes_first() -> None:
    """An outage fails thousands of requests."""
    world = World(retries=0)
    for number in range(2 * MAX_FAILED):
        request_id = world.submit(request_of([number] * 40))
        state, replica = world.flow.oldest(1)[0], replica_of(world.flow, request_id)
        assert replica is not None
        world.lose(replica)
        world.flow.recent.add_failure(state, world.errors[request_id], float(number))
        world.join(f"n{number}")

    failed = world.flow.recent.failed()

    assert [each.at for each in failed] == [float(2 * MAX_FAILED - 1 - place) for place in range(MAX_FAILED)]
    assert failed[0].status == 502
