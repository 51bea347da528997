"""The frames around a payload: topics, sequence numbers and the end marker. Pure: bytes in, named parts out.

Does not parse payloads (see dialects.py) and has no socket.

    events PUB      [topic, seq, payload]
    replay answer   [b"", topic, seq, payload] …, then [b"", topic, END_SEQ, b""]      (vLLM before 0.26: no topic)

Our topic is `kv-events@` followed by the publisher's epoch in 16 hex digits. ZeroMQ subscriptions match prefixes, so
readers that subscribe to `kv-events` (or to everything) receive it. The epoch identifies the publisher's start in every
frame; without it, a replay from a restarted publisher could be mistaken for the continuation of the old stream.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from ..errors import MalformedFrame
from .messages import EVENTS_TOPIC, MAX_SEQ

SEQ_BYTES = 8
END_SEQ = b"\xff" * SEQ_BYTES

_OWN_PREFIX = EVENTS_TOPIC + b"@"
_EPOCH_DIGITS = 16


class EventFrame(NamedTuple):
    """One numbered message of the compatible stream. `epoch` is None for other engines' publishers."""

    epoch: int | None
    seq: int
    payload: bytes


def events_topic(epoch: int) -> bytes:
    """Return the topic under which a publisher of this epoch (unsigned 64 bits) sends its events."""
    return _OWN_PREFIX + b"%0*x" % (_EPOCH_DIGITS, epoch)


@lru_cache(maxsize=256)  # one topic per publisher; parsing it took a tenth of processing a batch
def epoch_of(topic: bytes) -> int | None:
    """Return the epoch in one of our topics; None for any other topic."""
    digits = topic[len(_OWN_PREFIX) :]
    if not topic.startswith(_OWN_PREFIX) or len(digits) != _EPOCH_DIGITS:
        return None
    try:
        epoch = int(digits, 16)
    except ValueError:
        return None
    # int() also accepts signs, blanks and underscores.
    return epoch if events_topic(epoch) == topic else None


def encode_seq(seq: int) -> bytes:
    """Encode a sequence number for the wire."""
    return seq.to_bytes(SEQ_BYTES, "big")


def decode_seq(frame: bytes) -> int:
    """Inverse of `encode_seq`. Raises MalformedFrame, also for a number that no stream reaches (and END_SEQ)."""
    if len(frame) != SEQ_BYTES:
        raise MalformedFrame("sequence number", f"{len(frame)} bytes instead of {SEQ_BYTES}")
    seq = int.from_bytes(frame, "big")
    if seq > MAX_SEQ:
        raise MalformedFrame("sequence number", f"{seq} is above {MAX_SEQ}")
    return seq


def read_event(frames: Sequence[bytes]) -> EventFrame:
    """Parse a message from the events socket. Raises MalformedFrame."""
    if len(frames) != 3:
        raise MalformedFrame("event message", f"{len(frames)} frames instead of topic, seq, payload")
    return EventFrame(epoch_of(frames[0]), decode_seq(frames[1]), frames[2])


def read_replay(frames: Sequence[bytes]) -> EventFrame | None:
    """Parse one replay answer as a DEALER receives it. Returns None for the end marker. Raises MalformedFrame."""
    parts = frames[1:] if frames and not frames[0] and len(frames) > 2 else frames
    if len(parts) not in (2, 3):
        raise MalformedFrame("replay answer", f"{len(frames)} frames")
    if parts[-2] == END_SEQ:
        return None
    topic = parts[0] if len(parts) == 3 else b""
    return EventFrame(epoch_of(topic), decode_seq(parts[-2]), parts[-1])


def replay_request(since: int) -> list[bytes]:
    """Return the frames with which a DEALER requests all messages from number `since` on."""
    return [b"", encode_seq(since)]


def read_request(frames: Sequence[bytes]) -> tuple[bytes, bytes]:
    """Return the identity and body of a ROUTER's request, with or without delimiter. Raises MalformedFrame."""
    if len(frames) not in (2, 3):
        raise MalformedFrame("request", f"{len(frames)} frames instead of identity, (empty,) body")
    return frames[0], frames[-1]
