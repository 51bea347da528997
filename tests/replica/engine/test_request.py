"""Bookkeeping of a request's tokens and hashes."""

from hypothesis import given
from hypothesis import strategies as st

from homing.kvcache.hashing import BlockHasher, token_bytes
from homing.replica.messages import NO_LOGPROBS

from ..fakes import ROOT, request_state


@given(st.lists(st.integers(0, 96), min_size=1, max_size=20), st.lists(st.integers(0, 96), max_size=20))
def test_hashes_continue_as_blocks_fill(prompt: list[int], generated: list[int]) -> None:
    """Generated blocks are cached too, so their hashes must match those of a later prompt with the same tokens."""
    hasher = BlockHasher(3, seed=5)
    request = request_state(1, prompt, hasher)

    for token in generated:
        request.append(token, hasher)

    assert request.hashes == hasher.chain(ROOT, token_bytes(prompt + generated))
    assert request.generated == len(generated)


def test_a_request_that_lost_its_blocks_starts_over_but_keeps_its_tokens() -> None:
    """Preemption is by recomputation: only the KV is lost."""
    hasher = BlockHasher(2, seed=5)
    request = request_state(1, [1, 2, 3], hasher, prompt_logprobs=0)
    request.append(4, hasher)
    request.computed, request.prompt_logprobs = 3, [NO_LOGPROBS, NO_LOGPROBS]

    request.rewind()

    assert (request.computed, request.blocks, list(request.tokens)) == (0, [], [1, 2, 3, 4])
    assert request.prompt_logprobs == [NO_LOGPROBS, NO_LOGPROBS], "known logprobs are kept"
    request.check(hasher.block_size)


def test_prompt_logprobs_keep_a_request_from_the_cache_until_they_are_out() -> None:
    """A cached prompt token has no logits; once the logprobs are out, a preempted request uses the cache again."""
    request = request_state(1, [1, 2, 3], BlockHasher(2, seed=5), prompt_logprobs=0)

    before = request.may_use_cache
    request.output_sent = True

    assert (before, request.may_use_cache) == (False, True)
