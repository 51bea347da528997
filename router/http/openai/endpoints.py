"""The endpoints: each reads a body, asks front or backend, and answers. No decision of routing or text is here."""

from codecs import BOM_UTF8
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from .... import __version__
from ....replica.messages import ModelLimits
from ...errors import InvalidJson, InvalidRequest, NoReplica, NotAllowed
from ...metrics import CONTENT_TYPE
from ...tenants.api_keys import Tenant
from .. import metering
from ..errors import from_msgspec
from ..front import Front, Served
from ..headers import Caller, session
from ..protocol.exchange import Exchange
from . import chat, completions, validate
from .answers import ENCODER, Detokenized, ModelCard, ModelList, Tokenized
from .collect import WholeAnswer
from .generation import Answer, Generation, Job, generation_request
from .openapi import document
from .schema import CHAT, COMPLETION, DETOKENIZE, RESET, TOKENIZE, Body, ChatBody, CompletionBody, TokenizeBody
from .sse import EventStream

Decoded = TypeVar("Decoded")
MODELS = "/v1/models"
#: Answers an exchange, at once or later. What it raises is answered by its caller.
Handler = Callable[[Front, Exchange], Coroutine[Any, Any, None]]


def respond(exchange: Exchange, value: object) -> None:
    """Answer with `value` as JSON."""
    exchange.respond(ENCODER.encode(value))


def decode(data: bytes, decoder: "msgspec.json.Decoder[Decoded]") -> Decoded:
    """A body as a typed struct. Raises InvalidRequest, which names the field."""
    try:
        return decoder.decode(data)
    except msgspec.ValidationError as error:
        check_json(data)  # a wrong field may stand before the place where the JSON breaks
        raise from_msgspec(error) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        if data.startswith(BOM_UTF8):  # clients on Windows write it; RFC 8259 lets readers pass over it
            return decode(data.removeprefix(BOM_UTF8), decoder)
        raise InvalidJson(f"the body is not valid JSON: {error}") from error


def check_json(data: bytes) -> None:
    """Raises InvalidJson for what is no JSON at all."""
    try:
        msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidJson(f"the body is not valid JSON: {error}") from error


def tenant(front: Front, exchange: Exchange) -> Tenant:
    """Whose API key it is. Raises MissingKey and UnknownKey; to be asked before any work is done."""
    return front.tenants.of(exchange.request.headers.get("authorization"))


def metered(front: Front, exchange: Exchange) -> Tenant:
    """The same, of a tenant that has not used up its limits: else it is refused before its body costs anything."""
    who = tenant(front, exchange)
    meter = front.meters.get(who.digest)
    if meter is not None:
        metering.check(front, exchange, meter)
    return who


def caller(exchange: Exchange, who: Tenant, body: Body) -> Caller:
    """Who asks, by key, headers and `cache_salt`."""
    return Caller(
        request_id=exchange.id,
        session=session(exchange.request.headers),
        salt=who.cache_salt(body.cache_salt),
        tenant=who,
    )


def generate(front: Front, exchange: Exchange, job: Job, asks: Caller, answer: Answer) -> None:
    """Send the job to the backend; `answer` takes what comes. Raises QueueFull, NoReplica and PromptTooLong."""
    Generation(front, job, exchange, answer).begin(asks)


async def chat_completions(front: Front, exchange: Exchange) -> None:
    """POST /v1/chat/completions."""
    who = metered(front, exchange)
    body = decode(exchange.request.body, CHAT)
    served = await front.served(body.model)
    asks = caller(exchange, who, body)
    job = await chat.job(front, served, body, asks.salt)
    shape = chat.ChatShape(served, body, f"{front.random_bits(96):024x}", int(front.wall()))
    if body.stream:
        generate(front, exchange, job, asks, EventStream(exchange, chat.ChatChunks(shape, body)))
    else:
        generate(front, exchange, job, asks, WholeAnswer(exchange, shape.whole))


async def text_completions(front: Front, exchange: Exchange) -> None:
    """POST /v1/completions."""
    who = metered(front, exchange)
    body = decode(exchange.request.body, COMPLETION)
    served = await front.served(body.model)
    asks = caller(exchange, who, body)
    job = await completions.job(front, served, body)
    shape = completions.CompletionShape(served, body, f"{front.random_bits(96):024x}", int(front.wall()))
    if body.stream:
        generate(front, exchange, job, asks, EventStream(exchange, completions.CompletionChunks(shape, body)))
    else:
        generate(front, exchange, job, asks, WholeAnswer(exchange, shape.whole))


class _Kind(msgspec.Struct):
    """Tells a chat's body from a completion's."""

    messages: msgspec.Raw | UnsetType = UNSET


_KIND = msgspec.json.Decoder(_Kind)


async def explain(front: Front, exchange: Exchange) -> None:
    """POST /explain: the decision that a completion or chat body would meet now; nothing is generated."""
    who = metered(front, exchange)
    data = exchange.request.body
    body: ChatBody | CompletionBody
    if decode(data, _KIND).messages is UNSET:
        body = decode(data, COMPLETION)
        asks = caller(exchange, who, body)
        job = await completions.job(front, await front.served(body.model), body)
    else:
        body = decode(data, CHAT)
        asks = caller(exchange, who, body)
        job = await chat.job(front, await front.served(body.model), body, asks.salt)
    metering.charge(front, exchange, who, [len(prompt.token_ids) for prompt in job.prompts])
    respond(exchange, job.served.backend.explain(generation_request(job, job.prompts[0], asks, 0, None)))


