"""The work that a replica still has, for the load report. Pure: computed from the requests."""

from collections.abc import Sequence
from dataclasses import dataclass

from ...events.load_report import PrefillSpan, work_of
from ...events.wire.messages import PrefillWork
from .request import RequestState


@dataclass(slots=True, frozen=True)
class Backlog:
    """The remaining work, for the load report."""

    running: int
    waiting: int
    queued_prefill: PrefillWork
    decode_context_tokens: int
    waiting_blocks: int


def backlog_of(running: Sequence[RequestState], waiting: Sequence[RequestState]) -> Backlog:
    """The remaining work of these requests; for waiting ones, the tokens not cached when they started to wait."""
    decoding = [request for request in running if request.decoding]
    prefilling = [request for request in running if not request.decoding]
    spans = [PrefillSpan(each.cached_now, each.computed, each.num_tokens) for each in prefilling]
    spans += [PrefillSpan(each.expected_cached, each.expected_cached, each.num_tokens) for each in waiting]
    return Backlog(
        running=len(running),
        waiting=len(waiting),
        queued_prefill=work_of(spans),
        decode_context_tokens=sum(request.computed for request in decoding),
        waiting_blocks=sum(request.needed_blocks for request in waiting),
    )
