"""The values that an answer holds besides its text: token ids, logprobs, and tokens of echoed prompts. Pure."""

from collections.abc import Sequence

from ...errors import InvalidRequest
from .schema import Body


def affordable_tokens(
    body: Body,
    prompts: Sequence[int],
    choices: int,
    max_tokens: int,
    most_values: int,
    *,
    logprobs: int | None,
    prompt_logprobs: int | None,
    set_by_client: bool,
) -> int:
    """The output limit with which an answer holds at most `most_values` values.

    `prompts`: their lengths in tokens. `choices`: per prompt. `logprobs`: alternatives per token of the answer;
    `prompt_logprobs`: per token of an echoed prompt. Tokens of most streams are not held, so they do not count. An
    output limit that the client set is not lowered. Raises InvalidRequest, if the answer would hold more.
    """
    each = _per_token(body, logprobs)
    of_prompts = _per_prompt_token(body, prompt_logprobs) * sum(prompts) * choices
    total = of_prompts + each * len(prompts) * choices * max_tokens
    if total <= most_values:
        return max_tokens
    if each and not set_by_client and (left := (most_values - of_prompts) // (each * len(prompts) * choices)) >= 1:
        return left
    raise InvalidRequest.field(
        _cause(body, logprobs),
        f"the answer would hold {total:,} values; the maximum is {most_values:,}. Each logprob, each token id and each "
        f"token of an echoed prompt is one: for all choices, {choices * len(prompts):,} here",
    )


def _per_token(body: Body, logprobs: int | None) -> int:
    if body.stream and not body.REPEATS_STREAM:
        return 0
    scored = 0 if logprobs is None else 1 + max(logprobs, len(body.logprob_token_ids or ()))
    return scored + bool(body.return_token_ids)


def _per_prompt_token(body: Body, logprobs: int | None) -> int:
    scored = [count + 1 for count in (logprobs, body.prompt_logprobs) if count is not None]
    return sum(scored) + bool(body.return_token_ids) + body.echoes


def _cause(body: Body, logprobs: int | None) -> str:
    if body.prompt_logprobs is not None:
        return "prompt_logprobs"
    if logprobs is not None:
        return body.LOGPROBS
    return "return_token_ids" if body.return_token_ids else "echo"
