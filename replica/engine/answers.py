"""What a step's results mean for its requests: outputs that go out, requests that end, and those that failed.

Changes requests and the scheduler; runs nothing on the model and draws no tokens.
"""

import logging
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
import numpy.typing as npt

from ...kvcache.hashing import BlockHasher
from ..errors import ConstraintFailed, NonFiniteLogits, ReplicaError, RequestError, StepFailed
from ..messages import FinishReason, PositionLogprobs, Refused, TokenOutput, encoded_position
from .request import RequestPhase, RequestState
from .sampler import Sampled
from .scheduler import Scheduler
from .step_rows import LogitsLayout, ScheduledRow

log = logging.getLogger(__name__)


@dataclass(slots=True)
class StepResult:
    """The outputs of one step, keyed by source (the router's id)."""

    step: int
    outputs: dict[str, list[TokenOutput]] = field(default_factory=lambda: defaultdict(list))
    refused: dict[str, list[Refused]] = field(default_factory=lambda: defaultdict(list))
    failed: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))  #: ids, if the step failed
    rows: int = 0
    error: ReplicaError | None = None


class Answers:
    """Turns the tokens and vectors of steps into outputs."""

    def __init__(
        self, scheduler: Scheduler, hasher: BlockHasher, eos_token_ids: tuple[int, ...], clock: Callable[[], float]
    ) -> None:
        self._scheduler = scheduler
        self._hasher = hasher
        self._eos_token_ids = eos_token_ids
        self._clock = clock
        self.generated_tokens = 0  #: since the start, without those of warm-ups

    def embed(self, request: RequestState, total: npt.NDArray[np.float64], result: StepResult) -> None:
        """Finish a request with its prompt's vector, of length 1. The sum suffices: the mean has the same direction."""
        assert request.embedding is not None, f"request {request.key} did not ask for an embedding"
        vector = total[: request.embedding.dimensions]
        vector = vector / (np.linalg.norm(vector) or 1.0)
        source, request_id = request.key
        result.outputs[source].append(
            TokenOutput(
                request_id=request_id,
                index=0,
                token_ids=[],
                finish_reason="stop",
                cached_tokens=request.cached_tokens,
                loaded_tokens=request.loaded_tokens,
                embedding=vector.astype("<f4").tobytes(),
                waited_s=request.waited_s,
            )
        )
        request.output_sent = True
        self._scheduler.finish(request)

    def end_non_finite(self, request: RequestState, result: StepResult) -> None:
        error = NonFiniteLogits(
            f"the model's logits after token {len(request.tokens)} are NaN or infinite: they exceeded the range of its "
            "dtype (float16 has the smallest: use --dtype bfloat16 or float32), or its weights are damaged"
        )
        self._end_with(error, request, result)

    def _end_with(self, error: RequestError, request: RequestState, result: StepResult) -> None:
        """End one request with an error; other requests are not affected."""
        if request.phase is RequestPhase.FINISHED:
            return
        log.error("request_failed request=%s reason=%r", request.key, str(error))
        self._scheduler.finish(request)
        source, request_id = request.key
        result.refused[source].append(Refused(request_id=request_id, reason=error.reason, message=str(error)))

    def echo(self, layout: LogitsLayout, scores: Sequence[PositionLogprobs], result: StepResult) -> None:
        """Store a step's prompt logprobs, in the order of `prompt_rows`, for each request's first output.

        A preempted request computes positions again: the new values replace all stored from the first of them on.
        """
        values = iter(scores)
        for row, positions in layout.prompts:
            request, found = row.request, [*islice(values, len(positions))]
            if any(math.isnan(value.chosen.logprob) for value in found):
                self.end_non_finite(request, result)
            assert request.prompt_logprobs is not None, f"request {request.key} asked for no prompt logprobs"
            request.prompt_logprobs[positions[0] + 1 :] = map(encoded_position, found)

    def advance(self, request: RequestState, drawn: Sequence[Sampled], result: StepResult) -> None:
        """Append the drawn tokens, emit an output if one is due, and finish the request if it has ended.

        All tokens but the last matched their drafts, so their KV is already computed.
        """
        first = not request.output_sent
        pinned = 0 if first and request.pins else None
        if request.pins and request.phase is RequestPhase.RUNNING:  # if preempted in flight, it pins with a later token
            pinned, request.pins = self._scheduler.pin(request, self._clock()), ()
        stop_id = finish_reason = None
        for place, sampled in enumerate(drawn):
            if place:
                self._scheduler.accept(request)
            request.append(sampled.token_id, self._hasher)
            if request.guide is not None:
                request.guide.accept((sampled.token_id,))
                if request.guide.problem:
                    self._end_with(ConstraintFailed(f"constraint: {request.guide.problem}"), request, result)
                    return
            self.generated_tokens += not request.warm_up
            request.unsent.append(sampled.token_id)
            if sampled.logprobs:
                request.unsent_logprobs.append(sampled.logprobs)
            stop_id, finish_reason = self._end_of(request, sampled.token_id)
            if finish_reason is not None:
                break
        if not first and finish_reason is None and len(request.unsent) < request.tokens_per_output:
            return
        token_ids, request.unsent = request.unsent, []
        logprobs, request.unsent_logprobs = request.unsent_logprobs, []
        source, request_id = request.key
        result.outputs[source].append(
            TokenOutput(
                request_id=request_id,
                index=request.generated - len(token_ids),
                token_ids=token_ids,
                finish_reason=finish_reason,
                cached_tokens=request.cached_tokens if first else None,
                loaded_tokens=request.loaded_tokens if first else (),
                logprobs=logprobs or None,
                prompt_logprobs=request.prompt_logprobs if first else None,
                stop_token_id=stop_id,
                pinned_tokens=pinned,
                waited_s=request.waited_s if first else None,
            )
        )
        request.output_sent = True
        if finish_reason:
            self._scheduler.finish(request)

    def _end_of(self, request: RequestState, token_id: int) -> tuple[int | None, FinishReason | None]:
        params, generated = request.sampling, request.generated
        if generated >= params.min_tokens and (  # below `min_tokens`, our sampler bans these ids; another might not
            token_id in params.stop_token_ids or (not params.ignore_eos and token_id in self._eos_token_ids)
        ):
            return token_id, "stop"
        if request.guide is not None and request.guide.ended:
            return None, "stop"
        full = len(request.tokens) >= self._scheduler.limits.max_model_len
        return None, "length" if full or generated >= params.max_tokens else None

    def fail(self, step: int, rows: Iterable[ScheduledRow], error: Exception, result: StepResult) -> None:
        """Give up the requests of a failed step. Their KV may be half written, so none of it is committed."""
        failed = [row.request for row in rows if row.request.phase is not RequestPhase.FINISHED]
        message = f"step {step} failed: {type(error).__name__}: {error}"
        result.error = StepFailed(message)
        result.error.__cause__ = error
        log.error("step_failed step=%d requests=%d", step, len(failed), exc_info=error)
        for request in failed:
            source, request_id = request.key
            self._scheduler.finish(request)
            result.failed[source].append(request_id)
