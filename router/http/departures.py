"""Where a prompt departs from what is known: what to change in a client so that more comes from the cache.

Known are the last prompt of each agent of a session (`SessionPrompts`), by tokens, and what replicas hold, by blocks.
Of other sessions nothing else counts: an answer by tokens would let callers who share a cache guess each other's
prompts. Pure, but for the memory.
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
SHOWN_IN_BLOCK = 24
SHOWN_CHARACTERS = 60
#: Of longer prompts the place of a block is not looked for: that takes 40 ns a token.
MAX_PLACED_TOKENS = 64 * 1024

#: The salt of the tenant's cache, the session, and the agent in it.
SessionKey = tuple[bytes, str, str | None]
#: The token ids (uint32 LE), and the conversation that they were made of, if it was one.
Known = tuple[bytes, Conversation | None]


class Departure(msgspec.Struct, frozen=True):
    """The first token that differs."""

    token: int  #: its place in the prompt, from 0
    at: str | None  #: tools, system, messages[k], or template (what it writes by itself); None: of no conversation
    text: str  #: from this token on
    instead_of: str | None = None  #: what stood there in the other prompt; None: not known
    exact: bool = True  #: False: the first token of the first block that differs

    def header(self) -> str:
        """Without spaces, as `name=value;...`; texts are percent-encoded."""
        parts = [f"token={self.token}", "" if self.exact else "exact=no", f"at={self.at}" if self.at else ""]
        parts += [f"text={_quoted(self.text)}"]
        parts += [] if self.instead_of is None else [f"instead-of={_quoted(self.instead_of)}"]
        return ";".join(filter(None, parts))


def _quoted(text: str) -> str:
    return quote(text[:SHOWN_CHARACTERS].encode(errors="replace"), safe="")[:100]


class SessionPrompts:
    """The last prompt of each session, bounded in bytes, least recently used out first. Only for one event loop."""

    def __init__(self, capacity_bytes: int = MAX_BYTES) -> None:
        self._capacity = capacity_bytes
        self._known: OrderedDict[SessionKey, Known] = OrderedDict()
        self.used_bytes = 0

    def __len__(self) -> int:
        return len(self._known)

    def get(self, key: SessionKey) -> Known | None:
        """The last prompt."""
        return self._known.get(key)

    def put(self, key: SessionKey, prompt: Known) -> Known | None:
        """Keep this prompt and return the one before."""
        before = self._known.pop(key, None)
        self._known[key] = prompt
        self.used_bytes += _cost(prompt[0]) - (_cost(before[0]) if before is not None else 0)
        while self.used_bytes > self._capacity:
            _, (dropped, _) = self._known.popitem(last=False)
            self.used_bytes -= _cost(dropped)
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


def continues(before: Known, new: Known) -> bool:
    """Whether the new prompt begins with the one before: a few memory copies."""
    return new[0].startswith(before[0][: -4 * TAIL_TOKENS])


def from_longest(before: Known | None, new: Known, held_tokens: int, text: TextModel) -> Departure | None:
    """Where a prompt leaves its longest known prefix: what it shares with the one before, or what a replica holds."""
    if before is not None and common_tokens(before[0], new[0]) >= held_tokens:
        return between(before, new, text)
    return in_blocks(new, held_tokens, text)


def header(before: Known | None, new: Known, text: TextModel, held_tokens: int) -> str | None:
    """The same for a response header; None: there is no departure, or nothing was known."""
    found = from_longest(before, new, held_tokens, text) if before is not None or held_tokens else None
    return None if found is None else found.header()


def between(known: Known, new: Known, text: TextModel) -> Departure | None:
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


def in_blocks(new: Known, held_tokens: int, text: TextModel) -> Departure | None:
    """Where a prompt leaves what is held, of which only whole blocks are known."""
    token_ids, conversation = new
    if 4 * held_tokens >= len(token_ids):
        return None
    place = None
    if conversation is not None and len(token_ids) <= 4 * MAX_PLACED_TOKENS:
        ids = memoryview(token_ids).cast("I").tolist()
        held, rest = text.joined(ids[:held_tokens]), text.joined(ids[held_tokens:])
        place = place_in(conversation, held + rest, len(held))
    return Departure(held_tokens, place, _text_at(text, token_ids, held_tokens, SHOWN_IN_BLOCK), exact=False)


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


def _text_at(text: TextModel, token_ids: bytes, token: int, shown: int = SHOWN_TOKENS) -> str:
    return text.decode(memoryview(token_ids[4 * token : 4 * (token + shown)]).cast("I").tolist())
