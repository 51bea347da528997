"""The connection to one replica, over real sockets."""

import asyncio
import signal
import subprocess
import sys

import msgspec
import pytest
import zmq

from homing.events.follow.handshake import PATIENCE, Handshakes
from homing.events.security.curve_keys import ServerKeys, new_pair, protect_server
from homing.replica.messages import Abort, Reply, TokenBatch
from homing.router.replicas.request_link import PING_INTERVAL_MS, PING_TIMEOUT_MS, ReplicaLink

from ..fakes import until

ABORT = Abort(request_ids=[1])
BATCH = TokenBatch(step=1, outputs=[])
#: The request socket of a replica, and nothing else.
LISTENER = """
import time, zmq
with zmq.Context() as context, context.socket(zmq.ROUTER) as sock:
    sock.bind("tcp://127.0.0.1:*")
    print(sock.getsockopt_string(zmq.LAST_ENDPOINT), flush=True)
    time.sleep(600)
"""


class Sink:
    """Records a link's callbacks."""

    def __init__(self) -> None:
        self.up = self.down = 0
        self.replies: list[Reply] = []
        self.unread: list[str] = []

    def connected(self) -> None:
        self.up += 1

    def lost(self) -> None:
        self.down += 1

    def reply(self, reply: Reply) -> None:
        self.replies.append(reply)

    def unreadable(self, reason: str) -> None:
        self.unread.append(reason)


@pytest.fixture
def context():
    context = zmq.Context()
    yield context
    context.term()


@pytest.fixture
def peer(context):
    peer = context.socket(zmq.ROUTER)
    peer.linger = 0
    yield peer
    peer.close(0)


def open_link(context, endpoint: str, sink: Sink, name: str = "me") -> ReplicaLink:
    return ReplicaLink(endpoint, name, sink, context=context, loop=asyncio.get_running_loop())


def listen(peer) -> str:
    return f"tcp://127.0.0.1:{peer.bind_to_random_port('tcp://127.0.0.1')}"


async def received(peer) -> list[bytes]:
    await until(lambda: peer.poll(0))
    return peer.recv_multipart()


async def test_messages_go_both_ways(context, peer) -> None:
    """The connection's identity is the router's id, which the replica uses to address replies and to count requests."""
    sink = Sink()
    link = open_link(context, listen(peer), sink)
    await until(lambda: sink.up)

    assert link.send(ABORT)
    identity, payload = await received(peer)
    peer.send_multipart([identity, msgspec.msgpack.encode(BATCH)])
    await until(lambda: sink.replies)

    assert (identity, msgspec.msgpack.decode(payload, type=Abort)) == (b"me", ABORT)
    assert sink.replies == [BATCH]
    link.close()


async def test_nothing_is_queued_for_a_peer_that_is_not_there(context) -> None:
    """A request must not wait in a socket, where neither router nor replica can see it."""
    sink = Sink()
    link = open_link(context, "tcp://127.0.0.1:1", sink)

    assert not link.send(ABORT)
    await until(lambda: sink.down)

    assert not link.send(ABORT)
    assert (sink.up, sink.down) == (0, 1)


async def test_a_lost_peer_is_noticed_at_once(context, peer) -> None:
    """A killed process closes its sockets; replies that it sent before still count."""
    sink = Sink()
    link = open_link(context, listen(peer), sink)
    await until(lambda: sink.up)
    link.send(ABORT)
    identity, _ = await received(peer)

    for _ in range(1000):
        peer.send_multipart([identity, msgspec.msgpack.encode(BATCH)])
    await until(lambda: len(sink.replies) == 1000)
    peer.close(0)
    await until(lambda: sink.down)

    assert not link.send(ABORT)
    link.close()
    assert sink.down == 1


async def test_a_frozen_peer_is_lost(context) -> None:
    """SIGSTOP closes no socket: only pings detect it, and requests must move within a second."""
    sink = Sink()
    command = [sys.executable, "-c", LISTENER]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:  # noqa: ASYNC220 - prints one line
        try:
            link = open_link(context, process.stdout.readline().strip(), sink)
            await until(lambda: sink.up)
            process.send_signal(signal.SIGSTOP)
            await until(lambda: sink.down)
        finally:
            process.kill()

    assert not link.send(ABORT)
    assert PING_INTERVAL_MS + PING_TIMEOUT_MS < 1000
    link.close()


async def test_what_cannot_be_read_is_dropped_and_said(context, peer) -> None:
    """One malformed frame must not end the connection."""
    sink = Sink()
    link = open_link(context, listen(peer), sink)
    await until(lambda: sink.up)
    link.send(ABORT)
    identity, _ = await received(peer)

    deep = b"\x82" + b"".join(map(msgspec.msgpack.encode, ("type", "tokens", "deep"))) + b"\x91" * 5000
    for payload in (b"", b"\xff", deep, msgspec.msgpack.encode({"type": "tokens"}), msgspec.msgpack.encode(BATCH)):
        peer.send_multipart([identity, payload])
    await until(lambda: sink.replies)

    assert len(sink.unread) == 4
    link.close()


async def test_a_message_that_cannot_be_encoded_is_not_taken(context, peer) -> None:
    """An exception would interrupt the handling of a lost replica and leave other requests without a replica."""
    sink = Sink()
    link = open_link(context, listen(peer), sink)
    await until(lambda: sink.up)

    assert not link.send(Abort(request_ids=[2**64]))

    assert link.send(ABORT)
    link.close()


async def test_a_closed_link_says_nothing_more(context, peer) -> None:
    """Its owner no longer expects callbacks."""
    sink, other = Sink(), Sink()
    endpoint = listen(peer)
    link = open_link(context, endpoint, sink)
    open_link(context, endpoint, other, "other")
    await until(lambda: sink.up and other.up)

    link.close()
    link.close()
    peer.close(0)
    await until(lambda: other.down)

    assert sink.down == 0


async def test_an_address_that_is_none_is_a_loss(context) -> None:
    """A wrong description must not stop the router."""
    sink = Sink()
    open_link(context, "nowhere", sink)

    await until(lambda: sink.down)


async def test_a_link_with_the_replicas_key_is_encrypted_and_works(context, peer) -> None:
    """Prompts and answers are sent over this connection."""
    keys, sink = new_pair(), Sink()
    protect_server(peer, ServerKeys(keys, None))
    link = ReplicaLink(
        listen(peer), "me", sink, context=context, loop=asyncio.get_running_loop(), curve_key=keys.public.decode()
    )
    await until(lambda: sink.up)

    assert link.send(ABORT)
    _, payload = await received(peer)

    assert msgspec.msgpack.decode(payload, type=Abort) == ABORT
    link.close()


async def test_a_link_that_is_refused_is_lost_and_says_why(context, peer) -> None:
    """Without the replica's key or with a wrong one, no connection is ever made; the router must report why."""
    protect_server(peer, ServerKeys(new_pair(), None))
    endpoint, handshakes = listen(peer), Handshakes()

    for _ in range(PATIENCE):
        sink = Sink()
        ReplicaLink(endpoint, "me", sink, context=context, loop=asyncio.get_running_loop(), handshakes=handshakes)
        await until(lambda sink=sink: sink.down)
        assert not sink.up

    assert handshakes.refusal is not None
