"""Where a reader stands."""

import pytest

from homing.events.wire.cursor import Contiguous, Cursor, Gap, Initial, NewEpoch, Stale


@pytest.mark.parametrize(
    ("epoch", "seq", "answer"),
    [(7, 5, Contiguous()), (7, 8, Gap(5)), (7, 4, Stale()), (8, 5, NewEpoch(8)), (None, 5, NewEpoch(None))],
)
def test_a_number_means_what_it_says_where_the_reader_stands(epoch: int | None, seq: int, answer: object) -> None:
    """Values, so that they can be compared and tested; the classes differ, though tuples without fields are equal."""
    seen = Cursor(7, 5).observe(epoch, seq)

    assert seen == answer
    assert type(seen) is type(answer)


def test_before_the_first_position_nothing_can_be_placed() -> None:
    """A batch that comes then must wait for a snapshot."""
    assert isinstance(Cursor(7).observe(7, 0), Initial)


def test_the_cursor_moves_behind_what_was_taken() -> None:
    """By one, whatever it expected before."""
    assert Cursor(7, 5).after(5) == Cursor(7, 6)
