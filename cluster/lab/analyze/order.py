"""Advice on prompt order: finds text that varies early and thereby prevents sharing of the common text after it.

Pure functions over a sample of prompts as text. A prefix cache stops at the first difference. If a long text that many
prompts have in common follows a timestamp, it is computed again each time; if the timestamp came last, the text would
be shared. The method: split texts into sentences and lines, which are compared regardless of position; choose the one
worth most and the prompts that contain it; find where these prompts diverge and how much common text follows.

Existing sharing is taken from the whole log, not from the sample, which would underestimate it.
"""

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from os.path import commonprefix
from typing import Literal
from zlib import crc32

#: Number of leading characters of each prompt that are examined; only early differences matter.
TEXT_LIMIT = 32_768
#: A finding is reported if it would save this share of the sample's prompt tokens.
MIN_SAVED_SHARE = 0.01
#: Minimum number of common characters after the difference; for less, moving text is not worthwhile.
MIN_COMMON = 128
#: Shorter pieces occur in many prompts by chance.
MIN_PIECE = 12
#: Longer pieces are cut further, between words.
LONG_PIECE = 160
#: Share of a group that must contain a piece for it to be common, and that must agree on the next character to go on.
MOST = 0.8
#: Maximum number of groups examined; each costs a pass over the pieces of the sample.
MAX_GROUPS = 64
SNIPPET = 28

Kind = Literal["time", "id", "order", "text"]


@dataclass(slots=True, frozen=True)
class Part:
    """A part of a prompt that a caller writes: a message, a tool, or the whole prompt of a completion."""

    label: str
    text: str


@dataclass(slots=True, frozen=True)
class SampledPrompt:
    parts: tuple[Part, ...]
    tokens: int
    shared_tokens: int  #: leading tokens that it shares with an earlier request of the whole log


@dataclass(slots=True, frozen=True)
class OrderFinding:
    """One early difference and its cost."""

    kind: Kind
    part: str  #: label of the part in which the first difference lies
    character: int  #: start of the differing word in that part, from 0
    snippets: tuple[str, ...]  #: examples of the text there; cut and with addresses and ids masked
    requests: int  #: number of affected requests in the sample
    groups: int  #: number of different common texts that follow this difference
    common_tokens: int  #: tokens after the difference that most of these requests have in common
    now_tokens: float  #: mean number of shared tokens of such a request
    then_tokens: float  #: the same if the varying part came after the common one
    saved_tokens: int  #: total over the sample

    @property
    def advice(self) -> str:
        if self.part.startswith("tools") and self.kind in ("order", "text"):
            return "Always send the tools in the same order (by name, say) and with the same spelling."
        return _ADVICE[self.kind]


_ADVICE: dict[Kind, str] = {
    "time": "Move it after the common part (into the last message, say), or round it to the day.",
    "id": "Leave it out, send it outside the prompt (header, metadata), or move it after the common part.",
    "order": "The same texts come in different orders: sort them.",
    "text": "Move it after the common part (into the last message, say).",
}


@dataclass(slots=True, frozen=True)
class _Piece:
    start: int
    text: str


@dataclass(slots=True, eq=False)
class _Text:
    prompt: SampledPrompt
    text: str
    starts: list[int]  #: start of each part
    pieces: list[_Piece]
    words: frozenset[str]  #: the texts of its pieces

    def tokens(self, characters: float) -> float:
        """Estimated number of tokens in this many characters, by the mean over the whole prompt."""
        return characters * self.prompt.tokens / max(1, sum(len(part.text) + 1 for part in self.prompt.parts))

    def piece_at(self, place: int) -> str:
        """The text of the piece that covers a character; empty if that piece was too short to keep."""
        index = bisect_right(self.pieces, place, key=lambda piece: piece.start) - 1
        found = self.pieces[index] if index >= 0 else _Piece(0, "")
        return found.text if place < found.start + len(found.text) else ""


def advise(sample: Sequence[SampledPrompt]) -> list[OrderFinding]:
    """Return recommended changes to the prompts, the largest saving first."""
    texts = [_text_of(prompt) for prompt in sample if prompt.parts]
    least = MIN_SAVED_SHARE * sum(prompt.tokens for prompt in sample)
    findings = [finding for finding in _merged(_findings(texts)) if finding.saved_tokens >= max(1.0, least)]
    return sorted(findings, key=lambda finding: -finding.saved_tokens)


