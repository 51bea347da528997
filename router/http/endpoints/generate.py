"""Generates: answers in the body's API dialect, and embeddings."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec

from ....kvcache.hashing import token_bytes
from ..caller import Caller
from ..departures import Departure, SessionKey, continues, if_known
from ..dialects import messages
from ..dialects.chat import CHAT, ChatCompletion, engine_chat, raw_fields
from ..dialects.completions import COMPLETION, Completion
from ..dialects.dialect import BodyType, Dialect, StreamWriter, WholeWriter
from ..dialects.embeddings import EmbeddingBuilder, EmbeddingsBody, EmbeddingsResponse
from ..dialects.embeddings import job as embeddings_job
from ..dialects.schema import unused_fields
from ..front import Front
from ..generation import Generation, Job
from ..protocol.exchange import Exchange
from .endpoint import Endpoint, Handler, charged, decoded

#: Fields of vLLM about its cache, connectors and versions of weights, which it also takes with token ids.
ENGINE_ONLY = frozenset("session_id kv_hints kv_transfer_params return_weight_versions".split())
_EMBEDDINGS = msgspec.json.Decoder(EmbeddingsBody)


async def generate(dialect: Dialect[BodyType], front: Front, exchange: Exchange, caller: Caller) -> None:
    body = await decoded_in(dialect, front, caller, exchange)
    await start_generation(dialect, front, exchange, caller, body)


async def decoded_in(
    dialect: Dialect[BodyType], front: Front, caller: Caller, exchange: Exchange, part: bytes | None = None
) -> BodyType:
    """Decode a request's body, or `part` of it, in a dialect. Raises InvalidRequest and ClientGoneError."""
    unknown, unused = dialect.unknown, dialect.unused
    decoder = dialect.decoder
    return await decoded(front, caller, exchange, decoder, lenient=True, unknown=unknown, unused=unused, part=part)


async def start_generation(
    dialect: Dialect[BodyType],
    front: Front,
    exchange: Exchange,
    caller: Caller,
    body: BodyType,
    prepare: Callable[[Any], None] | None = None,
) -> None:
    """Generate the response to `body`. `prepare` is called with its builder before anything is generated."""
    response_id = f"{front.random_bits(96):024x}"
    caller.named(body.rid, body.request_id)  # before anything that takes long
    exchange.names = (*exchange.names, response_id)
    served = await front.served(body.model)
    sender = caller.sender(body.cache_salt)
    job = await dialect.job(front, served, body, sender)
    if unread := dialect.unread(job):
        front.metrics.fields_ignored(len(unread))
        caller.ignore([*caller.ignored, *unread])
    if served.backend.has_engines:
        job = _with_engine_fields(front, job, caller, exchange.request.body)
    session, departure = caller.session or job.session, None
    if session is not None and job.conversation is not None:
        departure = _departure(front, job, (sender.salt, session, caller.agent), sender.body_bytes)
    builder = dialect.builder(served, body, response_id, int(front.wall()))
    if prepare is not None:
        prepare(builder)
    writer = StreamWriter(exchange, builder) if body.stream else WholeWriter(exchange, builder)
    await Generation(front, job, exchange, caller, writer, departure).begin()


def _with_engine_fields(front: Front, job: Job, caller: Caller, sent: bytes) -> Job:
    """Add the fields that only external engines interpret, which are then not listed as ignored."""
    if job.engine_renders:
        caller.ignore(())
        default = job.sampling.max_tokens if front.settings.default_max_tokens else 0
        return msgspec.structs.replace(job, chat=engine_chat(sent, default))
    if passed := ENGINE_ONLY.intersection(caller.ignored):
        caller.ignore([name for name in caller.ignored if name not in passed])
        fields = raw_fields(sent)
        return msgspec.structs.replace(job, given=job.given | {name: fields[name] for name in passed})
    return job


def _departure(front: Front, job: Job, key: SessionKey, body_bytes: int) -> Callable[[int], Departure | None] | None:
    """Remember a session's prompt. Returns what finds its departure; None: it continues the last prompt."""
    new = token_bytes(job.prompts[0].token_ids), job.conversation
    before = front.session_prompts.put(key, new, body_bytes)
    if before is not None and continues(before, new):
        return None
    return partial(if_known, before, new, job.served.text)


async def embeddings(front: Front, exchange: Exchange, caller: Caller) -> None:
    body = await decoded(front, caller, exchange, _EMBEDDINGS, lenient=True, unused=unused_fields)
    served = await front.served(body.model)
    job = await embeddings_job(front, served, body, caller.sender(body.cache_salt))
    await Generation(front, job, exchange, caller, WholeWriter(exchange, EmbeddingBuilder(served, body))).begin()


def generating(path: str, dialect: Dialect[Any], what: str, response: type, handler: Handler | None = None) -> Endpoint:
    """The endpoint that generates responses in a dialect, with `generate` by default."""
    guarded, bodies = charged(handler or partial(generate, dialect)), (dialect.decoder.type,)
    return Endpoint("POST", path, guarded, f"{what}, streamed or whole", response, bodies, streams=True)


def in_anthropic_format(endpoint: Endpoint) -> Endpoint:
    """The same endpoint with errors in the format of Anthropic's API."""
    return replace(endpoint, error_body=messages.messages_error_body, errors=messages.MessagesError)


ENDPOINTS = (
    generating("/v1/completions", COMPLETION, "completion", Completion),
    generating("/v1/chat/completions", CHAT, "chat", ChatCompletion),
    in_anthropic_format(
        generating("/v1/messages", messages.MESSAGES, "message in Anthropic's API", messages.MessageResponse)
    ),
    Endpoint(
        "POST",
        "/v1/embeddings",
        charged(embeddings),
        "embedding vectors of texts",
        EmbeddingsResponse,
        (EmbeddingsBody,),
    ),
)
