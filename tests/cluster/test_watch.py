"""What `homing watch` prints for each kind of event."""

import asyncio
import io
import json
from pathlib import Path

import pytest

from homing.cluster.cli import run
from homing.cluster.errors import SettingsError
from homing.cluster.watch import PrintingSink, Source, Viewing, Wanted, Watching
from homing.events import (
    Cleared,
    EventPublisher,
    EventsSettings,
    FeedStatus,
    Recorded,
    Removed,
    SnapshotBlock,
    Stored,
    StreamEvent,
    read_lines,
    rebuild,
    to_line,
)

SOURCE = Source("r0", 7)


def printed(lines: object) -> list[str]:
    out: list[str] = []
    sink = PrintingSink(SOURCE, out.append, as_json=lines == "json")
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


def shown(wanted: Wanted, *events: object) -> list[str]:
    """The readable lines of one batch, without time and replica."""
    out: list[str] = []
    PrintingSink(SOURCE, out.append, as_json=False, wanted=wanted).apply(events)
    return [" ".join(line.split()[2:]) for line in out]


def test_a_run_of_one_kind_is_one_line() -> None:
    """A step of a busy engine stores a dozen chains; nobody reads a dozen lines for it."""
    chains = [Stored(None, [1, 2]), Stored(None, [3])]

    assert shown(Wanted(), Removed([9]), *chains) == [
        "removed 1 block: 0000000000000009",
        "stored 3 blocks in 2 chains",
    ]


def test_filters_keep_the_kinds_and_blocks_that_were_asked_for() -> None:
    """One block is followed through its life among thousands."""
    batch = [Stored(None, [0x1F << 56, 0x2F << 56]), Removed([0x1F << 56]), Cleared()]

    assert [line.split()[0] for line in shown(Wanted(kinds=frozenset(["removed"])), *batch)] == ["removed"]
    assert shown(Wanted(hash_prefix="1f"), *batch)[0].startswith("stored 1 block after the root, the last is 1f00")
    assert shown(Wanted(hash_prefix="ee"), *batch) == ["cleared"]


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    """A file as `--record` writes it."""
    items = [StreamEvent(4, None, Stored(None, [1, 2], [7, 8], 1), resync=True), StreamEvent(5, 60.0, Removed([1]))]
    path = tmp_path / "events.jsonl"
    path.write_bytes(b"".join(to_line(Recorded(replica, item)) + b"\n" for replica in ("r0", "r1") for item in items))
    return path


def test_a_recorded_file_is_printed_through_the_same_filters(recording: Path) -> None:
    """What happened last night is looked at as what happens now."""
    out = io.StringIO()

    assert run(["watch", "--replay", str(recording), "--replica", "r1", "--event", "stored"], out) == 0

    assert out.getvalue().endswith("r1 #4 stored 2 blocks at the start of a prompt (2 tokens) (resync)\n")
    assert out.getvalue().count("\n") == 1


def test_a_replay_as_json_is_the_recording(recording: Path) -> None:
    """It can be filtered into another recording."""
    out = io.StringIO()

    run(["watch", "--replay", str(recording), "--json"], out)

    assert out.getvalue() == recording.read_text()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--event", "store"], "did you mean stored"),
        (["--rates", "0"], "above 0"),
        (["--replay", "/nowhere"], "cannot replay /nowhere"),
    ],
)
def test_mistakes_are_told_by_name(words: list[str], told: str) -> None:
    """With the remedy."""
    with pytest.raises(SettingsError, match=told):
        run(["watch", *words], io.StringIO())


async def test_what_is_followed_is_recorded_whole_whatever_is_shown(tmp_path: Path) -> None:
    """A filter for the eye must not put holes into the record: the tree rebuilt from it is the replica's."""
    publisher = EventPublisher(EventsSettings(), host="127.0.0.1", block_size=1, epoch=7, medium="CPU")
    endpoints = publisher.start()
    publisher.stored(None, [bytes(15) + b"\1", bytes(15) + b"\2"], bytes(8))
    publisher.flush()
    viewing, lines = Viewing(wanted=Wanted(kinds=frozenset(["status"]))), []

    with (tmp_path / "record").open("wb") as record:
        watching = Watching("http://unused", viewing, lines.append, None, record)
        watching.adjust({SOURCE: endpoints})
        async with asyncio.timeout(20):
            while not any("live" in line for line in lines):  # noqa: ASYNC110 - lines are plain text
                await asyncio.sleep(0.01)
        watching.adjust({})
    publisher.close()

    mirrors = rebuild(read_lines((tmp_path / "record").read_bytes().splitlines()))
    assert mirrors["r0"].parents == {1: None, 2: 1}
    assert [line.split()[2] for line in lines] == ["joined", "status", "gone"]
