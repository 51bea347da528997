"""Publisher and readers with CURVE keys over real sockets: readers with keys follow, others get an error."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from pathlib import Path

import pytest
import zmq

from homing.events import EndpointUnusable, EventEndpoints, EventFeed, KeyPair, KeysRefused, load_pair, subscribe
from homing.events.config import EventsSettings
from homing.events.follow.handshake import WATCHED, Connection, Handshakes
from homing.events.publish.publisher import EventPublisher
from homing.events.security.curve_keys import ServerKeys, add_client, make_folder, new_pair, reader_keys, server_keys

from .fakes import FoldingSink, store, until

Publishers = Callable[..., EventPublisher]
Follow = Callable[[EventEndpoints, FoldingSink, KeyPair | None], EventFeed]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a cluster's keys."""
    make_folder(tmp_path / "keys")
    return tmp_path / "keys"


@pytest.fixture
def server(folder: Path) -> ServerKeys:
    return server_keys(EventsSettings(events_curve_keys=str(folder)))


@pytest.fixture
def reader(folder: Path) -> KeyPair:
    return reader_keys(EventsSettings(events_curve_keys=str(folder)))


@pytest.fixture
async def follow() -> AsyncIterator[Follow]:
    """Starts feeds in the test's event loop and closes them at the end."""
    made: list[EventFeed] = []

    def make(endpoints: EventEndpoints, sink: FoldingSink, keys: KeyPair | None) -> EventFeed:
        made.append(EventFeed(endpoints, sink, heartbeat_interval_s=0.05, keys=keys))
        made[-1].start(asyncio.get_running_loop())
        return made[-1]

    yield make
    for feed in made:
        feed.close()


def with_server_key(endpoints: EventEndpoints, key: bytes) -> EventEndpoints:
    return EventEndpoints(
        events=endpoints.events,
        replay=endpoints.replay,
        state=endpoints.state,
        snapshot=endpoints.snapshot,
        curve_key=key.decode(),
    )


async def test_a_reader_with_keys_follows_as_usual(
    make_publisher: Publishers, follow: Follow, server: ServerKeys, reader: KeyPair
) -> None:
    """Uses all four sockets: events, replay after a gap, heartbeats and snapshot."""
    publisher, sink = make_publisher(keys=server), FoldingSink()
    endpoints = publisher.start()
    store(publisher, 1, 2)
    publisher.flush()

    follow(endpoints, sink, reader)
    await until(lambda: sink.live and len(sink.mirror) == 2)
    store(publisher, 3, parent=2)
    publisher.flush()
    await until(lambda: 3 in sink.mirror and sink.live)

    assert endpoints.curve_key == server.pair.public.decode()
    assert sink.refusals == []


async def test_an_unknown_client_is_told_and_logged_on_both_sides(
    make_publisher: Publishers, follow: Follow, server: ServerKeys, caplog: pytest.LogCaptureFixture
) -> None:
    """libzmq gives up silently; without an error, a reader would wait for ever."""
    publisher, sink = make_publisher(keys=server), FoldingSink()
    endpoints = publisher.start()

    follow(endpoints, sink, new_pair())
    await until(lambda: sink.refusals and "client_refused" in caplog.text)

    assert "does not know our key" in str(sink.refusals[0])
    assert "event_stream_refused" in caplog.text
    assert not sink.live


async def test_a_client_without_keys_is_told_that_it_gave_none(
    make_publisher: Publishers, follow: Follow, server: ServerKeys
) -> None:
    """The user may not know about keys, so the error must not speak of "our key"."""
    publisher, sink = make_publisher(keys=server), FoldingSink()

    follow(publisher.start(), sink, None)
    await until(lambda: sink.refusals)

    assert "no key was given" in str(sink.refusals[0])
    assert "--events-curve-keys" in str(sink.refusals[0])


@pytest.mark.parametrize("reader_encrypts", [True, False])
async def test_keys_of_another_server_are_reported(
    make_publisher: Publishers, follow: Follow, server: ServerKeys, reader: KeyPair, reader_encrypts: bool
) -> None:
    """With another server's key, or with none, libzmq just closes the connection, over and over."""
    publisher, sink = make_publisher(keys=server), FoldingSink()
    wrong = with_server_key(publisher.start(), new_pair().public if reader_encrypts else b"")

    follow(wrong, sink, reader if reader_encrypts else None)
    await until(lambda: sink.refusals)

    assert wrong.events in str(sink.refusals[0])


async def test_a_reader_that_encrypts_does_not_talk_to_a_publisher_that_does_not(
    make_publisher: Publishers, follow: Follow, reader: KeyPair
) -> None:
    """The publisher may not be the intended one."""
    sink = FoldingSink()
    plain = make_publisher().start()

    follow(with_server_key(plain, new_pair().public), sink, reader)
    await until(lambda: sink.refusals)
    with pytest.raises(EndpointUnusable, match="has no CURVE key"):
        follow(plain, sink, reader)


async def test_a_client_that_is_added_later_gets_in(
    make_publisher: Publishers, follow: Follow, server: ServerKeys, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Adding a client requires no restart of replicas."""
    publisher, sink = make_publisher(keys=server), FoldingSink()
    endpoints = publisher.start()

    follow(endpoints, sink, load_pair(add_client(folder, "lmcache")))
    await until(lambda: sink.live)

    assert "client_refused" not in caplog.text


async def test_any_client_gets_in_where_that_is_the_setting(
    make_publisher: Publishers, follow: Follow, server: ServerKeys
) -> None:
    """The connection is still encrypted; the reader generates its own key pair."""
    publisher, sink = make_publisher(keys=ServerKeys(server.pair, None)), FoldingSink()

    follow(publisher.start(), sink, None)
    await until(lambda: sink.live)


async def test_a_subscriber_with_wrong_keys_gets_an_error_and_not_silence(
    make_publisher: Publishers, server: ServerKeys
) -> None:
    """A loop that never yields would not tell its user what is wrong."""
    endpoints = make_publisher(keys=server).start()

    async with asyncio.timeout(120), aclosing(subscribe(endpoints, keys=new_pair())) as stream:
        with pytest.raises(KeysRefused, match="does not know our key"):
            await anext(stream)


@pytest.mark.parametrize("name", ["events", "replay", "state", "snapshot"])
def test_no_socket_accepts_a_client_without_keys(make_publisher: Publishers, server: ServerKeys, name: str) -> None:
    """A single unprotected socket would defeat the protection of the others."""
    endpoint = getattr(make_publisher(keys=server).start(), name)
    context = zmq.Context()
    sock = context.socket(zmq.SUB if name in ("events", "state") else zmq.DEALER)
    monitor = sock.get_monitor_socket(WATCHED)
    sock.connect(endpoint)

    handshakes = Handshakes()
    while handshakes.refusal is None:
        assert monitor.poll(20_000)
        assert handshakes.observe(monitor.recv_multipart()) is not Connection.READY
    sock.disable_monitor()
    monitor.close(0)
    sock.close(0)
    context.term()
