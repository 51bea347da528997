"""The pure decision about which clients are admitted, and the socket through which libzmq asks."""

import contextlib
from collections.abc import Iterator

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st
from zmq.utils import z85

from homing.events.errors import BadKeys, MalformedFrame
from homing.events.security.curve_authenticator import CurveAuthenticator, authorize

RAW = bytes(range(32))
KEY = z85.encode(RAW)
REQUEST = [b"1.0", b"id", b"homing", b"10.0.0.7", b"", b"CURVE", RAW]


def test_a_known_key_is_let_in() -> None:
    """The reply consists of version, request id, status code, status text, user and metadata."""
    verdict = authorize(REQUEST, frozenset([KEY]))

    assert verdict.accepted
    assert verdict.reply == [b"1.0", b"id", b"200", b"OK", KEY, b""]


def test_an_unknown_key_is_refused_and_named() -> None:
    """The log names the key, so that an administrator can add it."""
    verdict = authorize(REQUEST, frozenset())

    assert not verdict.accepted
    assert (verdict.key, verdict.address, verdict.reply[2]) == (KEY, "10.0.0.7", b"400")


@given(st.lists(st.binary(max_size=40), max_size=9))
def test_whatever_is_asked_has_an_answer_or_a_name(request: list[bytes]) -> None:
    """Any other exception would stop the publisher's thread."""
    with contextlib.suppress(MalformedFrame):
        assert not authorize(request, frozenset()).accepted


@pytest.fixture
def context(no_leaks: None) -> Iterator[zmq.Context]:
    context = zmq.Context()
    yield context
    context.term()


def unreadable() -> frozenset[bytes]:
    """Fails like a clients' folder with a file that is being written."""
    raise BadKeys("clients/x.key", "no key in it")


def test_keys_that_cannot_be_read_let_nobody_in_and_end_nothing(context: zmq.Context) -> None:
    """The publisher's thread runs the authenticator and must survive an error."""
    gate, asker = CurveAuthenticator(context, unreadable), context.socket(zmq.REQ)
    asker.connect("inproc://zeromq.zap.01")
    asker.send_multipart(REQUEST)
    assert gate.socket.poll(20_000)

    gate.answer()

    assert asker.recv_multipart()[2] == b"400"
    asker.close(0)
    gate.close()


@pytest.mark.parametrize("frames", [[], [b"1.0"], [b"1.0", b"id", b"homing", b"", b"", b"NULL"]])
def test_a_malformed_request_is_logged_and_refused(
    context: zmq.Context, caplog: pytest.LogCaptureFixture, frames: list[bytes]
) -> None:
    """An exception here would end the publisher's thread, and with it the replica's event stream."""
    gate, asker = CurveAuthenticator(context, frozenset), context.socket(zmq.DEALER)
    asker.connect("inproc://zeromq.zap.01")
    asker.send_multipart([b"", *frames] if frames else [b"no delimiter"])
    assert gate.socket.poll(20_000)

    gate.answer()

    assert b"400" in asker.recv_multipart()
    assert "client_refused reason=malformed" in caplog.text
    asker.close(0)
    gate.close()
