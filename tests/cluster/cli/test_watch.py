"""The output of `homing watch` for each kind of event."""

import asyncio
import contextlib
import io
import json
from pathlib import Path

import pytest

from homing.cluster.cli.main import run
from homing.cluster.cli.watch import (
    EventFilter,
    EventRates,
    JsonPrinter,
    TextPrinter,
    WatchOptions,
    WatchSession,
    check_replicas,
    listed_replicas,
    recorded,
)
from homing.cluster.errors import ClusterError, SettingsError
from homing.events import (
    Cleared,
    EventEndpoints,
    EventFeed,
    Recorded,
    Removed,
    Stored,
    StreamEvent,
    read_lines,
    rebuild,
    to_line,
)
from homing.events.config import EventsSettings
from homing.events.follow.cluster_feed import ClusterFeed, Source
from homing.events.follow.subscription import Apply, Counters, FeedStatus, Reset
from homing.events.publish.publisher import EventPublisher
from homing.events.sdk.plain_stream import stream_events
from homing.events.wire.messages import SnapshotBlock

from ...events.routers import Listing, serving

SOURCE = Source("r0", 2**64 - 7)


def printed(printer: type[JsonPrinter] | type[TextPrinter], wanted: EventFilter = EventFilter()) -> list[str]:  # noqa: B008
    out: list[str] = []
    made = printer(out.append, wanted)
    made.batch(recorded(SOURCE, Reset(7, 4, [SnapshotBlock(1, None, [5]), SnapshotBlock(2, 1, [6])])))
    made.remark(SOURCE, "status", "live")
    made.batch(recorded(SOURCE, Apply(5, 60.0, [Stored(2, [3, 4], [7, 8], 1, "CPU"), Removed([3]), Cleared()])))
    return out


def test_json_lines_are_those_of_a_recording() -> None:
    """Pipe and file share one schema, and no number exceeds what JSON readers support."""
    lines = printed(JsonPrinter)
    events = [json.loads(line) for line in lines]

    assert [event["event"] for event in events] == ["cleared", "stored", "status", "stored", "removed", "cleared"]
    assert all(event["replica"] == "r0" and event["epoch"] == "fffffffffffffff9" for event in events)
    assert [event.get("resync", False) for event in events] == [True, True, False, False, False, False]
    assert events[1]["hashes"] == ["0000000000000001", "0000000000000002"]
    assert events[2]["status"] == "live"
    assert [to_line(record).decode() for record in read_lines(lines)] == lines[:2] + lines[3:]


def test_a_program_can_choose_what_it_reads() -> None:
    """A resync matches two filters: as a reset, and as the events that it repeats."""
    kinds = [
        [json.loads(line)["event"] for line in printed(JsonPrinter, EventFilter(kinds=frozenset([kind])))]
        for kind in ("reset", "stored", "status", "joined")
    ]

    assert kinds == [["cleared", "stored"], ["stored", "stored"], ["status"], []]


@pytest.mark.parametrize("as_json", [True, False])
async def test_rates_are_lines_of_the_kind_that_was_asked_for(as_json: bool) -> None:
    """A program that asked for JSON must not get a table."""
    lines: list[str] = []

    def write(line: str) -> None:
        lines.append(line)
        if len(lines) == 2:
            watching.stop()

    watching = WatchSession(WatchOptions(as_json=as_json, rates_s=0.01), write, None)
    nowhere = EventFeed(EventEndpoints(events="", replay="", state="", snapshot=""), IgnoringSink())

    watching.joined(SOURCE, nowhere)
    watching.blocks_changed(SOURCE, Apply(5, 60.0, [Stored(None, [3, 4])]))
    await watching.until_stopped()

    if as_json:
        joined, rates, *_ = [json.loads(line) for line in lines]
        assert joined == {"replica": "r0", "epoch": "fffffffffffffff9", "event": "joined"}
        assert (rates["event"], rates["replica"], rates["gaps"]) == ("rates", "r0", 0)
        assert rates["stored_per_s"] > 0
        assert list(read_lines(lines)) == []
    else:
        assert "stored" in lines[1]
        assert "/s" in lines[1]