def _merged(findings: Iterable[OrderFinding]) -> list[OrderFinding]:
    """Merge findings with the same cause before different texts, such as a time before each system prompt."""
    merged: dict[tuple[str, int, bool], OrderFinding] = {}
    for finding in findings:
        # The kind is guessed from some snippets, so it may differ between groups, except that "order" is reliable.
        place = (finding.part, finding.character, finding.kind == "order")
        merged[place] = _joined(merged[place], finding) if place in merged else finding
    return list(merged.values())


def _joined(one: OrderFinding, other: OrderFinding) -> OrderFinding:
    requests = one.requests + other.requests

    def mean(first: float, second: float) -> float:
        return (first * one.requests + second * other.requests) / requests

    return replace(
        max(one, other, key=lambda finding: finding.requests),
        requests=requests,
        common_tokens=round(mean(one.common_tokens, other.common_tokens)),
        now_tokens=mean(one.now_tokens, other.now_tokens),
        then_tokens=mean(one.then_tokens, other.then_tokens),
        saved_tokens=one.saved_tokens + other.saved_tokens,
        groups=one.groups + other.groups,
    )


def _text_of(prompt: SampledPrompt) -> _Text:
    starts = [0, *accumulate(len(part.text) + 1 for part in prompt.parts)]
    text = "\n".join(part.text for part in prompt.parts)[:TEXT_LIMIT]
    pieces = [piece for piece in _pieces(text) if len(piece.text) >= MIN_PIECE]
    return _Text(prompt, text, starts[:-1], pieces, frozenset(piece.text for piece in pieces))


_PIECE = re.compile(r"[^\n]*?(?:[.!?;](?=\s)|\n|$)", re.DOTALL)
_WORD = re.compile(r"\s*[^\s,]+,?|,")


def _pieces(text: str) -> Iterator[_Piece]:
    """Yield lines and sentences, each without surrounding spaces."""
    for match in _PIECE.finditer(text):
        whole = match[0]
        begin = match.start() + len(whole) - len(whole.lstrip())
        yield from _cut(begin, whole.strip())


def _cut(begin: int, piece: str) -> Iterator[_Piece]:
    """Cut a long piece after words with a certain checksum, so that the same words are cut equally everywhere."""
    if len(piece) <= LONG_PIECE:
        yield _Piece(begin, piece)
        return
    start = 0
    for word in _WORD.finditer(piece):
        long_enough = word.end() - start >= MIN_PIECE
        if long_enough and crc32(word[0].strip().encode()) % 8 == 0:
            yield _Piece(begin + start, piece[start : word.end()])
            start = word.end()
    yield _Piece(begin + start, piece[start:])


def _findings(texts: list[_Text]) -> Iterator[OrderFinding]:
    """Yield a finding per group; each group is formed around the most valuable text in the remaining prompts."""
    waiting = [texts]
    for _ in range(MAX_GROUPS):
        if not waiting:
            return
        group = waiting.pop()
        parting = _parting(group)
        if parting is None:
            continue
        members = _members_of_dearest(group, parting.place)
        if len(members) < 2:
            continue
        chosen = set(map(id, members))
        if rest := [text for text in group if id(text) not in chosen]:
            waiting.append(rest)
        own = _parting(members)
        if own is None:
            continue
        finding = _finding(members, own)
        if finding is not None:
            yield finding
        elif own.place > parting.place or len(members) < len(group):
            waiting.append(own.together)


@dataclass(slots=True, frozen=True)
class _Parting:
    place: int
    together: list[_Text]  #: texts that are equal up to there


def _parting(group: list[_Text]) -> _Parting | None:
    """The first place at which no large majority (MOST) has the same next character. None: there is no such place.

    A text that ends where others continue is an earlier turn of theirs. It is shared entirely, so it does not count.
    """
    together = group
    while len(together) > 1:
        place = _common_length([text.text for text in together])
        longer = [text for text in together if len(text.text) > place]
        ways = Counter(text.text[place] for text in longer)
        if not ways:
            return None
        way, followers = ways.most_common(1)[0]
        if len(ways) > 1 and followers < MOST * len(longer):
            return _Parting(place, longer)
        together = [text for text in longer if text.text[place] == way]
    return None


def _common_length(texts: Sequence[str]) -> int:
    return len(commonprefix(texts))  # noqa: RUF071 - character by character is intended


