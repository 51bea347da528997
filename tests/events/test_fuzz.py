"""No input crashes the reader, and no event of a known type is lost.

Damaged recordings get deeper into the decoders than random bytes do: bits are flipped, and parts are deleted,
duplicated or replaced by parts of other payloads.
"""

import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from homing.events import Removed, Stored
from homing.events.errors import MalformedFrame
from homing.events.wire.dialects import BatchDecoder
from homing.events.wire.frames import read_event, read_replay

from . import own_recording
from .recordings import RECORDINGS

MAX = 2**64 - 1
KINDS = ("BlockStored", "BlockRemoved", "AllBlocksCleared")
PAYLOADS = [live.frames[2] for recording in RECORDINGS.values() for live in recording.live]
PAYLOADS += [own.sent.payload for own in own_recording.batches()]
MESSAGES = [list(live.frames) for recording in RECORDINGS.values() for live in recording.live]
ANSWERS = [list(frames) for recording in RECORDINGS.values() for frames in recording.replayed]


def damaged(payload: bytes, rng: random.Random) -> bytes:
    """A copy of the payload, damaged in one to three places."""
    data = bytearray(payload)
    for _ in range(rng.randint(1, 3)):
        at, end = sorted(rng.randrange(len(data) + 1) for _ in range(2))
        match rng.randrange(5):
            case 0 if data:
                data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            case 1 if data:
                data[rng.randrange(len(data))] = rng.choice([0x00, 0x7F, 0x80, 0x90, 0xC0, 0xC1, 0xDC, 0xDE, 0xFF])
            case 2:
                del data[at:end]
            case 3:
                data[at:at] = data[at:end]
            case _:
                other = rng.choice(PAYLOADS)
                data[at:end] = other[at : rng.randrange(at, len(other) + 1)] if at < len(other) else b""
    return bytes(data)


class Tagged(msgspec.Struct):
    """An event encoded as a map."""

    type: object


def announced(payload: bytes) -> int:
    """Number of events of a known type in a readable batch, whatever else it contains."""
    parts = msgspec.msgpack.decode(payload, type=list[msgspec.Raw] | dict[str, msgspec.Raw])
    events = parts["events"] if isinstance(parts, dict) else parts[1]
    return sum(kind(event) in KINDS for event in msgspec.msgpack.decode(events, type=list[msgspec.Raw]))


def kind(event: msgspec.Raw) -> object:
    try:
        return msgspec.msgpack.decode(event, type=Tagged).type
    except msgspec.ValidationError:
        raw = msgspec.msgpack.decode(event)
        return raw["type"] if isinstance(raw, dict) else raw[0]


def decode_and_compare(payload: bytes, *, token_ids: bool) -> bool:
    """Decode, and check that every event of a known type is kept or named. Returns False if the batch is none."""
    try:
        batch = BatchDecoder(token_ids=token_ids).decode(payload)
    except MalformedFrame:
        return False
    if not batch.unreadable:
        assert len(batch.events) == announced(payload)
    for event in batch.events:
        if isinstance(event, Stored | Removed):
            assert all(0 <= block <= MAX for block in event.hashes)
        if isinstance(event, Stored) and event.token_ids:
            assert len(event.token_ids) == len(event.hashes) * event.block_size
    return True


@pytest.mark.parametrize("token_ids", [True, False])
def test_damaged_payloads_are_read_or_refused_by_name(token_ids: bool) -> None:
    """10,000 payloads, the same in every run; both outcomes must be frequent, or the damage is unsuitable."""
    rng = random.Random(f"damage {token_ids}")

    read = sum(decode_and_compare(damaged(rng.choice(PAYLOADS), rng), token_ids=token_ids) for _ in range(10_000))

    assert 500 < read < 9_500


@given(st.sampled_from(PAYLOADS), st.data(), st.booleans())
@settings(max_examples=300)
def test_any_single_edit_of_a_recorded_payload_is_read_or_refused(
    payload: bytes, data: st.DataObject, token_ids: bool
) -> None:
    """The same property with Hypothesis, which shrinks failing examples."""
    at = data.draw(st.integers(0, len(payload)))
    end = data.draw(st.integers(at, len(payload)))
    patch = data.draw(st.binary(max_size=12))

    decode_and_compare(payload[:at] + patch + payload[end:], token_ids=token_ids)


@pytest.mark.parametrize("read", [read_event, read_replay])
def test_damaged_frames_are_read_or_refused_by_name(read) -> None:
    """Frames are missing, duplicated, emptied, swapped or damaged."""
    rng = random.Random(7)
    for _ in range(5_000):
        frames = list(rng.choice(MESSAGES if read is read_event else ANSWERS))
        at, other = rng.randrange(len(frames)), rng.randrange(len(frames))
        match rng.randrange(5):
            case 0:
                del frames[at]
            case 1:
                frames.insert(at, frames[other])
            case 2:
                frames[at] = b""
            case 3:
                frames[at], frames[other] = frames[other], frames[at]
            case _:
                frames[at] = damaged(frames[at], rng)
        try:
            frame = read(frames)
        except MalformedFrame:
            continue
        assert frame is None or 0 <= frame.seq <= MAX
