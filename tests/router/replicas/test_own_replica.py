"""What a replica's cache events do to the index, without sockets."""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from random import Random

import msgspec
import pytest
import zmq

from homing.events.wire.dialects import CacheEvent, Cleared, Removed, Stored
from homing.router.backend import RouterCounters
from homing.router.flow.request_flow import Dispatcher, DispatcherLimits, Naming
from homing.router.replicas.external.external_replica import ForeignMember
from homing.router.replicas.external.probe import ForeignTerms
from homing.router.replicas.own_replica import Member
from homing.router.replicas.replica_handle import Shell
from homing.router.routing.policy.base import make_policy
from homing.router.routing.replica_load import LoadBook
from homing.router.routing.reservations import Reservations

from ..fakes import BLOCK, HASHER, LIMITS, ROOT, description_of

NAMING = Naming(HASHER, ROOT, LIMITS)
TERMS = ForeignTerms(model_names=("fake",), max_model_len=4096, block_size=BLOCK, canary_ids=(), max_running_requests=8)


class Moved(msgspec.Struct, frozen=True, tag="moved"):
    """An event type that nobody has taught the router."""

    hashes: Sequence[int]


@contextmanager
def joined(kind: type[Member] | type[ForeignMember]) -> Iterator[tuple[Member | ForeignMember, Dispatcher]]:
    """A replica that holds two blocks, and the flow that it tells."""
    loop, context = asyncio.new_event_loop(), zmq.Context[zmq.Socket[bytes]]()
    dispatcher = Dispatcher(
        make_policy("expected-ttft"),
        NAMING,
        loads=LoadBook("me", 1e9),
        reservations=Reservations(30.0),
        limits=DispatcherLimits(100, 3, request_timeout_s=600.0),
        counters=RouterCounters(),
        rng=Random(1),
    )
    shell = Shell(loop, context, "me", 0.2, lambda: 0.0, dispatcher.counters, None, None, lambda _: None)
    url = {"request_endpoint": "http://127.0.0.1:1"}
    description = description_of("r0", foreign=kind is ForeignMember, **url)
    dispatcher.join(description, 0.0)
    try:
        if kind is Member:
            yield Member(description, dispatcher, shell), dispatcher
        else:
            yield ForeignMember(description, dispatcher, shell, NAMING, TERMS), dispatcher
    finally:
        context.term()
        loop.close()


def stored(*hashes: int) -> Stored:
    """Blocks of a prompt of 0, 1, 2, …"""
    return Stored(None, hashes, range(len(hashes) * BLOCK), BLOCK)


@pytest.mark.parametrize("kind", [Member, ForeignMember])
@pytest.mark.parametrize(
    ("events", "held"),
    [
        ([stored(1, 2)], 2),
        ([stored(1, 2), Removed([2])], 1),
        ([stored(1, 2), Cleared()], 0),
    ],
)
def test_the_index_follows_each_type_of_event(
    kind: type[Member] | type[ForeignMember], events: list[CacheEvent], held: int
) -> None:
    """The counterpart of the test below: known types have their effect."""
    with joined(kind) as (member, dispatcher):
        member.apply(events)

        assert dispatcher.index.count("r0") == held


@pytest.mark.parametrize("kind", [Member, ForeignMember])
def test_an_unknown_type_of_event_is_an_error_and_clears_nothing(kind: type[Member] | type[ForeignMember]) -> None:
    """A new type that was forgotten here must not pass for `Cleared`."""
    with joined(kind) as (member, dispatcher):
        member.apply([stored(1, 2)])

        with pytest.raises(AssertionError, match="Moved"):
            member.apply([Moved([1])])  # type: ignore[list-item]

        assert dispatcher.index.count("r0") == 2
