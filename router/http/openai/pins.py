"""`cache_control`: which parts of a prompt a caller wants kept, and for how long; in Anthropic's words.

From fields to numbers of tokens. Knows no replicas: whether a pin fits into the tenant's budget is theirs to say.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from ...config import RouterSettings
from ...errors import InvalidRequest, TemplateRefusal
from ...text.template import Chat
from ...text.tokenizer import TextModel
from ..errors import from_msgspec
from .schema import CacheControl, MessageBody
from .validate import text_of

#: Places that one chat may mark, as Anthropic has it.
MAX_MARKS = 4
_NAMED_S = {"5m": 300.0, "1h": 3600.0}


@dataclass(slots=True, frozen=True)
class PinWish:
    """Keep the first tokens of a prompt."""

    num_tokens: int
    ttl_s: float


@dataclass(slots=True, frozen=True)
class Mark:
    """A place in a chat up to which the prompt is to be kept."""

    message: int
    text: str | None  #: the message's content up to there; None: the message is kept whole
    ttl_s: float
    param: str


def ttl_s(control: CacheControl, settings: RouterSettings, param: str) -> float:
    """How long to keep it. Raises InvalidRequest beyond the setting's bound."""
    if control.ttl is None:
        return min(settings.pin_ttl_s, settings.pin_max_ttl_s)
    seconds = _NAMED_S[control.ttl] if isinstance(control.ttl, str) else control.ttl
    if seconds > settings.pin_max_ttl_s:
        raise InvalidRequest(
            f"field '{param}.ttl': at most {settings.pin_max_ttl_s:g} seconds are kept here", param=f"{param}.ttl"
        )
    return seconds


def whole_prompt(
    control: CacheControl | None, settings: RouterSettings, token_ids: Sequence[int]
) -> tuple[PinWish, ...]:
    """What the field beside the prompt asks for: all of it."""
    return () if control is None else (PinWish(len(token_ids), ttl_s(control, settings, "cache_control")),)


def marks(messages: Sequence[MessageBody], settings: RouterSettings) -> list[Mark]:
    """The marked places of a chat, first to last. Raises InvalidRequest."""
    marked = [
        (index, message)
        for index, message in enumerate(messages)
        if message.cache_control is not None or isinstance(message.content, list)
    ]
    found = [mark for index, message in marked for mark in _marks_of(message, index, settings)]
    if len(found) > MAX_MARKS:
        raise InvalidRequest(f"field 'messages': at most {MAX_MARKS} places with 'cache_control'", param="messages")
    return found


def _marks_of(message: MessageBody, index: int, settings: RouterSettings) -> Iterator[Mark]:
    if isinstance(message.content, list):
        for place, part in enumerate(message.content):
            param = f"messages[{index}].content[{place}].cache_control"
            if (control := _control(part.get("cache_control"), param)) is not None:
                text = text_of(message.content[: place + 1], f"messages[{index}].content")
                last = place == len(message.content) - 1
                yield Mark(index, None if last else text, ttl_s(control, settings, param), param)
    if message.cache_control is not None:
        param = f"messages[{index}].cache_control"
        yield Mark(index, None, ttl_s(message.cache_control, settings, param), param)


def _control(given: Any, param: str) -> CacheControl | None:
    if given is None:
        return None
    try:
        return msgspec.convert(given, CacheControl)
    except msgspec.ValidationError as error:
        raise from_msgspec(error, param) from error


async def chat_pins(
    text: TextModel, chat: Chat, places: Sequence[Mark], token_ids: Sequence[int], salt: bytes
) -> tuple[PinWish, ...]:
    """The marked places in tokens of the whole prompt, which is `token_ids`."""
    return tuple([PinWish(await _tokens_up_to(text, chat, mark, token_ids, salt), mark.ttl_s) for mark in places])


async def _tokens_up_to(text: TextModel, chat: Chat, mark: Mark, token_ids: Sequence[int], salt: bytes) -> int:
    """Tokens that the whole prompt and the chat cut at the mark have in common.

    The end of a cut chat may be rendered or tokenized otherwise than its middle, so the common prefix is what counts.
    Some templates refuse a chat that ends there, after a system message, say: then a question of the user follows.
    """
    if mark.text is None and mark.message == len(chat.messages) - 1:
        return len(token_ids)
    kept = [dict(message) for message in chat.messages[: mark.message + 1]]
    if mark.text is not None:
        kept[-1]["content"] = mark.text
    cut = msgspec.structs.replace(chat, messages=kept, add_generation_prompt=False, continue_final_message=False)
    ids: Sequence[int]
    try:
        ids = await text.encode_chat(cut, tenant=salt)
    except TemplateRefusal:
        ids = await _with_question(text, cut, mark, salt)
    return common_prefix(ids, token_ids)


async def _with_question(text: TextModel, cut: Chat, mark: Mark, salt: bytes) -> Sequence[int]:
    asked = msgspec.structs.replace(cut, messages=[*cut.messages, {"role": "user", "content": "?"}])
    try:
        return await text.encode_chat(asked, tenant=salt)
    except TemplateRefusal as error:
        raise InvalidRequest(
            f"field {mark.param!r}: this model's chat template cannot be cut there; mark a later message",
            param=mark.param,
        ) from error


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """How many leading ids are the same."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))
