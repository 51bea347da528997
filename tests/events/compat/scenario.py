"""The events that the recorder makes every engine's publisher send, as plain values, independent of their structs.

A batch is a list of events, and an event is a map of fields. A field may exist only in some engines or versions; the
recorder leaves out those that the current struct lacks. Hashes are ints; with `--bytes` they get SHA-256's size.
"""

from collections.abc import Mapping, Sequence

Plain = Mapping[str, object]

LARGEST = 2**64 - 1


def stored(hashes: Sequence[int], parent: int | None, tokens: Sequence[int], **more: object) -> Plain:
    """A `BlockStored` of 4-token blocks on the GPU, unless `more` says otherwise."""
    fields = {"block_hashes": list(hashes), "parent_block_hash": parent, "token_ids": list(tokens), "block_size": 4}
    return {"type": "BlockStored", **fields, "lora_id": None, "medium": "GPU", "lora_name": None, **more}


def removed(hashes: Sequence[int], **more: object) -> Plain:
    """A `BlockRemoved`."""
    return {"type": "BlockRemoved", "block_hashes": list(hashes), "medium": "GPU", **more}


CLEARED: Plain = {"type": "AllBlocksCleared"}

#: Batches by name; the name says what the batch covers.
SCENARIO: Mapping[str, Sequence[Plain]] = {
    "a prompt of three blocks": [
        stored([11, 12, 13], None, range(12), group_idx=0, kv_cache_spec_kind="full_attention")
    ],
    "a continuation": [stored([14], 13, range(12, 16), group_idx=0)],
    "the largest and the smallest hash": [stored([LARGEST, 0], None, range(8))],
    "a second copy of a block": [stored([11], None, range(4), group_idx=0)],
    "an adapter": [stored([21], None, range(4), lora_id=3, lora_name="sql", extra_keys=[["sql"]])],
    "keys of an image and a salt": [stored([22, 23], 21, range(8), extra_keys=[[["img-7f", 0], "tenant-a"], None])],
    "a salt in SGLang's way": [stored([24], None, range(4), cache_salt="tenant-a", session_id="s-1")],
    "another medium": [stored([31], None, range(4), medium="CPU"), removed([31], medium="CPU")],
    "a sparse group: more tokens than its hashes cover": [stored([41], 40, range(16), group_idx=1)],
    "a sparse group: fewer tokens than its hashes cover": [stored([42, 43], 41, range(4), group_idx=1)],
    "large token ids": [stored([51], None, [0, 255, 65_536, 4_294_967_295])],
    "one of two copies goes": [removed([11], group_idx=0)],
    "a removal of what nobody announced": [removed([99_999])],
    "several kinds in one batch": [removed([12, 13]), stored([61], 11, range(4)), removed([14])],
    "no event at all": [],
    "a reset": [CLEARED],
    "life after a reset": [stored([71], None, range(4))],
}
