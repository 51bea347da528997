"""What the summary lines of `homing watch --rates` count."""

from homing.cluster.cli.event_rates import EventRates
from homing.events import Removed, Stored
from homing.events.follow.subscription import Apply, Counters, Reset


def test_a_report_says_rates_since_the_last_one() -> None:
    """Blocks a second tell whether a cache churns."""
    tally = EventRates()
    tally.add(Apply(0, 99.0, [Stored(None, [1, 2, 3]), Removed([4])]), now_s=100.0)
    tally.add(Apply(1, 99.975, [Stored(3, [5])]), now_s=100.0)

    line = tally.take(2.0, 7, Counters(gaps=1, snapshots=3)).words()
    empty = tally.take(2.0, 7, Counters()).words()

    words = " ".join(line.split())
    assert words == "stored 2.0/s removed 0.5/s batches 1.0/s lag 25 ms holds 7 blocks gaps 1 resyncs 2"
    assert " ".join(empty.split()).startswith("stored 0.0/s removed 0.0/s batches 0.0/s lag - holds 7")


def test_what_a_resync_tells_anew_is_no_news() -> None:
    """A late joiner's first report would show a burst that never was."""
    tally = EventRates()

    tally.add(Reset(7, 4, []), now_s=1.0)

    assert (tally.stored, tally.batches) == (0, 0)
