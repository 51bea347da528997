"""Measure the event stream: a reader's ingest over ZeroMQ into the router's index, and the publisher's side.

    python tests/bench/events.py [--batches N] [--rounds N] [--out FILE]

A child process sends N batches of 8 blocks of 16 tokens (half of them stores, then their removals) over ipc, encoded as
our publisher does; `EventFeed` applies them to a `PrefixIndex`. The rate is batches per second of the reading thread's
CPU time, which would be wall-clock time on an otherwise idle machine. The rows without a socket run in process.
Dynamo's figure, 57,000 batches per second, was measured earlier on this kind of machine; it is not run here.
"""

import asyncio
import gc
import multiprocessing
import struct
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from statistics import median

import zmq

sys.path.insert(0, str(Path(__file__).parents[2]))
from homing.events import EventEndpoints, EventFeed, Subscription
from homing.events.config import EventsSettings
from homing.events.follow.feed import FeedSink
from homing.events.follow.residency import SetResidency
from homing.events.follow.subscription import Apply, FeedOptions, Reset
from homing.events.publish.event_log import EventLog
from homing.events.publish.step_changes import RemovedBlocks, Step, StoredBlocks
from homing.events.wire.dialects import BatchDecoder
from homing.events.wire.frames import encode_seq, events_topic, read_event
from homing.events.wire.messages import SnapshotChunk
from homing.router.routing.placement import Placement
from homing.router.routing.policy.registry import make_policy
from tests.bench.report import Row, arguments, publish
from tests.router.fakes import description_of

BLOCKS, BLOCK_SIZE, EPOCH = 8, 16, 7
GOAL_PER_S = 60_000.0
Frames = list[bytes]


