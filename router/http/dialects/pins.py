"""`cache_control`: which prefixes of a prompt to keep in the cache, and for how long, as in Anthropic's API.

Turns fields into numbers of tokens. Whether a pin fits the tenant's budget is decided by the replica.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec

from ...config import RouterSettings
from ...errors import InvalidRequest, TemplateRefusal
from ...text.template import Conversation
from ...text.tokenizer import TextModel
from ..generation import PinRequest
from .schema import CacheControl, MessageBody, from_msgspec

#: Places that one chat may mark; the same number as Anthropic's.
MAX_MARKS = 4
_NAMED_S = {"5m": 300.0, "1h": 3600.0}


@dataclass(slots=True, frozen=True)
class _Mark:
    """A place in a chat up to which the prompt is to be kept."""

    message: int
    text: str | None  #: the message's content up to the mark; None: keep the whole message
    ttl_s: float
    param: str


def ttl_s(control: CacheControl, settings: RouterSettings, param: str) -> float:
    """How long to keep the prefix. Raises InvalidRequest above the setting's maximum."""
    if control.ttl is None:
        return min(settings.pin_ttl_s, settings.pin_max_ttl_s)
    seconds = _NAMED_S[control.ttl] if isinstance(control.ttl, str) else control.ttl
    if seconds > settings.pin_max_ttl_s:
        raise InvalidRequest(
            f"field '{param}.ttl': the maximum is {settings.pin_max_ttl_s:g} seconds", param=f"{param}.ttl"
        )
    return seconds


def whole_prompt(
    control: CacheControl | None, settings: RouterSettings, token_ids: Sequence[int]
) -> tuple[PinRequest, ...]:
    """The pin of a `cache_control` beside the prompt: all of it."""
    return () if control is None else (PinRequest(len(token_ids), ttl_s(control, settings, "cache_control")),)


def _marks_of(message: MessageBody, index: int, settings: RouterSettings) -> Iterator[_Mark]:
    if isinstance(message.content, list):
        for place, part in enumerate(message.content):
            param = f"messages[{index}].content[{place}].cache_control"
            given = part.get("cache_control")
            if given is not None:
                try:
                    control = msgspec.convert(given, CacheControl)
                except msgspec.ValidationError as error:
                    raise from_msgspec(error, param) from error
                last = place == len(message.content) - 1
                text = None if last else message.text(index, place + 1)
                yield _Mark(index, text, ttl_s(control, settings, param), param)
    if message.cache_control is not None:
        param = f"messages[{index}].cache_control"
        yield _Mark(index, None, ttl_s(message.cache_control, settings, param), param)


async def requested(
    text: TextModel,
    conversation: Conversation,
    messages: Sequence[MessageBody],
    control: CacheControl | None,
    token_ids: Sequence[int],
    salt: bytes,
    settings: RouterSettings,
) -> tuple[PinRequest, ...]:
    """The pins of a chat, by the `cache_control` of its parts, its messages and its body. Raises InvalidRequest."""
    marks = [
        mark
        for index, message in enumerate(messages)
        if message.cache_control is not None or isinstance(message.content, list)
        for mark in _marks_of(message, index, settings)
    ]
    if len(marks) > MAX_MARKS:
        raise InvalidRequest(f"field 'messages': at most {MAX_MARKS} places with 'cache_control'", param="messages")
    kept = [PinRequest(await _tokens_up_to(text, conversation, mark, token_ids, salt), mark.ttl_s) for mark in marks]
    return (*kept, *whole_prompt(control, settings, token_ids))


async def _tokens_up_to(
    text: TextModel, conversation: Conversation, mark: _Mark, token_ids: Sequence[int], salt: bytes
) -> int:
    """Tokens that the whole prompt and the conversation cut at the mark have in common.

    The end of a cut conversation may be rendered or tokenized differently from its middle, so the common prefix counts.
    Some templates refuse a conversation that ends there, such as after a system message: then a user's question is
    appended.
    """
    if mark.text is None and mark.message == len(conversation.messages) - 1:
        return len(token_ids)
    kept = [dict(message) for message in conversation.messages[: mark.message + 1]]
    if mark.text is not None:
        kept[-1]["content"] = mark.text
    cut = msgspec.structs.replace(
        conversation, messages=kept, add_generation_prompt=False, continue_final_message=False
    )
    try:
        ids = await text.encode_chat(cut, tenant=salt)
    except TemplateRefusal:
        asked = msgspec.structs.replace(cut, messages=[*kept, {"role": "user", "content": "?"}])
        try:
            ids = await text.encode_chat(asked, tenant=salt)
        except TemplateRefusal as error:
            raise InvalidRequest(
                f"field {mark.param!r}: this model's chat template cannot be cut there; mark a later message",
                param=mark.param,
            ) from error
    pairs = enumerate(zip(ids, token_ids, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(ids), len(token_ids)))
