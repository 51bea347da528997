"""The publisher over real sockets, read with plain pyzmq."""

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator

import msgspec
import pytest
import zmq

from homing.events import EndpointUnusable
from homing.events.config import EventsSettings
from homing.events.publish.publisher import EventPublisher
from homing.events.wire.frames import END_SEQ, encode_seq, replay_request
from homing.events.wire.messages import Heartbeat, SnapshotChunk, SnapshotRequest

from ..fakes import block, load_report, new_publisher, store

Publishers = Callable[..., EventPublisher]
Connect = Callable[..., "zmq.Socket[bytes]"]


@pytest.fixture
def free_ports() -> list[int]:
    """Two ports next to each other that nobody listens on."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as first:
            port = int(first.getsockname()[1])
            with contextlib.suppress(OSError, OverflowError), socket.create_server(("127.0.0.1", port + 1)):
                return [port, port + 1]


@pytest.fixture
def connect(no_leaks: None) -> Iterator[Connect]:
    """Makes plain sockets with a timeout that only catches hangs."""
    context = zmq.Context()
    made: list[zmq.Socket[bytes]] = []

    def make(kind: int, endpoint: str, topic: bytes = b"") -> "zmq.Socket[bytes]":
        sock = context.socket(kind)
        sock.rcvtimeo = 20_000
        if kind == zmq.SUB:
            sock.subscribe(topic)
        sock.connect(endpoint)
        made.append(sock)
        return sock

    yield make
    for sock in made:
        sock.close(0)
    context.term()


def replay(dealer: "zmq.Socket[bytes]", since: int) -> list[list[bytes]]:
    """The answers to a replay request, without the end marker."""
    dealer.send_multipart(replay_request(since))
    return list(iter(dealer.recv_multipart, [b"", b"kv-events@%016x" % 7, END_SEQ, b""]))


def snapshot(dealer: "zmq.Socket[bytes]") -> list[SnapshotChunk]:
    """The parts of a snapshot."""
    dealer.send_multipart([b"", msgspec.msgpack.encode(SnapshotRequest())])
    parts = [msgspec.msgpack.decode(dealer.recv_multipart()[-1], type=SnapshotChunk)]
    while not parts[-1].last:
        parts.append(msgspec.msgpack.decode(dealer.recv_multipart()[-1], type=SnapshotChunk))
    return parts


def test_live_messages_and_replayed_ones_are_the_same(make_publisher: Publishers, connect: Connect) -> None:
    """A replay answer is an empty frame and the three live frames; an end marker follows the last one."""
    publisher = make_publisher()
    endpoints = publisher.start()
    events, dealer = connect(zmq.SUB, endpoints.events), connect(zmq.DEALER, endpoints.replay)
    seen: list[list[bytes]] = []
    number = 0
    while not seen:  # until the subscription has reached the publisher
        number += 1
        store(publisher, number)
        publisher.flush()
        if events.poll(20):
            seen.append(events.recv_multipart())

    replayed = replay(dealer, 0)

    topic, seq, payload = seen[0]
    assert topic == b"kv-events@%016x" % 7
    assert [b"", topic, seq, payload] in replayed
    assert [answer[2] for answer in replayed] == [encode_seq(n) for n in range(len(replayed))]


def test_a_step_without_changes_sends_nothing(make_publisher: Publishers, connect: Connect) -> None:
    """Most decode steps store no block and should cost no message."""
    publisher = make_publisher()
    endpoints = publisher.start()
    publisher.flush()
    publisher.stored(None, [], b"")
    publisher.removed([])
    publisher.flush()

    assert replay(connect(zmq.DEALER, endpoints.replay), 0) == []


def test_a_reset_needs_no_step_to_be_sent(make_publisher: Publishers, connect: Connect) -> None:
    """An idle engine takes no steps; without this, readers would credit a cache that was cleared."""
    publisher = make_publisher()
    endpoints = publisher.start()
    state = connect(zmq.SUB, endpoints.state, b"heartbeat")
    store(publisher, 1)
    publisher.flush()
    publisher.cleared()

    beats = (msgspec.msgpack.decode(state.recv_multipart()[1], type=Heartbeat) for _ in range(100))

    assert any((beat.seq, beat.blocks, beat.digest) == (1, 0, 0) for beat in beats)


def test_without_cache_events_load_and_heartbeats_still_flow(make_publisher: Publishers, connect: Connect) -> None:
    """Users may choose to route by load alone."""
    publisher = make_publisher(EventsSettings(publish_events=False, heartbeat_interval_s=0.02))
    endpoints = publisher.start()
    state = connect(zmq.SUB, endpoints.state)
    store(publisher, 1, 2)
    publisher.removed([block(1)])
    publisher.cleared()
    publisher.flush()
    publisher.report(load_report(1))

    topics = {state.recv_multipart()[0] for _ in range(6)}

    assert topics == {b"heartbeat", b"load"}
    assert replay(connect(zmq.DEALER, endpoints.replay), 0) == []
    assert snapshot(connect(zmq.DEALER, endpoints.snapshot))[0].blocks == []


def test_steps_beyond_the_queue_are_numbered_holes_and_the_snapshot_stays_exact(
    make_publisher: Publishers, connect: Connect
) -> None:
    """The engine does not wait; readers detect the gap and can recover from a snapshot."""
    publisher = make_publisher(EventsSettings(heartbeat_interval_s=0.05), queued_batches=3)
    for number in range(1, 11):  # before the thread runs, so that the queue is certain to fill
        store(publisher, number)
        publisher.flush()
    endpoints = publisher.start()

    (part,) = snapshot(connect(zmq.DEALER, endpoints.snapshot))
    store(publisher, 11)
    publisher.flush()
    while len(kept := replay(connect(zmq.DEALER, endpoints.replay), 0)) < 4:
        pass

    assert [held.block_hash for held in part.blocks] == list(range(1, 11))
    assert part.seq == 9
    assert [answer[2] for answer in kept] == [encode_seq(n) for n in (0, 1, 2, 10)]


def test_a_long_replay_reaches_a_slow_reader_whole_while_others_are_served(
    make_publisher: Publishers, connect: Connect
) -> None:
    """A ROUTER silently drops messages above a reader's high-water mark (1,000 messages by default)."""
    publisher = make_publisher()
    endpoints = publisher.start()
    for number in range(1, 6001):
        store(publisher, number)
        publisher.flush()
    slow, quick = connect(zmq.DEALER, endpoints.replay), connect(zmq.DEALER, endpoints.replay)
    asker = connect(zmq.DEALER, endpoints.snapshot)
    while snapshot(asker)[0].seq != 5999:
        pass
    slow.send_multipart(replay_request(0))

    assert len(replay(quick, 5990)) == 10
    answers = [slow.recv_multipart() for _ in range(6001)]
    assert [answer[2] for answer in answers] == [*map(encode_seq, range(6000)), END_SEQ]


