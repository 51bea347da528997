"""Places waiting requests when their turn comes, and suspects when a replica is free for their trial."""

from collections.abc import Collection, Sequence
from math import inf

from ..routing.joined_replica import JoinedReplica
from ..routing.placement import Placement
from ..routing.policy.base import SATURATED
from ..routing.policy.explain import why_none_opens
from .dispatcher import Dispatcher
from .request_state import Continue, Instruction, RequestState, Send
from .request_table import ITS_TURN, RequestTable

#: Waiting requests placed in one iteration of the event loop: a decision takes 0.1 ms, with 512 engines up to 0.4 ms.
PLACED_AT_ONCE = 4


class Turns:
    """The order in which waiting requests are placed: that of the queue (fair_queue.py)."""

    def __init__(self, table: RequestTable, dispatcher: Dispatcher, placement: Placement) -> None:
        self._table = table
        self._dispatcher = dispatcher
        self._placement = placement

    def pump(self, now: float) -> list[Instruction]:
        """Place some waiting requests in queue order. One that fits nowhere lets others pass (fair_queue.py)."""
        table = self._table
        instructions: list[Instruction] = self._try_suspects(now) if table.suspects.waiting else []
        left, again = PLACED_AT_ONCE, False
        if table.queue and (opened := self._opened(now)):
            offers = {
                group: frozenset(each.name for each in opened if each.offers(group)) for group in table.queue.groups
            }
            kept: set[str] = set()  # replicas for which others wait

            def keep(group: str) -> list[str]:
                kept.update(offers[group])
                return [each for each, names in offers.items() if names <= kept]

            for name in table.queue.turns(shut=[each for each, names in offers.items() if not names], keep=keep):
                if not left:
                    again = True
                    break
                request = table.get(name)
                assert request is not None, f"request {name} waits, and is over"
                refused = request.moves.excluded
                sent = self.place(request, now, kept)
                if sent is None:
                    again |= bool(refused)  # those that refused it may be tried now
                    table.queue.let_pass(name, self._patience(request))
                    continue
                left -= 1
                instructions.append(sent)
                table.queue.take(name, request.sent.decision.uncached_tokens)
        if again:
            instructions.append(Continue())
        return instructions

    def place(self, request: RequestState, now: float, kept: Collection[str] = ()) -> Send | None:
        """Send a request to a replica, but not to one that is on trial with a suspect; None if none can take it.

        `kept`: replicas for which others wait.
        """
        trials = self.kept_for_trials(now)
        return self._dispatcher.place(request, now, {*kept, *trials} if trials else kept)

    def kept_for_trials(self, now: float) -> Collection[str]:
        suspects = self._table.suspects
        return suspects.closed(self._table.usable(now)) if suspects else ()

    def _try_suspects(self, now: float) -> list[Instruction]:
        """Send suspects to replicas that are free for a trial."""
        instructions: list[Instruction] = []
        suspects, usable = self._table.suspects, self._table.usable(now)
        for request in suspects.in_turn():
            if places := suspects.places(request, usable, now):
                closed = [each.name for each in self._placement.fleet if each.name not in places]
                sent = self._dispatcher.place(request, now, closed)
                if sent is not None:
                    suspects.begin(request, sent.replica, now)
                    instructions.append(sent)
        return instructions

    def _opened(self, now: float) -> list[JoinedReplica]:
        """The replicas that take new requests. Requests that none of them can take are told why."""
        fleet = self._placement.fleet
        fleet.refresh(now)
        opened = [each for each in fleet if each.load.available]
        self._table.tell({adapter: self._why_waiting(adapter, opened) for adapter in self._table.queue.groups})
        return opened

    def _why_waiting(self, adapter: str, opened: Sequence[JoinedReplica]) -> str:
        """Why a request waits that was not tried, if these replicas take new requests."""
        if any(each.offers(adapter) for each in opened):
            return ITS_TURN
        offering = [each for each in self._placement.fleet if each.offers(adapter)]
        if adapter and not offering:
            return f"held: no replica offers {adapter}"
        return why_none_opens((each.name, each.load) for each in offering)

    def _patience(self, request: RequestState) -> float:
        """Work that may pass a request that fits nowhere, in tokens; infinity if it does not wait for room."""
        return request.prompt_tokens + request.generated if SATURATED in request.waits_for else inf
