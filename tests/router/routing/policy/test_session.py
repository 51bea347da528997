"""The replica of each recent session."""

from homing.router.routing.policy.session import SessionReplicas


def test_the_oldest_session_is_forgotten_first() -> None:
    """Memory is bounded, however many sessions there are; a session that comes again is recent."""
    sessions = SessionReplicas(limit=2)
    for session in ("a", "b", "a", "c"):
        sessions.remember(session, f"replica of {session}")

    found = [sessions.get(session) for session in ("a", "b", "c", None)]

    assert found == ["replica of a", None, "replica of c", None]
