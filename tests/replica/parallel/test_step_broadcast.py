"""The ranks' channel on real sockets: a peer without the group's secret can neither send nor receive.

The socket is a TCP port of the node, to which any process that can reach the host may connect.
"""

import contextlib
import random
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from homing.events.security.curve_keys import KeyPair, new_pair, protect_client
from homing.replica.errors import RankLost, StartupError
from homing.replica.parallel.step_broadcast import (
    HELLO,
    STEP,
    STOP,
    RankPlace,
    StepBroadcast,
    WorkerLink,
    rank_0_keys,
    read_hello,
)

from ..clients import PATIENCE_S

SECRET, OTHER_SECRET = bytes(range(32)), bytes(32)
SIZE = 3
KNOCKS = 40
#: ZMTP 3.1 greeting of a client that requests this mechanism.
GREETING = b"\xff\0\0\0\0\0\0\0\x01\x7f\x03\x01%s" + b"\0" * 32
ORDERS = 20


def spec(rank: int, size: int = SIZE, secret: bytes = SECRET) -> RankPlace:
    return RankPlace(rank=rank, size=size, host="127.0.0.1", port=0, secret=secret)


@contextlib.contextmanager
def rank_0(size: int = SIZE) -> Iterator[StepBroadcast]:
    channel = StepBroadcast(spec(0, size))
    try:
        yield channel
    finally:
        channel.close()


@contextlib.contextmanager
def workers(channel: StepBroadcast, size: int = SIZE) -> Iterator[list[WorkerLink]]:
    """The other ranks, created one after the other."""
    links = [WorkerLink(channel.endpoint, spec(rank, size)) for rank in range(1, size)]
    try:
        yield links
    finally:
        for link in links:
            link.close()


@contextlib.contextmanager
def dealer(endpoint: str, identity: bytes, server: bytes | None) -> Iterator["zmq.Socket[bytes]"]:
    """Another client; it is unencrypted without a `server` key."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as sock:
        sock.linger = 0
        sock.identity = identity
        if server is not None:
            protect_client(sock, new_pair(), server)
        sock.connect(endpoint)
        yield sock


def knock(endpoint: str, rng: random.Random) -> None:
    """A stranger's bytes on the bare connection: noise, or a handshake that turns into noise."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    mechanism = rng.choice([b"NULL", b"PLAIN", b"CURVE", b"GSSAPI"]).ljust(20, b"\0")
    hello = b"\x04\x26\x05READY" + rng.randbytes(32)
    parts = [GREETING % mechanism, hello, rng.randbytes(rng.choice([1, 64, 5000])), b"\x00\x05hello", b"\xff" * 9]
    with contextlib.suppress(OSError), socket.create_connection((host, int(port)), PATIENCE_S) as sock:
        for part in parts[rng.randrange(3) :]:
            sock.sendall(part)


def obeyed(channel: StepBroadcast, links: list[WorkerLink]) -> bool:
    """Whether every worker receives every order, in sequence, and nothing else."""
    orders = [(STEP, bytes([number])) for number in range(ORDERS)]
    for order in orders:
        channel.send(*order)
    return all([link.receive(PATIENCE_S) for _ in orders] == orders and link.receive(0) is None for link in links)


def test_ranks_are_told_apart_and_obey_in_turn() -> None:
    """Eleven workers: sorted as text, rank 10 would precede rank 2."""
    with rank_0(12) as channel, workers(channel, 12) as links:
        pids = channel.wait_for_workers(PATIENCE_S)

        assert len(pids) == 11
        assert obeyed(channel, links)


@pytest.mark.parametrize("seed", range(5))
def test_strangers_at_the_door_change_nothing(seed: int) -> None:
    """They connect before the workers, among them and after them."""
    rng = random.Random(seed)
    with rank_0() as channel, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(channel.wait_for_workers, PATIENCE_S)
        for _ in range(KNOCKS):
            knock(channel.endpoint, rng)
        with workers(channel) as links:
            pids = waiting.result(PATIENCE_S)
            for _ in range(KNOCKS):
                knock(channel.endpoint, rng)

            assert len(pids) == SIZE - 1
            assert obeyed(channel, links)


@pytest.mark.parametrize(
    "server",
    [None, rank_0_keys(OTHER_SECRET).public, new_pair().public],
    ids=["plain", "other secret", "other pair"],
)
def test_without_the_secret_nobody_is_a_rank(server: bytes | None) -> None:
    """A group must not start with a stranger as a rank: it would receive all plans instead of the real rank."""
    with rank_0() as channel, dealer(channel.endpoint, b"1", server) as stranger:
        stranger.send_multipart([HELLO, msgspec.msgpack.encode(1)])
        with workers(channel) as links:
            pids = channel.wait_for_workers(PATIENCE_S)

            assert 1 not in pids
            assert obeyed(channel, links)
            assert not stranger.poll(0)


