"""A router's index is compared with its replicas, batch by batch."""

from typing import Any

import pytest

from homing.cluster.index_check import Digests, judge
from homing.events import KeysRefused, Removed, Stored
from homing.events.follow.cluster_feed import Source
from homing.events.follow.subscription import Apply, Reset
from homing.events.wire.messages import SnapshotBlock

SOURCE = Source("r0", 7)


def followed() -> Digests:
    """A replica with blocks 1 and 2 as of batch 4, then block 4, and without block 2 after the next batch."""
    digests = Digests()
    digests.joined(SOURCE, None)
    digests.blocks_changed(SOURCE, Reset(7, 4, [SnapshotBlock(1, None, []), SnapshotBlock(2, 1, [])]))
    stored = Stored(parent=1, hashes=[4], token_ids=(), block_size=1)
    digests.blocks_changed(SOURCE, Apply(5, 0.0, [stored]))
    digests.blocks_changed(SOURCE, Apply(6, 0.0, [Removed(hashes=[2])]))
    return digests


def listed(**changes: Any) -> dict[str, Any]:
    """The replica as the router sees it, by default after the last batch."""
    row = {"replica_id": "r0", "epoch": 7, "url": None, "feed": "live", "events_seq": 7}
    return row | {"indexed_blocks": 2, "index_digest": f"{1 ^ 4:016x}"} | changes


@pytest.mark.parametrize(
    ("changes", "exact"),
    [
        ({}, True),
        ({"events_seq": 6, "indexed_blocks": 3, "index_digest": f"{1 ^ 2 ^ 4:016x}"}, True),
        ({"events_seq": 5, "index_digest": f"{1 ^ 2:016x}"}, True),
        ({"index_digest": f"{1 ^ 2:016x}"}, False),
        ({"indexed_blocks": 3}, False),
        ({"events_seq": 8}, None),
        ({"epoch": 8}, None),
        ({"feed": "stale"}, None),
        ({"url": "http://engine"}, None),
        ({"tiers": {"CPU": {"indexed_blocks": 0, "index_digest": "0"}}}, True),
        ({"tiers": {"CPU": {"indexed_blocks": 1, "index_digest": "2"}}}, False),
    ],
)
def test_equal_digests_after_the_same_batch_are_exact(changes: dict[str, Any], exact: bool | None) -> None:
    """Router and command never see the same batch at the same time; what cannot be compared is not called exact."""
    assert judge(listed(**changes), followed()).exact is exact


def test_a_replica_that_has_published_nothing_is_exact() -> None:
    """A cluster without traffic yet: both sides wait for batch 0."""
    digests = Digests()
    digests.joined(SOURCE, None)
    digests.blocks_changed(SOURCE, Reset(7, None, []))

    assert judge(listed(events_seq=0, indexed_blocks=0, index_digest="0"), digests).exact is True


def test_a_replica_that_refuses_us_is_named() -> None:
    """Otherwise the operator would wait for its events."""
    digests = Digests()
    digests.refused(SOURCE, KeysRefused("tcp://h:1", "no"))

    assert judge(listed(), digests).text.startswith("not compared: ")
