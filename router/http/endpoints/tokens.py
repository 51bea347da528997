"""Token ids of texts and chats, texts of token ids, numbers of tokens, and properties of the tokenizer."""

from typing import Annotated

import msgspec
from msgspec import Meta

from ...errors import InvalidRequest
from ...text.encoder import TokenIds
from ..caller import Caller
from ..dialects import messages
from ..dialects.bounds import Name, TokenId
from ..dialects.chat import conversation
from ..dialects.long_json import LongList, Steps, long_text, pieces_of
from ..dialects.schema import TokenizeBody
from ..dialects.validate import check_token_ids
from ..front import Front, Served
from ..protocol.exchange import Exchange
from .endpoint import Endpoint, charged, decoded, respond, respond_in_steps, with_key
from .generate import in_anthropic_format

#: Token ids that one step of a /tokenize response encodes: 4 ms with their names.
IDS_AT_ONCE = 16 * 1024


class Tokenized(msgspec.Struct, frozen=True):
    """The token ids of a prompt."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /detokenize: the token ids of a text."""

    model: Name | None = None
    tokens: Annotated[list[TokenId], Meta(max_length=512 * 1024)]


class Detokenized(msgspec.Struct, frozen=True):
    """The text of the given token ids."""

    prompt: str


_TOKENIZE = msgspec.json.Decoder(TokenizeBody)
_DETOKENIZE = msgspec.json.Decoder(DetokenizeBody)
_COUNT = msgspec.json.Decoder(messages.CountBody)


async def tokenize(front: Front, exchange: Exchange, caller: Caller) -> None:
    """Return the token ids of a text or a chat. The bodies of this and of `detokenize` are vLLM's."""
    body = await decoded(front, caller, exchange, _TOKENIZE)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("exactly one of 'prompt' and 'messages' is required", param="prompt")
    served = await front.served(body.model)
    sender = caller.sender()
    if body.prompt is not None:
        special_tokens = body.add_special_tokens is not False
        [tokens] = await served.text.encode([body.prompt], special_tokens=special_tokens, sender=sender, param="prompt")
    else:
        made = lambda: conversation(body).template_input()  # noqa: E731 - built in the thread that renders it
        tokens = await served.text.encode_chat(made, sender=sender, param="messages")
        if body.add_special_tokens:
            tokens = _with_special_tokens(tokens, served)
    caller.charge([len(tokens)])
    steps = _tokenized(tokens, served, with_names=bool(body.return_token_strs))
    await respond_in_steps(front, exchange, caller, steps)


def _with_special_tokens(tokens: TokenIds, served: Served) -> TokenIds:
    """A chat's tokens between those that the tokenizer puts around a text; templates write their own."""
    encode = served.text.encode_now
    [plain], [around] = (encode(["a"], special_tokens=special) for special in (False, True))
    at = next(start for start in range(len(around)) if around[start : start + len(plain)] == plain)
    return around[:at] + tokens + around[at + len(plain) :]


def _tokenized(tokens: TokenIds, served: Served, *, with_names: bool) -> Steps[list[bytes]]:
    ids, names = LongList(), LongList()
    for start in range(0, len(tokens), IDS_AT_ONCE):
        if start:
            yield
        part = tokens[start : start + IDS_AT_ONCE]
        ids.add(part.tolist())
        if with_names:
            names.add(served.text.piece_names(part))
    shown = names.ended() if with_names else None
    return pieces_of(Tokenized(len(tokens), served.limits.max_model_len, ids.ended(), shown))


async def detokenize(front: Front, exchange: Exchange, caller: Caller) -> None:
    body = await decoded(front, caller, exchange, _DETOKENIZE)
    served = await front.served(body.model)
    check_token_ids(body.tokens, served.limits.vocab_size, "tokens")
    caller.charge([len(body.tokens)])
    [text] = await served.text.decode_long([body.tokens], caller.sender())
    await respond_in_steps(front, exchange, caller, _detokenized(text))


def _detokenized(text: str) -> Steps[list[bytes]]:
    return pieces_of(Detokenized((yield from long_text(text))))


async def count_tokens(front: Front, exchange: Exchange, caller: Caller) -> None:
    """Count the prompt tokens of a Messages request."""
    body = await decoded(
        front, caller, exchange, _COUNT, lenient=True, unknown=messages.unknown, unused=messages.unused
    )
    served = await front.served(body.model)
    sender = caller.sender(body.cache_salt)
    tokens = await served.text.encode_chat(
        lambda: messages.conversation(body, front.settings).template_input(), sender=sender
    )
    caller.charge([len(tokens)])
    respond(exchange, messages.TokenCount(len(tokens)))


async def tokenizer_info(front: Front, exchange: Exchange, _caller: Caller) -> None:
    """Return properties of the only model's tokenizer, with the names that `tokenizer_config.json` uses."""
    served = await front.served(None)
    respond(exchange, {**served.text.info, "model_max_length": served.limits.max_model_len})


ENDPOINTS = (
    Endpoint("POST", "/tokenize", charged(tokenize), "text or chat to token ids", Tokenized, (TokenizeBody,)),
    Endpoint("POST", "/detokenize", charged(detokenize), "token ids to text", Detokenized, (DetokenizeBody,)),
    Endpoint("GET", "/tokenizer_info", with_key(tokenizer_info), "special tokens and chat template of the model"),
    in_anthropic_format(
        Endpoint(
            "POST",
            "/v1/messages/count_tokens",
            charged(count_tokens),
            "the number of prompt tokens of a message",
            messages.TokenCount,
            (messages.CountBody,),
        )
    ),
)
