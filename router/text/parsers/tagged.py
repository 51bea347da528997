"""Reads parameters that are written one by one between tags, as Qwen3-Coder and GLM do.

Values are not escaped, so a tag may be part of a value: an agent that edits XML writes such values. A closing tag ends
a value only if the next tag of the call, or its end, follows, and if it does not close a tag within the value. Where a
model forgot or misspelt a closing tag, the value ends before the next parameter that the tool declares and that has not
been written yet.
"""

import re
from collections.abc import Collection
from dataclasses import dataclass

from .calls import CallScanner
from .scanner import Steps, TextEnded

#: Longest tag with a parameter's name.
_MAX_TAG = 256
_QUOTES = " \t\"'"


@dataclass(frozen=True, slots=True)
class Tags:
    """The tags of a format: `key` NAME `key_end`, `value`, the text of the value, `value_end`; then `ends`, `outer`."""

    key: str
    key_end: str
    value: str  #: tag that opens a value; empty: values are on lines of their own
    value_end: str
    ends: tuple[str, ...]  #: tags that end the call
    outer: str  #: tag that ends the block around one or more calls
    nexts: tuple[str, ...]  #: tags that begin another call

    @property
    def pairs(self) -> tuple[tuple[str, str], ...]:
        """Openers and closers that a value may quote. The first pair is that of a value."""
        calls = tuple(zip(self.nexts, (self.outer, *self.ends), strict=True))
        return (("<" + self.value_end[2:-1], self.value_end), *calls)

    @property
    def follow(self) -> tuple[str, ...]:
        """Tags that may follow a value."""
        return (self.key, *self.ends, self.outer)

    def end_at(self, text: str, *, line_start: bool, expected: Collection[str], closed: bool) -> bool | None:
        """Whether a value ends before the tag with which `text` begins. None: that depends on text to come.

        `line_start`: whether the tag begins a line. `expected`: parameters that may follow. `closed`: no more comes.
        """
        if text.startswith(self.value_end):
            return _begins(text[len(self.value_end) :], self.follow, closed=closed)
        if text.startswith(self.key):
            name, found, _ = text[len(self.key) :].partition(self.key_end)
            if not found and not closed and len(name) < _MAX_TAG and "\n" not in name:
                return None
            return bool(found) and name.strip(_QUOTES) in expected and (line_start or bool(self.value))
        for end in self.ends:
            if text.startswith(end):
                return _begins(text[len(end) :], (self.outer, *self.nexts), closed=closed, or_nothing=True)
        if text.startswith(self.outer) and (line_start or self.value):
            return _begins(text[len(self.outer) :], self.nexts, closed=closed, or_nothing=True)
        tags = (*self.follow, *(tag for pair in self.pairs for tag in pair))
        return None if not closed and any(each.startswith(text) for each in tags) else False

    def whole(self, text: str) -> str:
        """A value before its closing tag, without its last line feed and without repetitions of that tag."""
        tag = self.value_end
        surplus = text.count(tag) - text.count("<" + tag[2:-1])
        end = kept = len(text)
        while surplus > 0:  # without copies, as a model may repeat it for as long as it may write
            while end and text[end - 1].isspace():
                end -= 1
            if not text.endswith(tag, 0, end):
                break
            end = kept = end - len(tag)
            surplus -= 1
        text = text[:kept]
        return text if self.value else text.removesuffix("\n")

    def unclosed(self, text: str, key: str) -> str:
        """A value whose closing tag is missing, without the tag that was written in its place."""
        misspelt = rf"\n?(?:</(?:param\w*|arg_\w*|{re.escape(key)})>?[ \t]*)?\n?\Z"
        return re.sub(misspelt, "", text, count=1)


def parameters(p: CallScanner, tags: Tags) -> Steps[dict[str, str]]:
    """Consume the parameters of the call being read, and its end; return the values' texts. `outer` is not consumed."""
    found: dict[str, str] = {}
    while True:
        yield from p.space()
        tag = yield from p.expect(*tags.follow, tags.value_end)
        if tag == tags.outer:
            p.at -= len(tag)
            return found
        if tag in tags.ends:
            return found
        if tag == tags.value_end:
            continue  # written twice
        key = (yield from p.until(tags.key_end, tags.value or "\n")).strip(_QUOTES)
        yield from p.choose(tags.key_end)
        if tags.value:
            yield from p.space()
        yield from p.choose(tags.value or "\n")
        found[key] = yield from _value(p, tags, key, {each for each in p.properties() if each not in found} - {key})


def _value(p: CallScanner, tags: Tags, key: str, expected: Collection[str]) -> Steps[str]:
    """Consume a value and its closing tag."""
    p.forget()
    parts: list[str] = []
    at = 0  # where to look for the next tag
    quoted = dict.fromkeys(tags.pairs, 0)  # number of openers within the value that have not been closed
    while True:
        at = p.text.find("<", at)
        if at < 0:
            at = len(p.text)
            ended: bool | None = None
        else:
            rest, before = p.text[at:], p.text[max(0, at - 1) : at] or "".join(parts[-1:])
            line_start = not before or before.endswith("\n")
            ended = tags.end_at(rest, line_start=line_start, expected=expected, closed=p.closed)
            own = rest.startswith(tags.value_end)
            ended = ended and not any(count for pair, count in quoted.items() if not own or pair[1] == tags.value_end)
        if ended:
            text = "".join(parts) + p.text[:at]
            if not p.text.startswith(tags.value_end, at):
                p.at = at
                return tags.unclosed(text, key)
            p.at = at + len(tags.value_end)
            return tags.whole(text)
        if ended is None:
            if p.closed:
                p.at = len(p.text)
                raise TextEnded
            if at:
                parts.append(p.text[:at])
                p.at, at = at, 0
                p.forget()
            yield
        else:
            for opener, closer in tags.pairs:
                if p.text.startswith((opener, closer), at):
                    more = 1 if p.text.startswith(opener, at) else -1
                    quoted[opener, closer] = max(0, quoted[opener, closer] + more)
            at += 1


def _begins(text: str, literals: Collection[str], *, closed: bool, or_nothing: bool = False) -> bool | None:
    """Whether one of the literals follows, after white space, or nothing does. None: that depends on text to come."""
    text = text.lstrip()
    if text.startswith(tuple(literals)):
        return True
    if not text or any(each.startswith(text) for each in literals):
        return (or_nothing and not text) if closed else None
    return False
