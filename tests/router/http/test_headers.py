"""What headers tell of the caller."""

import pytest

from homing.router.http.headers import MAX_SESSION_CHARS, session


@pytest.mark.parametrize("name", ["x-session-affinity", "x-correlation-id"])
def test_a_conversation_is_known_by_either_header(name: str) -> None:
    """Clients and proxies write the one or the other."""
    assert session({name: "chat-7"}) == "chat-7"
    assert session({}) is None


def test_a_long_name_of_a_conversation_is_kept_short() -> None:
    """65,536 are remembered: with 64 KB each, whoever may ask could fill 4 GB."""
    one, other = session({"x-session-affinity": "a" * 60_000}), session({"x-session-affinity": "a" * 60_001})

    assert one is not None
    assert len(one) <= MAX_SESSION_CHARS
    assert one == session({"x-session-affinity": "a" * 60_000})
    assert one != other
