"""Requests that may have killed a replica: each runs again, apart from the others, until it is cleared.

When a replica dies, any request on it may be the cause: a prompt that crashes the engine would crash the next one, too.
So each of them becomes a suspect and is tried: on a replica without other requests if there is one, else beside
requests whose answers are well under way. No other request is sent there meanwhile. The trial ends well after a few
tokens. If that replica dies as well, the suspect is to blame and ends with an error, and all others are cleared.

    on a replica ──it dies──▶ waiting ──places()──▶ on trial ──TRIAL_TOKENS, end, TRIAL_S──▶ as any other request
                                                        └──it dies──▶ blamed

A request that kills its replica later in its answer does so at about the same point again. If it is the only one on
the second replica for which that holds, it is to blame, too. Otherwise its next trial lasts beyond that point. What
kills at no certain point uses up its retries.

One replica is left without trials, so that new requests need not wait; if there is only one, they wait for a trial.
Pure state: requests, replicas' names and times. The request flow moves and ends requests.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from .request_state import RequestId, RequestState, Suspicion

#: When a replica dies, a step may be in progress and another one's tokens on their way: a request that kills it at a
#: certain token may be so much further than the router knows.
IN_FLIGHT_TOKENS = 2
#: A trial ends after this many tokens.
TRIAL_TOKENS = 2 * IN_FLIGHT_TOKENS
#: A trial ends after this time in any case, so that a long prompt does not keep the others waiting.
TRIAL_S = 10.0
#: A request without a token so long after it was due, on a replica that computes others, is in the replica's queue.
QUEUED_S = 0.5
#: Suspects are tried this long after the death. Replicas of one machine die together, and the router notices at
#: different times; a request sent to a replica that is already dead would be blamed for its death.
SETTLE_S = 0.25
#: A suspect whose answer had not begun waits this long for a replica without requests, as it is the likelier cause and
#: its client has not seen a stream stop. Any suspect waits this long for one without other suspects.
PATIENCE_S = 1.0


class Usable(NamedTuple):
    """A replica that takes new requests."""

    requests: int  #: all that it has
    started: bool  #: whether none of this router's `is_starting`
    unclear: bool  #: whether any of this router's `is_unclear`


class Suspects:
    """The suspects that wait for a trial, and the trials."""

    def __init__(self) -> None:
        self.waiting: dict[RequestId, RequestState] = {}
        self._trials: dict[str, tuple[RequestState, float]] = {}  #: by replica, with their start

    def __bool__(self) -> bool:
        return bool(self.waiting or self._trials)

    def died(
        self, replica: str, requests: Sequence[RequestState], now: float, *, busy: bool = False
    ) -> RequestState | None:
        """Suspect the requests of a replica that died or hangs, or of its step that failed.

        Unless one is to blame: that one is returned.

        `busy`: the replica computed requests until it died. One on trial that was due long before was not among them.
        """
        tried = self._trials[replica][0] if replica in self._trials else None
        if tried is not None and not any(each is tried for each in requests):
            tried = None
        if tried is not None:
            del self._trials[replica]
        if (
            tried is not None
            and busy
            and len(requests) > 1
            and not tried.produced
            and now > tried.sent.due_at + QUEUED_S
        ):
            assert tried.suspicion is not None, "a trial without a suspicion"
            tried.suspicion = Suspicion((*tried.suspicion.deaths[:-1], (replica, now)), tried.suspicion.produced)
            requests, tried = [each for each in requests if each is not tried], None
        again = [each for each in requests if each is tried or _at_the_same_point(each)]
        guilty = again[0] if len(again) == 1 else None
        if tried is None and any(is_starting(each, now) for each in requests if each is not guilty):
            guilty = None
        for each in requests if guilty is None else (guilty,):
            earlier = each.suspicion.deaths if each in again and each.suspicion is not None else ()
            each.suspicion = Suspicion((*earlier, (replica, now)), each.produced)
        return guilty

    def twins(self, guilty: RequestState) -> list[RequestState]:
        """Suspects that wait with the same prompt, such as the other choices of a request: they would do the same."""
        return [each for each in self.waiting.values() if _same_prompt(each, guilty) and each is not guilty]

    def clear(self, request: RequestState, guilty: RequestState) -> bool:
        """Clear a request of the deaths for which another one is to blame. Returns whether there were any."""
        if request.suspicion is None or guilty.suspicion is None:
            return False
        left = tuple(death for death in request.suspicion.deaths if death not in guilty.suspicion.deaths)
        if left == request.suspicion.deaths:
            return False
        request.suspicion = Suspicion(left, request.suspicion.produced) if left else None
        if not left:
            self.gone(request)
        return True

    def places(self, request: RequestState, usable: Mapping[str, Usable], now: float) -> Collection[str]:
        """The replicas on which a suspect may be tried now."""
        assert request.suspicion is not None, f"request {request.request_id} is not suspected"
        since, usable = request.suspicion.since, _elsewhere(request, usable)
        free = self._free(usable)
        if (
            now < since + SETTLE_S
            or not free
            or any(_same_prompt(request, other) for other, _ in self._trials.values())
        ):
            return ()
        if empty := [name for name in free if not usable[name].requests]:
            return empty
        started = [name for name in free if usable[name].started]
        if len(usable) > 1 and now < since + PATIENCE_S:
            started = [name for name in started if request.suspicion.produced and not usable[name].unclear]
        return [_fewest(started, usable)] if started else ()

    def closed(self, usable: Mapping[str, Usable]) -> Collection[str]:
        """The replicas that get no other new request: those with trials, and one that is to become free for one."""
        closed = {name for name in usable if name in self._trials}
        if self.waiting and len(usable) > 1 and (free := self._free(usable)):
            wanted = _elsewhere(next(iter(self.waiting.values())), usable)
            closed.add(_fewest([name for name in free if name in wanted] or free, usable))
        return closed

    def in_turn(self) -> list[RequestState]:
        """Those that wait, in the order in which they are tried: first those whose clients have seen a stream stop."""
        return sorted(self.waiting.values(), key=lambda each: each.suspicion is None or not each.suspicion.produced)

    def wait(self, request: RequestState) -> None:
        self.waiting[request.request_id] = request

    def begin(self, request: RequestState, replica: str, now: float) -> None:
        """The suspect is sent to this replica."""
        assert replica not in self._trials, f"a trial on {replica} where one runs"
        del self.waiting[request.request_id]
        self._trials[replica] = request, now

    def gone(self, request: RequestState) -> None:
        """The request left its replica or the queue, for whatever reason. Does nothing if it was not tried."""
        self.waiting.pop(request.request_id, None)
        if request.replica is not None and self.on_trial(request):
            del self._trials[request.replica]

    def on_trial(self, request: RequestState) -> bool:
        return request.replica in self._trials and self._trials[request.replica][0] is request

    def passed(self, replica: str) -> bool:
        """End the replica's trial if the suspect has generated enough. Returns whether it ended."""
        request = self._trials[replica][0] if replica in self._trials else None
        if request is None or request.suspicion is None or request.produced < _trial_tokens(request.suspicion):
            return False
        del self._trials[replica]
        return True

    def expire(self, now: float) -> None:
        """End trials that have lasted too long."""
        for replica, (_, since) in tuple(self._trials.items()):
            if since + TRIAL_S <= now:
                del self._trials[replica]

    def check(self, on_replicas: Iterable[RequestState]) -> None:
        running = {id(each): each.replica for each in on_replicas}
        for replica, (request, _) in self._trials.items():
            assert running.get(id(request)) == replica, f"the trial on {replica} is of a request that is not there"
            assert request.suspicion is not None, "a trial without a suspicion"
        assert not [each for each in self.waiting.values() if id(each) in running], "a suspect waits and runs"

    def _free(self, usable: Mapping[str, Usable]) -> list[str]:
        """The replicas without a trial, if another trial may begin."""
        free = [name for name in usable if name not in self._trials]
        return free if len(free) > 1 or len(usable) == 1 else []


