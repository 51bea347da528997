"""Stop strings across token boundaries. Pure state of one answer; knows text only, no tokens.

A stop string takes effect at the first moment the text contains one, whatever pieces the text came in; the text is cut
before it. Text is held back only as long as it may be the beginning of a stop string.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(slots=True, frozen=True)
class StopMatch:
    """A stop string inside some text."""

    start: int
    end: int
    stop: str


def first_match(text: str, stops: Sequence[str]) -> StopMatch | None:
    """The stop string that is complete first; of those that end together, the longest."""
    found = ((text.find(stop), stop) for stop in stops)
    matches = [StopMatch(start, start + len(stop), stop) for start, stop in found if start >= 0]
    return min(matches, key=lambda match: (match.end, match.start), default=None)


def held_length(text: str, stops: Sequence[str]) -> int:
    """Length of the longest end of `text` that begins a stop string without being one."""
    longest = 0
    for stop in stops:
        for length in range(min(len(stop) - 1, len(text)), longest, -1):
            if text.endswith(stop[:length]):
                longest = length
                break
    return longest


class StopFinder:
    """Looks for stop strings in text that comes in pieces."""

    __slots__ = ("_held", "_stops", "stopped_by")

    def __init__(self, stops: Sequence[str]) -> None:
        """`stops` are not empty strings."""
        self._stops = tuple(stops)
        self._held = ""
        self.stopped_by: str | None = None  #: once set, no more text comes

    def push(self, text: str) -> str:
        """The text that is safe to show now."""
        if not self._stops:
            return text
        if self.stopped_by is not None or not text:
            return ""
        # A match must end in the new text: had it ended before, it would have been found then.
        text = self._held + text
        if match := first_match(text, self._stops):
            self.stopped_by, self._held = match.stop, ""
            return text[: match.start]
        cut = len(text) - held_length(text, self._stops)
        self._held = text[cut:]
        return text[:cut]

    def flush(self) -> str:
        """The end of the answer: what was held began a stop string that never came."""
        held, self._held = self._held, ""
        return held
