"""A queue of calls in virtual time."""

from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count

#: Time, order and call.
_Entry = tuple[float, int, Callable[[], None]]


class EventQueue:
    """Runs calls in order of their time, and calls of equal time in the order in which they were added."""

    __slots__ = ("_heap", "_order", "_sorted", "now")

    def __init__(self) -> None:
        self.now = 0.0  #: virtual seconds since the start
        self._heap: list[_Entry] = []
        #: calls that were added in the order of their times, such as those with a constant delay: cheaper than a heap
        self._sorted: deque[_Entry] = deque()
        self._order = count()

    def at(self, when: float, call: Callable[[], None]) -> None:
        heappush(self._heap, (when, next(self._order), call))

    def later(self, after_s: float, call: Callable[[], None]) -> None:
        entries, when = self._sorted, self.now + after_s
        if entries and when < entries[-1][0]:
            self.at(when, call)
        else:
            entries.append((when, next(self._order), call))

    def until(self, when: float) -> None:
        """Run all calls that are due up to `when`. With infinity, run all calls and leave the time at the last one."""
        heap, entries = self._heap, self._sorted
        while heap or entries:
            from_heap = bool(heap) and (not entries or heap[0] < entries[0])
            if (heap[0] if from_heap else entries[0])[0] > when:
                break
            self.now, _, call = heappop(heap) if from_heap else entries.popleft()
            call()
        if when != float("inf"):
            self.now = max(self.now, when)
