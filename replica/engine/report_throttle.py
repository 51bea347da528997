"""Which steps are told to routers and subscribers at once. Pure: it is given the time and sends nothing.

The publisher's thread takes the interpreter's lock from the engine's: after each step that cost 0.3 to 1 ms of a
token's 11 on two cores. A step in which requests only went on decoding is therefore told with a later one, or by a
heartbeat.
"""

from ...events.wire.messages import LoadReport

#: A step that changed nothing but how far requests have decoded waits at most so long.
QUIET_S = 0.05


class News:
    """Remembers what was told last."""

    def __init__(self) -> None:
        self._told: LoadReport | None = None
        self._told_at = 0.0

    def worth_telling(self, load: LoadReport, now: float) -> bool:
        """Whether this load, and the events of the steps since the last one, should go out now (seconds, monotonic)."""
        if self._told is not None and now - self._told_at < QUIET_S and _gist(load) == _gist(self._told):
            return False
        self._told, self._told_at = load, now
        return True


def _gist(load: LoadReport) -> tuple[object, ...]:
    """What a router's choice depends on, but for decoding, which it foresees by itself."""
    return (
        load.running,
        load.waiting,
        load.queued_prefill_tokens,
        load.accepted,
        load.draining,
        load.pinned_blocks,
        load.counters.preemptions,
    )
