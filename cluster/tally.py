"""What `homing watch --rates` counts: one replica's stream between two reports. Pure: numbers in, a line out."""

from dataclasses import dataclass

from ..events import Removed, Stored
from ..events.subscription import Apply, Counters, Reset


@dataclass(slots=True)
class Tally:
    """Sums since the last report."""

    stored: int = 0
    removed: int = 0
    batches: int = 0
    lag_s: float | None = None  #: of the newest batch, from the publisher's clock to ours

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

    def report(self, seconds: float, held: int, counters: Counters) -> str:
        """The line for the last `seconds`, and start anew."""
        lag = "-" if self.lag_s is None else f"{self.lag_s * 1000:.0f} ms"
        line = (
            f"stored {self.stored / seconds:7.1f}/s  removed {self.removed / seconds:7.1f}/s  "
            f"batches {self.batches / seconds:6.1f}/s  lag {lag:>7}  "
            f"holds {held} blocks  gaps {counters.gaps}  resyncs {counters.snapshots - 1 if counters.snapshots else 0}"
        )
        self.stored = self.removed = self.batches = 0
        self.lag_s = None
        return line
