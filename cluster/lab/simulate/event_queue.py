"""Virtual time and what is due in it. Knows nothing of what the calls do."""

from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count


class Agenda:
    """Calls in order of their time, and of their entry where times are equal."""

    __slots__ = ("_heap", "_order", "done", "now")

    def __init__(self) -> None:
        self.now = 0.0
        #: calls made so far
        self.done = 0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()

    def at(self, when: float, call: Callable[[], None]) -> None:
        """Have this called at that time."""
        heappush(self._heap, (when, next(self._order), call))

    def until(self, when: float) -> None:
        """Let everything happen that is due up to `when`; infinity: everything, and time stays at the last of it."""
        heap = self._heap
        while heap and heap[0][0] <= when:
            self.now, _, call = heappop(heap)
            self.done += 1
            call()
        if when != float("inf"):
            self.now = max(self.now, when)
