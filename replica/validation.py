"""Is a `Generate` one that this replica can run? Pure. Every refusal names the field and what it may be.

The router checks what clients send; this check protects the engine from a router of another version or with another
block size, whose hashes would otherwise end a step for everybody.
"""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from math import isfinite

from ..kvcache.hashing import HASH_BYTES, TOKEN_BYTES, BlockHash, split_hashes, token_array
from .engine.request import RequestKey, RequestState
from .errors import InvalidRequest
from .messages import Generate, Pin, SamplingParams

#: Most alternatives beside a token's own logprob. OpenAI allows 20 (chat) and 5 (completions).
MAX_LOGPROBS = 100
#: Length of a tenant's digest.
TENANT_BYTES = 16


@dataclass(slots=True, frozen=True)
class Admissible:
    """What a request must fit."""

    vocab_size: int
    block_size: int

    def state_of(self, source: str, request: Generate) -> RequestState:
        """The request as the scheduler wants it. Raises InvalidRequest."""
        tokens = self._tokens(request)
        _check(len(request.root) == HASH_BYTES, f"root: {len(request.root)} bytes instead of {HASH_BYTES}")
        full, size = len(tokens) // self.block_size, len(request.block_hashes)
        _check(
            size == full * HASH_BYTES,
            f"block_hashes: {size} bytes for {len(tokens)} tokens, which are {full} full blocks of {self.block_size}",
        )
        check_sampling(request.sampling, self.vocab_size)
        for pin in request.pins:
            check_pin(pin, request.prompt_tokens)
        generated = len(tokens) - request.prompt_tokens
        _check(
            generated < request.sampling.max_tokens,
            f"max_tokens: {generated} of {request.sampling.max_tokens} were already generated",
        )
        return RequestState(
            key=RequestKey(source, request.request_id),
            tokens=tokens,
            prompt_tokens=request.prompt_tokens,
            root=BlockHash(request.root),
            hashes=split_hashes(request.block_hashes),
            sampling=request.sampling,
            priority=request.priority,
            trace_id=request.trace_id,
            pins=request.pins,
            tokens_per_output=request.tokens_per_output,
            warm_up=request.warm_up,
        )

    def _tokens(self, request: Generate) -> "array[int]":
        size = len(request.token_ids)
        _check(size > 0 and size % TOKEN_BYTES == 0, f"token_ids: {size} bytes are no whole number of 4-byte ids")
        tokens = token_array(request.token_ids)
        _check(
            0 < request.prompt_tokens <= len(tokens),
            f"prompt_tokens: {request.prompt_tokens} of {len(tokens)} tokens",
        )
        highest = max(tokens)
        _check(highest < self.vocab_size, f"token_ids: {highest} is not below the vocabulary's {self.vocab_size}")
        return tokens


def check_pin(pin: Pin, prompt_tokens: int) -> None:
    """Raise InvalidRequest for what cannot be kept."""
    _check(0 < pin.num_tokens <= prompt_tokens, f"pins: {pin.num_tokens} of a prompt of {prompt_tokens} tokens")
    _check(isfinite(pin.ttl_s) and pin.ttl_s > 0, f"pins: a time of {pin.ttl_s} s is not above 0")
    _check(len(pin.tenant) == TENANT_BYTES, f"pins: tenant of {len(pin.tenant)} bytes instead of {TENANT_BYTES}")


def check_sampling(params: SamplingParams, vocab_size: int) -> None:
    """Raise InvalidRequest for the first parameter that is out of range."""
    _check(params.max_tokens >= 1, f"max_tokens: {params.max_tokens} is below 1")
    _check(0 <= params.min_tokens <= params.max_tokens, f"min_tokens: {params.min_tokens} of {params.max_tokens}")
    _check(0 <= params.seed < 2**64, f"seed: {params.seed} is not an unsigned 64-bit number")
    _check(isfinite(params.temperature) and params.temperature >= 0, f"temperature: {params.temperature} is below 0")
    _check(0 < params.top_p <= 1, f"top_p: {params.top_p} is not above 0 and at most 1")
    _check(params.top_k >= 0, f"top_k: {params.top_k} is below 0")
    _check(0 <= params.min_p <= 1, f"min_p: {params.min_p} is not between 0 and 1")
    _check(isfinite(params.presence_penalty), f"presence_penalty: {params.presence_penalty}")
    _check(isfinite(params.frequency_penalty), f"frequency_penalty: {params.frequency_penalty}")
    repetition = params.repetition_penalty
    _check(isfinite(repetition) and repetition > 0, f"repetition_penalty: {repetition} is not above 0")
    _check_ids("stop_token_ids", params.stop_token_ids, vocab_size)
    _check_ids("logit_bias", params.logit_bias, vocab_size)
    _check(all(map(isfinite, params.logit_bias.values())), "logit_bias: a bias is not finite")
    _check_count("logprobs", params.logprobs)
    _check_count("prompt_logprobs", params.prompt_logprobs)


def _check_ids(field: str, ids: Iterable[int], vocab_size: int) -> None:
    wrong = [token for token in ids if not 0 <= token < vocab_size]
    _check(not wrong, f"{field}: {wrong[:3]} are not token ids below {vocab_size}")


def _check_count(field: str, count: int | None) -> None:
    _check(count is None or 0 <= count <= MAX_LOGPROBS, f"{field}: {count} is not between 0 and {MAX_LOGPROBS}")


def _check(holds: bool, message: str) -> None:
    if not holds:
        raise InvalidRequest(message)
