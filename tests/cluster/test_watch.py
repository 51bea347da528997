"""What `homing watch` prints for each kind of event."""

import json

from homing.cluster.watch import PrintingSink, Source, json_lines, readable_lines
from homing.events import Cleared, FeedStatus, Removed, SnapshotBlock, Stored

SOURCE = Source("r0", 7)


def printed(lines: object) -> list[str]:
    out: list[str] = []
    sink = PrintingSink(SOURCE, out.append, json_lines if lines == "json" else readable_lines)
    sink.reset([SnapshotBlock(1, None, [5]), SnapshotBlock(2, 1, [6])])
    sink.status(FeedStatus.LIVE)
    sink.apply([Stored(2, [3, 4], [7, 8], 1, "CPU"), Removed([3]), Cleared()])
    return out


def test_json_lines_carry_all_that_a_tree_needs() -> None:
    """Another program rebuilds the cache from these lines alone."""
    reset, status, stored, removed, cleared = [json.loads(line) for line in printed("json")]

    assert all(event["replica"] == "r0" and event["epoch"] == 7 for event in (reset, status, stored, removed, cleared))
    assert reset["blocks"] == [
        {"hash": 1, "parent": None, "token_ids": [5]},
        {"hash": 2, "parent": 1, "token_ids": [6]},
    ]
    assert status["status"] == "live"
    assert (stored["parent"], stored["hashes"], stored["token_ids"], stored["medium"]) == (2, [3, 4], [7, 8], "CPU")
    assert (removed["event"], removed["hashes"]) == ("removed", [3])
    assert cleared["event"] == "cleared"


def test_readable_lines_are_one_per_event() -> None:
    """For eyes."""
    words = [line.split(maxsplit=2)[2] for line in printed("readable")]

    assert words == [
        "reset    holds 2 blocks",
        "status   live",
        "stored   2 blocks after 0000000000000002, the last is 0000000000000004",
        "removed  1 block: 0000000000000003",
        "cleared",
    ]
