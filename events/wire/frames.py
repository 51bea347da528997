"""The frames around a payload: topics, sequence numbers, the end marker. Pure: bytes in, named parts out.

Does not look into payloads (see dialects.py) and holds no socket.

    events PUB      [topic, seq, payload]
    replay answer   [b"", topic, seq, payload] …, then [b"", topic, END_SEQ, b""]      (vLLM before 0.26: no topic)

Our topic is `kv-events@` and the publisher's epoch in 16 hex digits. A subscription is a prefix, so readers that ask
for `kv-events` (or for everything) get it, and every frame says of which incarnation it is. Without that, a replay
from a restarted publisher could be mistaken for the continuation of the old one.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from ..errors import MalformedFrame
from .messages import EVENTS_TOPIC

SEQ_BYTES = 8
END_SEQ = b"\xff" * SEQ_BYTES

_OWN_PREFIX = EVENTS_TOPIC + b"@"
_EPOCH_DIGITS = 16


class EventFrame(NamedTuple):
    """One numbered message of the compatible stream. `epoch` is None for foreign publishers."""

    epoch: int | None
    seq: int
    payload: bytes


def events_topic(epoch: int) -> bytes:
    """The topic under which a publisher of this epoch (unsigned 64 bits) sends its events."""
    return _OWN_PREFIX + b"%0*x" % (_EPOCH_DIGITS, epoch)


@lru_cache(maxsize=256)  # one topic per publisher: parsing it was a tenth of taking a batch in
def epoch_of(topic: bytes) -> int | None:
    """The epoch in a topic of ours; None for any other topic."""
    digits = topic[len(_OWN_PREFIX) :]
    if not topic.startswith(_OWN_PREFIX) or len(digits) != _EPOCH_DIGITS:
        return None
    try:
        epoch = int(digits, 16)
    except ValueError:
        return None
    # int() also takes signs, blanks and underscores.
    return epoch if events_topic(epoch) == topic else None


def encode_seq(seq: int) -> bytes:
    """A sequence number as it stands on the wire."""
    return seq.to_bytes(SEQ_BYTES, "big")


def decode_seq(frame: bytes) -> int:
    """Inverse of `encode_seq`. Raises MalformedFrame."""
    if len(frame) != SEQ_BYTES:
        raise MalformedFrame("sequence number", f"{len(frame)} bytes instead of {SEQ_BYTES}")
    return int.from_bytes(frame, "big")


def read_event(frames: Sequence[bytes]) -> EventFrame:
    """Parts of a message from the events socket. Raises MalformedFrame."""
    if len(frames) != 3:
        raise MalformedFrame("event message", f"{len(frames)} frames instead of topic, seq, payload")
    return EventFrame(epoch_of(frames[0]), decode_seq(frames[1]), frames[2])


def read_replay(frames: Sequence[bytes]) -> EventFrame | None:
    """Parts of one replay answer as a DEALER receives it; None is the end marker. Raises MalformedFrame."""
    parts = frames[1:] if frames and not frames[0] and len(frames) > 2 else frames
    if len(parts) not in (2, 3):
        raise MalformedFrame("replay answer", f"{len(frames)} frames")
    if parts[-2] == END_SEQ:
        return None
    topic = parts[0] if len(parts) == 3 else b""
    return EventFrame(epoch_of(topic), decode_seq(parts[-2]), parts[-1])


def replay_request(since: int) -> list[bytes]:
    """Frames with which a DEALER asks for everything from `since` on."""
    return [b"", encode_seq(since)]


def read_request(frames: Sequence[bytes]) -> tuple[bytes, bytes]:
    """Identity and body of a request as a ROUTER receives it, with or without the delimiter. Raises MalformedFrame."""
    if len(frames) not in (2, 3):
        raise MalformedFrame("request", f"{len(frames)} frames instead of identity, (empty,) body")
    return frames[0], frames[-1]
