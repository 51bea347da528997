"""Where a prompt departs from a known one: what to change in a client so that more of its prompts come from the cache.

`SessionPrompts` keeps the last prompt of each agent of a session. What replicas hold is known by blocks only, so there
the departure is known to a block. Pure, but for the memory.
"""

from collections import OrderedDict
from urllib.parse import quote

import msgspec

from ..text.conversation import Conversation
from ..text.tokenizer import TextModel

#: Memory for the prompts of sessions, in each router process.
MAX_BYTES = 64 * 1024 * 1024
#: Of a token: four for its id, and for its part of the conversation at most this. Measured: 4 where that is text, 14
#: where it is definitions of tools.
TEXT_BYTES = 14
#: A prompt ends with what begins the answer, which the next one may show otherwise: not worth a word.
TAIL_TOKENS = 16
SHOWN_TOKENS = 8
SHOWN_CHARACTERS = 60

#: The salt of the tenant's cache, the session, and the agent in it.
SessionKey = tuple[bytes, str, str | None]


class Departure(msgspec.Struct, frozen=True):
    """The first token that differs."""

    token: int  #: its place in the prompt, from 0
    at: str | None  #: tools, system, messages[k], or template (what it writes by itself); None: of no conversation
    text: str  #: from this token on
    instead_of: str | None = None  #: what stood there in the other prompt; None: not known
    exact: bool = True  #: False: the first token of the first block that differs

    def header(self) -> str:
        """Without spaces, as `name=value;...`; texts are percent-encoded."""
        return f"token={self.token};at={self.at};text={_quoted(self.text)};instead-of={_quoted(self.instead_of or '')}"


def _quoted(text: str) -> str:
    return quote(text[:SHOWN_CHARACTERS].encode(errors="replace"), safe="")[:100]


class SessionPrompts:
    """The last prompt of each session, bounded in bytes, least recently used out first. Only for one event loop."""

    def __init__(self, capacity_bytes: int = MAX_BYTES) -> None:
        self._capacity = capacity_bytes
        self._known: OrderedDict[SessionKey, tuple[bytes, Conversation]] = OrderedDict()
        self.used_bytes = 0

    def __len__(self) -> int:
        return len(self._known)

    def get(self, key: SessionKey) -> tuple[bytes, Conversation] | None:
        """The token ids (uint32 LE) and the conversation of the last prompt."""
        return self._known.get(key)

    def put(self, key: SessionKey, token_ids: bytes, conversation: Conversation) -> tuple[bytes, Conversation] | None:
        """Keep this prompt and return the one before, if the new one does not begin with it: a few memory copies."""
        before = self._known.pop(key, None)
        self._known[key] = token_ids, conversation
        self.used_bytes += _cost(token_ids) - (_cost(before[0]) if before is not None else 0)
        while self.used_bytes > self._capacity:
            _, (dropped, _) = self._known.popitem(last=False)
            self.used_bytes -= _cost(dropped)
        if before is None or token_ids.startswith(before[0][: -4 * TAIL_TOKENS]):
            return None
        return before


def _cost(token_ids: bytes) -> int:
    return len(token_ids) // 4 * (4 + TEXT_BYTES)


def common_tokens(one: bytes, other: bytes) -> int:
    """How many tokens two prompts have in common at their beginning."""
    low, high = 0, min(len(one), len(other)) // 4
    while low < high:
        middle = (low + high + 1) // 2
        if one[4 * low : 4 * middle] == other[4 * low : 4 * middle]:
            low = middle
        else:
            high = middle - 1
    return low


def between(
    known: tuple[bytes, Conversation | None], new: tuple[bytes, Conversation | None], text: TextModel
) -> Departure | None:
    """Where the second prompt departs from the first. None: it does not, one of them begins with the other."""
    token = common_tokens(known[0], new[0])
    if 4 * token == min(len(known[0]), len(new[0])):
        return None
    at = place_between(known[1], new[1]) if known[1] is not None and new[1] is not None else None
    return Departure(token, at, _text_at(text, new[0], token), _text_at(text, known[0], token))


def place_between(one: Conversation, other: Conversation) -> str:
    """The first part of a conversation that differs."""
    if [each.definition for each in one.tools] != [each.definition for each in other.tools]:
        return "tools"
    index = 0
    for index, (a, b) in enumerate(zip(one.messages, other.messages, strict=False)):
        if a.as_dict() != b.as_dict():
            return _message(other, index)
    if len(one.messages) != len(other.messages):
        return f"messages[{index + 1}]"
    return "template"


def in_blocks(
    token_ids: bytes, held_tokens: int, conversation: Conversation | None, text: TextModel
) -> Departure | None:
    """Where a prompt leaves what is held, of which only whole blocks are known."""
    if 4 * held_tokens >= len(token_ids):
        return None
    place = None
    if conversation is not None:
        held = _decoded(text, token_ids[: 4 * held_tokens])
        place = place_in(conversation, _decoded(text, token_ids), len(held))
    return Departure(held_tokens, place, _text_at(text, token_ids, held_tokens), exact=False)


def place_in(conversation: Conversation, rendered: str, character: int) -> str:
    """The part of a conversation in which a character of its rendered prompt lies, by where the parts begin there."""
    place, start = "template", 0
    tools = [at for tool in conversation.tools if (at := rendered.find(f'"{tool.name}"')) >= 0]
    parts = [(min(tools), "tools")] if tools else []
    for index, message in enumerate(conversation.messages):
        found = rendered.find(message.content, start) if message.content else -1
        if found >= 0:
            parts.append((found, _message(conversation, index)))
            start = found + len(message.content or "")
    for begin, name in sorted(parts):
        if begin > character:
            break
        place = name
    return place


def _message(conversation: Conversation, index: int) -> str:
    return "system" if conversation.messages[index].role == "system" else f"messages[{index}]"


def _text_at(text: TextModel, token_ids: bytes, token: int) -> str:
    return _decoded(text, token_ids[4 * token : 4 * (token + SHOWN_TOKENS)])


def _decoded(text: TextModel, token_ids: bytes) -> str:
    return text.decode(memoryview(token_ids).cast("I").tolist())
