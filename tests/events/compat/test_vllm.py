"""The stream against vLLM itself over real sockets: its decoder reads our stream, our reader follows its publisher."""

import asyncio
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from homing.events import EventEndpoints, EventFeed
from homing.events.config import EventsSettings
from homing.events.follow.subscription import FeedStatus
from homing.events.publish.publisher import EventPublisher
from homing.events.wire.frames import END_SEQ, encode_seq

from .. import foreign_schema
from ..fakes import FoldingSink, block, new_publisher, store, tokens, until

TOPIC = b"kv-events"


@pytest.fixture
def publisher_of(tmp_path: Path) -> Iterator[Callable[[EventsSettings], EventPublisher]]:
    """Makes our publishers, closed at the end."""
    made: list[EventPublisher] = []

    def make(settings: EventsSettings) -> EventPublisher:
        made.append(new_publisher(settings, ipc_dir=tmp_path))
        return made[-1]

    yield make
    for publisher in made:
        publisher.close()


def a_life(publisher: EventPublisher) -> None:
    """Publish every kind of event."""
    store(publisher, 1, 2)
    publisher.flush()
    publisher.stored(block(2), [block(2**64 - 1)], tokens(9))
    publisher.removed([block(1)])
    publisher.flush()
    publisher.cleared()


def replayed(context: Any, kind: int, endpoint: str, since: int) -> Iterator[list[bytes]]:
    """Request a replay as vLLM's example subscriber does: 8 bytes, sent by a REQ or DEALER socket."""
    with context.socket(kind) as socket:
        socket.linger, socket.rcvtimeo = 0, 20_000
        socket.connect(endpoint)
        socket.send_multipart([encode_seq(since)] if kind == zmq.REQ else [b"", encode_seq(since)])
        frames: list[bytes] = []
        while END_SEQ not in frames:
            frames = socket.recv_multipart()
            yield frames
            if kind == zmq.REQ:
                return  # a REQ socket accepts one answer per request


@pytest.mark.parametrize("hash_format", ["int64", "bytes"])
def test_vllms_decoder_reads_our_stream_and_its_replay(
    publisher_of: Callable[[EventsSettings], EventPublisher], hash_format: str
) -> None:
    """Python readers of vLLM's stream decode with its `KVEventBatch`."""
    from vllm.distributed import kv_events

    publisher = publisher_of(EventsSettings(hash_format=hash_format, heartbeat_interval_s=0.05))
    endpoints = publisher.start()
    a_life(publisher)
    context = zmq.Context()

    answers: list[list[bytes]] = []
    while len(answers) < 4:  # the publisher's thread may still be sending
        answers = list(replayed(context, zmq.DEALER, endpoints.replay, 0))
    batches = [msgspec.msgpack.decode(frames[-1], type=kv_events.KVEventBatch) for frames in answers[:-1]]

    first, second, third = (batch.events for batch in batches)
    one, two, last = (block(n) if hash_format == "bytes" else n for n in (1, 2, 2**64 - 1))
    assert isinstance(first[0], kv_events.BlockStored)
    assert (first[0].block_hashes, first[0].parent_block_hash) == ([one, two], None)
    assert (first[0].token_ids, first[0].block_size, first[0].medium) == ([1] * 4 + [2] * 4, 4, "CPU")
    assert (first[0].group_idx, first[0].kv_cache_spec_kind) == (0, "full_attention")
    assert isinstance(second[0], kv_events.BlockRemoved)
    assert second[0].block_hashes == [one]
    assert (second[1].block_hashes, second[1].parent_block_hash) == ([last], two)
    assert isinstance(third[0], kv_events.AllBlocksCleared)
    assert [batch.data_parallel_rank for batch in batches] == [0, 0, 0]
    assert next(replayed(context, zmq.REQ, endpoints.replay, 1))[1:] == answers[1][2:]
    context.destroy(linger=0)


def test_the_schema_of_the_ordinary_tests_is_vllms() -> None:
    """The other tests run without vLLM, against a copy of its structs' fields."""
    from vllm.distributed import kv_events

    for ours in (foreign_schema.BlockStored, foreign_schema.BlockRemoved, foreign_schema.AllBlocksCleared):
        theirs = getattr(kv_events, ours.__name__)
        assert ours.__struct_fields__ == theirs.__struct_fields__
        assert ours.__struct_defaults__ == theirs.__struct_defaults__
        assert ours.__struct_config__.tag == theirs.__struct_config__.tag
    assert foreign_schema.VllmBatch.__struct_fields__ == kv_events.KVEventBatch.__struct_fields__


