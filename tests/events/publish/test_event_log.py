"""The publisher's event log."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from homing.events.config import EventsSettings
from homing.events.publish.event_log import EventLog
from homing.events.publish.step_changes import AllCleared, Change, LostSteps, RemovedBlocks, StoredBlocks
from homing.events.wire.cache_events import wire_hash
from homing.events.wire.messages import TierDigest

from ..fakes import BLOCK_SIZE, block, tokens


def new_log(**settings: object) -> EventLog:
    """An empty log of epoch 7."""
    return EventLog(EventsSettings(**settings), epoch=7, block_size=BLOCK_SIZE)


def chain(*numbers: int, parent: int | None = None) -> StoredBlocks:
    """A change that stores a chain of blocks."""
    return StoredBlocks(None if parent is None else block(parent), tuple(map(block, numbers)), tokens(*numbers))


def test_the_payload_is_byte_for_byte_what_vllm_readers_expect() -> None:
    """By a plain msgpack decoder: three elements, maps tagged by `type`, every promised key, nil if absent."""
    sent = new_log().commit([chain(1, 2, parent=9), RemovedBlocks((block(5),))], 2.5)

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


def test_blocks_in_tiers_are_told_to_those_alone_who_ask_for_them() -> None:
    """A reader that knows one medium must take no block of another for its own, nor the end of one, in whatever it
    reads: batches, replays, heartbeats and snapshots.
    """
    log = new_log()
    log.commit([chain(1, 2)], 1.0)
    moved = log.commit([RemovedBlocks((block(2),)), chain(2, 3, parent=1)._replace(medium="CPU")], 2.0)
    dropped = log.commit([RemovedBlocks((block(3),), "CPU")], 3.0)
    parts = list(log.snapshot(token_ids=False))
    beat = log.heartbeat(4.0)

    def told(payload: bytes) -> list[tuple[str, str, list[int]]]:
        return [(each["type"], each["medium"], each["block_hashes"]) for each in msgspec.msgpack.decode(payload)[1]]

    in_tier = [("BlockStored", "CPU", [2, 3])]
    assert told(moved.payload) == [("BlockRemoved", "GPU", [2])]
    assert told(moved.tiered) == told(moved.payload) + in_tier
    assert (told(dropped.payload), told(dropped.tiered)) == ([], [("BlockRemoved", "CPU", [3])])
    assert (beat.blocks, beat.digest, beat.tiers) == (1, 1, [TierDigest("CPU", 1, 2)])
    assert [[each.block_hash for each in part.blocks] for part in parts] == [[1], []]
    assert [[each.block_hash for each in part.tiers.get("CPU", [])] for part in parts] == [[], [2]]
    assert [part.last for part in parts] == [False, True]
    log.commit([AllCleared()], 5.0)
    assert (log.heartbeat(6.0).blocks, log.heartbeat(6.0).tiers) == (0, [])
    log.check()


def test_a_cleared_event_by_hand() -> None:
    """The smallest message in bytes: array(3) of float64 1.0, array(1) of map(1) type: AllBlocksCleared, rank 0."""
    payload = new_log().commit([AllCleared()], 1.0).payload

    assert payload == (
        b"\x93" + b"\xcb\x3f\xf0\x00\x00\x00\x00\x00\x00" + b"\x91\x81" + b"\xa4type\xb0AllBlocksCleared" + b"\x00"
    )


def test_hashes_may_be_sent_whole() -> None:
    """64 bits suffice for routing, but not to index a store that outlives the process."""
    log = new_log(hash_format="bytes")

    events = msgspec.msgpack.decode(log.commit([chain(1, parent=9)], 1.0).payload)[1]
    held = next(log.snapshot(token_ids=False)).blocks

    assert (events[0]["block_hashes"], events[0]["parent_block_hash"]) == ([block(1)], block(9))
    assert (held[0].block_hash, held[0].parent) == (block(1), block(9))


def test_in_hash_only_mode_no_token_id_leaves_the_replica() -> None:
    """Token ids reveal a tenant's text."""
    log = new_log(hash_only=True)

    events = msgspec.msgpack.decode(log.commit([chain(1)], 1.0).payload)[1]

    assert events[0]["token_ids"] == []
    assert next(log.snapshot(token_ids=True)).blocks[0].token_ids == []


def test_the_salt_is_told_with_the_first_block_of_a_chain_in_events_and_snapshots() -> None:
    """Readers that key by tokens merge tenants without it; vLLM and SGLang send it in these two forms."""
    log = new_log()
    step = [chain(1, 2)._replace(salt="ann"), chain(3, parent=2), chain(4)._replace(salt="bob"), chain(5)]

    events = msgspec.msgpack.decode(log.commit(step, 1.0).payload)[1]
    held = next(log.snapshot(token_ids=True)).blocks
    told = [(event.get("cache_salt"), event.get("extra_keys")) for event in events]
    assert told == [("ann", [["ann"], None]), (None, None), ("bob", [["bob"]]), (None, None)]
    assert [each.cache_salt for each in held] == ["ann", None, None, "bob", None]

    log.commit([RemovedBlocks((block(2), block(3), block(1))), chain(1)], 2.0)
    log.check()
    assert [each.cache_salt for each in next(log.snapshot(token_ids=False)).blocks] == ["bob", None, None]
    log.commit([AllCleared()], 3.0)
    log.check()


