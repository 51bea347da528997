"""A router keeps serving whatever a replica sends on its request socket and its four event sockets.

The router opens these connections itself, to addresses from Ray, but the process that answers may still be broken.
Damaged messages are decoded only in part; messages of the right types with wrong values get furthest.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Iterator

import msgspec
import pytest
import zmq

from homing.events.load_report import SUMS
from homing.events.wire.frames import encode_seq, events_topic
from homing.events.wire.messages import (
    HEARTBEAT_TOPIC,
    LOAD_TOPIC,
    BlockRemoved,
    BlockStored,
    CacheCounters,
    EventBatch,
    EventEndpoints,
    Heartbeat,
    PrefillCost,
    PrefillWork,
    SnapshotBlock,
    SnapshotChunk,
)
from homing.replica.messages import (
    NO_LOGPROBS,
    CacheReset,
    NextEvictions,
    PositionLogprobs,
    Refused,
    Reply,
    TokenBatch,
    TokenLogprob,
    TokenOutput,
    encoded_position,
)
from homing.router.errors import RouterError

from ..replica.clients import PATIENCE_S
from ..replica.test_fuzz import wounded
from .fakes import BLOCK, SEED, answer, description_of, report_of, request_of
from .replicas.test_service import Cluster, Watcher, tokens

#: Replica id and epoch of the liar.
LIAR, EPOCH = "r1", 5
TURNS = 120  #: the minimum; the test continues until the liar's feed was live once and it got a request
NUMBERS = (-(2**62), -1, 0, 1, 2, 7, 10**9, 2**62)
FLOATS = (-1.0, 0.0, 1e-300, 1.0, 1e300, float("nan"), float("inf"), float("-inf"))


class Liar:
    """A replica's sockets that send random messages. Some are valid, so that the others are processed further."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._context = zmq.Context()
        self._requests, self._replay, self._snapshot = (self._bound(zmq.ROUTER) for _ in range(3))
        self._events, self._state = (self._bound(zmq.PUB) for _ in range(2))
        names = {"events": self._events, "replay": self._replay, "state": self._state, "snapshot": self._snapshot}
        ends = EventEndpoints(**{name: sock.getsockopt_string(zmq.LAST_ENDPOINT) for name, sock in names.items()})
        self.description = description_of(
            LIAR,
            epoch=EPOCH,
            request_endpoint=self._requests.getsockopt_string(zmq.LAST_ENDPOINT),
            event_endpoints=ends,
        )
        self.requests = 0  #: number of requests received
        self._seq = 0

    def _bound(self, kind: int) -> "zmq.Socket[bytes]":
        sock: zmq.Socket[bytes] = self._context.socket(kind)
        sock.linger = 0
        sock.bind("tcp://127.0.0.1:*")
        return sock

    def take_turn(self) -> None:
        """Send random messages on every socket, and answer the questions received."""
        rng, self._seq = self._rng, self._seq + self._rng.choice([0, 1, 1, 1, 1, 2])
        self.requests += len(list(self._asked(self._requests)))
        for _ in range(4):
            self._requests.send_multipart([b"me", self._bent(reply(rng, self.requests))])
        event = [rng.choice([events_topic(EPOCH), events_topic(EPOCH), b""]), encode_seq(self._seq)]
        self._events.send_multipart([*event, self._bent(batch(rng))])
        kind, state = rng.choice([(LOAD_TOPIC, load(rng)), (HEARTBEAT_TOPIC, heartbeat(rng, self._seq))])
        self._state.send_multipart([kind, self._bent(state)])
        for asker, _ in self._asked(self._snapshot):
            self._snapshot.send_multipart([asker, b"", self._bent(chunk(rng, self._seq))])
        for asker, question in self._asked(self._replay):
            parts = [*question[:1], *event, self._bent(batch(rng)), b""]
            self._replay.send_multipart([asker, *parts[rng.choice([0, 0, 1]) : rng.choice([3, 4, 4, 5])]])

    def _asked(self, sock: "zmq.Socket[bytes]") -> Iterator[tuple[bytes, list[bytes]]]:
        while sock.poll(0):
            asker, *question = sock.recv_multipart()
            yield asker, question

    def _bent(self, message: msgspec.Struct) -> bytes:
        payload = msgspec.msgpack.encode(message)
        return wounded(payload, self._rng) if self._rng.random() < 0.3 else payload

    def close(self) -> None:
        self._context.destroy(linger=0)


def reply(rng: random.Random, requests: int) -> Reply:
    return rng.choice(
        [
            TokenBatch(step=rng.choice(NUMBERS), outputs=[output(rng, requests) for _ in range(rng.randrange(4))]),
            Refused(
                request_id=rng.randrange(2 * requests + 2),
                reason=rng.choice(["prompt_too_long", "draining", "invalid", "internal"]),
                message="x" * rng.randrange(3),
                retry=rng.random() < 0.5,
            ),
            CacheReset(ask_id=rng.choice(NUMBERS), done=rng.random() < 0.5),
            NextEvictions(hashes=rng.randbytes(rng.randrange(2000))),
        ]
    )


def output(rng: random.Random, requests: int) -> TokenOutput:
    logprobs = [PositionLogprobs(TokenLogprob(rng.choice(NUMBERS), rng.choice(FLOATS)), [])] * rng.randrange(3)
    return TokenOutput(
        request_id=rng.randrange(2 * requests + 2),
        index=rng.choice([0, 0, 0, *NUMBERS]),
        token_ids=[rng.choice(NUMBERS) for _ in range(rng.randrange(3))],
        finish_reason=rng.choice([None, None, None, None, "stop", "length", "abort", "error"]),
        cached_tokens=rng.choice([None, *NUMBERS]),
        logprobs=rng.choice([None, logprobs]),
        prompt_logprobs=rng.choice([None, [*map(encoded_position, logprobs), NO_LOGPROBS]]),
        stop_token_id=rng.choice([None, *NUMBERS]),
        pinned_tokens=rng.choice([None, *NUMBERS]),
    )


