"""Long answers to readers that read, read slowly, or do not read at all."""

from collections.abc import Callable, Iterator

import pytest
import zmq

from homing.events.publish.answer_sender import STALL_S, AnswerSender

Reader = Callable[[bytes], "zmq.Socket[bytes]"]
PART = b"x" * 100_000


@pytest.fixture
def router(no_leaks: None) -> Iterator["zmq.Socket[bytes]"]:
    """A ROUTER socket that queues one message per reader."""
    context = zmq.Context()
    sock = context.socket(zmq.ROUTER)
    sock.set_hwm(1)
    sock.bind("inproc://answers")
    yield sock
    sock.close(0)
    context.term()


@pytest.fixture
def reader(router: "zmq.Socket[bytes]") -> Iterator[Reader]:
    """Makes readers that have sent a request."""
    made: list[zmq.Socket[bytes]] = []

    def make(identity: bytes) -> "zmq.Socket[bytes]":
        sock = router.context.socket(zmq.DEALER)
        sock.identity = identity
        sock.set_hwm(1)
        sock.connect("inproc://answers")
        sock.send(b"ask")
        made.append(sock)
        return sock

    yield make
    for sock in made:
        sock.close(0)


def long_answer(parts: int = 50) -> Iterator[list[bytes]]:
    """An answer with more parts than a socket queues."""
    return iter([[b"%d" % number, PART] for number in range(parts)])


def ask(transfers: AnswerSender) -> None:
    """Start an answer to every pending request."""
    for identity, _ in transfers.requests():
        transfers.start(identity, long_answer())


def read_all(sock: "zmq.Socket[bytes]") -> list[bytes]:
    """The first frames of all messages that have arrived."""
    got = []
    while sock.poll(5):
        got.append(sock.recv_multipart()[0])
    return got


def test_a_slow_reader_gets_every_part_in_order(router: "zmq.Socket[bytes]", reader: Reader) -> None:
    """A ROUTER silently drops messages above its high-water mark. A reader that keeps reading is never given up."""
    slow, transfers, now_s, got = reader(b"slow"), AnswerSender(router), 0.0, []
    ask(transfers)
    while transfers:
        transfers.advance(now_s)
        now_s += STALL_S * 0.4
        got += read_all(slow)
    got += read_all(slow)

    assert got == [b"%d" % number for number in range(50)]


def test_readers_that_never_read_are_given_up_and_make_room(router: "zmq.Socket[bytes]", reader: Reader) -> None:
    """Each holds a slot and keeps the publisher's thread busy; enough of them would block all other readers."""
    transfers = AnswerSender(router)
    for number in range(256):
        reader(b"idle%d" % number)
    for _ in range(4):
        ask(transfers)
    transfers.advance(0.0)
    late = reader(b"late")
    assert router.poll(20_000)
    ask(transfers)
    assert router.poll(0), "its request waits in the socket"
    assert transfers.interest == 0, "polling for it would return at once, over and over"

    transfers.advance(STALL_S)
    assert not transfers
    assert transfers.interest == zmq.POLLIN
    ask(transfers)
    transfers.advance(STALL_S)

    assert read_all(late)[0] == b"0"


def test_a_reader_that_asks_again_gets_a_whole_answer_and_new_patience(
    router: "zmq.Socket[bytes]", reader: Reader
) -> None:
    """The reader has abandoned the earlier answer, so no part of it may precede the new one."""
    again, transfers = reader(b"again"), AnswerSender(router)
    ask(transfers)
    transfers.advance(0.0)
    again.send(b"ask")
    ask(transfers)
    transfers.advance(STALL_S)
    transfers.advance(STALL_S * 1.9)
    assert transfers

    got = []
    while transfers:
        got += read_all(again)
        transfers.advance(STALL_S * 1.9)
    got += read_all(again)

    assert got[got.index(b"0", 1) :] == [b"%d" % number for number in range(50)]
