"""The recorded streams of other engines, and their meaning in our reader's types."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from homing.events import CacheEvent, Cleared, Removed, Stored

FOLDER = Path(__file__).parent / "fixtures"


@dataclass(slots=True, frozen=True)
class Live:
    """A message of the events socket, the events its engine was given, and the blocks cached after it (if known)."""

    name: str
    frames: Sequence[bytes]
    said: Mapping[str, Any]
    cached: frozenset[int] | None


@dataclass(slots=True, frozen=True)
class Recording:
    """The content of one fixture."""

    package: str
    version: str
    live: Sequence[Live]
    replayed: Sequence[Sequence[bytes]]  #: answers to a replay request from number 2 on, including the end marker


def load(path: Path) -> Recording:
    """Read a fixture."""
    head, *lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    live = [
        Live(line["name"], _frames(line), line["said"], frozenset(line["cached"]) if "cached" in line else None)
        for line in lines
        if line["socket"] == "events"
    ]
    replayed = [_frames(line) for line in lines if line["socket"] == "replay"]
    return Recording(head["package"], head["version"], live, replayed)


def _frames(line: Mapping[str, Any]) -> list[bytes]:
    return [bytes.fromhex(frame) for frame in line["frames"]]


#: All fixtures, by file name without suffix.
RECORDINGS = {path.stem: load(path) for path in sorted(FOLDER.glob("*-*.jsonl"))}


def meaning(event: Mapping[str, Any]) -> CacheEvent:
    """A recorded event as our type, converted without our decoder."""
    if event["type"] == "AllBlocksCleared":
        return Cleared()
    hashes = [_name(value) for value in event["block_hashes"]]
    if event["type"] == "BlockRemoved":
        return Removed(hashes, event.get("medium"), event.get("group_idx"))
    parent, tokens, block_size = event["parent_block_hash"], event["token_ids"], event["block_size"]
    salt = event.get("cache_salt") or event.get("metadata", {}).get("cache_salt")  # SGLang's two forms
    return Stored(
        None if parent is None else _name(parent),
        hashes,
        tokens if len(tokens) == len(hashes) * block_size else (),
        block_size,
        event.get("medium"),
        event.get("group_idx"),
        event.get("lora_name") or (None if event.get("lora_id") is None else f"lora_id:{event['lora_id']}"),
        [[salt]] if salt and parent is None else event.get("extra_keys"),
        event.get("kv_cache_spec_kind"),
        event.get("kv_cache_spec_sliding_window"),
    )


def _name(value: int | str) -> int:
    """The wire hash: bytes (recorded as hex digits) are truncated to the last 8."""
    return value if isinstance(value, int) else int(value[-16:], 16)
