"""Reads text that arrives in pieces: literals, markers that may be split, and nested values.

Every method that may need more text is a generator. It yields while the text is ambiguous, and is resumed when more has
arrived or the text has ended. So a format's code reads like its grammar, and the result does not depend on where the
text is split.
"""

import re
from collections.abc import Callable, Generator
from typing import TypeVar

T = TypeVar("T")
Steps = Generator[None, None, T]

#: Most white space characters before a marker that belong to it. Without a limit, a model that writes only line feeds
#: would make the parser hold and search all of them.
MAX_SPACE = 8
#: Outside strings: quotes, brackets, and `<`, which occurs in no value and begins the marker that ends a call.
_OUTSIDE = {quotes: re.compile(rf"[{quotes}\[\](){{}}<]") for quotes in ('"', "\"'")}
_INSIDE = {quote: re.compile(rf"[{quote}\\]") for quote in "\"'"}
_SCALAR_END = re.compile(r"[\s,\]})<]")


class Malformed(Exception):  # noqa: N818 - control flow inside this folder
    """The text violates the format."""


class TextEnded(Malformed):
    """The text ended too early."""


class Markers:
    """Finds the first of several markers, or the beginning of a marker at the end of the text."""

    __slots__ = ("_firsts", "_lead", "_search")

    def __init__(self, *markers: str, lead: str = "") -> None:
        """`lead`: a regular expression for characters that belong to the marker if they directly precede it."""
        partial = "|".join(re.escape(marker[:length]) for marker in markers for length in range(len(marker) - 1, 0, -1))
        space = f"{lead}{{0,{MAX_SPACE}}}" if lead else ""
        whole = "|".join(map(re.escape, markers))
        self._search = re.compile(rf"{space}(?:({whole})|(?:{partial})?\Z)").search
        self._firsts = tuple({marker[0] for marker in markers})
        self._lead = bool(lead and markers)

    def find(self, text: str, at: int) -> re.Match[str] | None:
        """The match, whose group 1 is the marker if it is complete; None if no marker begins in the text."""
        if self._lead and text[-1:].isspace():
            return self._search(text, at)
        for first in self._firsts:
            if first in text:
                return self._search(text, at)
        return None


class Scanner:
    """Text that has arrived and is not consumed. When `Malformed` is raised, only emitted text has been consumed."""

    __slots__ = ("at", "closed", "taken", "text")

    def __init__(self) -> None:
        self.text = ""
        self.at = 0  #: end of the consumed text, which is kept until `forget`
        self.closed = False  #: whether the text has ended
        #: Text that was emitted or forgotten since the beginning of what may have to be given back; None: nothing may.
        self.taken: list[str] | None = None

    def forget(self) -> None:
        """Drop the consumed text, so that `at` can no longer be moved back into it."""
        self._drop(self.at)

    def _drop(self, end: int) -> None:
        if self.taken is not None and end:
            self.taken.append(self.text[:end])
        self.text, self.at = self.text[end:], 0

    def stream(self, markers: Markers, emit: Callable[[str], None]) -> Steps[str | None]:
        """Emit the text up to a marker, then consume and return the marker; None at the end of the text.

        The marker and its lead are kept until `forget`. Only a possible beginning of a marker is held back.
        """
        while True:
            text, start = self.text, self.at
            match = markers.find(text, start)
            end = len(text) if match is None else match.start()
            if end > start:
                emit(text[start:end])
            self._drop(end)
            if match is not None and match[1] is not None:
                self.at = len(match[0])
                return match[1]
            if self.closed:
                if self.text:
                    emit(self.text)
                    self._drop(len(self.text))
                return None
            yield

    def space(self, characters: str | None = None) -> Steps[None]:
        """Skip white space, or only these characters."""
        while True:
            rest = self.text[self.at :].lstrip(characters)
            self.at = len(self.text) - len(rest)
            if rest or self.closed:
                return
            yield

    def choose(self, *literals: str) -> Steps[str | None]:
        """Consume and return the literal that comes next; None if none does. No literal may be a prefix of another."""
        while True:
            for literal in literals:
                if self.text.startswith(literal, self.at):
                    self.at += len(literal)
                    return literal
            rest = self.text[self.at :]
            if self.closed or not any(literal.startswith(rest) for literal in literals):
                return None
            yield

    def expect(self, *literals: str) -> Steps[str]:
        """Consume and return the literal that comes next. Raises Malformed if none does."""
        found = yield from self.choose(*literals)
        if found is not None:
            return found
        rest = self.text[self.at :]
        raise TextEnded if any(literal.startswith(rest) for literal in literals) else Malformed

    def optional(self, *literals: str, cut: bool = False) -> Steps[str | None]:
        """Consume the literal that comes next, with white space before it, and return it; None if none does.

        `cut`: at the end of the text, the beginning of a literal counts, too.
        """
        while True:
            rest = self.text[self.at :]
            found = rest.lstrip()
            space = len(rest) - len(found)
            for literal in literals:
                if found.startswith(literal) and space <= MAX_SPACE:
                    self.at += space + len(literal)
                    return literal
            begun = next((literal for literal in literals if literal.startswith(found)), None)
            if self.closed or space > MAX_SPACE or begun is None:
                if cut and begun is not None and found:
                    self.at = len(self.text)
                    return begun
                return None
            yield

    def until(self, *ends: str, most: int = 256) -> Steps[str]:
        """Consume and return the text before the first of these ends, which must come within `most` characters."""
        while True:
            window = self.text[self.at : self.at + most]
            places = [place for end in ends if (place := window.find(end)) >= 0]
            if places:
                self.at += min(places)
                return window[: min(places)]
            if len(window) == most:
                raise Malformed
            if self.closed:
                raise TextEnded
            yield

    def value(self, emit: Callable[[str], None] | None = None, quotes: str = '"') -> Steps[str]:
        """Consume one JSON value (Python if `quotes` has both quotes) and return its text; only its end is checked.

        With `emit`, its text is emitted as it arrives instead, even if the value then turns out to be malformed.
        """
        while len(self.text) <= self.at:
            if self.closed:
                raise TextEnded
            yield
        outside = _OUTSIDE[quotes].search
        scalar = self.text[self.at] not in "{[(" + quotes
        search = _SCALAR_END.search if scalar else outside
        i, depth, quote, passed_on, done, broken = self.at, 0, "", False, False, False
        while True:
            text = self.text
            size = len(text)
            while i < size and not done and not broken:
                match = search(text, i)
                if match is None:
                    i = size
                    break
                i = match.end()
                character = text[i - 1]
                if quote and character == "\\":
                    i += 1  # the next character, which may not have arrived
                elif quote:
                    quote, search, done = "", outside, not depth
                elif scalar or character == "<":
                    i -= 1
                    done = scalar and (passed_on or i > self.at)
                    broken = not done
                elif character in quotes:
                    quote, search = character, _INSIDE[character].search
                elif character in "{[(":
                    depth += 1
                else:
                    depth -= 1
                    done = not depth
            if emit is not None and size > self.at and i > self.at:
                emit(text[self.at : i])
                self._drop(i)
                i, passed_on = max(0, i - size), True
            if done:
                found, self.at = (text[self.at : i], i) if emit is None else ("", 0)
                return found
            if broken or self.closed:
                self.at = i
                raise Malformed if broken else TextEnded
            yield
