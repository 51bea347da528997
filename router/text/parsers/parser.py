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
        self._called = False  #: whether the last call could be read
        self._cut = False  #: whether the text ended within a call
        self._unknown_names = unknown_names
        self._reasoning = reasoning
        if "harmony" in (calls and calls.name, reasoning and reasoning.name):
            run = self._harmony(starts_in_reasoning)
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
        """Whether there was a call, and the text did not end within one."""
        return self._scanner.committed > 0 and not self._cut

    def _harmony(self, starts_in_reasoning: bool) -> Steps[None]:
        self._cut = not (
            yield from harmony(
                self._scanner,
                in_reasoning=starts_in_reasoning,
                reasoning=self._reasoning is not None,
                unknown_names=self._unknown_names,
            )
        )

    def _run(self, starts_in_reasoning: bool) -> Steps[None]:
        p, reasoning, thinking = self._scanner, self._reasoning, False
        if reasoning is not None:
            thinking = (yield from p.optional(reasoning.opener)) is not None or starts_in_reasoning
        yield from self._begin(thinking=thinking)
        while True:
            family = self._family
            openers = family.openers if family is not None else ()
            closers: tuple[str, ...] = ()
            if thinking:
                assert reasoning is not None
                ends = openers if family is not None and family.ends_reasoning else ()
                found = yield from p.stream(_markers(reasoning.closer, *ends, lead=r"\n"), p.reasoning)
            else:
                # Closers that a model repeats, or writes after text, are no text.
                closers = family.closers if family is not None and self._called else ()
                found = yield from p.stream(_markers(*openers, *closers, lead=r"\s"), p.content)
            if found is None:
                return
            if found in closers:
                p.forget()
            elif found not in openers:
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
            p.any_name = self._unknown_names
            yield from self._call(p.content)
            p.any_name = False

    def _call(self, sink: Callable[[str], None]) -> Steps[bool]:
        """Read calls from their opener. Returns whether there was one. What could not be read becomes text."""
        p, before = self._scanner, self._scanner.committed
        assert self._family is not None
        assert self._family.read is not None
        p.at = 0
        p.begin()
        try:
            yield from self._family.read(p)
            self._called = True
        except Malformed as error:
            self._called, self._cut = False, isinstance(error, TextEnded)
            if self._cut:  # its arguments may quote calls, so that none of it is read again
                p.at = len(p.text)
            text = p.give_back()
            if p.committed and text.strip() in self._family.openers and self._cut:
                self._cut = False  # an opener in place of the last closer
            else:
                (p.content if p.committed > before else sink)(text)
        p.taken = None
        if self._called:
            yield from p.space()
            p.forget()
        return p.committed > before
