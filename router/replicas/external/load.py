"""How busy a foreign engine is, in the words of a replica of ours. Pure: requests and times come in, reports come out.

An engine tells at most a few numbers, once in a while (numbers.py); the rest is kept from what was sent there and what
came back. Requests that have no token yet are counted by the router itself
(router/routing/replica_load.py), until they have.
"""

import msgspec

from ....events.wire.messages import CacheCounters, LoadReport
from ....replica.messages import ReplicaDescription
from .engine_metrics import Numbers
from .pace import Pace
from .request import ForeignRequest

#: Blocks of an engine that does not say how many it has; bounds the index, not the engine.
UNKNOWN_BLOCKS = 1 << 20


class ForeignLoad:
    """What is known of one engine."""

    def __init__(self, description: ReplicaDescription) -> None:
        self.description = description
        self.pace = Pace()
        self._numbers = Numbers()
        self._others = 0  #: requests of other clients of the engine
        self._waiting: dict[int, ForeignRequest] = {}
        self._running: dict[int, ForeignRequest] = {}
        self._heard_at = 0.0
        self._reports = 0
        self._counters = CacheCounters()

    def begin(self, numbers: Numbers) -> None:
        """The engine was let in: nothing runs there that we know of."""
        self._waiting.clear()
        self._running.clear()
        self.look(numbers)
        self.description = msgspec.structs.replace(
            self.description,
            num_blocks=numbers.num_blocks or UNKNOWN_BLOCKS,
            prefill_tokens_per_s=self.pace.prefill_tokens_per_s,
            decode_step_s=self.pace.decode_step_s,
        )

    def look(self, numbers: Numbers) -> None:
        """The engine told this just now."""
        self._numbers = numbers
        told = (numbers.running or 0) + (numbers.waiting or 0)
        self._others = max(0, told - len(self._waiting) - len(self._running))

    def sent(self, request: ForeignRequest) -> None:
        """The request is on its way there."""
        self._waiting[request.request_id] = request

    def heard(self, request: ForeignRequest, now: float) -> bool:
        """Tokens of the request came; whether they are its first."""
        gap_s, self._heard_at = now - request.heard_at, now
        if request.request_id in self._running:
            self.pace.next_tokens(1, gap_s)
            return False
        self.pace.first_token(request.tokens_ahead, now - request.sent_at)
        self._waiting.pop(request.request_id, None)
        self._running[request.request_id] = request
        return True

    def ended(self, request: ForeignRequest) -> None:
        """The request has left the engine; harmless when repeated."""
        self._waiting.pop(request.request_id, None)
        if self._running.pop(request.request_id, None) is not None:
            self._count(request)

    def silent_s(self, now: float) -> float:
        """Seconds since any token came."""
        return now - self._heard_at

    def report(self, now: float, *, cached_blocks: int) -> LoadReport:
        """The engine's load as of now."""
        self._reports += 1
        total = self.description.num_blocks
        free = total - round(total * (self._numbers.kv_usage or 0.0))
        return LoadReport(
            epoch=self.description.epoch,
            step=self._reports,
            ts=now,
            running=len(self._running) + self._others,
            waiting=0,
            queued_prefill_tokens=0,
            decode_context_tokens=sum(request.context_tokens for request in self._running.values()),
            free_blocks=free,
            cached_free_blocks=max(0, min(free, cached_blocks - (total - free))),
            total_blocks=total,
            prefill_tokens_per_s=self.pace.prefill_tokens_per_s,
            decode_step_s=self.pace.decode_step_s,
            counters=self._counters,
        )

    def _count(self, request: ForeignRequest) -> None:
        asked, hit = len(request.generate.token_ids) // 4, request.cached_tokens or 0
        before = self._counters
        self._counters = msgspec.structs.replace(
            before,
            query_tokens=before.query_tokens + asked,
            hit_tokens=before.hit_tokens + hit,
            generated_tokens=before.generated_tokens + request.generated,
            prefilled_tokens=before.prefilled_tokens + asked - hit,
        )
