"""Decides after which steps a load report and events are sent at once. Pure: it is given the time and sends nothing.

The publisher's thread competes with the engine's for the interpreter lock: after each step that cost 0.3 to 1 ms of a
token's 11 on two cores. A step that only decoded is therefore reported with a later one, or with a heartbeat.
"""

from ...events.wire.messages import LoadReport

#: Longest delay of a report on steps that changed nothing but how far requests have decoded.
QUIET_S = 0.05


class ReportThrottle:
    """Compares each load with the last one that was sent."""

    def __init__(self) -> None:
        self._sent: tuple[object, ...] | None = None
        self._sent_at = 0.0

    def due(self, load: LoadReport, now: float) -> bool:
        """Whether this load, and the events since the last report, should be sent now (seconds, monotonic)."""
        # What routing depends on, except decoding, which routers predict themselves.
        state = (
            load.running,
            load.waiting,
            load.queued_prefill_tokens,
            load.accepted,
            load.draining,
            load.pinned_blocks,
            load.counters.preemptions,
        )
        if state == self._sent and now - self._sent_at < QUIET_S:
            return False
        self._sent, self._sent_at = state, now
        return True
