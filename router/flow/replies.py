"""What a replica's reply means for one request. Changes the request's progress and counters, never its phase."""

from ...replica.messages import Refused, TokenOutput
from ..backend import RouterCounters, TextOutput, TokenDelta
from ..errors import InvalidGeneration, PromptTooLong, RequestFailed, RouterError
from .request_state import RequestState


class ReplyReader:
    """Turns the outputs of replicas into deltas for readers."""

    def __init__(self, counters: RouterCounters, block_size: int, max_model_len: int) -> None:
        self._counters = counters
        self._block_size = block_size
        self._max_model_len = max_model_len

    def tokens(self, request: RequestState, output: TokenOutput) -> TokenDelta:
        """The new tokens. Those that an earlier replica delivered already are dropped and counted.

        The caller has made sure that no token is missing between the request's progress and this output.
        """
        known = min(request.generated - output.index, len(output.token_ids))
        self._counters.duplicate_tokens += known
        fresh = output.token_ids[known:]
        first = not request.generated
        request.generated += len(fresh)
        request.new_tokens += fresh
        cached_tokens = self._first_cached_tokens(request, output.cached_tokens)
        return TokenDelta(
            token_ids=fresh,
            logprobs=output.logprobs[known:] if output.logprobs is not None else None,
            prompt_logprobs=output.prompt_logprobs if first else None,
            finish_reason=output.finish_reason,
            cached_tokens=cached_tokens,
            predicted_cached_tokens=None if cached_tokens is None else request.predicted_cached_tokens,
            stop_token_id=output.stop_token_id,
            pinned_tokens=output.pinned_tokens if first else None,
        )

    def text(self, request: RequestState, output: TextOutput) -> TokenDelta:
        """The text of an engine that reports no token ids. It binds the request to that engine."""
        request.text_only = True
        request.generated += output.num_tokens
        cached_tokens = self._first_cached_tokens(request, output.cached_tokens)
        return TokenDelta(
            token_ids=[],
            text=output.text,
            text_tokens=output.num_tokens,
            finish_reason=output.finish_reason,
            cached_tokens=cached_tokens,
            predicted_cached_tokens=None if cached_tokens is None else request.predicted_cached_tokens,
        )

    def refusal(self, request: RequestState, refused: Refused) -> RouterError:
        match refused.reason:
            case "prompt_too_long":
                return PromptTooLong(request.prompt_tokens, self._max_model_len)
            case "invalid":
                return InvalidGeneration(refused.message)
            case _:
                return RequestFailed(f"replica {request.replica} refused the request: {refused.message}")

    def nothing_left(self, request: RequestState) -> bool:
        """Whether all tokens have arrived, so that a lost replica has only failed to send the finish reason."""
        if request.generated >= request.request.sampling.max_tokens:
            return True
        return request.generated > 0 and request.prompt_tokens + request.generated >= self._max_model_len

    def _first_cached_tokens(self, request: RequestState, cached_tokens: int | None) -> int | None:
        """The first report only: a continuation finds its own blocks in a cache. Compares it with the prediction."""
        if cached_tokens is None or request.delivered_cached_tokens is not None:
            return None
        request.delivered_cached_tokens = cached_tokens
        if cached_tokens < request.predicted_cached_tokens:
            self._counters.predictions_high += 1
        elif cached_tokens < request.predicted_cached_tokens + self._block_size:
            self._counters.predictions_exact += 1
        else:
            self._counters.predictions_low += 1
        return cached_tokens
