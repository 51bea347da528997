"""New replicas whose caches are filled with the hottest prefixes before they take traffic: what each is sent next.

One request at a time to each, for one token, behind all others in priority and counted as nobody's traffic; so what is
lost when a warm-up ends early is no more than one prefill. Pure state: which prefixes is the heat's business (heat.py),
when to begin and to end is the dispatcher's.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from ...kvcache.hashing import TOKEN_BYTES
from ...replica.messages import Generate, Refused, SamplingParams, TokenBatch
from ..backend import RouterCounters, WarmUpProgress
from .hot_prefixes import HotPrefix

#: Behind whatever clients may ask for.
LAST_PRIORITY = 2**31 - 1
_ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0.0)


@dataclass(slots=True)
class _WarmUp:
    planned_tokens: int
    prefixes: deque[HotPrefix]
    done_tokens: int = 0
    wire_id: int = 0
    asked: HotPrefix | None = None  #: what it computes


@dataclass(slots=True)
class WarmUps:
    """All that are under way from one router."""

    counters: RouterCounters
    _by_replica: dict[str, _WarmUp] = field(default_factory=dict)

    def __contains__(self, replica: object) -> bool:
        return replica in self._by_replica

    def __len__(self) -> int:
        return len(self._by_replica)

    def begin(self, replica: str, prefixes: Sequence[HotPrefix]) -> None:
        """Fill this replica with these, in this order; `next` follows."""
        assert replica not in self._by_replica, f"{replica} is being warmed up already"
        tokens = sum(len(prefix.tokens) // TOKEN_BYTES for prefix in prefixes)
        self._by_replica[replica] = _WarmUp(tokens, deque(prefixes))

    def next(self, replica: str, wire_id: int) -> Generate | None:
        """What it is to compute now, under this id; None, and the warm-up is over, when all is done."""
        warm_up = self._by_replica[replica]
        if not warm_up.prefixes:
            del self._by_replica[replica]
            return None
        prefix = warm_up.asked = warm_up.prefixes.popleft()
        warm_up.wire_id = wire_id
        return Generate(
            request_id=wire_id,
            token_ids=prefix.tokens,
            prompt_tokens=len(prefix.tokens) // TOKEN_BYTES,
            root=prefix.root,
            block_hashes=prefix.hashes,
            sampling=_ONE_TOKEN,
            priority=LAST_PRIORITY,
            trace_id=f"warm-up-{replica}",
            warm_up=True,
        )

    def answered(self, replica: str, reply: TokenBatch | Refused) -> bool:
        """What the replica says. Whether it is done with what it was asked; who refuses one is asked the next."""
        warm_up = self._by_replica[replica]
        if isinstance(reply, Refused):
            return reply.request_id == warm_up.wire_id
        mine = [output for output in reply.outputs if output.request_id == warm_up.wire_id and output.finish_reason]
        if not mine or warm_up.asked is None:
            return False
        tokens = len(warm_up.asked.tokens) // TOKEN_BYTES
        warm_up.done_tokens += tokens
        self.counters.warm_up_requests += 1
        self.counters.warm_up_tokens += tokens - (mine[0].cached_tokens or 0)
        return True

    def stop(self, replica: str) -> int | None:
        """End it before it is through; the id of what is under way, if any. Harmless when there is no warm-up."""
        warm_up = self._by_replica.pop(replica, None)
        if warm_up is None:
            return None
        self.counters.warm_ups_cut += 1
        return warm_up.wire_id or None

    def replicas(self) -> tuple[str, ...]:
        """Who is being warmed up."""
        return tuple(self._by_replica)

    def progress(self, replica: str) -> WarmUpProgress | None:
        """How far it is; None: it is not being warmed up."""
        warm_up = self._by_replica.get(replica)
        if warm_up is None:
            return None
        return WarmUpProgress(done_tokens=warm_up.done_tokens, planned_tokens=warm_up.planned_tokens)
