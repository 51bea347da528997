"""The parser of one answer: feeds text to its format's reader and keeps text that is not a call."""

from collections.abc import Callable
from contextlib import suppress
from functools import cache

from .calls import CallScanner, MakeId, Tools
from .deltas import Delta
from .families import ReasoningFamily, ToolFamily
from .harmony import harmony
from .scanner import Malformed, Markers, Steps, TextEnded

#: Cached for each set of arguments: creating one takes longer than parsing a short answer.
_markers = cache(Markers)
#: Characters of an answer that are read again because a call turned out to be text; then no more calls are looked for.
#: Each can reach to the end of the text, so their cost is quadratic: 20,000 characters made for it took 0.4 s.
MAX_REREAD = 256 * 1024
#: Counted in addition for each such call.
REREAD_PER_CALL = 256


class AnswerParser:
    """Splits one answer into deltas while its text arrives.

    The division of the text into pieces affects only where adjacent deltas of one kind are divided.
    """

    def __init__(
        self,
        calls: ToolFamily | None,
        reasoning: ReasoningFamily | None,
        tools: Tools,
        make_id: MakeId,
        *,
        starts_in_reasoning: bool = False,
        parallel: bool = True,
        unknown_names: bool = True,
    ) -> None:
        """`tools`: the tools that may be called; if empty, calls stay text.

        `starts_in_reasoning`: whether the prompt ends inside reasoning. `parallel`: whether all calls are returned; if
        not, all but the first are dropped, as in vLLM. `unknown_names`: whether a call after a marker counts even if
        there is no such tool, so that an agent can say so to the model; otherwise it stays text.
        """
        self._scanner = CallScanner(
            tools if calls is not None else {},
            make_id,
            parallel=parallel,
            id_length=calls.id_length if calls is not None else 0,
        )
        self._family = calls if tools and calls is not None and calls.read is not None else None
        self._reread = 0
        self._unknown_names = unknown_names
        self._reasoning = reasoning
        if "harmony" in (calls and calls.name, reasoning and reasoning.name):
            run = harmony(self._scanner, in_reasoning=starts_in_reasoning, reasoning=reasoning is not None)
        else:
            run = self._run(starts_in_reasoning)
        self._advance = run.__next__

    def feed(self, text: str) -> list[Delta]:
        """The deltas that this text completes."""
        scanner = self._scanner
        scanner.text = scanner.text + text if scanner.text else text
        self._advance()
        found, scanner.out = scanner.out, []
        return found

    def finish(self) -> list[Delta]:
        """The deltas from held text, at the end of the answer. Must be called at most once."""
        self._scanner.closed = True
        with suppress(StopIteration):
            self._advance()
        return self._scanner.out

    @property
    def called(self) -> bool:
        """Whether there was a call, and the last one is complete."""
        return self._scanner.started > 0 and not self._scanner.cut

    def _run(self, starts_in_reasoning: bool) -> Steps[None]:
        p, reasoning, thinking = self._scanner, self._reasoning, False
        if reasoning is not None:
            thinking = (yield from p.optional(reasoning.opener)) is not None or starts_in_reasoning
        yield from self._begin(thinking=thinking)
        while True:
            family = self._family
            openers = family.openers if family is not None else ()
            if thinking:
                assert reasoning is not None
                ends = openers if family is not None and family.ends_reasoning else ()
                found = yield from p.stream(_markers(reasoning.closer, *ends, lead=r"\n"), p.reasoning)
            else:
                found = yield from p.stream(_markers(*openers, lead=r"\s"), p.content)
            if found is None:
                return
            if found not in openers:
                thinking = False
                yield from self._begin(thinking=False, after_reasoning=True)
            else:
                p.any_name = self._unknown_names and not thinking
                if (yield from self._call(p.reasoning if thinking else p.content)):
                    thinking = False
                p.any_name = False

    def _begin(self, *, thinking: bool, after_reasoning: bool = False) -> Steps[None]:
        """Read the beginning of the reasoning or content. Templates write line feeds on both sides of `</think>`."""
        p = self._scanner
        if thinking or after_reasoning:
            yield from p.space("\n")
            p.forget()
        bare = self._family.bare if self._family is not None and not thinking else ()
        if bare and (yield from p.optional(*bare)) is not None:
            yield from self._call(p.content)

    def _call(self, sink: Callable[[str], None]) -> Steps[bool]:
        """Read a call from its opener. Returns whether there was one; if not, its first character has become text."""
        p, before = self._scanner, self._scanner.started
        assert self._family is not None
        assert self._family.read is not None
        p.open, p.at = False, 0
        try:
            yield from self._family.read(p)
        except Malformed as error:
            if not p.open and p.text:
                # Go back to the opener or to the end of the last complete call: the text after it may contain a call.
                self._reread += p.at + REREAD_PER_CALL
                if self._reread > MAX_REREAD:
                    self._family = None
                give = p.content if p.started > before else sink
                first = len(p.text) - len(p.text.lstrip()) + 1
                give(p.text[:first])
                p.text, p.at = p.text[first:], 0
                return p.started > before
            p.at = len(p.text) if isinstance(error, TextEnded) else 0
        yield from p.optional(*self._family.closers)
        yield from p.space()
        p.forget()
        return True
