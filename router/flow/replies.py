"""Applies replicas' replies to their requests: progress and deltas, ends and moves. Pure state."""

import logging
from collections.abc import Sequence
from typing import assert_never

from ...replica.messages import FailedStep, Refused, TokenBatch, TokenOutput
from ..backend import RouterCounters, TextOutput, TokenDelta
from ..errors import RequestFailed
from ..routing.placement import Placement
from .deltas import delta_of, refusal_error
from .dispatcher import Dispatcher
from .request_state import SENT, STREAMING, Deliver, Instruction, RequestState
from .request_table import RequestTable

log = logging.getLogger(__name__)


class Replies:
    """Handles the replies of all replicas."""

    def __init__(
        self, table: RequestTable, dispatcher: Dispatcher, placement: Placement, counters: RouterCounters
    ) -> None:
        self._table = table
        self._dispatcher = dispatcher
        self._placement = placement
        self._counters = counters

    def take(
        self, replica: str, reply: TokenBatch | TextOutput | Refused | FailedStep, now: float
    ) -> list[Instruction]:
        """Apply a reply. Requests that must move return to the queue."""
        match reply:
            case TokenBatch(outputs=outputs):
                return self._on_outputs(replica, outputs, now)
            case TextOutput():
                return self._on_text(replica, reply, now)
            case Refused():
                return self._on_refused(replica, reply, now)
            case FailedStep():
                return self._on_failed_step(replica, reply, now)
            case _:
                assert_never(reply)

    def _on_outputs(self, replica: str, outputs: Sequence[TokenOutput], now: float) -> list[Instruction]:
        """Process a step's outputs. The loop inlines the common case: the next tokens of a streaming request."""
        instructions: list[Instruction] = []
        on_wire = self._table.on_wire
        for output in outputs:
            request = on_wire(output.request_id)
            if (
                request is None
                or request.phase is not STREAMING
                or output.finish_reason is not None
                or output.index != request.generated
                or request.replica != replica
            ):
                instructions += self._on_output(request, replica, output, now)
                continue
            request.generated += len(output.token_ids)
            request.new_tokens += output.token_ids
            delta = TokenDelta(token_ids=output.token_ids, logprobs=output.logprobs)
            instructions.append(Deliver(request.request_id, delta, request.replica))
        return instructions

    def _on_text(self, replica: str, output: TextOutput, now: float) -> list[Instruction]:
        """Process one piece of text from an external engine, with the same shortcut as `_on_outputs`."""
        request = self._table.on_wire(output.request_id)
        if (
            request is None
            or request.phase is not STREAMING
            or output.finish_reason is not None
            or request.replica != replica
            or not request.text_only
        ):
            return self._on_output(request, replica, output, now)
        request.generated += output.num_tokens
        delta = TokenDelta(token_ids=[], text=output.text, text_tokens=output.num_tokens, deltas=output.deltas)
        return [Deliver(request.request_id, delta, request.replica)]

    def _on_output(
        self, request: RequestState | None, replica: str, output: TokenOutput | TextOutput, now: float
    ) -> list[Instruction]:
        if request is None or request.replica != replica:  # it is over, such as cancelled, or has moved elsewhere
            return []
        table = self._table
        if isinstance(output, TokenOutput) and output.index > request.generated:
            error = RequestFailed(
                f"tokens are missing: {request.generated} arrived, the next ones start at {output.index}"
            )
            log.error("tokens_missing replica=%s trace=%s reason=%s", replica, request.request.trace_id, error.message)
            return [*table.abort(request), table.fail(request, error)]
        if output.finish_reason in ("error", "abort"):
            error = RequestFailed(f"replica {replica} ended the request: {output.finish_reason}")
            return [table.fail(request, error)]
        if request.phase is SENT:
            request.advance("start")
            self._placement.started(replica, request.sent.wire_id)
        known = request.cached_tokens is not None
        delta = delta_of(request, output, self._dispatcher.block_size, self._counters)
        if not known and (cached := request.cached_tokens) is not None:
            self._dispatcher.found_less(request, cached)
        if delta.text is None and not delta.token_ids and delta.finish_reason is None:
            return []
        if request.ttft_s is None:
            request.ttft_s = now - request.arrived
        if delta.finish_reason is not None:
            return table.finish(request, delta, now)
        return [Deliver(request.request_id, delta, request.replica)]

    def _on_refused(self, replica: str, refused: Refused, now: float) -> list[Instruction]:
        request = self._table.on_wire(refused.request_id)
        if request is None or request.replica != replica:
            return []
        error = refusal_error(request, refused, self._table.max_model_len)
        if not refused.retry:
            return [self._table.fail(request, error)]
        request.exclude(replica)
        request.moves.attempts += 1
        return self._table.move(request, error, now)

    def _on_failed_step(self, replica: str, step: FailedStep, now: float) -> list[Instruction]:
        """Move a failed step's requests. They are suspected: one of them may fail every step that it is in."""
        requests = self._table.on_replica(replica, step.request_ids)
        for request in requests:
            request.moves.counted = True
            request.exclude(replica)
        error = RequestFailed(f"replica {replica} failed, and no retry is left: {step.message}")
        return self._table.leave(replica, requests, error, now, died=True)
