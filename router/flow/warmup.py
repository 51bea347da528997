"""Fills the caches of new replicas with the hottest prefixes before they take requests.

Each such replica gets one request at a time, for one token and at the lowest priority, so a warm-up that is cut short
wastes at most one prefill. Warm-up requests are counted separately from clients' requests. Pure state. The request flow
decides when a warm-up may start and when it must stop; hot_prefixes.py decides which prefixes are hot.
"""

import logging
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from ...kvcache.hashing import TOKEN_BYTES, salt_text
from ...replica.messages import Abort, FailedStep, Generate, Refused, SamplingParams, TokenBatch
from ..backend import RouterCounters, TextOutput, WarmUpProgress
from ..routing.joined_replica import ARRIVES_WITHIN_S
from ..routing.placement import Placement
from .hot_prefixes import HotPrefix, HotPrefixes
from .request_state import Instruction, Send

log = logging.getLogger(__name__)

#: Lower than any priority that a client may request.
LOWEST_PRIORITY = 2**31 - 1
_ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0.0)


@dataclass(slots=True)
class _WarmUp:
    prefixes: deque[HotPrefix]  #: prefixes not sent yet
    progress: WarmUpProgress
    wire_id: int = 0  #: wire id of the current request
    computing: HotPrefix | None = None  #: prefix of the current request
    sent_at: float = 0.0  #: of the current request
    reports_before: int = 0  #: the replica's `JoinedReplica.reports` then


class CacheWarmup:
    """All warm-ups that this router runs."""

    def __init__(
        self, placement: Placement, hot_prefixes: HotPrefixes, counters: RouterCounters, wire_ids: Iterator[int]
    ) -> None:
        """`wire_ids` is shared with clients' requests: replicas expect increasing ids."""
        self._placement = placement
        self._hot_prefixes = hot_prefixes
        self._counters = counters
        self._wire_ids = wire_ids
        self._by_replica: dict[str, _WarmUp] = {}

    def __contains__(self, replica: object) -> bool:
        return replica in self._by_replica

    def __len__(self) -> int:
        return len(self._by_replica)

    @property
    def replicas(self) -> tuple[str, ...]:
        return tuple(self._by_replica)

    def begin(self, replica: str, share: float, now: float) -> list[Instruction]:
        """Start filling this share (0 to 1) of the replica's cache. Does nothing unless the replica is `warming`."""
        placement = self._placement
        if replica in self._by_replica or replica not in placement or not placement.fleet.load(replica, now).warming:
            return []
        index = placement.index
        blocks = int(share * placement.fleet[replica].description.num_blocks) - index.count(replica)
        prefixes = self._hot_prefixes.hottest(
            max(0, blocks), held=partial(index.holds, replica), kept=index.__contains__
        )
        log.info("warm_up_started replica=%s prefixes=%d", replica, len(prefixes))
        planned = sum(len(prefix.tokens) // TOKEN_BYTES for prefix in prefixes)
        self._by_replica[replica] = _WarmUp(deque(prefixes), WarmUpProgress(done_tokens=0, planned_tokens=planned))
        return self._send_next(replica, now)

    def expire(self, now: float) -> list[Instruction]:
        """Pass over prefixes that were sent to replicas and never arrived: those are idle ever since."""
        instructions: list[Instruction] = []
        for replica, warm_up in tuple(self._by_replica.items()):
            joined = self._placement.fleet[replica]
            idle = now - joined.idle_since > ARRIVES_WITHIN_S and not joined.description.external
            if idle and joined.has_had(warm_up.sent_at, warm_up.reports_before):
                log.warning("warm_up_lost replica=%s", replica)
                instructions += [Send(replica, Abort(request_ids=[warm_up.wire_id])), *self._send_next(replica, now)]
        return instructions

    def on_reply(
        self, replica: str, reply: TokenBatch | TextOutput | Refused | FailedStep, now: float
    ) -> list[Instruction]:
        """Send the next prefix once the current one is computed or refused. Ignores late replies to earlier ones."""
        warm_up = self._by_replica[replica]
        if isinstance(reply, FailedStep):
            return self._send_next(replica, now) if warm_up.wire_id in reply.request_ids else []
        if isinstance(reply, Refused):
            return self._send_next(replica, now) if reply.request_id == warm_up.wire_id else []
        outputs = [reply] if isinstance(reply, TextOutput) else reply.outputs
        done = next((each for each in outputs if each.request_id == warm_up.wire_id and each.finish_reason), None)
        if done is None or warm_up.computing is None:
            return []
        tokens, progress = len(warm_up.computing.tokens) // TOKEN_BYTES, warm_up.progress
        warm_up.progress = WarmUpProgress(
            done_tokens=progress.done_tokens + tokens, planned_tokens=progress.planned_tokens
        )
        self._counters.warm_up_requests += 1
        self._counters.warm_up_tokens += tokens - (done.cached_tokens or 0)
        return self._send_next(replica, now)

    def stop(self, replica: str) -> list[Instruction]:
        """Abort the replica's warm-up. Does nothing if there is none."""
        if replica not in self._by_replica:
            return []
        log.info("warm_up_stopped replica=%s progress=%s", replica, self.progress(replica))
        wire_id = self._by_replica[replica].wire_id
        self.drop(replica)
        return [Send(replica, Abort(request_ids=[wire_id]))]

    def drop(self, replica: str) -> None:
        """End the warm-up without sending an Abort, for a replica that cannot be reached."""
        if self._by_replica.pop(replica, None) is not None:
            self._counters.warm_ups_cut += 1

    def progress(self, replica: str) -> WarmUpProgress | None:
        warm_up = self._by_replica.get(replica)
        return None if warm_up is None else warm_up.progress

    def _send_next(self, replica: str, now: float) -> list[Instruction]:
        warm_up, wire_id = self._by_replica[replica], next(self._wire_ids)
        if not warm_up.prefixes:
            del self._by_replica[replica]
            log.info("warm_up_finished replica=%s", replica)
            return []
        prefix = warm_up.computing = warm_up.prefixes.popleft()
        warm_up.wire_id = wire_id
        warm_up.sent_at, warm_up.reports_before = now, self._placement.fleet[replica].reports
        request = Generate(
            request_id=wire_id,
            token_ids=prefix.tokens,
            prompt_tokens=len(prefix.tokens) // TOKEN_BYTES,
            root=prefix.root,
            salt=salt_text(prefix.salt),
            block_hashes=prefix.hashes,
            sampling=_ONE_TOKEN,
            priority=LOWEST_PRIORITY,
            trace_id=f"warm-up-{replica}",
            warm_up=True,
        )
        return [Send(replica, request)]
