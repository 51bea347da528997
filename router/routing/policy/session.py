"""Session affinity: a hint that breaks ties. It never costs more than a tie."""

from collections import OrderedDict

SESSIONS_KEPT = 65_536


class SessionReplicas:
    """The replica that each of the most recent sessions was sent to last."""

    def __init__(self, limit: int = SESSIONS_KEPT) -> None:
        self._limit = limit
        self._replicas: OrderedDict[str, str] = OrderedDict()

    def get(self, session: str | None) -> str | None:
        """The session's replica, which may be gone; None for an unknown session."""
        return self._replicas.get(session) if session is not None else None

    def remember(self, session: str, replica: str) -> None:
        self._replicas[session] = replica
        self._replicas.move_to_end(session)
        if len(self._replicas) > self._limit:
            self._replicas.popitem(last=False)
