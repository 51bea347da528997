"""Meaning of a socket monitor's handshake events."""

import struct

import pytest
import zmq

from homing.events.follow.handshake import PATIENCE, Connection, Handshakes

FAILED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL


def message(event: int) -> list[bytes]:
    """Frames as a monitor socket sends them."""
    return [struct.pack("=hi", event, 0) if event < 1 << 15 else struct.pack("=Hi", event, 0), b"tcp://x"]


def observe(handshakes: Handshakes, *events: int) -> list[Connection | None]:
    return [handshakes.observe(message(event)) for event in events]


@pytest.mark.parametrize("event", [zmq.EVENT_HANDSHAKE_FAILED_AUTH, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL])
def test_a_refusal_is_known_when_the_connection_is_lost(event: int) -> None:
    """libzmq does not retry after a refusal, so no later event would report it."""
    handshakes = Handshakes()

    assert observe(handshakes, event, zmq.EVENT_DISCONNECTED) == [None, Connection.LOST]
    assert handshakes.refusal is not None


def test_connections_that_just_end_are_believed_to_be_refused_after_some() -> None:
    """A process that dies during a handshake causes the same events, but only once."""
    handshakes = Handshakes()

    observe(handshakes, *[FAILED, zmq.EVENT_DISCONNECTED] * (PATIENCE - 1))
    assert handshakes.refusal is None
    observe(handshakes, FAILED, zmq.EVENT_DISCONNECTED)

    assert "an unexpected key" in handshakes.refusal


def test_a_connection_that_comes_about_ends_all_doubt() -> None:
    """The keys may have been corrected meanwhile."""
    handshakes = Handshakes()
    observe(handshakes, zmq.EVENT_HANDSHAKE_FAILED_AUTH, FAILED, FAILED)

    assert observe(handshakes, zmq.EVENT_HANDSHAKE_SUCCEEDED, FAILED) == [Connection.READY, None]
    assert handshakes.refusal is None


def test_a_plain_loss_is_no_refusal() -> None:
    """A connection is also lost when the publisher's process dies."""
    handshakes = Handshakes()

    assert observe(handshakes, zmq.EVENT_CLOSED, zmq.EVENT_DISCONNECTED) == [Connection.LOST] * 2
    assert handshakes.refusal is None