async def tokenize(front: Front, exchange: Exchange) -> None:
    """POST /tokenize."""
    who = metered(front, exchange)
    body = decode(exchange.request.body, TOKENIZE)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("exactly one of 'prompt' and 'messages' is needed", param="prompt")
    served = await front.served(body.model)
    tokens = await _tokens(served, body)
    metering.charge(front, exchange, who, [len(tokens)])
    names = served.text.piece_names(tokens) if body.return_token_strs else None
    respond(exchange, Tokenized(len(tokens), served.limits.max_model_len, tokens, names))


async def _tokens(served: Served, body: TokenizeBody) -> list[int]:
    if body.prompt is None:
        return list(await served.text.encode_chat(validate.chat(body)))
    special_tokens = body.add_special_tokens is not False
    encoded = await served.text.encode([body.prompt], special_tokens=special_tokens)
    return list(encoded[0])


async def detokenize(front: Front, exchange: Exchange) -> None:
    """POST /detokenize."""
    who = metered(front, exchange)
    body = decode(exchange.request.body, DETOKENIZE)
    served = await front.served(body.model)
    validate.check_token_ids(body.tokens, served.limits, "tokens")
    metering.charge(front, exchange, who, [len(body.tokens)])
    respond(exchange, Detokenized(served.text.decode(body.tokens)))


def _card(front: Front, limits: ModelLimits) -> ModelCard:
    return ModelCard(id=limits.name, created=front.started_at, max_model_len=limits.max_model_len)


async def models(front: Front, exchange: Exchange) -> None:
    """GET /v1/models: the served models; one of which no replica has joined yet is not among them."""
    tenant(front, exchange)
    respond(exchange, ModelList([_card(front, limits) for limits in front.backend.models()]))


async def model(front: Front, exchange: Exchange) -> None:
    """GET /v1/models/{id}."""
    tenant(front, exchange)
    limits = front.backend.choose(exchange.request.path.removeprefix(f"{MODELS}/")).model()
    if limits is None:
        raise NoReplica("no replica has joined yet", retry_after_s=1.0)
    respond(exchange, _card(front, limits))


async def reset_prefix_cache(front: Front, exchange: Exchange) -> None:
    """POST /reset_prefix_cache: every replica (of `model`, where the body names one) forgets its cached blocks.

    An admin's to ask; 409 while requests run.
    """
    if not tenant(front, exchange).admin:
        raise NotAllowed("a reset empties everybody's cache: it takes a key with 'admin: true'")
    body = exchange.request.body
    name = decode(body, RESET).model if body else None
    respond(exchange, {"status": "ok", "replicas": await front.backend.reset_caches(name)})


async def health(_front: Front, exchange: Exchange) -> None:
    """GET /health: the process answers."""
    respond(exchange, {"status": "ok"})


async def ready(front: Front, exchange: Exchange) -> None:
    """GET /ready: a request for some model would be answered now; 503 otherwise.

    One model's outage must not have a load balancer take the others away: the answer says how many serve of each.
    """
    serving = {view.name: view.serving for view in front.backend.view().models}
    served = [limits for limits in front.backend.models() if serving.get(limits.name)]
    if not served:
        raise NoReplica("no replica can serve now", retry_after_s=1.0)
    if not front.backend.exact():
        raise NoReplica("the prefix index is not exact yet", retry_after_s=1.0)
    if not all(map(front.texts.loaded, front.backend.texts())):
        raise NoReplica("the model's tokenizer is being loaded", retry_after_s=1.0)
    respond(exchange, {"status": "ready", "replicas": sum(serving.values()), "models": serving})


async def metrics(front: Front, exchange: Exchange) -> None:
    """GET and HEAD /metrics."""
    front.metrics.observe_cluster(front.backend.view())
    exchange.respond(front.metrics.render(), content_type=CONTENT_TYPE)


async def version(_front: Front, exchange: Exchange) -> None:
    """GET /version."""
    respond(exchange, {"version": __version__})


async def openapi(_front: Front, exchange: Exchange) -> None:
    """GET /openapi.json: all of this as types."""
    exchange.respond(document())


async def cluster(front: Front, exchange: Exchange) -> None:
    """GET /cluster: the cluster as the router sees it."""
    respond(exchange, front.backend.view())


#: Handlers by path and method. GET paths answer HEAD too. Below `MODELS` names follow (app.py).
ENDPOINTS: Mapping[str, Mapping[str, Handler]] = {
    MODELS: {"GET": models},
    "/v1/completions": {"POST": text_completions},
    "/v1/chat/completions": {"POST": chat_completions},
    "/tokenize": {"POST": tokenize},
    "/detokenize": {"POST": detokenize},
    "/explain": {"POST": explain},
    "/reset_prefix_cache": {"POST": reset_prefix_cache},
    "/cluster": {"GET": cluster},
    "/health": {"GET": health},
    "/ready": {"GET": ready},
    "/metrics": {"GET": metrics},
    "/version": {"GET": version},
    "/openapi.json": {"GET": openapi},
}
