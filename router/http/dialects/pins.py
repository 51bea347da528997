"""`cache_control`: which prefixes of a prompt to keep in the cache, and for how long, as in Anthropic's API.

Turns marks into prefix lengths in tokens. The replica decides whether a pin fits the tenant's budget.
"""

from collections.abc import Sequence

import msgspec

from ...config import RouterSettings
from ...errors import InvalidRequest, TemplateRefusal
from ...text.conversation import CacheMark, Conversation
from ...text.encoder_threads import Sender
from ...text.template import TemplateInput
from ...text.tokenizer import TextModel
from ..generation import PinRequest

#: Maximum number of marks in one chat, and how long a mark without `ttl` lasts, as in Anthropic's API.
MAX_MARKS = 4
TTL_S = 300.0


def ttl_s(mark: CacheMark, settings: RouterSettings) -> float:
    """Seconds to keep the marked prefix. Raises InvalidRequest above the setting's maximum."""
    if mark.ttl_s is None:
        return min(TTL_S, settings.pin_max_ttl_s)
    if mark.ttl_s > settings.pin_max_ttl_s:
        param = f"{mark.param}.ttl"
        raise InvalidRequest.field(param, f"the maximum is {settings.pin_max_ttl_s:g} seconds")
    return mark.ttl_s


def whole_prompt(mark: CacheMark | None, settings: RouterSettings, token_ids: Sequence[int]) -> tuple[PinRequest, ...]:
    """The pin for a mark outside the prompt, which covers all of it; empty without a mark."""
    return () if mark is None else (PinRequest(len(token_ids), ttl_s(mark, settings)),)


async def requested(
    text: TextModel,
    conversation: Conversation,
    rendered: TemplateInput,
    token_ids: Sequence[int],
    sender: Sender,
    settings: RouterSettings,
) -> tuple[PinRequest, ...]:
    """The pins of a chat; `rendered` and `token_ids` are made from `conversation`. Raises InvalidRequest."""
    marks = [(message, mark, ttl_s(mark, settings)) for message, mark in conversation.marks()]
    if len(marks) > MAX_MARKS:
        raise InvalidRequest.field("messages", f"at most {MAX_MARKS} places with 'cache_control'")
    kept = [
        PinRequest(await _tokens_up_to(text, rendered, message, mark, token_ids, sender), seconds)
        for message, mark, seconds in marks
    ]
    return (*kept, *whole_prompt(conversation.mark, settings, token_ids))


async def _tokens_up_to(
    text: TextModel, rendered: TemplateInput, message: int, mark: CacheMark, token_ids: Sequence[int], sender: Sender
) -> int:
    """The number of leading tokens that the whole prompt shares with the conversation cut at the mark.

    The place of the cut may be rendered or tokenized differently at a prompt's end than in its middle, so only the
    common prefix counts. Some templates refuse a conversation that ends there, such as after a system message or the
    tools; then a user message is appended.
    """
    if mark.end is None and message == len(rendered.messages) - 1:
        return len(token_ids)
    kept = [dict(each) for each in rendered.messages[: message + 1]]
    if mark.end is not None:
        kept[-1]["content"] = kept[-1]["content"][: mark.end]
    cut = msgspec.structs.replace(rendered, messages=kept, add_generation_prompt=False, continue_final_message=False)
    try:
        ids = await text.encode_chat(cut, sender=sender)
    except TemplateRefusal:
        asked = msgspec.structs.replace(cut, messages=[*kept, {"role": "user", "content": "?"}])
        try:
            ids = await text.encode_chat(asked, sender=sender)
        except TemplateRefusal as error:
            raise InvalidRequest.field(
                mark.param, "this model's chat template cannot be cut there; mark a later message"
            ) from error
    pairs = enumerate(zip(ids, token_ids, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(ids), len(token_ids)))
