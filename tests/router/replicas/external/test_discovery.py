"""Discovery of engines' properties, over real sockets."""

import asyncio

import pytest
import zmq

from homing.router.replicas.external import discovery
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


def source(rank: int | None, port: int, replay: str | None = None) -> dict[str, object]:
    return {
        "data_parallel_rank": rank,
        "endpoint": f"tcp://*:{port}",
        "replay_endpoint": replay,
        "topic": "",
        "other": [1],
    }


@pytest.mark.parametrize(
    ("named", "ranks", "sockets"),
    [
        ([source(0, 41234, "tcp://0.0.0.0:7")], 1, [("tcp://127.0.0.1:41234", "tcp://127.0.0.1:7")]),
        ([source(None, 5)], 1, [("tcp://127.0.0.1:5", "")]),
        (
            [source(1, 9), source(0, 5, "tcp://[::]:6")],
            2,
            [("tcp://127.0.0.1:5", "tcp://127.0.0.1:6"), ("tcp://127.0.0.1:9", "")],
        ),
        ([source(1, 9), source(0, 5)], 1, [("tcp://127.0.0.1:5", ""), ("tcp://127.0.0.1:9", "")]),
        ([source(0, 5)], 2, [("tcp://127.0.0.1:5", ""), ("tcp://127.0.0.1:6", "")]),
        ([], 1, [("", "")]),
        ([{"endpoint": 5}], 1, [("", "")]),
        ([source(-1, 5)], 1, [("", "")]),
        ([{"endpoint": "inproc://x"}], 1, [("", "")]),
    ],
)
async def test_vllm_names_where_each_rank_publishes(
    named: list[dict[str, object]], ranks: int, sockets: list[tuple[str, str]]
) -> None:
    """With port 0 nobody else knows it, and ranks may be anywhere."""
    engine = FakeEngine()
    engine.behaves.names_sources, engine.behaves.ranks = named, ranks
    await engine.start()
    try:
        info = await discover(client_of(engine.url), EngineAddress(engine.url), try_ports=False)
        given = await discover(client_of(engine.url), EngineAddress(engine.url, "tcp://mine:1"), try_ports=False)
    finally:
        await engine.stop()

    assert [(each.events, each.replay) for each in info.replica_addresses("b0")] == sockets
    assert given.replica_addresses("b0")[0].events == "tcp://mine:1"


async def test_questions_that_an_engine_does_not_answer_are_not_held_against_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only its models must be known; a proxy before it may swallow the other paths."""
    monkeypatch.setattr(discovery, "OPTIONAL_TIMEOUT_S", 0.05)
    engine = FakeEngine()
    engine.behaves.silent_paths = ("/version", "/kv_event_sources", "/server_info?config_format=json", "/metrics")
    await engine.start()
    try:
        info = await discover(client_of(engine.url), EngineAddress(engine.url), try_ports=False)
    finally:
        engine.behaves.silent_paths = ()
        await engine.stop()

    assert (info.kind, info.version, info.cards[0].id, info.block_size) == ("", "", "fake", None)


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