def _members_of_dearest(group: list[_Text], place: int) -> list[_Text]:
    """The prompts that contain the most valuable piece. A piece's value is its length times its repetitions.

    Pieces before `place` do not count, because they are already shared.
    """
    holders = _holders(group, place)
    dearest = max(holders, key=lambda word: (len(word) * (holders[word] - 1), word), default=None)
    if dearest is None or holders[dearest] < 2:
        return []
    return [text for text in group if dearest in text.words]


def _finding(members: list[_Text], parting: _Parting) -> OrderFinding | None:
    texts = parting.together
    holders = _holders(texts, parting.place + 1)  # pieces that begin after the difference
    common = {word for word, count in holders.items() if count >= MOST * len(texts)}
    if sum(map(len, common)) < MIN_COMMON:
        return None
    head = texts[0].text[: parting.place]
    then = []
    for text in members:
        before = _common_length([text.text, head])
        moved = sum(len(word) for word in common if word in text.words)
        then.append(max(text.prompt.shared_tokens, min(text.prompt.tokens - 1.0, text.tokens(before + moved))))
    now = [text.prompt.shared_tokens for text in members]
    gains = [after - before for before, after in zip(now, then, strict=True)]
    first = texts[0]
    part = bisect_right(first.starts, parting.place) - 1
    snippets = [_snippet(text, parting.place, common) for text in texts]
    return OrderFinding(
        kind=_kind(parting, common, snippets),
        part=first.prompt.parts[part].label,
        character=max(0, _word_start(first.text, parting.place) - first.starts[part]),
        snippets=tuple(_masked(snippet) for snippet in list(dict.fromkeys(snippets))[:3]),
        requests=len(members),
        groups=1,
        common_tokens=round(first.tokens(sum(map(len, common)))),
        now_tokens=sum(now) / len(members),
        then_tokens=sum(then) / len(members),
        saved_tokens=int(sum(gains) - max(gains)),  # the first request computes it in any order
    )


def _holders(texts: list[_Text], place: int) -> Counter[str]:
    """For each piece, the number of texts in which it begins at `place` or later."""
    return Counter(word for text in texts for word in {piece.text for piece in text.pieces if piece.start >= place})


def _word_start(text: str, place: int) -> int:
    return max(text.rfind(space, 0, place) for space in (" ", "\n")) + 1


def _snippet(text: _Text, place: int, common: set[str]) -> str:
    """The text at `place`, from the beginning of the word to the next common piece or the end of the line."""
    begin = _word_start(text.text, place)
    line_end = text.text.find("\n", place)
    end = len(text.text) if line_end < 0 else line_end
    nexts = (piece.start for piece in text.pieces if piece.start > place and piece.text in common)
    return text.text[begin : min(end, next(nexts, end))].strip()


_TIME = re.compile(
    r"\d{4}-\d\d|\b\d{1,2}:\d\d|\b\d{10}(\d{3})?\b|\b\d{1,2}[./]\d{1,2}[./]\d{2,4}\b"
    r"|\b(mon|tues|wednes|thurs|fri|satur|sun)day\b|\b(jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*\.? \d",
    re.IGNORECASE,
)
_ID = re.compile(r"\b[0-9a-f]{8}-[0-9a-f]{4}-|\b(?=[a-z_-]*\d)(?=\d*[a-z_-])[\w-]{10,}|\b\d{6,}\b", re.IGNORECASE)
_MAIL = re.compile(r"[\w.+-]+@[\w.-]+")


def _kind(parting: _Parting, common: set[str], snippets: list[str]) -> Kind:
    here = {text.piece_at(parting.place) for text in parting.together}
    everywhere = frozenset.intersection(*(text.words for text in parting.together[:50]))
    if len(here) > 1 and sum(word in everywhere or word in common for word in here) > len(here) / 2:
        return "order"
    heads = [snippet[:SNIPPET] for snippet in snippets]
    tests: tuple[tuple[Kind, Callable[[str], object]], ...] = (("time", _TIME.search), ("id", _ID.search))
    for kind, test in tests:
        if sum(test(head) is not None for head in heads) >= MOST * len(heads):
            return kind
    return "text"


def _masked(snippet: str) -> str:
    """Shorten a snippet and mask addresses and ids, because reports are passed on."""
    masked = _MAIL.sub("<email>", snippet)
    if not _TIME.search(snippet):
        masked = _ID.sub(lambda match: match[0][:4] + "…", masked)
    return masked if len(masked) <= SNIPPET else masked[: SNIPPET - 1] + "…"