class IgnoringSink:
    """A feed sink that ignores everything."""

    def __getattr__(self, name: str) -> object:
        return lambda *_: None


async def test_a_reader_that_goes_away_ends_the_command_quietly() -> None:
    """`homing watch | head`: lines are printed in event-loop callbacks, where exceptions do not end the command."""
    attempts = 0

    def gone(_: str) -> None:
        nonlocal attempts
        attempts += 1
        raise BrokenPipeError

    watching = WatchSession(WatchOptions(), gone, None)
    watching.status(SOURCE, FeedStatus.LIVE)
    watching.status(SOURCE, FeedStatus.STALE)

    with pytest.raises(BrokenPipeError):
        await watching.until_stopped()
    assert attempts == 1


@pytest.mark.parametrize("flags", [[], ["--record", "/dev/full"]])
def test_what_cannot_be_written_ends_the_command(flags: list[str]) -> None:
    """A full disk would otherwise leave a recording with a hole and half a line."""
    publisher = EventPublisher(EventsSettings(), host="127.0.0.1", block_size=1, epoch=7)
    listing = Listing()
    listing.put("r0", 7, publisher.start())

    with serving(listing) as url, Path("/dev/full").open("w") as full:
        out = io.StringIO() if flags else full
        with pytest.raises(SettingsError, match="No space left on device"):
            run(["watch", "--url", url, *flags], out)
        with contextlib.suppress(OSError):
            full.close()
    publisher.close()


def test_a_replica_with_an_unusable_address_is_an_error_in_one_line() -> None:
    """The response of /cluster comes from another machine."""
    listing = Listing()
    listing.put("r0", 7, EventEndpoints(events="nonsense", replay="", state="", snapshot=""))

    with serving(listing) as url, pytest.raises(ClusterError, match="cannot connect to 'nonsense'"):
        run(["watch", "--url", url], io.StringIO())


def test_readable_lines_are_one_per_event() -> None:
    """This format is for people."""
    words = [line.split(maxsplit=2)[2] for line in printed(TextPrinter)]

    assert words == [
        "reset    holds 2 blocks",
        "status   live",
        "stored   2 blocks after 0000000000000002, the last is 0000000000000004",
        "removed  1 block: 0000000000000003",
        "cleared",
    ]


def shown(wanted: EventFilter, *events: object) -> list[str]:
    """The readable lines of one batch, without time and replica."""
    out: list[str] = []
    TextPrinter(out.append, wanted).batch(recorded(SOURCE, Apply(5, 60.0, events)))
    return [" ".join(line.split()[2:]) for line in out]


def test_a_run_of_one_kind_is_one_line() -> None:
    """A step of a busy engine stores a dozen chains, which are not worth a dozen lines."""
    chains = [Stored(None, [1, 2]), Stored(None, [3])]

    assert shown(EventFilter(), Removed([9]), *chains) == [
        "removed 1 block: 0000000000000009",
        "stored 3 blocks in 2 chains",
    ]


def test_an_event_without_blocks_is_a_line() -> None:
    """Another engine's publisher may send one."""
    assert shown(EventFilter(), Stored(None, []), Removed([])) == ["stored 0 blocks in 1 chains", "removed 0 blocks:"]


def test_filters_keep_the_kinds_and_blocks_that_were_asked_for() -> None:
    """For example, one block can be followed through its life among thousands."""
    batch = [Stored(None, [0x1F << 56, 0x2F << 56]), Removed([0x1F << 56]), Cleared()]

    assert [line.split()[0] for line in shown(EventFilter(kinds=frozenset(["removed"])), *batch)] == ["removed"]
    assert shown(EventFilter(hash_prefix="1f"), *batch)[0].startswith("stored 1 block after the root, the last is 1f00")
    assert shown(EventFilter(hash_prefix="ee"), *batch) == ["cleared"]


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    """A file as written by `--record`."""
    items = [StreamEvent(4, None, Stored(None, [1, 2], [7, 8], 1), resync=True), StreamEvent(5, 60.0, Removed([1]))]
    path = tmp_path / "events.jsonl"
    path.write_bytes(b"".join(to_line(Recorded(replica, item)) + b"\n" for replica in ("r0", "r1") for item in items))
    return path


