"""Finds where a prompt departs from known prefixes, which shows what to change in a client for more cache hits.

Known are the last prompt of each agent in a session (`SessionPrompts`), token by token, and the prefixes that replicas
hold, in whole blocks. Prompts of other sessions are never compared by token: callers who share a cache could guess each
other's prompts from the answers. Pure, except for the memory.
"""

from collections import OrderedDict
from urllib.parse import quote

import msgspec

from ..text.conversation import Conversation
from ..text.tokenizer import TextModel

#: Memory for the prompts of all sessions, per router process.
MAX_BYTES = 64 * 1024 * 1024
#: Memory of an entry besides its ids and its conversation.
ENTRY_BYTES = 1024
#: Memory of a conversation, in bytes per byte of its body. Measured: 1 for text, 3 for tool definitions, up to 27 for
#: bodies made for it. A conversation may be far longer than its prompt: templates leave parts of it out.
CONVERSATION_BYTES = 3
#: Tokens at a prompt's end that `continues` ignores: they open the answer, and may differ in the next prompt.
TAIL_TOKENS = 16
SHOWN_TOKENS = 8
SHOWN_IN_BLOCK = 24
SHOWN_CHARACTERS = 60
#: Blocks of longer prompts are not located in the conversation, which takes 40 ns per token.
MAX_PLACED_TOKENS = 64 * 1024
#: Messages that may be missing in the rendered prompt, because the template changed their content (many remove spaces
#: at its ends). Each is searched for in the whole rest of the prompt: up to 0.1 ms.
MAX_MISSING = 50

#: The cache salt, the session, and the agent within the session.
SessionKey = tuple[bytes, str, str | None]
#: A prompt's token ids (uint32 LE), and the conversation that it was rendered from; None: it was no chat.
KnownPrompt = tuple[bytes, Conversation | None]


class Departure(msgspec.Struct, frozen=True):
    """The first token in which a prompt differs from a known prefix."""

    token: int  #: its index in the prompt
    at: str | None  #: tools, system, messages[k], or template (text that the template adds); None: no chat, or too long
    text: str  #: the prompt from this token on, abridged
    instead_of: str | None = None  #: the other prompt from this token on; None: unknown
    exact: bool = True  #: False: `token` is the first token of the first block that differs

    def header(self) -> str:
        """The header value: `name=value;...` without spaces; texts are percent-encoded."""
        parts = [f"token={self.token}", "" if self.exact else "exact=no", f"at={self.at}" if self.at else ""]
        parts += [f"text={_quoted(self.text)}"]
        parts += [] if self.instead_of is None else [f"instead-of={_quoted(self.instead_of)}"]
        return ";".join(filter(None, parts))


def _quoted(text: str) -> str:
    return quote(text[:SHOWN_CHARACTERS].encode(errors="replace"), safe="")[:100]


class SessionPrompts:
    """The last prompt of each agent in a session, bounded in bytes; drops the oldest first. Not thread-safe."""

    def __init__(self, capacity_bytes: int = MAX_BYTES) -> None:
        self._capacity = capacity_bytes
        self._known: OrderedDict[SessionKey, tuple[KnownPrompt, int]] = OrderedDict()  #: with the memory it takes
        self.used_bytes = 0

    def __len__(self) -> int:
        return len(self._known)

    def get(self, key: SessionKey) -> KnownPrompt | None:
        """The last prompt; None if there is none."""
        return self._known.get(key, (None, 0))[0]

    def put(self, key: SessionKey, prompt: KnownPrompt, body_bytes: int) -> KnownPrompt | None:
        """Store a prompt from a body of this size, and return the previous one."""
        before, freed = self._known.pop(key, (None, 0))
        cost = ENTRY_BYTES + len(prompt[0]) + CONVERSATION_BYTES * body_bytes
        self._known[key] = prompt, cost
        self.used_bytes += cost - freed
        while self.used_bytes > self._capacity:
            self.used_bytes -= self._known.popitem(last=False)[1][1]
        return before


def common_tokens(one: bytes, other: bytes) -> int:
    """The length in tokens of the common prefix of two prompts."""
    low, high = 0, min(len(one), len(other)) // 4
    while low < high:
        middle = (low + high + 1) // 2
        if one[4 * low : 4 * middle] == other[4 * low : 4 * middle]:
            low = middle
        else:
            high = middle - 1
    return low


def continues(before: KnownPrompt, new: KnownPrompt) -> bool:
    """Whether the new prompt begins with the previous one, less `TAIL_TOKENS`. Costs a few memory copies."""
    return new[0].startswith(before[0][: -4 * TAIL_TOKENS])


def from_longest(before: KnownPrompt | None, new: KnownPrompt, held_tokens: int, text: TextModel) -> Departure | None:
    """Where a prompt departs from its longest known prefix: shared with the previous prompt or held by a replica."""
    if before is not None and common_tokens(before[0], new[0]) >= held_tokens:
        return between(before, new, text)
    return in_blocks(new, held_tokens, text)


def if_known(before: KnownPrompt | None, new: KnownPrompt, text: TextModel, held_tokens: int) -> Departure | None:
    """`from_longest`; None also if no prefix was known."""
    return from_longest(before, new, held_tokens, text) if before is not None or held_tokens else None


def between(known: KnownPrompt, new: KnownPrompt, text: TextModel) -> Departure | None:
    """Where the second prompt departs from the first; None: one is a prefix of the other."""
    token = common_tokens(known[0], new[0])
    if 4 * token == min(len(known[0]), len(new[0])):
        return None
    at = place_between(known[1], new[1]) if known[1] is not None and new[1] is not None else None
    return Departure(token, at, _text_at(text, new[0], token), _text_at(text, known[0], token))


def place_between(one: Conversation, other: Conversation) -> str:
    """The first part in which two conversations differ, as in `Departure.at`."""
    if [each.definition for each in one.tools] != [each.definition for each in other.tools]:
        return "tools"
    index = 0
    for index, (a, b) in enumerate(zip(one.messages, other.messages, strict=False)):
        if a.as_dict() != b.as_dict():
            return _message(other, index)
    if len(one.messages) != len(other.messages):
        return f"messages[{index + 1}]"
    return "template"


def in_blocks(new: KnownPrompt, held_tokens: int, text: TextModel) -> Departure | None:
    """Where a prompt departs from the prefix that a replica holds, of which only whole blocks are known."""
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
    """The part of a conversation that contains a character of its rendered prompt, by where the parts start."""
    place, start = "template", 0
    tools = [at for tool in conversation.tools if (at := rendered.find(f'"{tool.name}"')) >= 0]
    parts = [(min(tools), "tools")] if tools else []
    missing = 0
    for index, message in enumerate(conversation.messages):
        content = message.content
        if not content:
            continue
        found = rendered.find(content, start)
        if found >= 0:
            parts.append((found, _message(conversation, index)))
            start = found + len(content)
        elif (missing := missing + 1) == MAX_MISSING:
            break
    for begin, name in sorted(parts):
        if begin > character:
            break
        place = name
    return place


def _message(conversation: Conversation, index: int) -> str:
    return "system" if conversation.messages[index].role == "system" else f"messages[{index}]"


def _text_at(text: TextModel, token_ids: bytes, token: int, shown: int = SHOWN_TOKENS) -> str:
    return text.decode(memoryview(token_ids[4 * token : 4 * (token + shown)]).cast("I").tolist())