def test_a_rank_group_of_strangers_does_not_start() -> None:
    """The number of strangers that say hello does not matter."""
    with rank_0() as channel, contextlib.ExitStack() as stack:
        for rank in range(1, SIZE):
            stranger = stack.enter_context(dealer(channel.endpoint, str(rank).encode(), None))
            stranger.send_multipart([HELLO, msgspec.msgpack.encode(1)])

        with pytest.raises(StartupError, match="0 of 2 workers"):
            channel.wait_for_workers(0.3)


def test_who_knows_the_secret_and_says_nothing_sensible_is_passed_over() -> None:
    """For example, a worker of another version: rank 0 keeps waiting for its own ranks."""
    said: list[tuple[bytes, list[bytes]]] = [
        (b"7", [HELLO, msgspec.msgpack.encode(1)]),
        (b"0", [HELLO, msgspec.msgpack.encode(1)]),
        (b"01", [HELLO, msgspec.msgpack.encode(1)]),
        (b"a", [b""]),
        (b"b", [STOP, b""]),
        (b"c", [HELLO, b"\xc1"]),
        (b"d", [b"x"] * 50),
        (b"e", [HELLO, b"x" * 2000]),
    ]
    with rank_0() as channel, contextlib.ExitStack() as stack:
        for identity, frames in said:
            sock = stack.enter_context(dealer(channel.endpoint, identity, rank_0_keys(SECRET).public))
            sock.send_multipart(frames)
        links = stack.enter_context(workers(channel))
        pids = channel.wait_for_workers(PATIENCE_S)

        assert 1 not in pids
        assert obeyed(channel, links)


def test_a_worker_takes_no_orders_from_a_stranger() -> None:
    """Another process may listen on rank 0's old port; its orders, above all STOP, must not be read."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as impostor:
        impostor.linger = 0
        _serve_curve(impostor, rank_0_keys(OTHER_SECRET))
        impostor.bind("tcp://127.0.0.1:*")
        link = WorkerLink(impostor.getsockopt_string(zmq.LAST_ENDPOINT), spec(1))
        try:
            with pytest.raises(RankLost):  # the handshake failed
                link.receive(PATIENCE_S)
            assert not impostor.poll(0)
        finally:
            link.close()


def test_a_rank_that_is_gone_is_an_error_at_the_next_order() -> None:
    """The other ranks cannot continue without it."""
    with rank_0() as channel, contextlib.ExitStack() as stack:
        links = stack.enter_context(workers(channel))
        channel.wait_for_workers(PATIENCE_S)
        assert obeyed(channel, links)
        links.pop().close()

        with pytest.raises(RankLost, match="rank 2 of 3"):
            _until_raised(channel)


@given(st.lists(st.binary(max_size=20), max_size=5), st.integers(2, 9))
def test_a_hello_is_read_or_refused_by_name(frames: list[bytes], size: int) -> None:
    """Any other frames must raise a named error."""
    try:
        rank, _ = read_hello(frames, size)
    except (ValueError, msgspec.MsgspecError):
        return
    assert 0 < rank < size


@given(st.integers(2, 64), st.data())
def test_every_rank_is_known_by_its_hello(size: int, data: st.DataObject) -> None:
    """No rank's hello may be taken for another's."""
    rank, pid = data.draw(st.integers(1, size - 1)), data.draw(st.integers(1, 2**22))
    frames = [str(rank).encode(), HELLO, msgspec.msgpack.encode(pid)]

    assert read_hello(frames, size) == (rank, pid)
    with pytest.raises(ValueError, match="unknown rank"):
        read_hello(frames, rank)


def test_the_secret_is_in_no_log() -> None:
    """Specs are logged when a start fails."""
    assert repr(SECRET) not in repr(spec(1))
    assert rank_0_keys(SECRET).secret.decode() not in repr(rank_0_keys(SECRET))


def _serve_curve(sock: "zmq.Socket[bytes]", keys: KeyPair) -> None:
    sock.curve_server = True
    sock.curve_publickey, sock.curve_secretkey = keys.public, keys.secret


def _until_raised(channel: StepBroadcast) -> None:
    """ZeroMQ notices a closed connection with a delay."""
    for _ in range(int(PATIENCE_S * 100)):
        channel.send(STEP)
        time.sleep(0.01)
