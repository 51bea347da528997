"""Our reader understands other engines' streams, and their readers understand ours.

Runs on recorded bytes (fixtures/README.md). `make compat` runs the same checks against vLLM itself.
"""

from collections.abc import Iterator

import msgspec
import pytest

from homing.events import Subscription
from homing.events.follow.residency import CountedResidency
from homing.events.follow.subscription import FeedOptions, FeedStatus, Instruction, RequestReplay, SetStatus
from homing.events.wire.dialects import BatchDecoder
from homing.events.wire.frames import read_event, read_replay

from . import foreign_schema, own_recording
from .recordings import RECORDINGS, Live, Recording, meaning

CASES = [pytest.param(live, id=f"{name}: {live.name}") for name, rec in RECORDINGS.items() for live in rec.live]
EVERY = pytest.mark.parametrize("recording", RECORDINGS.values(), ids=RECORDINGS.keys())


def test_the_recordings_cover_what_is_in_the_field() -> None:
    """A missing fixture must fail the tests instead of silently reducing them."""
    found = {(recording.package, recording.version) for recording in RECORDINGS.values()}

    assert found == {("vllm", v) for v in ("0.33.0", "0.25.1", "0.23.0")} | {
        ("sglang", v) for v in ("0.5.23", "0.5.18", "0.4.9", "eagle")
    } | {("tensorrt-llm", "dynamo"), ("dynamo", "kvbm"), ("lmcache", "coordinator"), ("mooncake", "master")}


@pytest.mark.parametrize("live", CASES)
def test_a_recorded_batch_means_what_its_engine_was_told_to_say(live: Live) -> None:
    """Covers hashes, parents, tokens, media, groups and adapters, in each engine's own encoding."""
    batch = BatchDecoder(token_ids=True).decode(live.frames[2])

    assert list(batch.events) == [meaning(event) for event in live.said["events"]]
    assert (batch.ts, batch.data_parallel_rank) == (live.said["ts"], live.said["rank"])


#: What no engine should send, and what the next version of one may send.
ODD: list[object] = [
    *(7, None, [], ["BlockStored"], {"type": 3}, {"type": "BlockPinned", "block_hashes": [1]}, ["BlockMoved", [1]]),
    {"type": "BlockStored", "block_hashes": [1.5], "parent_block_hash": None, "token_ids": [1], "block_size": 1},
    {"type": "BlockStored", "block_hashes": [1], "parent_block_hash": "x", "token_ids": [1], "block_size": 1},
    {"type": "BlockStored", "block_hashes": [1], "parent_block_hash": None, "token_ids": [1], "block_size": "4"},
    ["BlockStored", [b"12345678", 3, None], None, [1], 1],
    {"type": "BlockRemoved", "block_hashes": "1"},
]


@pytest.mark.parametrize("odd", ODD, ids=repr)
@pytest.mark.parametrize("live", [rec.live[0] for rec in RECORDINGS.values()], ids=RECORDINGS)
def test_an_odd_event_loses_only_itself(live: Live, odd: object) -> None:
    """One value that cannot be read would otherwise cost the rest of its batch, on every replay again."""
    ts, events, *rank = msgspec.msgpack.decode(live.frames[2])
    batch = BatchDecoder(token_ids=True).decode(msgspec.msgpack.encode([ts, [odd, *events, odd], *rank]))

    assert list(batch.events) == [meaning(event) for event in live.said["events"]]


@pytest.mark.parametrize("live", CASES)
def test_a_reader_that_needs_no_tokens_gets_the_same_hashes(live: Live) -> None:
    """The router decodes without tokens, which takes another code path."""
    batch = BatchDecoder().decode(live.frames[2])

    assert [getattr(event, "hashes", None) for event in batch.events] == [
        getattr(meaning(event), "hashes", None) for event in live.said["events"]
    ]


@EVERY
def test_live_and_replayed_frames_carry_the_same_numbers_and_payloads(recording: Recording) -> None:
    """vLLM's replay answers have a topic only since 0.26; the end marker comes in both forms."""
    live = [read_event(message.frames) for message in recording.live]
    *answers, end = [read_replay(frames) for frames in recording.replayed]

    assert [frame.seq for frame in live] == list(range(len(live)))
    assert end is None
    assert [(frame.seq, frame.payload) for frame in answers if frame] == [(f.seq, f.payload) for f in live[2:]]


def test_counted_copies_add_up_to_what_vllms_pool_has_cached() -> None:
    """vLLM's real block pool announces and removes every copy: twins, salts, evictions and a reset are recorded."""
    residents, decoder = CountedResidency(), BatchDecoder()
    told: list[bool] = []
    for live in RECORDINGS["vllm-0.33-engine"].live:
        for event in decoder.decode(live.frames[2]).events:
            residents.apply([event])
        assert live.cached is not None
        told.append(all(block in residents for block in live.cached) and residents.digest.blocks == len(live.cached))
        residents.check()

    assert told == [True] * 7


@EVERY
def test_a_hole_in_a_recorded_stream_is_closed_by_the_recorded_replay(recording: Recording) -> None:
    """The whole path of an external publisher's messages: frames, payload, order, recovery, residency."""
    decoder = BatchDecoder()
    reader = Subscription(FeedOptions(snapshot=False, heartbeats=False), CountedResidency())
    steps: list[list[Instruction]] = [reader.start(), reader.on_replay_end()]

    for frames in [*[live.frames for live in recording.live[:2]], recording.live[-1].frames]:
        frame = read_event(frames)
        steps.append(reader.on_batch(None, frame.seq, decoder.decode(frame.payload)))
    for frames in recording.replayed:
        answer = read_replay(frames)
        steps.append(
            reader.on_replay_end()
            if answer is None
            else reader.on_replayed(None, answer.seq, decoder.decode(answer.payload))
        )

    told = [instruction for step in steps for instruction in step]
    assert RequestReplay(2) in told
    assert SetStatus(FeedStatus.LIVE) in told
    assert reader.status is FeedStatus.LIVE
    assert reader.digest == _all_at_once(recording).digest
    assert reader.exact


def _all_at_once(recording: Recording) -> CountedResidency:
    residents = CountedResidency()
    for live in recording.live:
        for event in live.said["events"]:
            residents.apply([meaning(event)])
    return residents


def test_our_bytes_are_what_they_were() -> None:
    """Readers outside this repository depend on these bytes. See docs/events.md before changing the recording."""
    assert own_recording.lines() == own_recording.PATH.read_text(encoding="utf-8").splitlines()


def foreign_cases() -> Iterator[object]:
    for schema in (foreign_schema.VllmBatch, foreign_schema.SglangBatch):
        for own in own_recording.batches():
            if schema is foreign_schema.SglangBatch and own.settings.hash_format == "bytes":
                continue  # SGLang's reader accepts only ints
            yield pytest.param(schema, own, id=f"{schema.__name__}: {own.name}")


@pytest.mark.parametrize(("schema", "own"), list(foreign_cases()))
def test_typed_readers_of_other_engines_understand_our_batches(
    schema: type[foreign_schema.VllmBatch | foreign_schema.SglangBatch], own: own_recording.Own
) -> None:
    """Decoders written like vLLM's and SGLang's are strict about types, positions and required fields."""
    batch = msgspec.msgpack.decode(own.sent.payload, type=schema)

    assert [
        foreign_schema.fields(event, want) for event, want in zip(batch.events, own.expected, strict=True)
    ] == own.expected
