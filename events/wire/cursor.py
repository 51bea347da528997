"""Where a reader stands in one numbered stream, and what a number means to it. Pure values.

Knows no payload and decides nothing: subscription.py acts on the answers.
"""

from typing import NamedTuple


class Initial(NamedTuple):
    """Nothing is known yet: no number can be placed."""


class Contiguous(NamedTuple):
    """The very next one: apply it."""


class Gap(NamedTuple):
    """Numbers from `expected` on are missing."""

    expected: int


class Stale(NamedTuple):
    """Already had: a duplicate, or late."""


class NewEpoch(NamedTuple):
    """From another incarnation of the publisher: everything known so far is void."""

    epoch: int | None


class Cursor(NamedTuple):
    """`expected` is the next number of `epoch`; None before the first position is known."""

    epoch: int | None = None
    expected: int | None = None

    def observe(self, epoch: int | None, seq: int) -> Initial | Contiguous | Gap | Stale | NewEpoch:
        """What batch `seq` of `epoch` is to a reader that stands here."""
        if epoch != self.epoch:
            return NewEpoch(epoch)
        if self.expected is None:
            return Initial()
        if seq == self.expected:
            return Contiguous()
        return Gap(self.expected) if seq > self.expected else Stale()

    def after(self, seq: int) -> "Cursor":
        """The position behind batch `seq`."""
        return Cursor(self.epoch, seq + 1)
