"""The common part of chat and text completions: bodies with choices, streams of unnamed chunks, and `[DONE]`."""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from ....replica.messages import decoded_positions
from ...errors import RouterError
from ...text.answer import TextDelta, TokenAt
from ..errors import error_body
from ..front import Served
from ..generation import RunningChoice
from ..protocol.exchange import GenerationSummary
from .dialect import PLACEHOLDER, ResponseBuilder
from .logprobs import PromptLogprobs, prompt_logprobs
from .long_json import STEP_BYTES, LongList, Steps, pieces_of, slices
from .schema import ENCODER, Body, Usage, usage, usage_of

#: `usage` of a chunk: counts, null (they come later), or absent (they were not requested).
ChunkUsage = Usage | UnsetType | None

encode = ENCODER.encode  # bound once: it runs for each token
DONE = b"data: [DONE]\n\n"


def if_given(ids: list[int] | None) -> list[int] | UnsetType:
    """A field of a chunk, which is absent where a field of a whole body is null."""
    return UNSET if ids is None else ids


class ChunkBuilder(ResponseBuilder):
    """Builds the bodies of one response with `id`, `created`, `model`, `choices` and `usage`."""

    __slots__ = (
        *("_by_id", "_common", "_continuous_usage", "_include_usage"),
        *("_model_text", "_prompt_logprobs", "_token_ids"),
    )

    whole_type: type[msgspec.Struct]
    chunk_type: type[msgspec.Struct]

    def __init__(self, served: Served, body: Body, response_id: str, created: int) -> None:
        options = body.stream_options
        self._model_text = served.text
        self._common: dict[str, Any] = {"id": response_id, "created": created, "model": served.limits.name}
        self._token_ids = bool(body.return_token_ids)
        self._by_id = bool(body.return_tokens_as_token_ids)
        self._prompt_logprobs = body.prompt_logprobs
        self._include_usage = bool(options and options.include_usage)
        self._continuous_usage = bool(options and options.continuous_usage_stats and options.include_usage is not False)

    @abstractmethod
    def choices(self, choices: Sequence[RunningChoice]) -> Iterator[Steps[object]]:
        """The choices of a body that is not streamed."""

    def extras(self, choices: Sequence[RunningChoice]) -> Steps[dict[str, Any]]:  # noqa: ARG002
        """Additional fields of a body that is not streamed."""
        yield from ()
        return {}

    @abstractmethod
    def parts(self, choice: RunningChoice, shown: TextDelta, *, first: bool) -> Sequence[object]:
        """The next delta of a choice, as one part for each chunk."""

    def _ids(self, tokens: Sequence[TokenAt]) -> list[int] | None:
        """The ids of these tokens, if ids were requested."""
        return [token.token_id for token in tokens] if self._token_ids else None

    def _prompt_ids(self, choice: RunningChoice) -> list[int] | None:
        return list(choice.prompt.token_ids) if self._token_ids else None

    def _scores(self, choice: RunningChoice) -> Steps[PromptLogprobs | None]:
        """The field `prompt_logprobs`, if it was requested."""
        if self._prompt_logprobs is None:
            return None
        piece, made = self._model_text.piece, LongList()
        for part in slices(choice.prompt_logprobs or (), self._prompt_logprobs + 1):
            if len(made.pieces) > 1:
                yield
            made.add(prompt_logprobs(decoded_positions(part), lambda each: piece(each).decode(errors="replace")))
        scores: PromptLogprobs = made.ended()
        return scores

    def whole(self, choices: Sequence[RunningChoice], summary: GenerationSummary) -> Steps[list[bytes]]:
        common, made, size = {**self._common, **(yield from self.extras(choices))}, LongList(), 0
        for steps in self.choices(choices):
            if size > STEP_BYTES:
                size = 0
                yield
            pieces = pieces_of((yield from steps))
            size += sum(map(len, pieces))
            made.add_pieces(pieces)
        return pieces_of(self.whole_type(**common, choices=made.ended(), usage=usage_of(summary)))

    def text(self, choice: RunningChoice, text: str) -> bytes:
        """Put the text into a chunk that was encoded once: encoding every chunk would take 2 us each."""
        before, after = choice.around_text or self._template(choice)
        return before + encode(text) + after

    def _template(self, choice: RunningChoice) -> tuple[bytes, bytes]:
        event = self.events(choice, TextDelta(PLACEHOLDER), first=False)
        before, _, after = event.partition(ENCODER.encode(PLACEHOLDER))
        if not self._continuous_usage:  # otherwise counts differ from chunk to chunk
            choice.around_text = before, after
        return before, after

    def events(self, choice: RunningChoice, shown: TextDelta, *, first: bool) -> bytes:
        counts: ChunkUsage = None if self._include_usage else UNSET
        if self._continuous_usage:
            counts = usage(len(choice.prompt.token_ids), choice.generated, choice.cached, choice.reasoning_tokens)
        return b"".join([self._chunk([part], counts) for part in self.parts(choice, shown, first=first)])

    def end(self, choices: Sequence[RunningChoice], summary: GenerationSummary) -> list[bytes]:  # noqa: ARG002
        return [self._chunk([], usage_of(summary)), DONE] if self._include_usage else [DONE]

    def error(self, error: RouterError) -> bytes:
        return b"data: " + error_body(error) + b"\n\n"

    def _chunk(self, parts: Sequence[object], counts: ChunkUsage) -> bytes:
        """One event. The event with the request's total usage has no parts."""
        return b"data: " + ENCODER.encode(self.chunk_type(**self._common, choices=parts, usage=counts)) + b"\n\n"