def steps(count: int) -> list[Step]:
    """As many stores as removals, of blocks with random hashes."""
    rng = Random(3)
    tokens = b"".join(struct.pack("<I", rng.randrange(128_000)) for _ in range(BLOCKS * BLOCK_SIZE))
    chains = [tuple(rng.randbytes(16) for _ in range(BLOCKS)) for _ in range(count // 2)]
    stores: list[Step] = [[StoredBlocks(None, chain, tokens)] for chain in chains]
    return stores + [[RemovedBlocks(chain)] for chain in chains]


def ledger(*, hash_only: bool = False) -> EventLog:
    return EventLog(EventsSettings(hash_only=hash_only), epoch=EPOCH, block_size=BLOCK_SIZE)


def messages(count: int, *, hash_only: bool = False) -> list[Frames]:
    """The messages that a publisher sends."""
    book = ledger(hash_only=hash_only)
    sent = [book.commit(step, 1.0) for step in steps(count)]
    return [[events_topic(EPOCH), encode_seq(batch.seq), batch.payload] for batch in sent]


class IndexSink(FeedSink):
    """The router's part of a feed: the index is the only copy of what the replica holds."""

    def __init__(self) -> None:
        self.placement = Placement(make_policy("expected-ttft"), router_id="bench", silence_s=1e9, rng=Random(0))
        self.placement.join(description_of("r0", num_blocks=10**9), 0.0)
        self.batches = 0

    def blocks_changed(self, instruction: Apply | Reset) -> None:
        self.batches += isinstance(instruction, Apply)

    def malformed(self, error: Exception) -> None:
        raise error


def send(endpoint: str, count: int) -> None:
    """The child process: send everything at once to the first subscriber."""
    frames = messages(count)
    context = zmq.Context()
    sock = context.socket(zmq.XPUB)
    sock.set_hwm(0)
    sock.bind(endpoint)
    sock.recv()  # subscribed
    for message in frames:
        sock.send_multipart(message)
    sock.recv()  # unsubscribed
    sock.close(0)
    context.term()


def over_zeromq(count: int) -> float:
    """CPU seconds of the reading thread for all batches."""
    endpoint = f"ipc:///tmp/homing-bench-{time.monotonic_ns()}"
    child = multiprocessing.get_context("spawn").Process(target=send, args=(endpoint, count))
    child.start()
    seconds = asyncio.run(ingest(endpoint, count))
    child.join()
    Path(endpoint.removeprefix("ipc://")).unlink(missing_ok=True)
    return seconds


async def ingest(endpoint: str, count: int) -> float:
    """CPU seconds from the first batch to the last; waiting costs no CPU."""
    sink = IndexSink()
    options = FeedOptions(replay=False, snapshot=False, heartbeats=False)
    ends = EventEndpoints(events=endpoint, replay="", state="", snapshot="")
    feed = EventFeed(ends, sink, options=options, blocks=sink.placement.blocks_of("r0"))
    feed.start(asyncio.get_running_loop())
    while not sink.batches:  # noqa: ASYNC110 - the sink is what is measured
        await asyncio.sleep(0.001)
    begin, before = time.thread_time(), sink.batches
    while sink.batches < count:  # noqa: ASYNC110
        await asyncio.sleep(0.02)
    spent, done = time.thread_time() - begin, count - before
    feed.close()
    assert sink.placement.index.count("r0") == 0, "what was stored was not removed"
    return spent * count / done


def cost(rounds: int, count: int, work: Callable[[], object]) -> float:
    """Median CPU microseconds per batch."""
    runs = []
    for _ in range(rounds):
        gc.collect()
        begin = time.thread_time()
        work()
        runs.append((time.thread_time() - begin) / count * 1e6)
    return median(runs)


def follow(frames: list[Frames]) -> None:
    """Apply the frames without a socket: decoding, the state machine and the index."""
    decoder, sink = BatchDecoder(), IndexSink()
    reader = Subscription(residency=SetResidency(sink.placement.blocks_of("r0")))
    reader.start()
    reader.on_chunk(SnapshotChunk(epoch=EPOCH, seq=None, index=0, last=True, blocks=[]))
    for message in frames:
        frame = read_event(message)
        reader.on_batch(frame.epoch, frame.seq, decoder.decode(frame.payload))


@contextmanager
def no_log() -> Iterator[None]:
    """Keep no inputs of subscriptions and of the placement."""
    logged = [(Subscription, "on_batch"), (Placement, "stored"), (Placement, "removed")]
    kept = [getattr(owner, name) for owner, name in logged]
    for (owner, name), method in zip(logged, kept, strict=True):
        setattr(owner, name, method.__wrapped__)
    yield
    for (owner, name), method in zip(logged, kept, strict=True):
        setattr(owner, name, method)


def commit(todo: list[Step]) -> None:
    book = ledger()
    for step in todo:
        book.commit(step, 1.0)


def measure(count: int, rounds: int) -> list[Row]:
    rates, bare_rates = [], []
    for _ in range(rounds):
        rates.append(count / over_zeromq(count))
        with no_log():
            bare_rates.append(count / over_zeromq(count))
    frames, bare, todo = messages(count), messages(count, hash_only=True), steps(count)
    return [
        Row("ingest over ZeroMQ", "batches/s", median(rates), goal=GOAL_PER_S, higher_is_better=True),
        Row("the same, without the log of inputs", "batches/s", median(bare_rates), higher_is_better=True),
        Row("ingest without the socket", "µs/batch", cost(rounds, count, lambda: follow(frames))),
        Row("the same, hash_only", "µs/batch", cost(rounds, count, lambda: follow(bare))),
        Row("publisher: number, fold, encode", "µs/batch", cost(rounds, count, lambda: commit(todo))),
    ]


def main() -> int:
    parser = arguments("Measure the cost of the event stream.")
    parser.add_argument("--batches", type=int, default=60_000, help="batches of 8 blocks in one run")
    parser.add_argument("--rounds", type=int, default=5, help="number of runs; figures are their median")
    options = parser.parse_args()
    publish(measure(options.batches, options.rounds), options.out, ["pyzmq", "msgspec"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
