"""The common part of Responses and Messages: an answer is a sequence of blocks that begin, grow and end."""

from abc import abstractmethod
from collections.abc import Iterator

from ...text.answer import AnswerBlock, TextDelta, append_delta
from ...text.parsers.deltas import Content, Reasoning, ToolCallArguments, ToolCallStart
from .dialect import ResponseBuilder


class BlockBuilder(ResponseBuilder):
    """Finds where blocks begin and end; the dialect's subclass makes the events. For responses with one choice."""

    def __init__(self) -> None:
        self._blocks: list[AnswerBlock] = []
        self._open = False  #: the last block may still grow

    @abstractmethod
    def start_block(self, index: int, block: AnswerBlock) -> bytes:
        """The events that start a block; its text follows."""

    @abstractmethod
    def extend_block(self, index: int, block: AnswerBlock, text: str) -> bytes:
        """The event of a block's next piece of text."""

    @abstractmethod
    def end_block(self, index: int, block: AnswerBlock, *, cut: bool) -> bytes:
        """The events that end a block; `cut`: it is not complete."""

    def block_events(self, shown: TextDelta, *, close: bool = True) -> Iterator[bytes]:
        """The events of the answer's next delta. `close`: if it is the last one, end its block, too."""
        tokens = shown.tokens
        for delta in shown.deltas or (Content(shown.text),):
            text, begins = "", False
            match delta:
                case ToolCallStart():
                    begins = True
                case ToolCallArguments(_, text):
                    pass
                case Content(text) | Reasoning(text):
                    if not text:
                        continue
                    kind = "text" if type(delta) is Content else "reasoning"
                    begins = not (self._open and self._blocks[-1].kind == kind)
            if begins:
                yield from self._close(cut=False)
            append_delta(self._blocks, TextDelta("", tokens=tokens, deltas=(delta,)))
            if type(delta) is Content:
                tokens = ()
            index, block = len(self._blocks) - 1, self._blocks[-1]
            if begins:
                self._open = True
                yield self.start_block(index, block)
            if text:
                yield self.extend_block(index, block, text)
        if shown.ending and close:
            yield from self._close(cut=shown.ending == "length")

    def _close(self, *, cut: bool) -> Iterator[bytes]:
        if self._open:
            self._open = False
            block = self._blocks[-1]
            yield self.end_block(len(self._blocks) - 1, block, cut=cut or block.is_cut_call)
