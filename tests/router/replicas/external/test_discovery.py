"""Discovery of engines' properties, over real sockets."""

import asyncio

import pytest
import zmq

from homing.router.replicas.external.discovery import EngineAddress, _accepts, discover, of_rank
from homing.router.replicas.external.http_client import Address, Client, EngineUnreachableError

from .fakes import FakeEngine


def client_of(url: str) -> Client:
    return Client(Address.of(url), loop=asyncio.get_running_loop())


async def test_an_engine_is_described_by_what_it_answers() -> None:
    """Model, limits, version and block size need no flag; neither do event sockets if the engine reports them."""
    engine = FakeEngine()
    await engine.start()
    try:
        address = EngineAddress(engine.url)
        plain = await discover(client_of(engine.url), address, try_ports=False)
        engine.behaves.tells_sockets, engine.behaves.ranks = True, 2
        full = await discover(client_of(engine.url), address, try_ports=False)
    finally:
        await engine.stop()

    assert (plain.kind, plain.version, plain.cards[0].id, plain.block_size) == ("vllm", "0.33.0", "fake", 16)
    assert (plain.ranks, plain.events, plain.replay) == ((), "", "")
    assert (full.ranks, full.events, full.replay) == ((0, 1), engine.endpoints.events, engine.endpoints.replay)


async def test_an_engine_that_is_not_there_is_said_to_be_so() -> None:
    """The router asks again later."""
    engine = FakeEngine()
    await engine.start()
    await engine.stop()

    with pytest.raises(EngineUnreachableError):
        await discover(client_of(engine.url), EngineAddress(engine.url), try_ports=False)


async def test_the_handshake_tells_a_publisher_from_a_replay_socket() -> None:
    """Any program may listen on a well-known port."""
    engine = FakeEngine()
    await engine.start()
    try:
        events, replay = engine.endpoints.events, engine.endpoints.replay
        found = [await _accepts(end, kind) for end in (events, replay) for kind in (zmq.SUB, zmq.DEALER)]
    finally:
        await engine.stop()

    assert found == [True, False, False, True]


def test_ranks_add_their_number_to_the_port() -> None:
    assert of_rank("tcp://[::1]:5557", 2) == "tcp://[::1]:5559"
    assert of_rank("", 2) == ""
