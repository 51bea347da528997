"""The effect of external replicas' cache events on the index, without sockets. Our own replicas use feeds instead."""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from random import Random

import msgspec
import pytest
import zmq

from homing.events.follow.subscription import Apply
from homing.events.wire.cache_events import CacheEvent, Cleared, Removed, Stored
from homing.router.backend import RouterCounters
from homing.router.config import RouterSettings
from homing.router.flow.dispatcher import ServedModel
from homing.router.flow.request_flow import RequestFlow
from homing.router.replicas.external.external_replica import ExternalReplica
from homing.router.replicas.external.probe import EngineRequirements
from homing.router.replicas.replica_handle import ServiceContext
from homing.router.routing.placement import Placement
from homing.router.routing.policy.registry import make_policy

from ...fakes import BLOCK, HASHER, LIMITS, ROOT, description_of

MODEL = ServedModel(HASHER, ROOT, LIMITS)
TERMS = EngineRequirements(
    model_names=("fake",), max_model_len=4096, block_size=BLOCK, canary_ids=(), max_running_requests=8
)


class Moved(msgspec.Struct, frozen=True, tag="moved"):
    """An event type that the router does not know."""

    hashes: Sequence[int]


@contextmanager
def joined() -> Iterator[tuple[ExternalReplica, Placement]]:
    """Yield a replica in routing, and the placement that it updates."""
    loop, context = asyncio.new_event_loop(), zmq.Context[zmq.Socket[bytes]]()
    placement = Placement(make_policy("expected-ttft"), router_id="me", silence_s=1e9, rng=Random(1))
    flow = RequestFlow(placement, RouterSettings(), block_size=BLOCK, counters=RouterCounters())
    flow.adopt(MODEL)
    shared = ServiceContext(loop, context, "me", 0.2, lambda: 0.0, None, None, lambda _: None, lambda *_: None)
    description = description_of("r0", external=True, request_endpoint="http://127.0.0.1:1")
    flow.join(description, 0.0)
    try:
        yield ExternalReplica(description, flow, shared, MODEL, TERMS), placement
    finally:
        context.term()
        loop.close()


def stored(*hashes: int) -> Stored:
    """Build the event that stores blocks of the prompt 0, 1, 2, …"""
    return Stored(None, hashes, range(len(hashes) * BLOCK), BLOCK)


@pytest.mark.parametrize(
    ("events", "held"),
    [
        ([stored(1, 2)], 2),
        ([stored(1, 2), Removed([2])], 1),
        ([stored(1, 2, 3), Removed([3]), Removed([2])], 1),
        ([stored(1, 2, 3), Removed([3]), Removed([2], "CPU"), Removed([1], "CPU")], 2),
        ([stored(1, 2), Removed([2]), stored(1, 2), Removed([2]), Removed([1])], 1),
        ([stored(1, 2), Cleared()], 0),
    ],
)
def test_the_index_follows_each_type_of_event(events: list[CacheEvent], held: int) -> None:
    """The counterpart of the test below: each known type has its effect."""
    with joined() as (replica, placement):
        replica.blocks_changed(Apply(0, 1.0, events))

        assert placement.index.count("r0") == held


def test_an_unknown_type_of_event_is_an_error_and_clears_nothing() -> None:
    """A new type that this code does not handle must not be treated as `Cleared`."""
    with joined() as (replica, placement):
        replica.blocks_changed(Apply(0, 1.0, [stored(1, 2)]))

        with pytest.raises(AssertionError, match="Moved"):
            replica.blocks_changed(Apply(1, 1.0, [Moved([1])]))  # type: ignore[list-item]

        assert placement.index.count("r0") == 2
