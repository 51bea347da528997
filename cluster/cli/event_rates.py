"""What `homing watch --rates` counts: one replica's stream between two reports. Pure: numbers in, numbers out."""

from dataclasses import dataclass

import msgspec

from ...events import Removed, Stored
from ...events.follow.subscription import Apply, Counters, Reset


class RateReport(msgspec.Struct, frozen=True, kw_only=True):
    """One replica's stream over some seconds."""

    seconds: float
    stored_per_s: float  #: blocks
    removed_per_s: float  #: blocks
    batches_per_s: float
    lag_s: float | None  #: of the newest batch, from the publisher's clock to ours; None: there was none
    held_blocks: int
    gaps: int  #: since it is followed
    resyncs: int  #: since then, beside the first

    def words(self) -> str:
        """For a person."""
        lag = "-" if self.lag_s is None else f"{self.lag_s * 1000:.0f} ms"
        return (
            f"stored {self.stored_per_s:7.1f}/s  removed {self.removed_per_s:7.1f}/s  "
            f"batches {self.batches_per_s:6.1f}/s  lag {lag:>7}  "
            f"holds {self.held_blocks} blocks  gaps {self.gaps}  resyncs {self.resyncs}"
        )


@dataclass(slots=True)
class EventRates:
    """Sums since the last report."""

    stored: int = 0
    removed: int = 0
    batches: int = 0
    lag_s: float | None = None  #: of the newest batch

    def add(self, instruction: Apply | Reset, now_s: float) -> None:
        """Count a batch; what a resync tells anew is not news. `now_s`: seconds since 1970."""
        if isinstance(instruction, Reset):
            return
        self.batches += 1
        self.lag_s = now_s - instruction.ts
        for event in instruction.events:
            if isinstance(event, Stored):
                self.stored += len(event.hashes)
            elif isinstance(event, Removed):
                self.removed += len(event.hashes)

    def take(self, seconds: float, held: int, counters: Counters) -> RateReport:
        """What the last `seconds` brought, and start anew."""
        rates = RateReport(
            seconds=seconds,
            stored_per_s=self.stored / seconds,
            removed_per_s=self.removed / seconds,
            batches_per_s=self.batches / seconds,
            lag_s=self.lag_s,
            held_blocks=held,
            gaps=counters.gaps,
            resyncs=max(0, counters.snapshots - 1),
        )
        self.stored = self.removed = self.batches = 0
        self.lag_s = None
        return rates