def test_a_recorded_file_is_printed_through_the_same_filters(recording: Path) -> None:
    """Past events are inspected with the same tools as live ones."""
    out = io.StringIO()

    assert run(["watch", "--replay", str(recording), "--replica", "r1", "--event", "removed"], out) == 0

    assert out.getvalue().endswith("  r1    removed  1 block: 0000000000000001\n")
    assert out.getvalue().count("\n") == 1


def test_a_replay_prints_what_watch_has_printed(tmp_path: Path) -> None:
    """A replay uses the format of live output; the time is the event's, and a resync has none."""
    instructions = [
        Reset(7, 4, [SnapshotBlock(1, None, [5]), SnapshotBlock(2, 1, [6])]),
        Apply(5, 60.0, [Stored(2, [3, 4], [7, 8], 1), Stored(4, [5], [9], 1), Removed([3]), Cleared()]),
    ]
    live: list[str] = []
    lines = []
    for instruction in instructions:
        TextPrinter(live.append, EventFilter(), lambda: 60.0).batch(recorded(SOURCE, instruction))
        lines += [to_line(Recorded("r0", item, SOURCE.epoch)) for item in stream_events(instruction)]
    (tmp_path / "record").write_bytes(b"\n".join(lines))
    out = io.StringIO()

    run(["watch", "--replay", str(tmp_path / "record")], out)

    assert out.getvalue().splitlines() == [live[0].replace(live[0][:8], "--:--:--"), *live[1:]]


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_a_replay_reports_rates_over_recorded_time(tmp_path: Path, flags: list[str]) -> None:
    """A recording of an hour is read in a second, but its rates are per recorded time."""
    batches = [(0, 100.0, Stored(None, [1, 2])), (1, 101.0, Stored(2, [3, 4])), (3, 103.0, Removed([4]))]
    lines = [to_line(Recorded("r0", StreamEvent(seq, ts, event), 7)) for seq, ts, event in batches]
    (tmp_path / "record").write_bytes(b"\n".join(lines))
    out = io.StringIO()

    run(["watch", "--replay", str(tmp_path / "record"), "--rates", "2", *flags], out)

    first, last = out.getvalue().splitlines()
    if flags:
        assert json.loads(first)["stored_per_s"] == 2.0
        assert json.loads(last)["ts"] == 103.0
        assert (json.loads(last)["removed_per_s"], json.loads(last)["gaps"]) == (1.0, 1)
    else:
        assert " ".join(first.split()[1:4]) == "r0 stored 2.0/s"
        assert "lag       -  holds 3 blocks  gaps 1" in last


@pytest.mark.parametrize("interval", ["2", "1e-8"])
def test_a_jump_of_the_recorded_clock_is_one_line_of_rates(tmp_path: Path, interval: str) -> None:
    """A machine may start in 1970, and a file may hold recordings of several days."""
    times = (0.0, 1.0, 1.7e9, 1.7e9 + 1)
    lines = [to_line(Recorded("r0", StreamEvent(seq, ts, Cleared()), 7)) for seq, ts in enumerate(times)]
    (tmp_path / "record").write_bytes(b"\n".join(lines))
    out = io.StringIO()

    run(["watch", "--replay", str(tmp_path / "record"), "--rates", interval, "--json"], out)

    reports = [json.loads(line) for line in out.getvalue().splitlines()]
    assert len(reports) <= 2 * len(times)
    assert sum(each["seconds"] for each in reports) == pytest.approx(1.7e9 + 1)


def test_a_recorded_time_may_be_any_number(tmp_path: Path) -> None:
    """It is the publisher's, which may count nanoseconds."""
    (tmp_path / "record").write_bytes(to_line(Recorded("r0", StreamEvent(0, 1.7e18, Cleared()))))
    out = io.StringIO()

    run(["watch", "--replay", str(tmp_path / "record")], out)

    assert out.getvalue() == "--:--:--  r0    cleared\n"