def test_a_request_that_cannot_be_read_is_logged_and_the_next_is_answered(
    make_publisher: Publishers, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    """Anyone who can connect may send a malformed request."""
    publisher = make_publisher()
    endpoints = publisher.start()
    dealer, asker = connect(zmq.DEALER, endpoints.replay), connect(zmq.DEALER, endpoints.snapshot)
    for frames in ([b""], [b"", b"short"], [b"", b"a", b"b", b"c"]):
        dealer.send_multipart(frames)
    asker.send_multipart([b"", b"\xc1"])
    asker.send_multipart([b"", b"\x81" + msgspec.msgpack.encode("deep") + b"\x91" * 5000])

    assert replay(dealer, 0) == []
    assert snapshot(asker)[0].last
    assert caplog.text.count("request_malformed") == 5


def test_what_was_flushed_before_closing_is_sent(make_publisher: Publishers, connect: Connect) -> None:
    """Closing twice and announcing after closing are harmless, because an engine may still be shutting down."""
    before = set(threading.enumerate())  # other tests' publishers may still run
    publisher = make_publisher()
    publisher.start()
    store(publisher, 1)
    publisher.flush()

    publisher.close()
    publisher.close()
    store(publisher, 2)
    publisher.flush()
    publisher.report(load_report(1))

    assert "homing-events" not in {thread.name for thread in set(threading.enumerate()) - before}


@pytest.mark.parametrize(
    ("settings", "topic"),
    [
        ({"events_preset": "llm-d"}, b"kv@127.0.0.1@poet"),
        ({"events_preset": "aibrix"}, b"kv-events@%016x" % 7),
        ({"events_topic": "{model}/{replica}/{epoch}"}, b"poet/r3/%016x" % 7),
    ],
)
def test_the_same_batches_are_published_at_a_fixed_address(
    settings: dict[str, str], topic: bytes, connect: Connect, free_ports: list[int], no_leaks: None
) -> None:
    """Other indexers dial ports that they know, under their own topic; our readers' sockets stay as they are. A second
    replica of the node takes the next ports."""
    ports = {"events_port": free_ports[0], "events_replay_port": free_ports[1]}
    made = [EventsSettings(heartbeat_interval_s=0.05, **ports, **settings) for _ in range(2)]
    publishers = [
        EventPublisher(each, host="127.0.0.1", block_size=4, epoch=7, model="poet", replica="r3") for each in made
    ]
    try:
        ends = [publisher.start() for publisher in publishers]
        for publisher in publishers:
            store(publisher, 1)
            publisher.flush()
        own, fixed = [connect(zmq.DEALER, each) for each in (ends[0].replay, ends[0].fixed_replay)]
        fixed.send_multipart(replay_request(0))
        (first, end) = fixed.recv_multipart(), fixed.recv_multipart()

        assert ends[0].fixed_events == f"tcp://127.0.0.1:{free_ports[0]}"
        assert ends[0].fixed_replay == f"tcp://127.0.0.1:{free_ports[1]}"
        assert ends[1].fixed_events not in {ends[0].fixed_events, ""}
        assert first[1:3] == [topic, encode_seq(0)]
        assert end == [b"", topic, END_SEQ, b""]
        assert [answer[3] for answer in replay(own, 0)] == [first[3]]
    finally:
        for publisher in publishers:
            publisher.close()


@pytest.mark.parametrize("host", ["", "*", "0.0.0.0", "::"])
def test_a_publisher_refuses_to_listen_on_every_interface(host: str, no_leaks: None) -> None:
    """Unless CURVE keys are configured, anyone who connects can read tenants' token ids."""
    publisher = EventPublisher(EventsSettings(), host=host, block_size=4, epoch=1)

    with pytest.raises(EndpointUnusable, match="all interfaces"):
        publisher.start()


def test_a_folder_too_long_for_a_socket_address_is_refused_by_name(tmp_path, no_leaks: None) -> None:
    """ZeroMQ's own error only says that a file name is too long."""
    with pytest.raises(EndpointUnusable, match="at most 103"):
        new_publisher(ipc_dir=tmp_path / ("x" * 120)).start()


def test_an_address_that_cannot_be_bound_leaves_nothing_behind(tmp_path, no_leaks: None) -> None:
    """The cluster retries a failed start."""
    publisher = new_publisher(ipc_dir=tmp_path / "missing")

    with pytest.raises(EndpointUnusable, match="cannot bind"):
        publisher.start()
    publisher.close()
