"""The reader of one socket in an event loop."""

import asyncio
from collections.abc import Iterator

import pytest
import zmq

from homing.events.follow.socket_reader import MESSAGES_PER_WAKE, Message, SocketReader

from ..fakes import until

Pair = tuple["zmq.Socket[bytes]", "zmq.Socket[bytes]"]


@pytest.fixture
def pair(no_leaks: None) -> Iterator[Pair]:
    """Two connected sockets."""
    context = zmq.Context()
    here, there = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    here.bind("inproc://pair")
    there.connect("inproc://pair")
    yield here, there
    here.close(0)
    there.close(0)
    context.term()


async def test_more_messages_than_one_wake_up_takes_all_arrive_in_order(pair: Pair) -> None:
    """The descriptor signals once for many messages; those left over for fairness need their own wake-up."""
    got: list[Message] = []
    reader = SocketReader(asyncio.get_running_loop(), pair[0], got.append)
    sent = [[b"%d" % number] for number in range(3 * MESSAGES_PER_WAKE + 1)]
    for frames in sent:
        pair[1].send_multipart(frames)

    await until(lambda: len(got) == len(sent))

    assert got == sent
    reader.close()


async def test_what_waited_before_the_reader_came_is_handed_on(pair: Pair) -> None:
    """The descriptor's edge may have passed before the reader was created."""
    got: list[Message] = []
    pair[1].send_multipart([b"early"])

    reader = SocketReader(asyncio.get_running_loop(), pair[0], got.append)
    await until(lambda: got)

    assert got == [[b"early"]]
    reader.close()


async def test_a_handler_may_answer_and_is_not_called_within_itself(pair: Pair) -> None:
    """Sending consumes the descriptor's edge; draining at once would call the handler while it runs."""
    got: list[Message] = []
    depth = 0

    def handle(frames: Message) -> None:
        nonlocal depth
        depth += 1
        assert depth == 1
        got.append(frames)
        reader.send([b"answer"])
        reader.drain()
        depth -= 1

    reader = SocketReader(asyncio.get_running_loop(), pair[0], handle)
    for _ in range(3):
        pair[1].send_multipart([b"question"])
    await until(lambda: len(got) == 3)

    assert [pair[1].recv_multipart() for _ in range(3)] == [[b"answer"]] * 3
    reader.close()


async def test_a_handler_that_raises_does_not_stop_the_reader(pair: Pair) -> None:
    """The loop reports the exception; messages behind the failed one have no other wake-up."""
    reported: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
    got: list[Message] = []

    def handle(frames: Message) -> None:
        got.append(frames)
        if len(got) == 1:
            raise ZeroDivisionError("a user's mistake")

    reader = SocketReader(asyncio.get_running_loop(), pair[0], handle)
    for _ in range(2):
        pair[1].send_multipart([b"message"])
    await until(lambda: len(got) == 2)

    assert isinstance(reported[0]["exception"], ZeroDivisionError)
    reader.close()


async def test_no_message_comes_after_close_even_from_within_a_handler(pair: Pair) -> None:
    """The owner may already have released its own resources."""
    got: list[Message] = []

    def handle(frames: Message) -> None:
        got.append(frames)
        reader.close()
        reader.close()

    reader = SocketReader(asyncio.get_running_loop(), pair[0], handle)
    for _ in range(3):
        pair[1].send_multipart([b"message"])
    await until(lambda: got)
    assert pair[0].poll(20_000)  # the second message has arrived
    reader.drain()
    await asyncio.sleep(0)

    assert len(got) == 1
