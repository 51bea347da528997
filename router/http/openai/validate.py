"""From a decoded body and its encoded prompts to a `Job`: limits that involve two fields, the model or the settings.

Pure, but for the check of constraints. Every refusal names the field. What only one dialect checks is in its module.
"""

from collections.abc import Collection, Sequence

from ....replica.messages import Constraint, SamplingParams
from ...errors import ContextTooLong, InvalidRequest, PromptTooLong
from ...text.constraints import FIELDS, requested
from ..front import Front, Served
from .generation import SEED_MASK, EncodedPrompt, Job
from .schema import Body

#: Tokens delivered together if the response is not streamed. When a replica dies, at most this many are lost and
#: generated again.
WHOLE_RESPONSE_TOKENS = 32


def job(
    front: Front,
    served: Served,
    body: Body,
    salt: bytes,
    prompts: Sequence[EncodedPrompt],
    *,
    prompt_param: str,
    wanted: int | None,
    wanted_param: str = "max_tokens",
    best_of: int | None = None,
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
    constraint: Constraint | None = None,
) -> Job:
    """What the body requests of these prompts.

    `wanted`: the requested output limit, from the field `wanted_param`; 0 generates a token that is not shown.
    `best_of`: choices per prompt, if not `n`. `logprobs`: alternatives per token; None: not even the token's own.
    Raises InvalidRequest, PromptTooLong and ContextTooLong.
    """
    settings = front.settings
    count, count_param = (body.n or 1, "n") if best_of is None else (best_of, "best_of")
    if count * len(prompts) > settings.max_choices:
        raise InvalidRequest(
            f"field {count_param!r}: at most {settings.max_choices} choices in one request", param=count_param
        )
    longest = max([len(prompt.token_ids) for prompt in prompts])
    room = served.limits.max_model_len - longest
    if room < 1:
        raise PromptTooLong(longest, served.limits.max_model_len, param=prompt_param)
    if wanted is not None and wanted > room:
        raise ContextTooLong(
            f"the prompt has {longest} tokens and the request asks for {wanted} more; "
            f"the model's context is {served.limits.max_model_len} tokens",
            param=wanted_param,
        )
    max_tokens = min(settings.default_max_tokens, room) if wanted is None else max(wanted, 1)
    min_tokens = body.min_tokens or 0
    if min_tokens > max_tokens:
        raise InvalidRequest(
            f"field 'min_tokens': {min_tokens} exceeds the output limit of {max_tokens}", param="min_tokens"
        )
    check_token_ids(body.stop_token_ids or (), served.limits.vocab_size, "stop_token_ids")
    check_token_ids(body.logit_bias or (), served.limits.vocab_size, "logit_bias")
    seed = front.random_bits(64) if body.seed is None else body.seed
    temperature, top_p, top_k, repetition = body.temperature, body.top_p, body.top_k, body.repetition_penalty
    sampling = SamplingParams(
        max_tokens=max_tokens,
        seed=seed & SEED_MASK,
        temperature=1.0 if temperature is None else temperature,
        top_p=1.0 if top_p is None else top_p,
        top_k=0 if top_k is None or top_k < 0 else top_k,
        min_p=body.min_p or 0.0,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repetition_penalty=1.0 if repetition is None else repetition,
        min_tokens=min_tokens,
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=bool(body.ignore_eos),
        logit_bias=body.logit_bias or {},
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )
    stops = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    return Job(
        served=served,
        prompts=prompts,
        choices_per_prompt=count,
        sampling=sampling,
        salt=salt,
        stops=stops if any(stops) else (),
        priority=body.priority or 0,
        timeout_s=body.timeout,
        # Streams need each token, and a stop string must be noticed at once.
        tokens_per_delta=1 if body.stream or body.stop else WHOLE_RESPONSE_TOKENS,
        constraint=constraint,
        discard=wanted == 0,
    )


async def constraint(served: Served, body: Body) -> Constraint | None:
    """What the answer must match, if the body asks for it. Raises InvalidRequest."""
    fields = {name: value for name in FIELDS if (value := getattr(body, name)) is not None}
    asked = requested(fields) if fields else None
    return None if asked is None else await served.text.constraints.check(asked)


def check_token_ids(token_ids: Collection[int], vocab_size: int, param: str) -> None:
    """Raise InvalidRequest if the model does not have all of these ids."""
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
        raise no_such_token(vocab_size, param)


def no_such_token(vocab_size: int, param: str) -> InvalidRequest:
    """The refusal of a token id that does not exist."""
    return InvalidRequest(f"field {param!r}: token ids must be between 0 and {vocab_size - 1}", param=param)
