"""vLLM's endpoints for splitting a request: text to token ids (`/render`), and token ids to token ids."""

from functools import partial
from typing import Any, cast

import msgspec

from ....replica.messages import Constraint
from ...errors import InvalidRequest
from ..caller import REQUEST_ID, Caller
from ..dialects.chat import CHAT
from ..dialects.completions import COMPLETION
from ..dialects.dialect import Dialect
from ..dialects.long_json import Long, LongList, Steps, long_list, pieces_of
from ..dialects.messages import MESSAGES
from ..dialects.responses import RESPONSES
from ..dialects.schema import ENCODER, Body, StreamOptions
from ..dialects.token_ids import GENERATE_BODY, TOKEN_IDS, GenerateBody, Generated, completion_of, unused
from ..front import Front
from ..generation import Job
from ..protocol.exchange import Exchange
from .endpoint import Endpoint, charged, decoded, respond_in_steps
from .generate import decoded_in, in_anthropic_format, start_generation
from .stored_responses import put_history

GENERATE = "/inference/v1/generate"


class RenderedPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt as the body of `/inference/v1/generate`, with the sampling that a replica would get."""

    request_id: str
    model: str
    token_ids: list[int]
    sampling_params: dict[str, Any]
    stream: bool
    stream_options: StreamOptions | None
    cache_salt: str | None
    priority: int
    token_offsets: None = None
    features: None = None
    kv_transfer_params: None = None


async def generate_tokens(front: Front, exchange: Exchange, caller: Caller) -> None:
    """Generate token ids after token ids."""
    body = await decoded(front, caller, exchange, GENERATE_BODY, lenient=True, unused=unused)
    named = None if REQUEST_ID in exchange.request.headers else body.request_id
    await start_generation(TOKEN_IDS, front, exchange, caller, completion_of(body, named or exchange.id))


async def render(dialect: Dialect[Any], prefix: str, front: Front, exchange: Exchange, caller: Caller) -> None:
    """Return the prompts of a body without generating anything."""
    body = await decoded_in(dialect, front, caller, exchange)
    caller.named(body.rid, body.request_id)
    served = await front.served(body.model)
    if dialect is RESPONSES:
        await put_history(front, caller, body)
    job = await dialect.job(front, served, body, caller.sender(body.cache_salt))
    caller.charge([len(prompt.token_ids) for prompt in job.prompts])
    await respond_in_steps(front, exchange, caller, _rendered(job, body, f"{prefix}{exchange.id}"))


def _rendered(job: Job, body: Body, request_id: str) -> Steps[list[bytes]]:
    """The prompts as a list, or the only one of what is not a completion."""
    sampling, made = Long([ENCODER.encode(_sampling(job, body))]), LongList()
    for index, prompt in enumerate(job.prompts):
        yield
        pieces = pieces_of(
            RenderedPrompt(
                request_id=request_id if job.conversation is not None else f"{request_id}-{index}",
                model=job.served.limits.name,
                token_ids=(yield from long_list(list(prompt.token_ids), 1)),
                sampling_params=cast(Any, sampling),
                stream=bool(body.stream),
                stream_options=body.stream_options,
                cache_salt=body.cache_salt,
                priority=job.priority,
            )
        )
        if job.conversation is not None:
            return pieces
        made.add_pieces(pieces)
    return list(made.ended().pieces)


def _sampling(job: Job, body: Body) -> dict[str, Any]:
    """The fields of sampling with the defaults that apply, as `/inference/v1/generate` reads them."""
    found = {name: value for name, value in msgspec.structs.asdict(job.sampling).items() if value is not None}
    found |= {"seed": body.seed, "n": job.choices_per_prompt, "stop": job.stops, "bad_words": body.bad_words}
    found |= {"skip_special_tokens": not job.show_special, "include_stop_str_in_output": job.show_stop}
    if job.constraint is not None:
        found["structured_outputs"] = _structured(job.constraint)
    return {name: value for name, value in found.items() if value not in (None, (), {})}


def _structured(constraint: Constraint) -> dict[str, Any]:
    """The constraint as vLLM's `structured_outputs`. Raises InvalidRequest."""
    if constraint.after or constraint.opener:
        raise InvalidRequest("the answer's format cannot be rendered: it applies only after the model's reasoning")
    match constraint.kind:
        case "json_object":
            return {"json_object": True}
        case "json_schema":
            return {"json": constraint.source}
        case "choice":
            return {"choice": msgspec.json.decode(constraint.source)}
        case kind:
            return {kind: constraint.source}


def _rendering(path: str, dialect: Dialect[Any], prefix: str) -> Endpoint:
    return Endpoint(
        "POST",
        f"{path}/render",
        charged(partial(render, dialect, prefix)),
        "the prompt as token ids",
        None if dialect is COMPLETION else RenderedPrompt,  # a list of them
        (dialect.decoder.type,),
    )


ENDPOINTS = (
    Endpoint(
        "POST",
        GENERATE,
        charged(generate_tokens),
        "token ids to token ids, streamed or whole",
        Generated,
        (GenerateBody,),
        streams=True,
    ),
    _rendering("/v1/chat/completions", CHAT, "chatcmpl-"),
    _rendering("/v1/completions", COMPLETION, "cmpl-"),
    _rendering("/v1/responses", RESPONSES, "resp_"),
    in_anthropic_format(_rendering("/v1/messages", MESSAGES, "msg_")),
)