def hashes(rng: random.Random) -> list[int | bytes]:
    return [rng.choice([rng.randrange(8), rng.randbytes(16)]) for _ in range(rng.randrange(4))]


def batch(rng: random.Random) -> EventBatch:
    stored = BlockStored(
        block_hashes=hashes(rng),
        parent_block_hash=rng.choice([None, *hashes(rng)]),
        token_ids=list(range(BLOCK * rng.randrange(4))),
        block_size=rng.choice([0, 1, BLOCK]),
        lora_id=None,
        medium=rng.choice([None, "CPU"]),
        lora_name=None,
    )
    removed = BlockRemoved(block_hashes=hashes(rng), medium=None)
    return EventBatch(rng.choice(FLOATS), rng.choices([stored, removed], k=rng.randrange(3)))


def load(rng: random.Random) -> msgspec.Struct:
    """Return the load report of an idle replica with a few random fields."""

    def number() -> int:
        return rng.choice(NUMBERS)

    def real() -> float:
        return rng.choice(FLOATS)

    lies = {
        "epoch": number(),
        "ts": real(),
        "running": number(),
        "waiting": number(),
        "queued_prefill_tokens": number(),
        "decode_context_tokens": number(),
        "free_blocks": number(),
        "cached_free_blocks": number(),
        "total_blocks": number(),
        "prefill_tokens_per_s": real(),
        "decode_step_s": real(),
        "counters": CacheCounters(query_tokens=number(), hit_tokens=number()),
        "accepted": {"me": number()},
        "draining": True,
        "pinned_blocks": number(),
        "prefill_cost": PrefillCost(real(), real(), real(), real()),
        "queued_prefill_s": real(),
        "queued_prefill": PrefillWork(number(), number(), real(), real()),
        "waiting_blocks": number(),
        "prefill_sums": [real() for _ in range(rng.choice([0, SUMS, SUMS, SUMS + 1]))],
    }
    told = {name: lies[name] for name in rng.sample(sorted(lies), rng.choice([0, 1, 1, 2, 4]))}
    return report_of(**{"epoch": EPOCH, "step": rng.randrange(10**6), "prefill_tokens_per_s": 1e6} | told)


def heartbeat(rng: random.Random, seq: int) -> Heartbeat:
    return Heartbeat(
        epoch=rng.choice([EPOCH, EPOCH, EPOCH, 0, -1]),
        seq=rng.choice([seq, seq, None, *NUMBERS]),
        blocks=rng.choice(NUMBERS),
        digest=rng.choice(NUMBERS),
        ts=rng.choice(FLOATS),
    )


def chunk(rng: random.Random, seq: int) -> SnapshotChunk:
    """Return a chunk that is mostly a valid snapshot, so that the feed is live after a few hundred turns."""
    blocks = [SnapshotBlock(name, rng.choice([None, *hashes(rng)]), [1] * rng.randrange(3)) for name in hashes(rng)]
    return SnapshotChunk(
        epoch=rng.choice([EPOCH, EPOCH, EPOCH, 0]),
        seq=rng.choice([seq] * 20 + [None, *NUMBERS]),
        index=rng.choice([0] * 20 + [*NUMBERS]),
        last=rng.random() < 0.9,
        blocks=blocks,
    )


@pytest.fixture
async def cluster(tmp_path) -> AsyncIterator[Cluster]:
    cluster = Cluster(tmp_path, FaithlessWatcher())
    yield cluster
    cluster.service.close()
    for replica in cluster.all:
        await replica.stop()


class FaithlessWatcher(Watcher):
    """Accepts gaps in the liar's events."""

    def events_gap(self, replica_id: str) -> None:
        assert replica_id == LIAR


async def asked(cluster: Cluster, seed: int) -> bool:
    """Return whether a request got all its tokens; it may also fail with a `RouterError`."""
    try:
        _, deltas = await cluster.ask(request_of([seed] * 40, seed=seed))
    except RouterError:
        return False
    return tokens(deltas) == answer(request_of([seed] * 40, seed=seed))


async def test_a_replica_that_lies_on_every_socket_takes_nobody_along(cluster: Cluster) -> None:
    """Only the liar's requests may fail: no callback raises, the accounting stays right, later requests are served."""
    raised: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: raised.append(context))
    honest, liar = cluster.add("r0"), Liar(random.Random(13))
    parity = honest.description.parity
    description = msgspec.structs.replace(liar.description, parity=parity)
    cluster.service.apply_membership([honest.description, description], SEED)
    await cluster.ready("r0")
    asking, believed = [], set()
    async with asyncio.timeout(PATIENCE_S):
        while len(asking) < TURNS or "live" not in believed or not liar.requests:
            liar.take_turn()
            asking.append(asyncio.ensure_future(asked(cluster, len(asking) + 1)))
            await asyncio.sleep(0.002)
            believed.add(cluster.view(LIAR).feed)

    cluster.publish()
    ended = await asyncio.gather(*asking)
    liar.close()

    assert cluster.service.counters.malformed_frames > 0
    assert sum(ended) > len(asking) / 2
    assert await asked(cluster, 1000)
    assert raised == []
