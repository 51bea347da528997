"""Reads text that arrives in pieces: literals, markers that may be cut, and nested values.

Every method that may need more text is a generator. It yields while the text does not decide yet, and is resumed when
more has arrived or the text has ended. So a format reads like its grammar, and where the text is cut makes no
difference.
"""

import re
from collections.abc import Callable, Generator
from typing import TypeVar

T = TypeVar("T")
Steps = Generator[None, None, T]

#: White space before a marker belongs to the marker, up to this many characters: a model that writes nothing but line
#: feeds must not make the parser hold and search all of them.
MAX_SPACE = 8
#: Outside of a string: quotes, brackets, and `<`, which stands in no value and begins the marker that ends a call.
_OUTSIDE = {quotes: re.compile(rf"[{quotes}\[\](){{}}<]") for quotes in ('"', "\"'")}
_INSIDE = {quote: re.compile(rf"[{quote}\\]") for quote in "\"'"}
_SCALAR_END = re.compile(r"[\s,\]})<]")


class Malformed(Exception):  # noqa: N818 - control flow inside this folder
    """The text does not continue as the format demands."""


class Ended(Malformed):
    """The text has ended before it could."""


class Markers:
    """Finds the first of several markers, or the beginning of one at the end of the text."""

    __slots__ = ("_firsts", "_lead", "_search")

    def __init__(self, *markers: str, lead: str = "") -> None:
        """`lead`: a regular expression of the characters that belong to a marker that follows them."""
        partial = "|".join(re.escape(marker[:length]) for marker in markers for length in range(len(marker) - 1, 0, -1))
        space = f"{lead}{{0,{MAX_SPACE}}}" if lead else ""
        whole = "|".join(map(re.escape, markers))
        self._search = re.compile(rf"{space}(?:({whole})|(?:{partial})?\Z)").search
        self._firsts = tuple({marker[0] for marker in markers})
        self._lead = bool(lead and markers)

    def find(self, text: str, at: int) -> re.Match[str] | None:
        """The match, whose group 1 is the marker if it is complete; None if all of the text lies before any marker."""
        if self._lead and text[-1:].isspace():
            return self._search(text, at)
        for first in self._firsts:
            if first in text:
                return self._search(text, at)
        return None


class Scanner:
    """The text that has arrived and is not consumed. Who raises `Malformed` has consumed only what it passed on."""

    __slots__ = ("at", "closed", "text")

    def __init__(self) -> None:
        self.text = ""
        self.at = 0  #: what lies before it is consumed, but kept until `forget`
        self.closed = False  #: no more text comes

    def forget(self) -> None:
        """Drop what is consumed: there is no way back to it."""
        self.text, self.at = self.text[self.at :], 0

    def stream(self, markers: Markers, emit: Callable[[str], None]) -> Steps[str | None]:
        """Pass text on up to a marker, which is consumed and returned; None at the end of the text.

        The marker and its lead are kept until `forget`. Held back is only what may be the beginning of a marker.
        """
        while True:
            text, start = self.text, self.at
            match = markers.find(text, start)
            end = len(text) if match is None else match.start()
            if end > start:
                emit(text[start:end])
            self.text, self.at = text[end:], 0
            if match is not None and match[1] is not None:
                self.at = len(match[0])
                return match[1]
            if self.closed:
                if self.text:
                    emit(self.text)
                    self.text = ""
                return None
            yield

    def space(self, characters: str | None = None) -> Steps[None]:
        """Skip white space, or these characters."""
        while True:
            rest = self.text[self.at :].lstrip(characters)
            self.at = len(self.text) - len(rest)
            if rest or self.closed:
                return
            yield

    def choose(self, *literals: str) -> Steps[str | None]:
        """Consume the one of these that comes next; None if none does. None of them begins with another."""
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
        """Consume the one of these that comes next."""
        found = yield from self.choose(*literals)
        if found is not None:
            return found
        rest = self.text[self.at :]
        raise Ended if any(literal.startswith(rest) for literal in literals) else Malformed

    def optional(self, *literals: str) -> Steps[str | None]:
        """Consume the one of these that comes next, with white space before it; nothing if none does."""
        while True:
            rest = self.text[self.at :]
            found = rest.lstrip()
            space = len(rest) - len(found)
            for literal in literals:
                if found.startswith(literal) and space <= MAX_SPACE:
                    self.at += space + len(literal)
                    return literal
            if self.closed or space > MAX_SPACE or not any(literal.startswith(found) for literal in literals):
                return None
            yield

    def until(self, *ends: str, most: int = 256) -> Steps[str]:
        """Consume and return the text before the first of these ends, at most `most` characters."""
        while True:
            window = self.text[self.at : self.at + most]
            places = [place for end in ends if (place := window.find(end)) >= 0]
            if places:
                self.at += min(places)
                return window[: min(places)]
            if len(window) == most:
                raise Malformed
            if self.closed:
                raise Ended
            yield

    def value(self, emit: Callable[[str], None] | None = None, quotes: str = '"') -> Steps[str]:
        """Consume one JSON value (with both quotes: a Python one) and return its text. Only its end is looked for.

        With `emit`, its text is passed on as it arrives instead, also that of a value that then breaks.
        """
        while len(self.text) <= self.at:
            if self.closed:
                raise Ended
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
                self.text, self.at, i, passed_on = text[i:], 0, max(0, i - size), True
            if done:
                found, self.at = (text[self.at : i], i) if emit is None else ("", 0)
                return found
            if broken:
                raise Malformed
            if self.closed:
                raise Ended
            yield