def test_a_replay_as_json_is_the_recording(recording: Path) -> None:
    """The output can be filtered into another recording."""
    out = io.StringIO()

    run(["watch", "--replay", str(recording), "--json"], out)

    assert out.getvalue() == recording.read_text()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--event", "store"], "did you mean stored"),
        (["--rates", "0"], "above 0"),
        (["--replay", "/nowhere"], "cannot replay /nowhere"),
        (["--hash", "zz"], "--hash zz: a hash is up to 16 hex digits"),
        (["--hash", "0" * 17], "up to 16 hex digits"),
    ],
)
def test_mistakes_are_reported_by_name(words: list[str], told: str) -> None:
    """The message includes the remedy."""
    with pytest.raises(SettingsError, match=told):
        run(["watch", *words], io.StringIO())


async def test_what_is_followed_is_recorded_whole_whatever_is_shown(tmp_path: Path) -> None:
    """A display filter must not leave gaps in the recording: the tree rebuilt from it equals the replica's."""
    publisher = EventPublisher(EventsSettings(), host="127.0.0.1", block_size=1, epoch=7)
    endpoints = publisher.start()
    publisher.stored(None, [bytes(15) + b"\1", bytes(15) + b"\2"], bytes(8))
    publisher.flush()
    viewing, lines = WatchOptions(shown=EventFilter(kinds=frozenset(["status"]))), []

    with (tmp_path / "record").open("wb") as record:
        feed = ClusterFeed(dict, WatchSession(viewing, lines.append, record))
        feed.adjust({SOURCE: endpoints})
        async with asyncio.timeout(120):
            while not any("live" in line for line in lines):  # noqa: ASYNC110 - lines are plain text
                await asyncio.sleep(0.01)
        feed.adjust({})
    publisher.close()

    mirrors = rebuild(read_lines((tmp_path / "record").read_bytes().splitlines()))
    assert mirrors["r0"].parents == {1: None, 2: 1}
    assert [line.split()[2] for line in lines] == ["status"]


def test_a_replica_that_is_not_there_is_named_beside_those_that_are(recording: Path) -> None:
    """Empty output would look like an idle cache."""
    view = {"replicas": [{"replica_id": "r0"}], "absent": [{"replica_id": "r1"}], "refused": [{"replica_id": "r2"}]}

    with pytest.raises(SettingsError, match=r"--replica r9: the cluster has no such replica \(there are: r0, r1, r2\)"):
        check_replicas({"r0", "r1", "r9"}, listed_replicas(view), "the cluster")
    with pytest.raises(SettingsError, match=r"--replica r9: .*events.jsonl has no such replica \(there are: r0, r1\)"):
        run(["watch", "--replay", str(recording), "--replica", "r9"], io.StringIO())


def test_a_report_says_rates_since_the_last_one() -> None:
    """Blocks per second show whether a cache churns."""
    rates = EventRates()
    rates.add(Apply(0, 99.0, [Stored(None, [1, 2, 3]), Removed([4])]), now_s=100.0)
    rates.add(Apply(1, 99.975, [Stored(3, [5])]), now_s=100.0)

    out: list[str] = []
    printer = TextPrinter(out.append, EventFilter())
    printer.rates(SOURCE, rates.take(2.0, 7, Counters(gaps=1, snapshots=3)))
    printer.rates(SOURCE, rates.take(2.0, 7, Counters()))

    words, empty = (" ".join(line.split()[2:]) for line in out)
    assert words == "stored 2.0/s removed 0.5/s batches 1.0/s lag 25 ms holds 7 blocks gaps 1 resyncs 2"
    assert empty.startswith("stored 0.0/s removed 0.0/s batches 0.0/s lag - holds 7")


def test_what_a_resync_tells_anew_is_not_counted() -> None:
    """Otherwise, a late subscriber's first report would show a burst that never happened."""
    rates = EventRates()

    rates.add(Reset(7, 4, []), now_s=1.0)

    assert (rates.stored, rates.batches) == (0, 0)