@pytest.mark.parametrize(
    ("fixture", "flags"), [("vllm-0.33", []), ("vllm-0.33-bytes", ["--bytes"]), ("vllm-0.33-engine", ["--engine"])]
)
def test_recording_again_gives_the_very_bytes_of_the_fixtures(tmp_path: Path, fixture: str, flags: list[str]) -> None:
    """The other tests depend on these fixtures, which must not have been edited by hand."""
    script, kept = Path(__file__).with_name("record.py"), Path(__file__).parents[1] / "fixtures" / f"{fixture}.jsonl"
    fresh = tmp_path / kept.name

    subprocess.run([sys.executable, str(script), "vllm", str(fresh), *flags], check=True, capture_output=True)

    assert fresh.read_text(encoding="utf-8") == kept.read_text(encoding="utf-8")


class Engine:
    """vLLM's block pool with random prompts, and its publisher behind a relay that can drop messages."""

    def __init__(self, folder: Path, seed: int) -> None:
        from vllm.distributed.kv_events import ZmqEventPublisher

        from . import engine

        self._parts = engine
        self._rng = random.Random(seed)
        self._hash_blocks = engine.hasher("sha256", 4)
        self.cache = engine.manager(60, 4, events=True)
        self._running: list[Any] = []
        self._made = 0
        inner = f"ipc://{folder}/inner"
        self.publisher = ZmqEventPublisher(0, inner, f"ipc://{folder}/replay", topic=TOPIC.decode())
        self._context = zmq.Context()
        self._sub, self._pub = self._context.socket(zmq.SUB), self._context.socket(zmq.PUB)
        self._sub.subscribe(b"")
        self._sub.connect(inner)
        self._pub.bind(f"ipc://{folder}/events")
        self.endpoints = EventEndpoints(
            events=f"ipc://{folder}/events", replay=f"ipc://{folder}/replay", state="", snapshot=""
        )

    @property
    def cached(self) -> set[int]:
        return self._parts.cached(self.cache)

    def step(self) -> None:
        """Admit a prompt that shares its prefix with others, or finish one, and publish the changes."""
        if self._running and self._rng.random() < 0.5:
            self.cache.free(self._running.pop(self._rng.randrange(len(self._running))))
        elif self.cache.block_pool.get_num_free_blocks() > 20:
            head = self._rng.randrange(4)
            tokens = [head] * self._rng.randrange(4, 24) + [self._rng.randrange(9) for _ in range(24)]
            self._made += 1
            asked = self._parts.request(f"r{self._made}", tokens, self._hash_blocks)
            self._parts.admit(self.cache, asked)
            self._running.append(asked)
        self.publish()

    def reset(self) -> None:
        """Clear the prefix cache, as an operator does."""
        while self._running:
            self.cache.free(self._running.pop())
        assert self.cache.reset_prefix_cache()
        self.publish()

    def publish(self, *, always: bool = False) -> None:
        """Publish the changes; with `always`, even if there are none."""
        from vllm.distributed.kv_events import KVEventBatch

        events = self.cache.take_events()
        if events or always:
            self.publisher.publish(KVEventBatch(ts=time.time(), events=events))

    def carry(self, *, lose: bool = False) -> None:
        """Relay all pending messages to the reader, or drop them."""
        while self._sub.poll(0):
            frames = self._sub.recv_multipart()
            if not lose:
                self._pub.send_multipart(frames)

    def close(self) -> None:
        self.publisher.shutdown()
        self._context.destroy(linger=0)


async def settled(engine: Engine, sink: FoldingSink) -> None:
    """Wait until the reader holds exactly what vLLM's pool has cached.

    vLLM has no heartbeat, so a lost last batch shows only in the number of another batch, which is published if needed.
    """
    for turn in range(10_000):
        if sink.live and set(sink.mirror.parents) == engine.cached:
            return
        if turn % 100 == 99:
            engine.publish(always=True)
        engine.carry()
        await asyncio.sleep(0.005)
    pytest.fail("the reader never held what vLLM had cached")


async def test_our_reader_holds_what_vllms_pool_has_cached(tmp_path: Path) -> None:
    """Covers a late join, live batches, a gap closed by a replay, a reset, and a restart that counts from 0 again."""
    engine, sink = Engine(tmp_path, 1), FoldingSink()
    for _ in range(20):
        engine.step()
    feed = EventFeed(engine.endpoints, sink, topic=TOPIC, counted=True, token_ids=True)
    feed.start(asyncio.get_running_loop())
    await settled(engine, sink)

    for _ in range(60):
        engine.step()
        engine.carry()
    await settled(engine, sink)
    for _ in range(10):
        engine.step()
        await asyncio.sleep(0.01)
        engine.carry(lose=True)
    while feed.subscription.counters.gaps == 0:
        engine.step()
        engine.carry()
        await asyncio.sleep(0.01)
    await settled(engine, sink)
    engine.reset()
    await settled(engine, sink)
    assert not sink.mirror.parents
    assert feed.subscription.exact

    engine.close()
    await until(lambda: FeedStatus.STALE in sink.statuses)
    engine = Engine(tmp_path, 2)
    for _ in range(30):
        engine.step()
    await settled(engine, sink)
    assert sink.mirror.parents

    feed.close()
    engine.close()
    assert not sink.errors
