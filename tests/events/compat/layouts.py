"""Write the scenario as streams of publishers whose packages cannot be installed here, in their layouts.

    python -m tests.events.compat.layouts

Each layout follows the publisher's source or its description of the format: which form an event has, the types of its
hashes, which fields are missing, and which others come along. The files are like those that `record.py` writes.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from .record import _plain, as_bytes
from .scenario import SCENARIO, Plain

FOLDER = Path(__file__).parents[1] / "fixtures"
END = (2**64 - 1).to_bytes(8, "big")
#: Batches that a publisher cannot express: no event, several kinds, sparse groups, several copies.
_GROUPS = ("a sparse group: more tokens than its hashes cover", "a sparse group: fewer tokens than its hashes cover")


_VLLM_ONLY = ("group_idx", "kv_cache_spec_kind", "extra_keys")


def signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


def _fields(event: Plain, names: str) -> dict[str, Any]:
    return {name: event[name] for name in ("type", *names.split()) if name in event}


def tensorrt_llm(event: Plain) -> Any:
    """TensorRT-LLM through Dynamo's publisher: signed hashes, no medium, one event in each batch.

    Images come as a list of maps in maps; adapters by name only.
    """
    found = _fields(event, "block_hashes parent_block_hash token_ids block_size cache_salt")
    if "block_hashes" in found:
        found["block_hashes"] = [signed(each) for each in found["block_hashes"]]
    if event["type"] == "BlockStored":
        parent = found["parent_block_hash"]
        found["parent_block_hash"] = None if parent is None else signed(parent)
        if event.get("lora_name"):
            found["lora_name"] = event["lora_name"]
        found["block_mm_infos"] = [{"mm_objects": [{"mm_hash": 2**63, "offsets": [[0, 3]]}]}, None]
    return found


def kvbm(event: Plain) -> Any:
    """The consolidator of Dynamo's block manager: unsigned hashes; absent fields are left out; tiers of its own."""
    found = _fields(event, "block_hashes parent_block_hash token_ids block_size cache_salt medium")
    found["medium"] = {"GPU": "GPU", "CPU": "CPU_TIER1", None: None}[found.get("medium")]  # type: ignore[index]
    if event.get("lora_name"):
        found["lora_name"] = event["lora_name"]
    return {name: value for name, value in found.items() if value is not None or name == "parent_block_hash"}


def lmcache(event: Plain) -> Any:
    """LMCache's coordinator: arrays that end after the medium, hashes of 32 bytes, tiers of its own."""
    medium = {"GPU": "lmcache-l1", "CPU": "lmcache-l2-fs", None: None}[event.get("medium")]  # type: ignore[index]
    if event["type"] == "AllBlocksCleared":
        return ["AllBlocksCleared"]
    hashes = [as_bytes(each) for each in event["block_hashes"]]  # type: ignore[attr-defined]
    if event["type"] == "BlockRemoved":
        return ["BlockRemoved", hashes, medium]
    parent = event["parent_block_hash"]
    return [
        *("BlockStored", hashes, None if parent is None else as_bytes(parent)),  # type: ignore[arg-type]
        *(event["token_ids"], event["block_size"], None, medium),
    ]


def mooncake(event: Plain) -> Any:
    """Mooncake's master: maps with its own keys for tenant, worker and event, and an empty adapter."""
    if event["type"] == "AllBlocksCleared":
        return {"type": "AllBlocksCleared"}
    own = {"event_id": "mooncake:t:g:stored:1", "source": "mooncake", "tenant_id": "t", "group_id": "g"}
    found = _fields(event, "block_hashes parent_block_hash token_ids block_size") | own | {"worker_id": "10.0.0.1:1"}
    if event["type"] == "BlockStored":
        found |= {"lora_name": "", "model_name": "m", "dp_rank": 0}
    return found | {"medium": "EXTERNAL"}


def sglang_eagle(event: Plain) -> Any:
    """SGLang with EAGLE: each token comes with its successor; with RFC 1527's keys, media in small letters."""
    found = dict(event) | {"backend_id": "w-0", "event_id": 7, "model_name": "m", "dp_rank": 0}
    if event["type"] == "BlockStored":
        tokens: Any = event["token_ids"]
        found["token_ids"] = [[token, token + 1 if token < 2**32 - 1 else 0] for token in tokens]
        found |= {"session_id": None, "medium": str(event["medium"]).lower()}
    elif event["type"] == "BlockRemoved":
        found["medium"] = str(event["medium"]).lower()
    return {
        name: value for name, value in found.items() if name not in ("group_idx", "kv_cache_spec_kind", "extra_keys")
    }


def meant(package: str, event: Plain, sent: Any) -> dict[str, Any]:
    """What a reader should make of an event: the scenario's, without what the layout cannot say."""
    kept = {"type": event["type"]}
    for name in ("block_hashes", "parent_block_hash", "token_ids", "block_size"):
        if name in event:
            kept[name] = event[name]  # type: ignore[assignment]
    if isinstance(sent, dict):
        more = {name: sent[name] for name in ("medium", "cache_salt", "lora_id", "lora_name") if sent.get(name)}
    else:
        more = {"medium": sent[6 if event["type"] == "BlockStored" else 2]} if len(sent) > 1 else {}
    return kept | more


LAYOUTS: Mapping[str, tuple[Callable[[Plain], Any], int | None, bytes, bool]] = {
    #: by name: the layout, the rank, the topic, and whether a batch has one event only
    "tensorrt-llm-dynamo": (tensorrt_llm, 0, b"", True),
    "dynamo-kvbm": (kvbm, None, b"", False),
    "lmcache-coordinator": (lmcache, None, b"kv@node:n1@m", False),
    "mooncake-master": (mooncake, None, b"", True),
    "sglang-eagle": (sglang_eagle, 0, b"kv-events", False),
}


def lines(name: str) -> Iterator[dict[str, Any]]:
    layout, rank, topic, single = LAYOUTS[name]
    package, _, version = name.rpartition("-")
    yield {"package": package, "version": version, "command": "layouts.py"}
    sent: list[list[bytes]] = []
    for title, events in SCENARIO.items():
        if title in _GROUPS:
            continue
        batches: Sequence[Sequence[Plain]] = [[each] for each in events] if single else [events]
        for batch in batches:
            written = [layout(each) for each in batch]
            payload = msgspec.msgpack.encode([1000.0 + len(sent), written, rank])
            sent.append([topic, len(sent).to_bytes(8, "big"), payload])
            said = [meant(name, event, form) for event, form in zip(batch, written, strict=True)]
            yield {
                "socket": "events",
                "name": title,
                "frames": [frame.hex() for frame in sent[-1]],
                "said": {"ts": 1000.0 + len(sent) - 1, "rank": rank, "events": _plain(said)},
            }
    for frames in [*sent[2:], [b"", END, b""]]:
        yield {"socket": "replay", "since": 2, "frames": [frame.hex() for frame in [b"", *frames]]}


def main() -> None:
    for name in LAYOUTS:
        found = [json.dumps(line) for line in lines(name)]
        (FOLDER / f"{name}.jsonl").write_text("\n".join(found) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
