"""A stream is split into messages without changing a byte, regardless of how it arrives."""

from hypothesis import given
from hypothesis import strategies as st

from .zmtp import COMMAND, GREETING_BYTES, LONG, MORE, Messages

GREETING = bytes(GREETING_BYTES)


def frame(body: bytes, flags: int = 0) -> bytes:
    if len(body) > 255:
        return bytes([flags | LONG]) + len(body).to_bytes(8, "big") + body
    return bytes([flags, len(body)]) + body


READY = frame(b"\x05READY", COMMAND)
SHORT = frame(b"topic", MORE) + frame(b"payload")
LARGE = frame(b"topic", MORE) + frame(bytes(300))


def test_messages_of_several_frames_stay_together_and_commands_are_not_lost() -> None:
    """Dropping half a message would break the connection instead of losing a message."""
    assert Messages().feed(GREETING + READY + SHORT + LARGE) == [
        (GREETING, False),
        (READY, False),
        (SHORT, True),
        (LARGE, True),
    ]


def test_a_greeting_is_not_held_back_until_it_is_whole() -> None:
    """Each side waits for the peer's first greeting bytes before it sends the rest of its own."""
    messages = Messages()

    assert [messages.feed(GREETING[:10]), messages.feed(GREETING[10:] + READY)] == [
        [(GREETING[:10], False)],
        [(GREETING[10:], False), (READY, False)],
    ]


@given(st.lists(st.integers(1, 120)))
def test_it_does_not_matter_how_bytes_arrive(sizes: list[int]) -> None:
    """A socket may split the stream anywhere."""
    stream, messages, found = GREETING + READY + SHORT + LARGE, Messages(), []
    for size in [*sizes, len(stream)]:
        found += messages.feed(stream[:size])
        stream = stream[size:]

    assert [data for data, losable in found if losable] == [SHORT, LARGE]
    assert b"".join(data for data, _ in found) == GREETING + READY + SHORT + LARGE
