"""Which slot of the device's table each running request has. Pure."""

from collections.abc import Iterable

from ..engine.request import Phase, RequestState


class SlotBook:
    """Slots 1 to `count`; a request keeps its slot as long as it runs without being preempted."""

    def __init__(self, count: int) -> None:
        self._free = list(range(count, 0, -1))
        #: With each slot the stay that it was given for: a preempted request comes back as another one.
        self._held: dict[int, tuple[RequestState, int]] = {}
        self._slot_of: dict[int, int] = {}

    def assign(self, requests: Iterable[RequestState]) -> tuple[list[int], list[RequestState]]:
        """A slot for each running request, and those that were given one just now."""
        self._release()
        slots: list[int] = []
        started: list[RequestState] = []
        for request in requests:
            slot = self._slot_of.get(request.arrival)
            if slot is None:
                slot = self._slot_of[request.arrival] = self._free.pop()
                self._held[slot] = request, request.preemptions
                started.append(request)
            slots.append(slot)
        return slots, started

    def _release(self) -> None:
        for slot, (request, preemptions) in list(self._held.items()):
            if request.phase is not Phase.RUNNING or request.preemptions != preemptions:
                del self._held[slot], self._slot_of[request.arrival]
                self._free.append(slot)

    def check(self) -> None:
        """Assert that no slot is lost or given twice."""
        assert len(set(self._free) | set(self._held)) == len(self._free) + len(self._held)
        assert sorted(self._slot_of.values()) == sorted(self._held), (self._slot_of, self._held)