def is_starting(request: RequestState, now: float) -> bool:
    """Whether a request on a replica is so new there that it would be the likeliest cause of the replica's death."""
    return request.produced < TRIAL_TOKENS and now < request.sent.at + TRIAL_S


def _elsewhere(request: RequestState, usable: Mapping[str, Usable]) -> Mapping[str, Usable]:
    """The replicas that have not failed a step with the request, if there are any.

    One that lacks memory fails every step for a while; a second failure there says nothing about the request.
    """
    return {name: each for name, each in usable.items() if name not in request.moves.excluded} or usable


def _fewest(names: Iterable[str], usable: Mapping[str, Usable]) -> str:
    return min(names, key=lambda name: (usable[name].requests, name))


def _same_prompt(one: RequestState, other: RequestState) -> bool:
    one_of, other_of = one.request, other.request
    same_root = one_of.salt == other_of.salt and one_of.adapter == other_of.adapter
    return same_root and one_of.token_ids == other_of.token_ids


def _trial_tokens(suspicion: Suspicion) -> int:
    """Tokens after which a trial has ended well."""
    return TRIAL_TOKENS + (suspicion.produced if len(suspicion.deaths) > 1 else 0)


def is_unclear(request: RequestState) -> bool:
    """Whether a suspect has not passed the point yet at which a replica died before."""
    return request.suspicion is not None and request.produced <= request.suspicion.produced + IN_FLIGHT_TOKENS


def _at_the_same_point(request: RequestState) -> bool:
    """Whether its replica has generated as much for it as the one that died before."""
    before = request.suspicion
    return before is not None and abs(request.produced - before.produced) <= IN_FLIGHT_TOKENS
