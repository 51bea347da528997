"""A queue of calls in virtual time."""

from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count


class EventQueue:
    """Runs calls in order of their time, and calls of equal time in the order in which they were added."""

    __slots__ = ("_heap", "_order", "now")

    def __init__(self) -> None:
        self.now = 0.0  #: virtual seconds since the start
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()

    def at(self, when: float, call: Callable[[], None]) -> None:
        heappush(self._heap, (when, next(self._order), call))

    def later(self, after_s: float, call: Callable[[], None]) -> None:
        self.at(self.now + after_s, call)

    def until(self, when: float) -> None:
        """Run all calls that are due up to `when`. With infinity, run all calls and leave the time at the last one."""
        heap = self._heap
        while heap and heap[0][0] <= when:
            self.now, _, call = heappop(heap)
            call()
        if when != float("inf"):
            self.now = max(self.now, when)