def test_in_hash_only_mode_the_salt_stays_as_well() -> None:
    """Who knows a salt can find out by timing what is cached under it."""
    log = new_log(hash_only=True)

    events = msgspec.msgpack.decode(log.commit([chain(1)._replace(salt="secret")], 1.0).payload)[1]

    assert "cache_salt" not in events[0]
    assert "extra_keys" not in events[0]
    assert next(log.snapshot(token_ids=True)).blocks[0].cache_salt is None


def test_a_snapshot_is_of_one_moment_though_it_is_read_in_parts() -> None:
    """The publisher keeps sending between two parts; mixing states would give a set that never existed."""
    log = new_log()
    log.commit([chain(1, 2, 3, 4, 5)], 1.0)

    parts = log.snapshot(token_ids=True, chunk_blocks=2)
    first = next(parts)
    log.commit([RemovedBlocks((block(4), block(5))), chain(6)], 2.0)
    rest = list(parts)

    blocks = [held for part in [first, *rest] for held in part.blocks]
    assert [held.block_hash for held in blocks] == [1, 2, 3, 4, 5]
    assert [held.parent for held in blocks] == [None, 1, 2, 3, 4]
    assert blocks[1].token_ids == [2] * BLOCK_SIZE
    assert {part.seq for part in [first, *rest]} == {0}
    assert [part.last for part in [first, *rest]] == [False, False, True]


def _stored(numbers: list[int], back: int) -> StoredBlocks:
    parent = numbers[0] - back
    return chain(*numbers, parent=parent if parent >= 0 else None)


#: Chains of ascending numbers: a block's parent always has a lower number.
CHAINS = st.lists(st.integers(0, 30), min_size=1, max_size=5, unique=True).map(sorted)
CHANGES = st.lists(
    st.one_of(
        st.builds(_stored, CHAINS, st.integers(1, 4)),
        st.builds(lambda numbers: RemovedBlocks(tuple(map(block, numbers))), CHAINS),
        st.builds(AllCleared),
    ),
    max_size=30,
)


@given(CHANGES, st.integers(1, 4))
def test_a_snapshot_lists_every_block_once_and_no_child_before_its_parent(changes: list[Change], size: int) -> None:
    """Readers rebuild the tree in one pass; a child before its parent could not be attached."""
    log, held = new_log(), set[int]()
    for change in changes:
        log.commit([change], 1.0)
        match change:
            case StoredBlocks(hashes=hashes):
                held |= {wire_hash(name) for name in hashes}
            case RemovedBlocks(hashes):
                held -= {wire_hash(name) for name in hashes}
            case AllCleared():
                held.clear()

    listed = [each for part in log.snapshot(token_ids=True, chunk_blocks=size) for each in part.blocks]

    log.check()
    order = {each.block_hash: place for place, each in enumerate(listed)}
    assert order.keys() == held
    assert len(listed) == len(held)
    assert all(each.parent not in order or order[each.parent] < order[each.block_hash] for each in listed)
    assert all(set(each.token_ids) == {each.block_hash} for each in listed)


def test_an_empty_log_still_answers_a_snapshot() -> None:
    """Readers wait for a part marked as the last."""
    (only,) = new_log().snapshot(token_ids=False)

    assert (only.seq, only.index, only.last, only.blocks) == (None, 0, True, [])


def test_lost_steps_use_up_numbers_and_are_folded() -> None:
    """The gap tells readers that steps are lost, and the digest must include them."""
    log, lost = new_log(), LostSteps()
    log.commit([chain(1)], 1.0)
    lost.add([chain(2)])
    lost.add([RemovedBlocks((block(1),))])

    log.record_loss(lost)
    sent = log.commit([chain(3)], 2.0)

    assert sent.seq == 3
    assert [kept.seq for kept in log.replay(0)] == [0, 3]
    beat = log.heartbeat(3.0)
    assert (beat.seq, beat.blocks, beat.digest) == (3, 2, 2 ^ 3)
    log.check()


@pytest.mark.parametrize(("kept", "replayed"), [(0, []), (2, [3, 4]), (10, [2, 3, 4])])
def test_replay_gives_what_is_kept(kept: int, replayed: list[int]) -> None:
    """The history is limited by a setting."""
    log = new_log(replay_batches=kept)
    for number in range(5):
        log.commit([chain(number)], 1.0)

    assert [sent.seq for sent in log.replay(2)] == replayed
