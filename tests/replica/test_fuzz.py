"""Whatever a stranger sends to its sockets, a replica keeps answering well-formed requests.

Damaged messages get further than random bytes: they decode, but their contents make no sense.
"""

import contextlib
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from homing.events.publish.publisher import MAX_FRAME_BYTES
from homing.events.wire.frames import replay_request
from homing.events.wire.messages import SnapshotChunk, SnapshotRequest
from homing.replica.messages import Abort, AskNextEvictions, Constraint, Generate, Pin, ResetCache, SamplingParams
from homing.replica.request_socket import MAX_REQUEST_BYTES

from .clients import PATIENCE_S, Client, Served, served
from .fakes import generate

WOUNDED = 400
NONSENSE = 200
PROMPT = list(range(5, 30))


@pytest.fixture
def replica(checkpoint: Callable[..., Path], tmp_path: Path) -> Iterator[Served]:
    with served(checkpoint("llama"), tmp_path) as running:
        yield running


def answer(client: Client, request_id: int) -> list[int]:
    client.ask(request_id, PROMPT, max_tokens=6)
    client.wait(request_id)
    return client.tokens(request_id)


def wounded(data: bytes, rng: random.Random) -> bytes:
    """The data with one to three bytes changed, or with a part cut out or repeated."""
    wound = bytearray(data)
    for _ in range(rng.randint(1, 3)):
        at, end = sorted(rng.randrange(len(wound) + 1) for _ in range(2))
        match rng.randrange(3):
            case 0 if wound:
                wound[rng.randrange(len(wound))] = rng.randrange(256)
            case 1:
                del wound[at:end]
            case _:
                wound[at:at] = wound[at:end]
    return bytes(wound)


def nonsense(request_id: int, rng: random.Random) -> Generate:
    """A request whose fields have the right types but mostly invalid values."""
    sampling = SamplingParams(
        max_tokens=rng.choice([-1, 0, 1, 10**9]),
        temperature=rng.choice([-1.0, 0.0, float("nan"), float("inf"), 1.0]),
        top_p=rng.choice([-1.0, 0.0, float("nan"), 1.0]),
        top_k=rng.choice([-5, 0, 10**9]),
        seed=rng.choice([0, -1, 2**63 - 1]),
        logprobs=rng.choice([None, -1, 0, 10**9]),
        prompt_logprobs=rng.choice([None, None, -1, 10**9]),
        logit_bias=rng.choice([{}, {10**12: 1.0}, {-1: float("nan")}]),
        stop_token_ids=rng.choice([[], [-1], [10**12]]),
    )
    return Generate(
        request_id=request_id,
        token_ids=rng.randbytes(rng.choice([0, 1, 4, 40, 4000])),
        prompt_tokens=rng.choice([-1, 0, 1, 10, 10**12]),
        root=rng.randbytes(rng.choice([0, 16, 17])),
        block_hashes=rng.randbytes(rng.choice([0, 1, 16, 32, 1600])),
        sampling=sampling,
        priority=rng.choice([0, -(2**31), 2**63 - 1]),
        pins=rng.choice([(), (Pin(-1, 1.0, b""),), (Pin(10**12, float("nan"), b"x" * 99),)]),
        tokens_per_output=rng.choice([-1, 0, 1, 10**9]),
        constraint=rng.choice([None, None, Constraint(kind="regex", source="(", after=(-1, 10**12))]),
    )


def test_damaged_requests_harm_nobody(replica: Served) -> None:
    """A damaged message that still decodes may have wrong ids, lengths or hashes."""
    rng, client = random.Random(1), replica.client()
    right = answer(client, 1)
    whole = [generate(1000, PROMPT, replica.hasher), Abort(request_ids=[7]), ResetCache(ask_id=1), AskNextEvictions()]
    stranger = replica.client(b"stranger")
    for _ in range(WOUNDED):
        stranger.socket.send(wounded(msgspec.msgpack.encode(rng.choice(whole)), rng))

    assert answer(client, 2) == right
    replica.server.check()


def test_requests_that_make_no_sense_are_refused_or_run(replica: Served) -> None:
    """The router validates client requests, but the engine must not rely on that."""
    rng, client = random.Random(2), replica.client()
    right = answer(client, 1)
    stranger = replica.client(b"stranger")
    for number in range(NONSENSE):
        stranger.send(nonsense(number, rng))

    assert answer(client, 2) == right
    stranger.abort(*range(NONSENSE))
    replica.server.check()


def test_a_frame_beyond_all_bounds_ends_its_connection_alone(replica: Served, caplog: pytest.LogCaptureFixture) -> None:
    """Buffering it would let any peer exhaust the memory."""
    client = replica.client()
    right = answer(client, 1)
    replica.client(b"stranger").socket.send(bytes(MAX_REQUEST_BYTES + 1))

    assert answer(client, 2) == right
    assert "request_malformed" not in caplog.text


def ask(endpoint: str, *messages: list[bytes]) -> "zmq.Socket[bytes]":
    sock: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    sock.linger = 0
    sock.connect(endpoint)
    with contextlib.suppress(zmq.Again):  # libzmq closes the connection for good if the peer is a PUB socket
        for message in messages:
            sock.send_multipart(message, zmq.NOBLOCK)
    return sock


def test_damaged_questions_to_the_event_sockets_harm_nobody(replica: Served) -> None:
    """Snapshot and replay sockets answer any peer; a PUB socket must ignore what subscribers send."""
    rng, ends = random.Random(3), replica.description.event_endpoints
    answer(replica.client(), 1)
    question = msgspec.msgpack.encode(SnapshotRequest(token_ids=True))
    strangers = []
    for endpoint in (ends.snapshot, ends.replay, ends.events, ends.state):
        whole = rng.choice([[b"", question], replay_request(0)])
        wounds = [[wounded(frame, rng) for frame in whole for _ in range(rng.randint(0, 2))] for _ in range(100)]
        large = [b"", bytes(MAX_FRAME_BYTES + 1)]
        strangers += [ask(endpoint, *filter(None, wounds)), ask(endpoint, large)]

    asking = ask(ends.snapshot, [b"", question])
    assert asking.poll(PATIENCE_S * 1000)
    chunk = msgspec.msgpack.decode(asking.recv_multipart()[-1], type=SnapshotChunk)
    for sock in (*strangers, asking):
        sock.close()

    assert chunk.blocks
    assert len(answer(replica.client(b"router-2"), 1)) == 6
