"""A publisher's book."""

import msgspec
import pytest

from homing.events import EventsSettings
from homing.events.publish.event_log import EventLog
from homing.events.publish.step_changes import AllCleared, Lost, RemovedBlocks, StoredBlocks

from ..fakes import BLOCK_SIZE, block, tokens


def new_ledger(**settings: object) -> EventLog:
    """An empty book."""
    return EventLog(EventsSettings(**settings), epoch=7, block_size=BLOCK_SIZE, medium="GPU")


def chain(*numbers: int, parent: int | None = None) -> StoredBlocks:
    """A stored chain."""
    return StoredBlocks(None if parent is None else block(parent), tuple(map(block, numbers)), tokens(*numbers))


def test_the_payload_is_byte_for_byte_what_vllm_readers_expect() -> None:
    """By a plain msgpack reader: three elements, maps tagged by `type`, every promised key, nil where absent."""
    sent = new_ledger().commit([chain(1, 2, parent=9), RemovedBlocks((block(5),))], 2.5)

    assert sent.seq == 0
    assert sent.payload[:1] == b"\x93"
    assert msgspec.msgpack.decode(sent.payload) == [
        2.5,
        [
            {"type": "BlockRemoved", "block_hashes": [5], "medium": "GPU", "group_idx": 0},
            {
                "type": "BlockStored",
                "block_hashes": [1, 2],
                "parent_block_hash": 9,
                "token_ids": [1, 1, 1, 1, 2, 2, 2, 2],
                "block_size": 4,
                "lora_id": None,
                "medium": "GPU",
                "lora_name": None,
                "group_idx": 0,
                "kv_cache_spec_kind": "full_attention",
            },
        ],
        0,
    ]


def test_a_cleared_event_by_hand() -> None:
    """The smallest message, spelt out: array(3) of float64 1.0, array(1) of map(1) type: AllBlocksCleared, rank 0."""
    payload = new_ledger().commit([AllCleared()], 1.0).payload

    assert payload == (
        b"\x93" + b"\xcb\x3f\xf0\x00\x00\x00\x00\x00\x00" + b"\x91\x81" + b"\xa4type\xb0AllBlocksCleared" + b"\x00"
    )


def test_hashes_may_be_sent_whole() -> None:
    """64 bits are enough to route by, not to index a store that outlives the process."""
    ledger = new_ledger(hash_format="bytes")

    events = msgspec.msgpack.decode(ledger.commit([chain(1, parent=9)], 1.0).payload)[1]
    held = next(ledger.snapshot(token_ids=False)).blocks

    assert (events[0]["block_hashes"], events[0]["parent_block_hash"]) == ([block(1)], block(9))
    assert (held[0].block_hash, held[0].parent) == (block(1), block(9))


def test_in_hash_only_mode_no_token_id_leaves_the_replica() -> None:
    """Token ids are a tenant's text."""
    ledger = new_ledger(hash_only=True)

    events = msgspec.msgpack.decode(ledger.commit([chain(1)], 1.0).payload)[1]

    assert events[0]["token_ids"] == []
    assert next(ledger.snapshot(token_ids=True)).blocks[0].token_ids == []


def test_a_snapshot_is_of_one_moment_though_it_is_read_in_parts() -> None:
    """The publisher goes on between two parts; a torn snapshot would be a set that never was."""
    ledger = new_ledger()
    ledger.commit([chain(1, 2, 3, 4, 5)], 1.0)

    parts = ledger.snapshot(token_ids=True, chunk_blocks=2)
    first = next(parts)
    ledger.commit([RemovedBlocks((block(4), block(5))), chain(6)], 2.0)
    rest = list(parts)

    blocks = [held for part in [first, *rest] for held in part.blocks]
    assert [held.block_hash for held in blocks] == [1, 2, 3, 4, 5]
    assert [held.parent for held in blocks] == [None, 1, 2, 3, 4]
    assert blocks[1].token_ids == [2] * BLOCK_SIZE
    assert {part.seq for part in [first, *rest]} == {0}
    assert [part.last for part in [first, *rest]] == [False, False, True]


def test_an_empty_book_still_answers_a_snapshot() -> None:
    """A reader waits for a last part."""
    (only,) = new_ledger().snapshot(token_ids=False)

    assert (only.seq, only.index, only.last, only.blocks) == (None, 0, True, [])


def test_lost_steps_use_up_numbers_and_are_folded() -> None:
    """The hole tells the readers; the digest still tells the truth."""
    ledger, lost = new_ledger(), Lost()
    ledger.commit([chain(1)], 1.0)
    lost.add([chain(2)])
    lost.add([RemovedBlocks((block(1),))])

    ledger.lose(lost)
    sent = ledger.commit([chain(3)], 2.0)

    assert sent.seq == 3
    assert [kept.seq for kept in ledger.replay(0)] == [0, 3]
    beat = ledger.heartbeat(3.0)
    assert (beat.seq, beat.blocks, beat.digest) == (3, 2, 2 ^ 3)
    ledger.check()


@pytest.mark.parametrize(("kept", "replayed"), [(0, []), (2, [3, 4]), (10, [2, 3, 4])])
def test_replay_gives_what_is_kept(kept: int, replayed: list[int]) -> None:
    """History is bounded by a setting."""
    ledger = new_ledger(replay_batches=kept)
    for number in range(5):
        ledger.commit([chain(number)], 1.0)

    assert [sent.seq for sent in ledger.replay(2)] == replayed
