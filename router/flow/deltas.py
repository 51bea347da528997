"""What a replica's reply means for one request. Changes the request's progress and the counters, never its phase."""

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
    cached = output.cached_tokens if request.cached_tokens is None else None
    if cached is not None:  # only the first report counts: a continuation may find its own blocks cached
        request.cached_tokens = cached
        request.loaded_tokens = output.loaded_tokens if isinstance(output, TokenOutput) else ()
        _compare(request, cached, block_size, counters)
    first = not request.generated
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
        loaded_tokens=request.loaded_tokens if cached is not None else (),
        waited_s=output.waited_s if cached is not None and (output.waited_s or 0.0) >= 0.0 else None,  # no NaN
        stop_token_id=output.stop_token_id,
        pinned_tokens=output.pinned_tokens if first else None,
        embedding=output.embedding,
    )


def _compare(request: RequestState, cached: int, block_size: int, counters: RouterCounters) -> None:
    """Count the regret, and whether as much was cached as the decision expected."""
    forecast = request.forecast
    assert forecast is not None, f"request {request.request_id} was answered before it was sent"
    counters.regret_tokens += forecast.regret_tokens  # not at placement, which a moved request repeats
    if cached < forecast.cached_tokens:
        counters.predictions_high += 1
    elif cached < forecast.cached_tokens + block_size:
        counters.predictions_exact += 1
    else:
        counters.predictions_low += 1
    predicted, delivered = dict(forecast.loaded_tokens), dict(request.loaded_tokens)
    if predicted or delivered:
        media = predicted.keys() | delivered.keys()
        exact = all(predicted.get(each, 0) // block_size == delivered.get(each, 0) // block_size for each in media)
        counters.loads_exact += exact
        counters.loads_wrong += not exact


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
