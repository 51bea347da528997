"""POST /tokenize and /detokenize, in vLLM's shapes."""

import msgspec

from ...errors import InvalidRequest
from ..caller import Caller
from ..front import Front
from ..protocol.exchange import Exchange
from .chat import conversation
from .schema import ENCODER, NonNegative, TokenizeBody, decode
from .validate import check_token_ids


class Tokenized(msgspec.Struct, frozen=True):
    """The token ids of a prompt."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Token ids."""

    model: str | None = None
    tokens: list[NonNegative]


class Detokenized(msgspec.Struct, frozen=True):
    """Their text."""

    prompt: str


_TOKENIZE = msgspec.json.Decoder(TokenizeBody)
_DETOKENIZE = msgspec.json.Decoder(DetokenizeBody)


async def tokenize(front: Front, exchange: Exchange) -> None:
    caller = Caller(front, exchange)
    caller.check()
    body = decode(exchange.request.body, _TOKENIZE)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("exactly one of 'prompt' and 'messages' is required", param="prompt")
    served = await front.served(body.model)
    if body.prompt is not None:
        special_tokens = body.add_special_tokens is not False
        tokens = list((await served.text.encode([body.prompt], special_tokens=special_tokens))[0])
    else:
        tokens = list(await served.text.encode_chat(conversation(body, body.tools)))
    caller.charge([len(tokens)])
    names = served.text.piece_names(tokens) if body.return_token_strs else None
    exchange.respond(ENCODER.encode(Tokenized(len(tokens), served.limits.max_model_len, tokens, names)))


async def detokenize(front: Front, exchange: Exchange) -> None:
    caller = Caller(front, exchange)
    caller.check()
    body = decode(exchange.request.body, _DETOKENIZE)
    served = await front.served(body.model)
    check_token_ids(body.tokens, served.limits.vocab_size, "tokens")
    caller.charge([len(body.tokens)])
    exchange.respond(ENCODER.encode(Detokenized(served.text.decode(body.tokens))))
