"""Applies a replica's reply to one request. Changes the request's progress and the counters, never its phase."""

from ...replica.messages import Refused, TokenOutput
from ..backend import RouterCounters, TextOutput, TokenDelta
from ..errors import InvalidGeneration, PromptTooLong, RequestFailed, RouterError
from .request_state import RequestState


def delta_of(
    request: RequestState, output: TokenOutput | TextOutput, block_size: int, counters: RouterCounters
) -> TokenDelta:
    """Convert an output to a delta of its new tokens or text. Tokens already delivered are dropped and counted.

    The caller guarantees that no token is missing between the request's progress and this output.
    """
    cached = output.cached_tokens if request.delivered_cached_tokens is None else None
    if cached is not None:  # only the first report counts: a continuation may find its own blocks cached
        request.delivered_cached_tokens = cached
        counters.regret_tokens += request.regret_tokens  # not at placement, which a moved request repeats
        if cached < request.predicted_cached_tokens:
            counters.predictions_high += 1
        elif cached < request.predicted_cached_tokens + block_size:
            counters.predictions_exact += 1
        else:
            counters.predictions_low += 1
    predicted = None if cached is None else request.predicted_cached_tokens
    queue_s = None if cached is None else request.queue_s
    expected_ttft_s = None if cached is None else request.expected_ttft_s
    reason = None if cached is None else request.reason
    moves = request.continuations if output.finish_reason else 0
    first = not request.generated
    known_tokens = request.known_tokens if first else 0
    if isinstance(output, TextOutput):
        request.text_only = True
        request.generated += output.num_tokens
        return TokenDelta(
            token_ids=[],
            text=output.text,
            text_tokens=output.num_tokens,
            deltas=output.deltas,
            finish_reason=output.finish_reason,
            cached_tokens=cached,
            queue_s=queue_s,
            predicted_cached_tokens=predicted,
            expected_ttft_s=expected_ttft_s,
            reason=reason,
            continuations=moves,
            known_tokens=known_tokens,
        )
    known = min(request.generated - output.index, len(output.token_ids))
    counters.duplicate_tokens += known
    fresh = output.token_ids[known:]
    request.generated += len(fresh)
    request.new_tokens += fresh
    return TokenDelta(
        token_ids=fresh,
        logprobs=output.logprobs[known:] if output.logprobs is not None else None,
        prompt_logprobs=output.prompt_logprobs if first else None,
        finish_reason=output.finish_reason,
        cached_tokens=cached,
        queue_s=queue_s,
        predicted_cached_tokens=predicted,
        expected_ttft_s=expected_ttft_s,
        reason=reason,
        waited_s=output.waited_s if cached is not None and (output.waited_s or 0.0) >= 0.0 else None,  # no NaN
        continuations=moves,
        stop_token_id=output.stop_token_id,
        pinned_tokens=output.pinned_tokens if first else None,
        embedding=output.embedding,
        known_tokens=known_tokens,
    )


def refusal_error(request: RequestState, refused: Refused, max_model_len: int) -> RouterError:
    """The error for a request that its replica refused."""
    match refused.reason:
        case "prompt_too_long":
            return PromptTooLong(request.prompt_tokens, max_model_len)
        case "invalid":
            return InvalidGeneration(refused.message)
        case _:
            return RequestFailed(f"replica {request.replica} refused the request: {refused.message}")


def nothing_left(request: RequestState, max_model_len: int) -> bool:
    """Whether all tokens have arrived, so that only the finish reason was lost with the replica."""
    if request.generated >= request.request.sampling.max_tokens:
        return True
    return request.generated > 0 and request.prompt_tokens + request.generated >= max_model_len
