"""Values that a message must not contain, whoever sent it."""

import msgspec
import pytest

from homing.events.wire.messages import Heartbeat, SnapshotChunk

HEARTBEAT = {"epoch": 1, "blocks": 0, "digest": 0, "ts": 0.0}
CHUNK = {"epoch": 1, "index": 0, "last": True, "blocks": []}


@pytest.mark.parametrize("seq", [-1, 2**63, 2**64 - 1])
@pytest.mark.parametrize(("kind", "fields"), [(Heartbeat, HEARTBEAT), (SnapshotChunk, CHUNK)])
def test_a_number_after_which_none_can_be_requested_is_refused(kind, fields, seq):
    """A subscriber requests the next number, which must fit into 8 unsigned bytes."""
    with pytest.raises(msgspec.ValidationError, match="seq"):
        msgspec.msgpack.decode(msgspec.msgpack.encode(fields | {"seq": seq}), type=kind)
