"""Our own stream as bytes: the event log's messages for a fixed story, and the events that readers must get.

python -m tests.events.own_recording      rewrites fixtures/homing.jsonl, when the format is meant to change
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from homing.events.config import EventsSettings
from homing.events.publish.event_log import EventLog, SentBatch
from homing.events.publish.step_changes import AllCleared, RemovedBlocks, Step, StoredBlocks
from homing.events.wire.frames import encode_seq, events_topic

PATH = Path(__file__).parent / "fixtures" / "homing.jsonl"
EPOCH = 0x0123_4567_89AB_CDEF


def block(number: int) -> bytes:
    """A 16-byte hash whose last 8 bytes are `number`."""
    return b"\x11" * 8 + number.to_bytes(8, "big")


def tokens(*ids: int) -> bytes:
    """Token ids as the event log takes them."""
    return b"".join(token.to_bytes(4, "little") for token in ids)


BIG = 2**64 - 1
STORY: Mapping[str, Step] = {
    "two blocks of a prompt": [StoredBlocks(None, (block(BIG), block(2)), tokens(1, 2, 2**32 - 1, 4))],
    "a continuation": [StoredBlocks(block(2), (block(3),), tokens(5, 6))],
    "a removal and a store": [RemovedBlocks((block(3), block(2))), StoredBlocks(block(BIG), (block(4),), tokens(7, 8))],
    "a reset": [AllCleared()],
}
VARIANTS = {
    "ints": EventsSettings(),
    "bytes": EventsSettings(hash_format="bytes"),
    "hashes only": EventsSettings(hash_only=True),
}


@dataclass(slots=True, frozen=True)
class Own:
    """One of our batches, and its events as a reader must find them."""

    name: str
    settings: EventsSettings
    sent: SentBatch
    expected: list[dict[str, Any]]


def batches() -> Iterator[Own]:
    """The story under each setting that changes the wire format."""
    for variant, settings in VARIANTS.items():
        ledger = EventLog(settings, epoch=EPOCH, block_size=2)
        for number, (name, step) in enumerate(STORY.items()):
            expected = [_expected(change, settings) for change in step]
            yield Own(f"{variant}: {name}", settings, ledger.commit(step, 1000.0 + number), expected)


def _expected(change: object, settings: EventsSettings) -> dict[str, Any]:
    def wire(block_hash: bytes) -> int | bytes:
        return block_hash if settings.hash_format == "bytes" else int.from_bytes(block_hash[8:], "big")

    match change:
        case StoredBlocks(parent, hashes, content, _):
            ids = [int.from_bytes(content[at : at + 4], "little") for at in range(0, len(content), 4)]
            return {
                "type": "BlockStored",
                "block_hashes": [wire(block_hash) for block_hash in hashes],
                "parent_block_hash": None if parent is None else wire(parent),
                "token_ids": [] if settings.hash_only else ids,
                "block_size": 2,
                "lora_id": None,
                "medium": "GPU",
            }
        case RemovedBlocks(hashes):
            return {
                "type": "BlockRemoved",
                "block_hashes": [wire(block_hash) for block_hash in hashes],
                "medium": "GPU",
            }
    return {"type": "AllBlocksCleared"}


def lines() -> list[str]:
    """The lines of the fixture: topic, number and payload of each batch."""
    return [json.dumps({"name": own.name, "frames": [part.hex() for part in _frames(own.sent)]}) for own in batches()]


def _frames(sent: SentBatch) -> list[bytes]:
    return [events_topic(EPOCH), encode_seq(sent.seq), sent.payload]


if __name__ == "__main__":
    PATH.write_text("\n".join(lines()) + "\n", encoding="utf-8")
